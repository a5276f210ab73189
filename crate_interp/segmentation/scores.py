"""The three ways to score how well a layer segments, beside chance and maps without a network."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.probes.segmentation_probe import CHANCE, RESOLUTIONS, RULES
from crate_interp.results.result import Result
from crate_interp.segmentation.input_maps import without_network
from crate_interp.stats.intervals import mean_interval

WAYS = ("best head for each image", "fixed head", "mean over heads")
Columns = tuple[pd.DataFrame, np.ndarray]  # keys of the columns, and scores `[n, column]`


@dataclass(frozen=True)
class Scores:
    """Jaccard indices of one model and rule: `heads` `[n, layer, head]`, `best` `[n, layer]`.

    NaN means that a sample has no object.
    """

    heads: np.ndarray
    best: np.ndarray

    def on(self, chosen: np.ndarray) -> "Scores":
        """Returns the scores of some samples."""
        return Scores(self.heads[chosen], self.best[chosen])


def scores_of(samples: pd.DataFrame, head_samples: pd.DataFrame, name: str) -> Scores:
    """Returns the scores called `segmentation.{name}` in the tables of a sweep."""
    shape = [len(set(head_samples[axis])) for axis in ("sample", "layer", "head")]
    heads = head_samples[f"segmentation.{name}"].to_numpy().reshape(shape)
    best = samples[f"segmentation.{name}_best"].to_numpy().reshape(shape[0], -1)
    return Scores(heads, best[:, : shape[1]])


def fixed(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each sample's score `[n]`, and the layer and head that gave the score `[n, 2]`.

    The samples with even numbers are one half, those with odd numbers the other; each half is
    scored by the head that is best on the other half. heads: `[n, layer, head]`. If heads are
    equally good, the first one is taken.
    """
    score, place = np.empty(len(heads)), np.empty((len(heads), 2), dtype=int)
    for half in (0, 1):
        best = heads[1 - half :: 2].mean(axis=0).argmax()
        chosen = np.unravel_index(best, heads.shape[1:])
        score[half::2] = heads[half::2, chosen[0], chosen[1]]
        place[half::2] = chosen
    return score, place


def score_table(result: Result) -> pd.DataFrame:
    """Returns a row per rule, resolution, way and layer, with chance levels.

    strongest: the one of the masks without a network that has the highest mean over all images. The
    columns excess, excess_low and excess_high are the mean over images of the difference to it, and
    its interval.
    """
    kept = _with_object(result)
    constants: Any = result.table("constants")[kept]
    parts: list[pd.DataFrame] = []
    for rule, resolution, table, values in _beside_chance(result, _by_way, fewest=2):
        blind = without_network(constants, rule, resolution)
        means: Any = blind.mean()
        strongest = str(means.idxmax())
        excess = values - blind[[strongest]].to_numpy()
        low, high = mean_interval(excess)
        table = table.assign(
            **means, strongest=strongest, excess=excess.mean(axis=0), excess_low=low,
            excess_high=high,
        )  # fmt: skip
        table.insert(7, "n", int(kept.sum()))
        parts.append(table.astype({"layer": "Int64", "head_layer": "Int64", "head": "Int64"}))
    return pd.concat(parts, ignore_index=True)


def head_table(result: Result) -> pd.DataFrame:
    """Returns a row per rule, resolution, layer and head: its mean, interval and chance levels."""
    parts = [table for _, _, table, _ in _beside_chance(result, _by_head, fewest=1)]
    return pd.concat(parts, ignore_index=True)


def image_table(result: Result) -> pd.DataFrame:
    """Returns a row per image with an object: the fixed head's score `mass_token`."""
    kept, constants = _with_object(result), result.table("constants")
    own = scores_of(result.table("samples"), result.table("head_samples"), "mass_token")
    score, place = fixed(own.heads[kept])
    images = constants.loc[kept, ["sample", "label"]].assign(score=score)
    images["layer"], images["head"] = place.T
    return images.reset_index(drop=True)


def _by_way(scores: Scores) -> Columns:
    """Returns a column for each way and layer, and one for the head that is fixed over all layers.

    head_layer and head: the head that both halves of the samples chose, or None if they differ.
    """
    rows: list[tuple] = []
    for layer in range(scores.heads.shape[1]):
        score, place = fixed(scores.heads[:, layer : layer + 1])
        rows.append((WAYS[0], layer, None, None, scores.best[:, layer]))
        rows.append((WAYS[1], layer, *_agreed(place + [layer, 0]), score))
        rows.append((WAYS[2], layer, None, None, scores.heads[:, layer].mean(axis=1)))
    score, place = fixed(scores.heads)
    rows.append((WAYS[1], None, *_agreed(place), score))
    table = pd.DataFrame(rows, columns=["way", "layer", "head_layer", "head", "scores"])
    return table, np.stack(list(table.pop("scores")), axis=1)


def _by_head(scores: Scores) -> Columns:
    """Returns a column for each layer and head."""
    layer, head = np.indices(scores.heads.shape[1:]).reshape(2, -1)
    return pd.DataFrame({"layer": layer, "head": head}), scores.heads.reshape(-1, layer.size)


def _beside_chance(
    result: Result, columns: Callable[[Scores], Columns], fewest: int
) -> Iterator[tuple[str, str, pd.DataFrame, np.ndarray]]:
    """Yields rule, resolution, a table, and the scores `[n, row of the table]`.

    The table has each column's mean, interval and chance levels.

    Scores by the next image's mask use only images whose next image has an object; they are NaN for
    fewer than `fewest` such images.
    """
    kept, tables = _with_object(result), _tables(result)

    def means(scores: Scores, chosen: np.ndarray = kept) -> np.ndarray:
        return columns(scores.on(chosen))[1].mean(axis=0)

    for rule in RULES:
        for resolution in RESOLUTIONS:
            name = f"{rule}_{resolution}"
            own, random, other = (scores_of(*tables[0], f"{name}{chance}") for chance in CHANCE)
            table, values = columns(own.on(kept))
            low, high = mean_interval(values)
            table = table.assign(value=values.mean(axis=0), low=low, high=high)
            both = kept & ~np.isnan(other.best[:, 0])
            table["other_image"] = means(other, both) if both.sum() >= fewest else np.nan
            table["random"] = means(random)
            untrained = [means(scores_of(*twin, name)) for twin in tables[1:]]
            table["untrained"] = np.mean(untrained, axis=0) if untrained else np.nan
            table.insert(0, "rule", rule)
            table.insert(1, "resolution", resolution)
            yield rule, resolution, table, values


def _with_object(result: Result) -> np.ndarray:
    """Returns which samples have an object `[n]`."""
    return result.table("constants")["all_token"].notna().to_numpy()


def _tables(result: Result) -> list[tuple[Any, Any]]:
    """Returns the tables samples and head_samples of the model, then of each twin."""
    samples, heads = (result.table(f"untrained_{name}") for name in ("samples", "head_samples"))
    twins: list[tuple[Any, Any]] = [
        (samples[samples["seed"] == seed], heads[heads["seed"] == seed])
        for seed in range(result.meta["untrained"])
    ]
    return [(result.table("samples"), result.table("head_samples")), *twins]


def _agreed(place: np.ndarray) -> tuple[int | None, int | None]:
    """Returns the layer and head in `[n, 2]` if all samples share them, else None, None."""
    same = (place == place[0]).all()
    return (int(place[0, 0]), int(place[0, 1])) if same else (None, None)
