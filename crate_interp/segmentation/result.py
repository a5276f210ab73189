"""SegmentResult: how well each layer and head segments, with intervals, compared with chance."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.core import checks
from crate_interp.core.safe_text import notebook_view, table_in_html
from crate_interp.probes.segmentation_probe import RESOLUTIONS, RULES
from crate_interp.results.result import Cells, Result, Table, as_text, by
from crate_interp.segmentation import scores
from crate_interp.segmentation.scores import WAYS, WITHOUT_NETWORK
from crate_interp.stats.intervals import interval_words
from crate_interp.stats.verdicts import BROKEN, KEPT, UNDECIDED, of_interval

# scores of guesses that do not look at the image
BLIND = {
    "centre": "a centred map",
    "all_foreground": "all foreground",
    "other_image": "the mask of another image",
    "random": "patches in random order",
}
FINDS = {
    KEPT: "finds objects", BROKEN: "does not find objects",
    UNDECIDED: "is not shown to beat",
}  # fmt: skip
CELL = {"other_image": "mask of another image", "random": "random order", "untrained": "untrained"}


SHOWN, MEDIAN = 3, 2  # images in each of "best" and "worst"; images in "median"


def merged_examples(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
    """Returns the best, median and worst among the examples of both results.

    Each example keeps the head and score of its own result. The median examples are two of the four
    median examples of both results.
    """
    both: Any = pd.concat([table for table in (mine, theirs) if len(table)] or [mine])
    ranked = both.sort_values(["score", "sample"], ascending=[False, True], ignore_index=True)
    middle = middle_rows(ranked[ranked["group"] == "median"])
    others = ranked[ranked["group"] != "median"]
    best, worst = others.head(SHOWN), others.iloc[SHOWN:].tail(SHOWN).iloc[::-1]
    parts = [best.assign(group="best"), middle, worst.assign(group="worst")]
    return pd.concat(parts, ignore_index=True)


def middle_rows(ranked: pd.DataFrame) -> Any:
    """Returns the MEDIAN rows in the middle of ranked rows."""
    start = max((len(ranked) - MEDIAN) // 2, 0)
    return ranked.iloc[start : start + MEDIAN]


class SegmentResult(Result):
    """How well attention maps segment.

    `table("scores")`, the main table, has a row per rule, resolution, way (of choosing heads) and
    layer, with 95 % intervals over images. A fixed head is chosen on one half of the images and
    scored on the other; its numbers are means over 50 splits, and its interval includes the spread
    between splits (`stats.intervals.over_splits`). layer is empty in the row of the head that is
    fixed over all layers; head_layer and head name the head that was chosen most often, and chosen
    is this head's share of all choices. Further columns hold baselines: the same heads judged by
    the mask of the next image, the same heads with patches in random order, untrained networks, and
    six masks that need no network. strongest names the best of these six masks, by its mean over
    all images. excess is the score minus that mask's score, with an interval.

    `table("heads")` has a row per rule, resolution, layer and head. `table("images")` has a row per
    image with an object: the score of the fixed head by the rule "mass" at the resolution "token",
    mean over splits, and the head that scored the image in most of them.
    `table("examples")` has the images with the highest and lowest scores.

    Stored tables: `samples` and `head_samples` as in a sweep; the same two tables for the untrained
    twins, with their seeds; `constants` (scores that need no network, per image); and `examples`.
    """

    KIND = "segmentation"
    MAIN = "scores"
    INTERVALS = True
    STORED = {
        "samples": by("sample", "layer"),
        "head_samples": by("sample", "layer", "head"),
        "untrained_samples": by("seed", "sample", "layer"),
        "untrained_head_samples": by("seed", "sample", "layer", "head"),
        "constants": by("sample"),
        "examples": merged_examples,
    }
    DERIVED = {
        "scores": scores.score_table,
        "heads": scores.head_table,
        "images": scores.image_table,
    }

    def layers(self, rule: str = "mass", resolution: str = "token") -> pd.DataFrame:
        """Returns the scores of one rule ("mass" or "top") and resolution ("token" or "pixel").

        Raises ValueError for an unknown rule or resolution.
        """
        checks.one_of("rule", rule, RULES)
        checks.one_of("resolution", resolution, RESOLUTIONS)
        table: Any = self._table("scores")
        rows = table[(table["rule"] == rule) & (table["resolution"] == resolution)]
        return rows.reset_index(drop=True)

    def cells(self, rule: str = "mass", resolution: str = "token") -> Cells:
        """Returns header and rows as text: a row per layer, a column per way.

        A cell holds the value, then in brackets the chance levels that CELL names.
        """
        table: Any = self.layers(rule, resolution)
        rows = []
        for layer in range(self.meta["n_layers"]):
            here = table[table["layer"] == layer].set_index("way")
            rows.append([str(layer), *(_cell(here.loc[way]) for way in WAYS)])
        return ["layer", *WAYS], rows

    def text(self, rule: str = "mass", resolution: str = "token") -> str:
        """Returns the table of `cells` as text, between a line that explains it and `others`."""
        settings = self.meta["probes"]["segmentation"]["settings"]
        share = settings["mass" if rule == "mass" else "fraction"]
        levels = ", ".join(CELL.values())
        return (
            f"{rule} rule, {100 * share:.0f}\u00a0%; Jaccard index over {resolution}s ({levels}):\n"
            f"{as_text(*self.cells(rule, resolution))}\n"
            f"without a network: {self.others(rule, resolution)}"
        )

    def others(self, rule: str = "mass", resolution: str = "token") -> str:
        """Returns the scores of the masks that need no network, as text."""
        row = self.overall(rule, resolution)
        return ", ".join(f"{words} {row[name]:.3f}" for name, words in WITHOUT_NETWORK.items())

    def legend(self) -> str:
        """Returns the meaning of the rules and of the columns of `text`."""
        settings = self.meta["probes"]["segmentation"]["settings"]
        return (
            "mass rule: the patches with most attention that hold "
            f"{100 * settings['mass']:.0f}\u00a0% of a map. top rule: the "
            f"{100 * settings['fraction']:.0f}\u00a0% of the patches with most attention.\n"
            "best head for each image: chosen by the mask itself, so that chance is high as well.\n"
            "fixed head: the head that is best on the other half of the images, over 50 splits.\n"
            "Jaccard index: overlap over union, 1 is best."
        )

    def overall(self, rule: str = "mass", resolution: str = "token") -> dict[str, Any]:
        """Returns the row of the head that is fixed over all layers, as a dictionary."""
        table: Any = self.layers(rule, resolution)
        return table[table["layer"].isna()].iloc[0].to_dict()

    def chosen(self) -> list[tuple[int, int]]:
        """Returns (layer, head) of each head that scores some image in most of its splits."""
        places = self._table("images")[["layer", "head"]].drop_duplicates().to_numpy().tolist()
        return sorted((int(layer), int(head)) for layer, head in places)

    def named(self) -> str:
        """Returns the names of the chosen heads, such as "L3H2"."""
        return " and ".join(f"L{layer}H{head}" for layer, head in self.chosen())

    def verdict(self) -> str:
        """Returns whether the chosen heads find objects.

        They do if the interval lies above every chance level. They are worse than the strongest
        mask without a network if the interval of the difference lies below 0. They are no better
        than that mask if the interval includes 0.
        """
        row = self.overall()
        words = BLIND | {"untrained": "an untrained copy"}
        bar, top = max((row[name], said) for name, said in words.items() if not pd.isna(row[name]))
        verdict = FINDS[of_interval(row["low"], row["high"], (bar, np.inf))]
        if verdict == FINDS[UNDECIDED]:
            verdict = f"{'is no better than' if row['value'] <= bar else verdict} {top} ({bar:.3f})"
        if verdict == FINDS[KEPT]:
            way = of_interval(row["excess_low"], row["excess_high"], (0.0, np.inf))
            than = f"than {WITHOUT_NETWORK[row['strongest']]} ({row[row['strongest']]:.3f})"
            verdict += {KEPT: "", UNDECIDED: f", no better {than}", BROKEN: f", worse {than}"}[way]
        head = self.named().replace(" and ", " or ")
        return f"The chosen head ({head}) {verdict}: Jaccard index {row['value']:.3f}"

    def against(self) -> str:
        """Returns the strongest mask without a network, its score, and the difference to it."""
        row = self.overall()
        ends = interval_words(row["excess_low"], row["excess_high"], "+.3f", "")
        return (
            f"the best of {len(WITHOUT_NETWORK)} masks without a network is "
            f"{WITHOUT_NETWORK[row['strongest']]} with {row[row['strongest']]:.3f} "
            f"(difference {row['excess']:+.3f}, {ends})"
        )

    def worth(self) -> str:
        """Returns in how many images the chosen heads beat a blind guess, and miss the object."""
        images, row, constants = self.table("images"), self.overall(), self.table("constants")
        columns = {"centre": "centre_mass_token", "all_foreground": "all_token"}
        guess = max(columns, key=lambda name: row[name])
        blind = constants.set_index("sample").loc[images["sample"], columns[guess]]
        score = images["score"].to_numpy()
        return (
            f"The head beats {BLIND[guess]} in {(score > blind.to_numpy()).sum()} of {len(score)} "
            f"images and misses the object entirely in {(score == 0).sum()}"
        )

    def sentences(self) -> list[str]:
        """Returns whether heads find objects, beside a blind guess, other masks and chance."""
        row, words = self.overall(), BLIND | {"untrained": "untrained networks"}
        names = ("other_image", "centre", "all_foreground", "untrained", "random")
        chance = [f"{words[name]} {row[name]:.3f}" for name in names if not pd.isna(row[name])]
        ends = interval_words(row["low"], row["high"], ".3f", "")
        blind = max(BLIND, key=lambda name: -1.0 if pd.isna(row[name]) else row[name])
        return [
            f"{self.verdict()}.",
            f"The best blind guess, {BLIND[blind]}, scores {row[blind]:.3f}. Of maps without a "
            f"network, {WITHOUT_NETWORK[row['strongest']]} scores {row[row['strongest']]:.3f}.",
            f"Interval of the head's score: {ends}. {self.worth()}.",
            f"For comparison, {self.against()}. Chance: {', '.join(chance)}.",
        ]

    def _repr_html_(self) -> str:
        header, rows = self.cells()
        words = f"{self._words()} Score ({', '.join(CELL.values())}):"
        return notebook_view(words, table_in_html(pd.DataFrame(rows, columns=header)))


def _cell(row: Any) -> str:
    head = "" if pd.isna(row["head"]) else f" head {int(row['head'])}"
    levels = ["-" if pd.isna(row[name]) else f"{row[name]:.3f}" for name in CELL]
    return f"{row['value']:.3f}{head} ({', '.join(levels)})"
