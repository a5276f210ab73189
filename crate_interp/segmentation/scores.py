"""The three ways to score how well a layer segments, and scores of masks that need no network."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.data import Samples
from crate_interp.measures import mass_mask, top_mask
from crate_interp.probes.segmentation_probe import CHANCE, RESOLUTIONS, RULES, Targets
from crate_interp.results.kinds import Tables
from crate_interp.results.result import Result
from crate_interp.stats.intervals import mean_interval
from crate_interp.sweeps.runs.batches import Chunk

WAYS = ("best head for each image", "fixed head", "mean over heads")
Columns = tuple[pd.DataFrame, np.ndarray]  # keys of the columns, and scores `[n, column]`
LEAST = 4  # fewest images with an object


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
    """Returns a row per rule, resolution, way and layer, with chance levels."""
    kept, constants = _with_object(result), result.table("constants")[_with_object(result)]
    parts: list[pd.DataFrame] = []
    for rule, resolution, table in _beside_chance(result, _by_way, fewest=2):
        table["all_foreground"] = constants[f"all_{resolution}"].mean()
        table["centre"] = constants[f"{rule}_{resolution}"].mean()
        table.insert(7, "n", int(kept.sum()))
        parts.append(table.astype({"layer": "Int64", "head_layer": "Int64", "head": "Int64"}))
    return pd.concat(parts, ignore_index=True)


def head_table(result: Result) -> pd.DataFrame:
    """Returns a row per rule, resolution, layer and head: its mean, interval and chance levels."""
    parts = [table for _, _, table in _beside_chance(result, _by_head, fewest=1)]
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
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yields rule, resolution, and a table with each column's mean, interval and chance levels.

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
            yield rule, resolution, table


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


def constants_of(chunk: Chunk, mass: float, fraction: float) -> Tables:
    """Returns a row per image: sample, label, and the scores of masks that need no network.

    all_token, all_pixel: the scores of the whole image as foreground; the other columns are scores
    of the centred map by each rule. NaN means that the image has no object.
    """
    patch_size = chunk.model.cfg.patch_size
    parts: dict[str, list[Tensor]] = {}
    for batch in chunk.batches():
        masks = batch.masks
        assert masks is not None  # the stage has masks
        parts.setdefault("sample", []).append(torch.arange(batch.start, batch.last + 1))
        targets = Targets(masks, patch_size)
        patches = zip(masks.shape[1:], patch_size, strict=True)
        height, width = (side // patch for side, patch in patches)
        centre = centred_map((height, width))
        shapes = {"all": torch.ones_like(centre, dtype=torch.bool)}
        shapes |= {"mass": mass_mask(centre, mass), "top": top_mask(centre, fraction)}
        for name, shape in shapes.items():
            for resolution in RESOLUTIONS:
                mask = shape.expand(len(masks), 1, -1)
                scores = targets.mean(targets.jaccard(mask, resolution))[:, 0]
                parts.setdefault(f"{name}_{resolution}", []).append(scores)
    if not parts:
        return {"constants": pd.DataFrame({"sample": []})}
    columns = {name: torch.cat(values).numpy() for name, values in parts.items()}
    labels = _labels(chunk.samples)
    table = pd.DataFrame(columns)
    own = [labels[number - chunk.samples.start] for number in columns["sample"]]
    table.insert(1, "label", pd.Series(own, dtype=object))
    return {"constants": table.infer_objects()}


def check_objects(constants: pd.DataFrame) -> None:
    """Raises ValueError if fewer than 4 images have an object."""
    kept = int(constants["all_token"].notna().to_numpy().sum())
    if kept < LEAST:
        raise ValueError(
            f"{kept} of {len(constants)} images have an object: give at least {LEAST} such images, "
            "two in each half."
        )


def _labels(samples: Samples) -> list[Any]:
    """Returns the names of the labels, one for each image; None if there are no labels."""
    labels: list[Any] = samples.labels or [None] * samples.n
    if samples.names is None:
        return labels
    return [None if label is None else samples.names[label] for label in labels]


def centred_map(grid: tuple[int, int]) -> Tensor:
    """Returns a Gaussian around the middle of a grid `[h * w]`.

    Its standard deviation is a quarter of each side.
    """
    # made from integers, so that mirrored patches are exactly equal and only the tie rule decides
    rows, columns = ((2 * torch.arange(side) + 1 - side) / side * 2 for side in grid)
    return torch.exp(-(rows[:, None] ** 2 + columns**2) / 2).flatten()
