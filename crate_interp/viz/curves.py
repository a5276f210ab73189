"""The numbers a layer figure draws: one curve with its spread, the heads, and the untrained baseline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from crate_interp import checks
from crate_interp.sweeps.result import SweepResult


@dataclass(frozen=True)
class Curve:
    """A statistic by layer. `heads` `[layer, head]` or None; `mean`, `std` over samples (std NaN for weights)."""

    layers: Float[np.ndarray, "layer"]
    mean: Float[np.ndarray, "layer"]
    std: Float[np.ndarray, "layer"]
    heads: Float[np.ndarray, "layer head"] | None


def names(result: SweepResult) -> list[str]:
    """All "probe.statistic" that the result holds, in the order they were measured."""
    pairs = [
        (probe, statistic)
        for table in (result.layers(), result.heads())
        for probe, statistic in table[["probe", "statistic"]].drop_duplicates().to_numpy().tolist()
    ]
    order = list(result.meta["statistics"])
    return sorted((f"{probe}.{statistic}" for probe, statistic in pairs), key=order.index)


def curve(result: SweepResult, statistic: str) -> Curve:
    """The curve of "probe.statistic"; ValueError with the nearest names where the result lacks it.

    Of a statistic per head, mean is the mean over heads and std the mean over heads of the std over samples.
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
    """The same curve for each untrained twin, or None where there is none."""
    if not untrained:
        return None
    if isinstance(untrained, SweepResult):
        raise ValueError("untrained is a list of results, one for each seed: give [result].")
    means = [curve(result, statistic).mean for result in untrained]
    if len({len(mean) for mean in means}) > 1:
        raise ValueError(
            f"the untrained results have different numbers of layers: {[len(mean) for mean in means]}."
        )
    return np.stack(means)
