"""HeadAblation: how much worse a model answers without each head."""

import math
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.circuits.circuit import head_name
from crate_interp.results.result import Result, by
from crate_interp.results.result_files import near_chance
from crate_interp.results.sample_ranges import counted
from crate_interp.stats.bootstrap import RESAMPLES
from crate_interp.stats.contrasts import paired
from crate_interp.stats.intervals import LEVEL, holm, max_t, paired_shares, signs

_HOW = {
    "mean": "mean ablation: at each position, the head's output is replaced by its mean over all "
    "samples.",
    "zero": "zero ablation: the head's output is replaced by 0.",
}
_UNITS = {"loss": "nats of loss", "accuracy": "of accuracy"}


def _heads(result: Result) -> pd.DataFrame:
    base = result.table("base").set_index("sample")["base"]
    wide: Any = result.table("samples").pivot(
        index="sample", columns=["layer", "head"], values="ablated"
    )
    worse = 1 if result.meta["settings"]["metric"] == "loss" else -1
    ablated, whole = wide.to_numpy(float), base.loc[wide.index].to_numpy(float)[:, None]
    drops = worse * (ablated - whole)
    values = result.by_group(drops, wide.index)
    if _one_answer(result):
        found = paired_shares(drops)
        adjusted = holm(found.p)
    else:
        found = paired(values)
        adjusted = max_t(values, found.p)
    places = pd.DataFrame(wide.columns.tolist(), columns=["layer", "head"])
    means = {"base": whole.mean(), "ablated": ablated.mean(axis=0), "drop": drops.mean(axis=0)}
    tests = {"low": found.low, "high": found.high, "p_alone": found.p, "p": adjusted}
    return places.assign(**means, **tests, n=len(wide))


def _one_answer(result: Result) -> bool:
    """Tells whether each independent sample has one right answer; a text has one per token."""
    accuracy = result.meta["settings"]["metric"] == "accuracy"
    return accuracy and result.independent[1] == "images"


class HeadAblation(Result):
    """How much worse a model answers without each head.

    `table()` has a row per layer and head. base and ablated: the mean of the metric without and
    with the ablation. drop: how much worse the metric becomes (ablated - base for a loss, base -
    ablated for an accuracy); it is above 0 for a head that helps. low, high: the 95 % interval of
    the drop. p_alone: the p of this head by itself, twice the smaller tail. p: the p adjusted
    over all heads. n: the number of samples. Intervals and p_alone come from the bootstrap-t of the
    drops, paired by sample, and p from the largest t of all heads (`max_t` in
    crate_interp/stats/intervals.py). For the accuracy of images, where an answer flips or does
    not, they are Tango's score interval, the exact sign test and Holm's adjustment
    (`paired_shares` in crate_interp/stats/intervals.py). Intervals and p are NaN for a single
    sample, and from the bootstrap for a head whose drops are all equal.

    Stored tables: `samples` (sample, layer, head, ablated) and `base` (sample, base).
    """

    KIND = "head_ablation"
    MAIN = "heads"
    STORED = {"samples": by("sample", "layer", "head"), "base": by("sample")}
    DERIVED = {"heads": _heads}
    INTERVALS = True

    @property
    def alone(self) -> str:
        """Returns why this result does not merge, or "" if it does."""
        if self.meta["settings"]["how"] == "zero":
            return ""
        return (
            "mean ablation takes the mean over all samples: run ci.ablate_heads on all samples at "
            "once, or with how='zero', whose results merge."
        )

    def heads(self) -> pd.DataFrame:
        """Returns a row per layer and head.

        Its columns: layer, head, base, ablated, drop, low, high, p_alone, p, n.
        """
        return self.table("heads")

    def legend(self) -> str:
        """Returns the meaning of the columns of `heads()`."""
        metric, heads = self.meta["settings"]["metric"], len(self._table("heads"))
        interval = f"bootstrap-t over {self.independent[1]}, {RESAMPLES:,} resamples"
        test = "these resamples"
        way = "how often the largest effect of all heads would be so clear"
        none = "A head whose drops are all equal shows no spread: it has no interval and no test."
        before = "read low to high and p_alone"
        if _one_answer(self):
            interval = "Tango's score interval of how many answers become wrong and right"
            test, way, none = "the exact sign test of these answers", "Holm's method", ""
            before += " (if few answers change, the interval may exclude 0 while the test shows no"
            before += " effect: then none is shown)"
        return (
            f"base, ablated: the mean {metric} of n samples (of a text, over all its tokens), with "
            "the whole model and without the head. drop: how much worse ablated is than base; "
            "below 0 the head harms.\n"
            f"{_HOW[self.meta['settings']['how']]}\n"
            f"low to high: the 95 % interval of the drop of each head by itself ({interval}).\n"
            "p_alone: how often a drop at least this far from 0 would come up if the head did "
            "nothing; a small value speaks for an effect. It is twice the smaller tail of "
            f"{test}.\n"
            f"p: the same, adjusted for all {heads} heads ({way}). A p of {LEVEL} or less shows an "
            f"effect. A p of 1 says only that no effect is shown. {none}".rstrip()
            + "\n"
            f"For a head that you chose before you saw any drop, such as the sharpest, {before}. "
            "For a head that you chose for its drop, read p."
        )

    @property
    def by_chance(self) -> float:
        """Returns how many intervals would exclude 0 by chance, if no head had an effect."""
        return LEVEL * len(self._table("heads"))

    def finding(self) -> str:
        """Returns how many heads matter, how many would by chance, and the largest effect."""
        table: Any = self._table("heads")
        count, name = counted(len(table), "heads"), self.meta["model"] or "the model"
        apart = int((signs(table["low"], table["high"]) != 0).sum())
        shown: Any = table[table["p"] <= LEVEL]
        counts = {"help": int((shown["drop"] > 0).sum()), "harm": int((shown["drop"] < 0).sum())}
        words = " and ".join(f"{n} {way}{'s' * (n == 1)}" for way, n in counts.items() if n)
        words = words or "none is shown to help or to harm"
        return (
            f"{self._worse()}Of {count} of {name} on {self.counted_samples()}, {words} "
            f"(p of {LEVEL} or less, adjusted over heads; intervals that exclude 0: {apart}, "
            f"by chance {self.by_chance:.2g}). " + self._largest(shown if len(shown) else table)
        )

    def _largest(self, among: Any) -> str:
        """Returns a sentence on the largest effect among some heads."""
        settings, unit = self.meta["settings"], _UNITS[self.meta["settings"]["metric"]]
        best = among.loc[among["drop"].abs().idxmax()]
        head = head_name(int(best["layer"]), int(best["head"]))
        ends, p = self.interval_words(best["low"], best["high"], before="by itself "), best["p"]
        which = "The largest of their effects"
        if np.isnan(p) or p > LEVEL:
            by = "" if np.isnan(p) else f" (p {p:.2g})"
            which = f"The largest effect, not distinct from 0 when adjusted for all heads{by},"
        of, even = (" over all tokens" if self.meta["unit"] == "windows" else ""), self._even()
        chance = "" if even is None else f" (by chance {even:.3g})"
        return (
            f"{which} is that of {head} ({settings['how']} ablation): {best['drop']:+.3g} {unit} "
            f"({ends}), from a base of {best['base']:.3g}{of}{chance}."
        )

    def _even(self) -> float | None:
        """Returns the metric of equally likely answers, or None for fewer than two of them."""
        config = self.meta["config"]
        choices = config.get("n_classes") or config.get("d_vocab") or 1
        if choices == 1:
            return None
        return math.log(choices) if self.meta["settings"]["metric"] == "loss" else 1 / choices

    def _worse(self) -> str:
        """Returns a warning if answers are worse than by chance, else ""."""
        metric, even = self.meta["settings"]["metric"], self._even()
        table: Any = self._table("heads")
        base = float(table["base"].mean())
        if even is None or (base <= even if metric == "loss" else base >= even):
            return ""
        return (
            f"The model answers worse than by chance: {metric} {base:.3g}, by chance {even:.3g}. "
            "Check that the labels are in the order of the model's outputs, and that pictures are "
            "prepared as in its training. "
        )

    def caution(self) -> str:
        """Returns `Result.caution`, and whether an accuracy near chance may be that of settings."""
        if self.meta["settings"]["metric"] == "loss":
            return super().caution()
        base: Any = self._table("base")["base"]
        return f"{super().caution()} {near_chance(self.meta, float(base.mean()))}".strip()

    def _shown(self) -> pd.DataFrame:
        table: Any = self._table("heads")
        return table.sort_values("drop", key=abs, ascending=False, kind="stable").head(20)
