"""One network's statistics from a sweep: a number for each sample and layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_tables import TOGETHER, with_std


@dataclass(frozen=True)
class Statistic:
    """A statistic of one network.

    numbers: a row per layer with mean, error and n, over samples; error is the standard error, 0
    for statistics of the weights and NaN for a single sample. values: a row per sample and a column
    per layer, or None if the sweep has no values by sample: for weights, and for heads of which
    only means were saved. per_head: whether it is a mean over heads.
    """

    numbers: pd.DataFrame
    values: pd.DataFrame | None = None
    per_head: bool = False
    of_weights: bool = False

    def by_layer(self, layers: Sequence[int]) -> Float[ndarray, "number layer"]:
        """Returns mean, error and n of some layers, NaN for a layer that lacks the statistic."""
        return self.numbers.reindex(list(layers)).to_numpy(float).T


def statistics_of(result: SweepResult) -> dict[str, Statistic]:
    """Returns "probe.statistic" -> its numbers, in the order in which they were measured.

    A statistic per head is the mean over heads: for each sample if the sweep has every sample's
    numbers, else for all samples together. If a result was saved without the variance of this mean,
    the mean of the heads' errors, an upper bound, is its standard error.
    """
    samples, heads = result.table("samples"), result.table("head_samples")
    found = _of_weights(result.table("weights")) | _of_moments(result.table("moments"))
    for name in heads.columns[3:]:
        found[name] = _of_values(_mean_over_heads(heads, name), per_head=True)
    averaged = set(result.meta.get("heads_averaged", []))
    for name in samples.columns[3:]:
        wide: Any = samples.pivot(index="sample", columns="layer", values=name)
        found[name] = _of_values(wide.dropna(axis=1, how="all"), per_head=name in averaged)
    order = list(result.meta["statistics"])
    known = {name: found[name] for name in order if name in found}
    return {name: one for name, one in known.items() if len(one.numbers)}


def _of_values(wide: Any, per_head: bool) -> Statistic:
    numbers = {"mean": wide.mean(), "error": wide.sem(), "n": wide.count()}
    return Statistic(pd.DataFrame(numbers), wide, per_head)


def _mean_over_heads(heads: pd.DataFrame, name: str) -> Any:
    """Returns the mean over heads by sample and layer; NaN if some head has no value."""
    own: Any = heads[["sample", "layer", name]].groupby(["sample", "layer"])[name]
    whole = own.mean().where(own.count() == own.size())
    return whole.unstack("layer").dropna(axis=1, how="all")


def _of_moments(moments: pd.DataFrame) -> dict[str, Statistic]:
    found: dict[str, Statistic] = {}
    table = with_std(moments)
    table["error"] = table["std"] / table["n"] ** 0.5
    for (probe, statistic), own in table.groupby(["probe", "statistic"], sort=False):
        together = own[own["head"] == TOGETHER]
        own = together if len(together) else own
        numbers: Any = own.groupby("layer")[["mean", "error", "n"]].mean()
        found[f"{probe}.{statistic}"] = Statistic(numbers, per_head=True)
    return found


def _of_weights(weights: Any) -> dict[str, Statistic]:
    found: dict[str, Statistic] = {}
    for (probe, statistic), own in weights.groupby(["probe", "statistic"], sort=False):
        numbers = own.groupby("layer")[["value"]].mean().assign(error=0.0, n=1.0)
        heads = bool(own["head"].notna().any())
        found[f"{probe}.{statistic}"] = Statistic(numbers, per_head=heads, of_weights=True)
    return found
