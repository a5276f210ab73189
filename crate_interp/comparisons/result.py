"""Comparison: how two networks, or two groups of networks, differ in each statistic and layer."""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from crate_interp.comparisons.headline import evidence, headline, overview
from crate_interp.results.grouped_samples import counted
from crate_interp.results.result import Result, first
from crate_interp.stats.intervals import student_interval

_NUMBERS = (
    "layer", "layer_b", "a", "b", "difference", "low", "high", "p", "holds", "n", "untrained",
    "untrained_low", "untrained_high", "excess", "excess_low", "excess_high", "excess_p",
)  # fmt: skip
_FEW = 5  # with fewer networks, an interval over them is wide and relies on Student's t


class Comparison(Result):
    """How two networks, or two groups of networks, differ, compared with their untrained twins.

    `table()` has a row per statistic and pair of layers. layer, layer_b: the layers of a and of b,
    the same unless their depths differ. a, b: the means; difference: a - b, with its 95 % interval
    low to high. p: two-sided, adjusted over the layers of the statistic; holds: p <= 0.05. n: the
    number of samples, or of networks if a side has several; 1 for a statistic of the weights of
    single networks. This statistic, and a difference that is equal in all samples, has neither
    interval nor p. untrained_a, untrained_b, untrained: the means of the untrained twins and their
    difference, with untrained_low, untrained_high. excess: difference - untrained, with excess_low,
    excess_high and excess_p, adjusted over layers (Holm). untrained_p: as p, between two untrained
    networks; NaN for groups, or without twins. `ci.compare` describes the intervals.

    Stored tables: `differences`; and `networks`, with a row per network (side, number, trained),
    statistic and layer: mean, error (standard error over samples), n. meta: a and b with names and
    digests, `layers` (the pairs), `not_compared` (with reasons), `noted` (settings that differ),
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

    def not_compared(self) -> pd.DataFrame:
        """Returns the statistics that were left out: statistic, reason."""
        rows = list(self.meta["not_compared"].items())
        return pd.DataFrame(rows, columns=["statistic", "reason"])

    def text(self) -> str:
        """Returns a table as text: a row per statistic, with a sign for each layer.

        + a is higher, - a is lower, o no more than untrained networks differ, ? undecided, . cannot
        be tested.
        """
        return overview(self)

    def finding(self) -> str:
        """Returns how many differences are evidence, what stands beside that, and the largest."""
        return headline(self)

    def caution(self) -> str:
        """Returns a warning: what intervals leave out, and whether layers are paired by depth."""
        said = []
        sides = [self.meta[side] for side in "ab"]
        if self.single:
            said.append(super().caution())
            said.append(
                f"Intervals are over {self.meta['unit']} for these two networks: other seeds may "
                "differ."
            )
        elif min(len(side["networks"]) for side in sides) < _FEW:
            numbers = " and ".join(counted(len(side["networks"]), "networks") for side in sides)
            said.append(f"Intervals over {numbers} are wide and rest on Student's t.")
        if not all(side["untrained"] for side in sides):
            said.append("At least one side has no untrained networks to compare with.")
        elif self.single and min(len(side["untrained"]) for side in sides) < 2:
            said.append(
                "Whether trainings scatter by as much is unknown: that takes at least two "
                "untrained networks of each side."
            )
        if sides[0]["n_layers"] != sides[1]["n_layers"]:
            said.append(
                f"{sides[0]['n_layers']} layers are compared with {sides[1]['n_layers']} at the "
                "same relative depth."
            )
        return " ".join(words for words in said if words)

    def _shown(self) -> pd.DataFrame:
        table: Any = self._table("differences")
        columns = ["probe", "statistic", "layer", "a", "b", "difference", "low", "high", "p"]
        first = table.loc[(~evidence(table)).sort_values(kind="stable").index]
        return first[[*columns, "holds", "untrained", "excess"]].head(40)
