"""What a sweep says of one network, statistic by statistic: a number for each sample and layer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_tables import TOGETHER, with_std


@dataclass(frozen=True)
class Statistic:
    """A statistic of one network.

    mean, error: over samples, by layer; error is the standard error, 0 for what the weights alone
    decide and NaN for a single sample. n: samples. values: a number for each sample, or None where
    the sweep kept none: of the weights, or of heads whose means alone were kept. sample: their
    numbers. per_head: whether it is a mean over heads.
    """

    layers: list[int]
    mean: Float[np.ndarray, "layer"]
    error: Float[np.ndarray, "layer"]
    n: Float[np.ndarray, "layer"]
    values: Float[np.ndarray, "sample layer"] | None = None
    sample: list[int] | None = None
    per_head: bool = False
    of_weights: bool = False

    def at(self, layers: list[int]) -> Float[np.ndarray, "sample layer"]:
        """Returns the number of each sample in some layers."""
        assert self.values is not None
        return self.values[:, [self.layers.index(layer) for layer in layers]]

    def by_layer(self, layers: list[int]) -> Float[np.ndarray, "number layer"]:
        """Returns mean, error and n of some layers, NaN for a layer that lacks the statistic."""
        table = pd.DataFrame([self.mean, self.error, self.n], columns=self.layers)
        return table.reindex(columns=layers).to_numpy(float)


def statistics_of(result: SweepResult) -> dict[str, Statistic]:
    """Returns "probe.statistic" -> what was measured, in the order in which it was measured.

    A statistic per head is the mean over heads: of each sample where the sweep kept every sample's
    numbers, else of all samples together. Of a result that was saved without the variance of this
    mean, its standard error is the mean of the heads' errors, which is the most that it can be.
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
    return {name: one for name, one in known.items() if one.layers}


def _of_values(wide: Any, per_head: bool) -> Statistic:
    values = wide.to_numpy(dtype=float)
    n = (~np.isnan(values)).sum(axis=0)
    layers = [int(layer) for layer in wide.columns]
    sample = [int(number) for number in wide.index]
    mean = wide.mean(axis=0).to_numpy(dtype=float)
    error = wide.sem(axis=0).to_numpy(dtype=float)
    return Statistic(layers, mean, error, n.astype(float), values, sample, per_head)


def _mean_over_heads(heads: pd.DataFrame, name: str) -> Any:
    """Returns the mean over heads by sample and layer; NaN for a sample that one head lacks."""
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
        rows = own.groupby("layer")[["mean", "error", "n"]].mean()
        mean, error, n = rows.to_numpy(dtype=float).T
        layers = [int(layer) for layer in rows.index]
        found[f"{probe}.{statistic}"] = Statistic(layers, mean, error, n, per_head=True)
    return found


def _of_weights(weights: pd.DataFrame) -> dict[str, Statistic]:
    found: dict[str, Statistic] = {}
    table: Any = weights
    for (probe, statistic), own in table.groupby(["probe", "statistic"], sort=False):
        mean = own.groupby("layer")["value"].mean()
        layers = [int(layer) for layer in mean.index]
        zero, one = np.zeros(len(layers)), np.ones(len(layers))
        heads = bool(own["head"].notna().any())
        values = mean.to_numpy(dtype=float)
        found[f"{probe}.{statistic}"] = Statistic(
            layers, values, zero, one, per_head=heads, of_weights=True
        )
    return found
