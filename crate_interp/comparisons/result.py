"""Comparison: how two networks, or two groups of networks, differ in each statistic and layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from crate_interp.probes import statistic
from crate_interp.results.result import Result, as_text, first
from crate_interp.stats.intervals import LEVEL, student_interval
from crate_interp.stats.verdicts import BROKEN, KEPT, SHOWN, of_difference

_FEW = 5  # with fewer networks, an interval over them is wide and relies on Student's t
LARGEST = 3  # number of statistics with the largest differences to show


class Comparison(Result):
    """How two networks, or two groups of networks, differ, compared with their untrained copies.

    `table()` has a row per statistic and pair of layers. layer, layer_b: the layers of a and of b,
    the same unless their depths differ. a, b: the means; difference: a - b, with its 95 % interval
    low to high. p: two-sided, adjusted over the layers of the statistic; holds: p <= 0.05. n: the
    number of samples, or of networks if a side has several; 1 for a statistic of the weights of
    single networks. Such a statistic has no interval and no p, nor has a difference that is equal
    in all samples. untrained_a, untrained_b, untrained: the means of the untrained copies and their
    difference, with untrained_low, untrained_high. excess: difference - untrained, with excess_low,
    excess_high and excess_p, adjusted over layers (Holm). untrained_p: as p, between two untrained
    networks; NaN for groups, or without untrained copies. `ci.compare` describes the intervals.

    Stored tables: `differences`; and `networks`, with a row per network (side, number, trained),
    statistic and layer: mean, error (standard error over samples), n. meta: a and b with names and
    digests, `layers` (the pairs), `not_compared` (with reasons), `noted` (which maps stand for U),
    `heads_averaged` (statistics that are means over heads), `of_weights`.
    """

    KIND = "comparison"
    MAIN = "differences"
    STORED = {"differences": first, "networks": first}
    ALONE = "a comparison needs all samples at once: merge the sweeps, then compare them."
    INTERVALS = True

    @property
    def single(self) -> bool:
        """Whether each side is a single network, so that intervals are over samples."""
        return len(self.meta["a"]["networks"]) == len(self.meta["b"]["networks"]) == 1

    def networks(self) -> pd.DataFrame:
        """Returns a row per network, statistic and layer.

        Columns: side ("a" or "b"), network, trained, probe, statistic, layer, mean, error, n.
        """
        return self.table("networks")

    def mean_ends(
        self, statistic: str, side: str, layers: Int[np.ndarray, "layer"]
    ) -> tuple[Float[np.ndarray, "layer"], Float[np.ndarray, "layer"]]:
        """Returns the ends of the 95 % interval of a side's mean, by Student's t.

        The interval is over networks if the side has several, else over samples. Its ends are NaN
        if nothing varies.
        """
        table: Any = self._table("networks")
        names = table["probe"] + "." + table["statistic"]
        own = table[(names == statistic) & (table["side"] == side) & table["trained"]]
        mean, error, n = (
            own.pivot(index="network", columns="layer", values=name).reindex(columns=layers)
            for name in ("mean", "error", "n")
        )
        if len(mean) > 1:
            return student_interval(mean.mean().to_numpy(), mean.sem().to_numpy(), len(mean))
        (mean,), (error,), (n,) = (wide.to_numpy(float) for wide in (mean, error, n))
        return student_interval(mean, np.where(error > 0, error, np.nan), n)

    def text(self) -> str:
        """Returns a table as text: a row per statistic, with a sign for each layer.

        + a is higher, - a is lower, o no more than untrained networks differ, ? can't tell, .
        cannot be tested.
        """
        table: Any = self._table("differences")
        beside = {"untrained": "untrained", "excess": "beyond untrained"}
        if not (table["untrained"].fillna(0) != 0).any():
            beside = {}  # then the whole difference is beyond untrained networks
        rows: list[list[str]] = []
        for name, own in table.groupby(["probe", "statistic"], sort=False):
            signs = "".join(
                "o" if is_like_untrained(row) else SHOWN[verdict(row)].sign or "."
                for row in own.to_dict("records")
            )
            cells = [span(own[column].to_numpy()) for column in ("difference", *beside)]
            rows.append([".".join(name), signs, *cells])
        return as_text(["statistic", "layers", "a - b", *beside.values()], rows)

    def sentences(self) -> list[str]:
        """Returns how many differences are evidence, and how many two untrained networks have."""
        table: Any = self.table("differences")
        model, count = self.meta["model"], int(table["p"].notna().sum())
        if len(table) and not (table["difference"].fillna(0) != 0).any():
            return [f"{model}: every difference is 0."]
        if not count:
            return [f"{model}: no difference has an interval."]
        held, beyond = int(table["holds"].sum()), int(evidence(table).sum())
        spread = bool(table["excess_p"].notna().any())
        start = "" if beyond > LEVEL * count else "No evidence of a difference: "
        fewest = min(len(self.meta[side]["untrained"]) for side in "ab")
        if start and 0 < fewest < _FEW:
            start = f"Can't tell from {fewest} untrained (give 5): "
        how = "exceed the spread between untrained networks" if spread else "hold"
        said = [
            f"{start}{beyond} of {count} differences {how}.",
            f"At most {LEVEL * count:.2g} would by chance.",
            f"{held} differences hold between these networks ({model})." if spread else "",
        ]
        alike = table["untrained_p"]
        if spread and not alike.isna().all():
            said[2] = (
                f"Ignoring this spread, {held} differences hold between these networks ({model}), "
                f"and {(alike <= LEVEL).sum()} between two untrained networks."
            )
        if lead := steady(self):
            name, higher, layers, of = lead
            start = f"They differ: \u201c{statistic(self.meta, name).title}\u201d is "
            sides = f" in {self.meta['a']['name']}, in {layers} of {of} layers."
            said[:2] = start + ("higher" if higher else "lower") + sides, " ".join(said[:2])
        return [words for words in said if words]

    def finding(self) -> str:
        """Returns how many differences are evidence, what stands beside that, and the largest."""
        words = super().finding()
        for row in largest(self, 1):
            name = f"{row['probe']}.{row['statistic']}"
            words += f" The largest: {name}: {signed(row['difference'])} ({row['low']:+.3g} to "
            words += f"{row['high']:+.3g}) in {place(row, self.meta['a']['n_layers'])}, "
            unit = self.meta["statistics"][name][0]
            words += f"{row['a']:.4g} against {row['b']:.4g} {unit}".rstrip() + "."
        return words

    def caution(self) -> str:
        """Returns a warning: what intervals leave out, and whether layers are paired by depth."""
        a, b = self.meta["a"], self.meta["b"]
        doubts = []
        if self.single:
            doubts += [super().caution(), "Other seeds of these two networks may differ."]
        elif min(len(a["networks"]), len(b["networks"])) < _FEW:
            doubts.append(f"Intervals over fewer than {_FEW} networks are wide.")
        if not (a["untrained"] and b["untrained"]):
            doubts.append("At least one side has no untrained networks to compare with.")
        if a["n_layers"] != b["n_layers"]:
            pair = f"{a['n_layers']} layers are compared with {b['n_layers']}"
            doubts.append(f"{pair} at the same relative depth.")
        return " ".join(filter(None, doubts))

    def _notebook_table(self) -> pd.DataFrame:
        table: Any = self._table("differences")
        columns = ["probe", "statistic", "layer", "a", "b", "difference", "low", "high", "p"]
        first = table.loc[(~evidence(table)).sort_values(kind="stable").index]
        return first[[*columns, "holds", "untrained", "excess"]].head(40)


def verdict(row: Mapping[str, Any]) -> str:
    """Returns "kept" if a is shown to be higher than b, "broken" if lower.

    A statistic of the weights of single networks, and a difference that is equal in all samples,
    have no p, so the excess over untrained networks decides, if there is a difference at all.
    """
    if np.isnan(row["p"]) and row["difference"]:
        return of_difference(row["excess"], row["excess_p"])
    return of_difference(row["difference"], row["p"])


def is_like_untrained(row: Mapping[str, Any]) -> bool:
    """Tells whether a difference is shown that untrained networks may have as well."""
    return verdict(row) in (KEPT, BROKEN) and bool(row["excess_p"] > LEVEL)  # False for NaN


def span(values: np.ndarray) -> str:
    """Returns the lowest and the highest value, such as "-0.3 to +2", or "" for no values."""
    if np.isnan(values).all():
        return ""
    low, high = (signed(float(end)) for end in (np.nanmin(values), np.nanmax(values)))
    return low if low == high else f"{low} to {high}"


def signed(value: float) -> str:
    """Returns a number with its sign and three digits; 0 gets no sign."""
    return "0" if value == 0 else f"{value:+.3g}"


def evidence(differences: pd.DataFrame) -> pd.Series:
    """Returns which rows of `differences` other trainings would show, as a column of bool.

    A row counts if its difference holds and exceeds the spread between untrained networks. If that
    spread is unknown, every difference that holds counts.
    """
    table: Any = differences
    known = bool(table["excess_p"].notna().any())
    return table["holds"] & (table["excess_p"] <= LEVEL) if known else table["holds"]


def steady(result: Comparison) -> tuple[str, bool, int, int] | None:
    """Returns the difference that needs the fewest words: it has one sign wherever it is evidence.

    Of such statistics it is the one that is evidence in the largest part of its layers, and then
    the one whose median difference is the largest, relative to the larger mean. Returns its
    "probe.statistic", whether a is higher, in how many layers it is evidence, and of how many.
    """
    tested: Any = result.table("differences").dropna(subset="p")
    leading: Any = _leading(result).groupby(["probe", "statistic"], sort=False)
    counts, every = tested.value_counts(["probe", "statistic"]), []
    for (probe, name), own in leading:
        higher, of = {*(own["difference"] > 0)}, int(counts[probe, name])
        if len(higher) == 1:
            found = f"{probe}.{name}", *higher, len(own), of
            every.append((len(own) / of, own["share"].median(), found))
    return max(every)[-1] if every else None


def _leading(result: Comparison) -> pd.DataFrame:
    """Returns the differences that are evidence, with their `share` of the larger mean.

    The table is empty if no more differ than by chance.
    """
    table: Any = result.table("differences")
    rows = table[evidence(table)]
    most = np.maximum(rows["a"].abs(), rows["b"].abs())
    rows = rows.assign(share=rows["difference"].abs() / most.where(most > 0, 1.0))
    return rows if len(rows) > LEVEL * table["p"].notna().sum() else rows.head(0)


def largest(result: Comparison, count: int = LARGEST) -> list[dict[str, Any]]:
    """Returns the rows of the largest differences that are evidence, one for each statistic.

    A statistic has the row of the layer in which a and b differ most. Statistics have different
    units, so they are ordered by the largest difference relative to the larger of the two means.
    R - R^c is left out: it is mostly the scale of U.
    """
    rows: Any = _leading(result)
    rows = rows[~rows["statistic"].str.match("reduction_")].assign(size=rows["difference"].abs())
    rows = rows.assign(most=rows.groupby(["probe", "statistic"])["share"].transform("max"))
    ordered = rows.sort_values(["most", "size"], ascending=False, kind="stable")
    return ordered.drop_duplicates(["probe", "statistic"]).head(count).to_dict("records")


def place(row: dict[str, Any], depth: int | None = None) -> str:
    """Returns the layers of a row in words, such as "layer 3" or "layers 3 and 6".

    depth: how many layers a has; the layer of this number is the stream after the last.
    """
    own, other = int(row["layer"]), int(row["layer_b"])
    if own == depth:
        return "the stream after the last layer"
    return f"layer {own}" if own == other else f"layers {own} and {other}"
