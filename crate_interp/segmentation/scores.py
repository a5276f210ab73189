"""From scores per sample, layer and head to the three ways to score how well a layer segments."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.probes.segmentation_probe import CHANCE, RESOLUTIONS, RULES
from crate_interp.results.result import Result
from crate_interp.stats.intervals import mean_interval

WAYS = ("best head for each image", "fixed head", "mean over heads")


@dataclass(frozen=True)
class Scores:
    """Jaccard indices of one model and rule: `heads` `[n, layer, head]`, `best` `[n, layer]`.

    NaN stands for a sample without an object.
    """

    heads: np.ndarray
    best: np.ndarray


def scores_of(samples: pd.DataFrame, head_samples: pd.DataFrame, name: str) -> Scores:
    """Returns the scores called `segmentation.{name}` in the tables of a sweep."""
    shape = [len(set(head_samples[axis])) for axis in ("sample", "layer", "head")]
    heads = head_samples[f"segmentation.{name}"].to_numpy().reshape(shape)
    best = samples[f"segmentation.{name}_best"].to_numpy().reshape(shape[0], -1)
    return Scores(heads, best[:, : shape[1]])


def fixed(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores `[n]` by a head that the sample did not choose, and its place `[n, 2]`.

    Each half of the samples, those of even and of odd number, is scored by the head that is best on
    the other half. heads: `[n, layer, head]`. Of equal heads the lower layer and head wins.
    """
    score, place = np.empty(len(heads)), np.empty((len(heads), 2), dtype=int)
    for half in (0, 1):
        best = heads[1 - half :: 2].mean(axis=0).argmax()
        chosen = np.unravel_index(best, heads.shape[1:])
        score[half::2] = heads[half::2, chosen[0], chosen[1]]
        place[half::2] = chosen
    return score, place


def summarise(scores: Scores, kept: np.ndarray) -> list[dict[str, Any]]:
    """Returns a row for each way and layer, and one for the head that is fixed over all layers.

    Columns: way, layer, head_layer, head, value, low, high, n. kept: which samples have an object.
    head_layer and head: where both halves of the samples chose the same, else None.
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
    low, high = mean_interval(np.stack(columns, axis=1))
    return [row | {"low": low[place], "high": high[place]} for place, row in enumerate(rows)]


def score_table(result: Result) -> pd.DataFrame:
    """Returns a row per rule, resolution, way and layer, beside what chance has."""
    kept, constants = _kept(result), result.table("constants")
    parts: list[pd.DataFrame] = []
    for facts, (own, random, other), networks in _by_rule(result):
        rule, resolution = facts["rule"], facts["resolution"]
        table = pd.DataFrame([facts | row for row in summarise(own, kept)])
        table["other_image"] = _of_others(other, kept, len(table))
        table["random"] = [row["value"] for row in summarise(random, kept)]
        values = [[row["value"] for row in summarise(network, kept)] for network in networks]
        table["untrained"] = _mean(values, len(table))
        table["all_foreground"] = constants[f"all_{resolution}"].to_numpy()[kept].mean()
        table["centre"] = constants[f"{rule}_{resolution}"].to_numpy()[kept].mean()
        parts.append(table.astype({"layer": "Int64", "head_layer": "Int64", "head": "Int64"}))
    return pd.concat(parts, ignore_index=True)


def head_table(result: Result) -> pd.DataFrame:
    """Returns a row per rule, resolution, layer and head: its mean, interval and chance levels."""
    kept = _kept(result)
    parts: list[pd.DataFrame] = []
    for facts, (own, random, other), networks in _by_rule(result):
        values = own.heads[kept].reshape(int(kept.sum()), -1)  # [n, layer * head]
        low, high = mean_interval(values)
        layer, head = np.indices(own.heads.shape[1:]).reshape(2, -1)
        numbers = {"value": values.mean(axis=0), "low": low, "high": high}
        table = pd.DataFrame({**facts, "layer": layer, "head": head, **numbers})
        both = kept & ~np.isnan(other.best[:, 0])
        means = other.heads[both].mean(axis=0).reshape(-1) if both.any() else np.nan
        table["other_image"] = means
        table["random"] = random.heads[kept].mean(axis=0).reshape(-1)
        untrained = [network.heads[kept].mean(axis=0).reshape(-1) for network in networks]
        table["untrained"] = _mean(untrained, len(table))
        parts.append(table)
    return pd.concat(parts, ignore_index=True)


def image_table(result: Result) -> pd.DataFrame:
    """Returns a row per image with an object: its score by the fixed head, mass rule, tokens."""
    kept, constants = _kept(result), result.table("constants")
    own = scores_of(result.table("samples"), result.table("head_samples"), "mass_token")
    score, place = fixed(own.heads[kept])
    images = constants.loc[kept, ["sample", "label"]].assign(score=score)
    images["layer"], images["head"] = place.T
    return images.reset_index(drop=True)


def _kept(result: Result) -> np.ndarray:
    """Returns which samples have an object `[n]`."""
    return result.table("constants")["all_token"].notna().to_numpy()


def _by_rule(result: Result) -> list[tuple[dict[str, str], tuple[Scores, ...], list[Scores]]]:
    """Returns the scores of each rule and resolution, the chance levels, and the twins."""
    own = (result.table("samples"), result.table("head_samples"))
    twins = [
        tuple(part[part["seed"] == seed] for part in _of_twins(result))
        for seed in range(result.meta["untrained"])
    ]
    found = []
    for rule in RULES:
        for resolution in RESOLUTIONS:
            name = f"{rule}_{resolution}"
            levels = tuple(scores_of(*own, f"{name}{chance}") for chance in CHANCE)
            networks = [scores_of(samples, heads, name) for samples, heads in twins]
            found.append(({"rule": rule, "resolution": resolution}, levels, networks))
    return found


def _of_twins(result: Result) -> tuple[Any, Any]:
    return result.table("untrained_samples"), result.table("untrained_head_samples")


def _of_others(other: Scores, kept: np.ndarray, count: int) -> list[float]:
    """Returns values by the next image's mask, of the images whose next one has an object.

    NaN stands for fewer than two of them.
    """
    both = kept & ~np.isnan(other.best[:, 0])
    return [row["value"] for row in summarise(other, both)] if both.sum() > 1 else [np.nan] * count


def _mean(values: list[Any], count: int) -> np.ndarray:
    return np.mean(values, axis=0) if values else np.full(count, np.nan)


def _agreed(place: np.ndarray) -> tuple[int | None, int | None]:
    """Returns the layer and head of `[n, 2]` that are the same for all samples."""
    same = (place == place[0]).all()
    return (int(place[0, 0]), int(place[0, 1])) if same else (None, None)
