"""From scores per sample, layer and head to the three ways of telling how well a layer segments."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from crate_interp.sweeps.bootstrap import intervals
from crate_interp.sweeps.result import SweepResult

WAYS = ("best head for each image", "fixed head", "mean over heads")


@dataclass(frozen=True)
class Scores:
    """Jaccard indices of one model and rule: `heads` `[n, layer, head]`, `best` `[n, layer]`; NaN where a sample has no object."""

    heads: np.ndarray
    best: np.ndarray


def scores_of(result: SweepResult, name: str) -> Scores:
    """The scores called `segmentation.{name}` of a sweep."""
    table, samples = result.head_samples(), result.samples()
    shape = [len(set(table[axis])) for axis in ("sample", "layer", "head")]
    heads = table[f"segmentation.{name}"].to_numpy().reshape(shape)
    best = samples[f"segmentation.{name}_best"].to_numpy().reshape(shape[0], -1)
    return Scores(heads, best[:, : shape[1]])


def fixed(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores `[n]` and places `[n, 2]` (layer, head): each half of the samples with the head that is best on the other half.

    heads `[n, layer, head]`; halves are the samples of even and odd number. The lower layer and head win a tie.
    """
    score, place = np.empty(len(heads)), np.empty((len(heads), 2), dtype=int)
    for half in (0, 1):
        chosen = np.unravel_index(heads[1 - half :: 2].mean(axis=0).argmax(), heads.shape[1:])
        score[half::2] = heads[half::2, chosen[0], chosen[1]]
        place[half::2] = chosen
    return score, place


def summarise(scores: Scores, kept: np.ndarray) -> list[dict[str, Any]]:
    """A row for each way and layer, and one for the head fixed over all layers: way, layer, head_layer, head, value, low, high, n.

    kept: the samples that have an object. head_layer, head: where both halves of the samples chose the same, else None.
    """
    heads, best = scores.heads[kept], scores.best[kept]
    columns: list[np.ndarray] = []
    rows: list[dict[str, Any]] = []

    def add(
        way: str,
        layer: int | None,
        values: np.ndarray,
        place: tuple[int | None, int | None] = (None, None),
    ) -> None:
        columns.append(values)
        row = {"way": way, "layer": layer, "head_layer": place[0], "head": place[1]}
        rows.append(row | {"value": values.mean(), "n": len(values)})

    for layer in range(heads.shape[1]):
        add(WAYS[0], layer, best[:, layer])
        score, place = fixed(heads[:, layer : layer + 1])
        add(WAYS[1], layer, score, _agreed(place + [layer, 0]))
        add(WAYS[2], layer, heads[:, layer].mean(axis=1))
    score, place = fixed(heads)
    add(WAYS[1], None, score, _agreed(place))
    low, high = intervals(np.stack(columns, axis=1))
    return [row | {"low": low[place], "high": high[place]} for place, row in enumerate(rows)]


def _agreed(place: np.ndarray) -> tuple[int | None, int | None]:
    """The layer and head of `[n, 2]` that are the same for all samples."""
    return (int(place[0, 0]), int(place[0, 1])) if (place == place[0]).all() else (None, None)
