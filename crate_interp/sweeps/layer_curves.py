"""The numbers of a figure by layer: a curve, its interval, its heads, and baselines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from crate_interp.core import checks
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_findings import even


@dataclass(frozen=True)
class Curve:
    """A statistic by layer.

    mean, low, high: over n samples, with the ends of its 95 % interval, which are NaN for a
    statistic of the weights. heads: `[layer, head]`, or None if it has one value for all heads.
    """

    layers: Float[np.ndarray, "layer"]
    mean: Float[np.ndarray, "layer"]
    low: Float[np.ndarray, "layer"]
    high: Float[np.ndarray, "layer"]
    n: int
    heads: Float[np.ndarray, "layer head"] | None


def names(result: SweepResult) -> list[str]:
    """Returns all "probe.statistic" of a result, in the order in which they were measured."""
    pairs = [
        (probe, statistic)
        for table in (result.table("layers"), result.table("heads"))
        for probe, statistic in table[["probe", "statistic"]].drop_duplicates().to_numpy().tolist()
    ]
    order = list(result.meta["statistics"])
    return sorted((f"{probe}.{statistic}" for probe, statistic in pairs), key=order.index)


def curve(result: SweepResult, statistic: str) -> Curve:
    """Returns the curve of "probe.statistic".

    For a statistic per head, mean and interval are those of each sample's mean over heads. Raises
    ValueError, with the nearest names, if the result lacks the statistic.
    """
    rows = _rows(result.layers(), statistic)
    if len(rows):
        layers, mean = np.asarray(rows[["layer", "mean"]], dtype=float).T
        heads = _rows(result.heads(), statistic)
        wide = _wide(heads, "mean") if len(heads) else None
        return Curve(layers, mean, *result.mean_ends(rows), int(rows["n"].max()), wide)
    known = names(result)
    hint = checks.did_you_mean(statistic, known, f"It has {', '.join(known)}.")
    raise ValueError(f"the result has no statistic {statistic!r}. {hint}")


def _rows(table: Any, statistic: str) -> Any:
    """Returns the rows of "probe.statistic"."""
    probe, _, name = statistic.partition(".")
    return table[(table["probe"] == probe) & (table["statistic"] == name)]


def _wide(rows: Any, values: str) -> np.ndarray:
    """Returns a column of a table of heads as `[layer, head]`."""
    return rows.pivot(index="layer", columns="head", values=values).to_numpy(dtype=float)


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


def chance(
    results: Sequence[SweepResult], statistic: str
) -> tuple[str, Float[np.ndarray, "layer"]] | None:
    """Returns the name and the values by layer of a statistic's chance level, or None.

    It is None if it is unknown, or differs between the results.
    """
    found = [_chance(result, statistic) for result in results]
    levels = [one[1] for one in found if one is not None]
    if not levels or {len(level) for level in levels} != {len(levels[0])}:
        return None
    return found[0] if len(levels) == len(found) and np.allclose(levels, levels[0]) else None


def _chance(result: SweepResult, statistic: str) -> tuple[str, np.ndarray] | None:
    config, every = result.meta["config"], curve(result, statistic).layers
    if statistic in ("alignment.head_overlap", "alignment.energy_head"):
        p, d = config.get("d_head"), config.get("d_model")
        return ("random subspaces, p/d", np.full(len(every), p / d)) if p and d else None
    if statistic == "alignment.dictionary_shape":
        short, long = sorted((config.get("d_model") or 0, config.get("d_mlp") or 0))
        return ("a random D", np.full(len(every), (short / long) ** 0.5)) if short else None
    if statistic == "sparsity.zero_fraction":
        return "a ReLU of noise", np.full(len(every), 0.5)
    if statistic == "linear.accuracy" and "linear.chance" in names(result):
        return "the commonest class", curve(result, "linear.chance").mean
    level = even(result, statistic)
    return None if level is None else ("even attention", level)


def head_interval(
    result: SweepResult, statistic: str
) -> tuple[Float[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]] | None:
    """Returns the ends of the 95 % intervals of a statistic per head, or None for the weights."""
    rows = _rows(result.heads(), statistic)
    low, high = result.mean_ends(rows)
    rows = rows.assign(low=low, high=high)
    return None if np.isnan(low).all() else (_wide(rows, "low"), _wide(rows, "high"))
