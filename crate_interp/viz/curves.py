"""The numbers that a figure by layer draws: a curve, its spread, its heads, and a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from crate_interp import checks
from crate_interp.sweeps.result import SweepResult


@dataclass(frozen=True)
class Curve:
    """A statistic by layer.

    mean, std: over samples; std is NaN for a statistic of the weights. heads: `[layer, head]`, or
    None if the statistic has one value for all heads.
    """

    layers: Float[np.ndarray, "layer"]
    mean: Float[np.ndarray, "layer"]
    std: Float[np.ndarray, "layer"]
    heads: Float[np.ndarray, "layer head"] | None


def names(result: SweepResult) -> list[str]:
    """Returns all "probe.statistic" of a result, in the order in which they were measured."""
    pairs = [
        (probe, statistic)
        for table in (result.layers(), result.heads())
        for probe, statistic in table[["probe", "statistic"]].drop_duplicates().to_numpy().tolist()
    ]
    order = list(result.meta["statistics"])
    return sorted((f"{probe}.{statistic}" for probe, statistic in pairs), key=order.index)


def curve(result: SweepResult, statistic: str) -> Curve:
    """Returns the curve of "probe.statistic".

    If the statistic is per head, mean is the mean over heads, and std the mean over heads of the
    standard deviation over samples. Raises ValueError, with the nearest names, if the result lacks
    the statistic.
    """
    probe, _, name = statistic.partition(".")
    for table in (result.layers(), result.heads()):
        rows = table[(table["probe"] == probe) & (table["statistic"] == name)]
        if len(rows) and "head" in rows:
            wide = rows.pivot(index="layer", columns="head", values="mean")
            std = rows.pivot(index="layer", columns="head", values="std")
            heads = wide.to_numpy(dtype=float)
            return Curve(
                wide.index.to_numpy(dtype=float),
                heads.mean(axis=1),
                std.to_numpy(dtype=float).mean(axis=1),
                heads,
            )
        if len(rows):
            layers, mean, std = np.asarray(rows[["layer", "mean", "std"]], dtype=float).T
            return Curve(layers, mean, std, heads=None)
    known = names(result)
    hint = checks.did_you_mean(statistic, known, f"It has {', '.join(known)}.")
    raise ValueError(f"the result has no statistic {statistic!r}. {hint}")


def baseline(
    untrained: Sequence[SweepResult] | None, statistic: str
) -> Float[np.ndarray, "seed layer"] | None:
    """Returns the mean of a statistic by layer for each untrained twin, or None without twins.

    Raises ValueError if the twins differ in depth or lack the statistic.
    """
    if not untrained:
        return None
    if isinstance(untrained, SweepResult):
        raise ValueError("untrained is a list of results, one for each seed: give [result].")
    means = [curve(result, statistic).mean for result in untrained]
    if len({len(mean) for mean in means}) > 1:
        raise ValueError(
            "the untrained results have different numbers of layers: "
            f"{[len(mean) for mean in means]}."
        )
    return np.stack(means)
