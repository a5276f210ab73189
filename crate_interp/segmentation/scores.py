"""The three ways to score how well a layer segments, beside chance and maps without a network."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.measures import input_maps, mass_mask, top_mask
from crate_interp.measures.maps import MAPS
from crate_interp.probes.segmentation_probe import CHANCE, RESOLUTIONS, RULES, Targets
from crate_interp.questions import batches, experiment
from crate_interp.results.result import Result
from crate_interp.stats.contrasts import by_group
from crate_interp.stats.intervals import halves, mean_interval, over_splits

WAYS = ("best head for each image", "fixed head", "mean over heads")
WITHOUT_NETWORK = {"all_foreground": "all foreground"} | MAPS


class Scores(NamedTuple):
    """Jaccard indices of one model and rule: `heads` `[n, layer, head]`, `best` `[n, layer]`.

    NaN means that a sample has no object.
    """

    heads: np.ndarray
    best: np.ndarray

    def chosen(self, heads: np.ndarray) -> np.ndarray:
        """Returns the scores of the heads of `choices`, `[draw, n, layer + 1]`."""
        return np.take_along_axis(self.heads.reshape(1, len(self.heads), -1), heads, axis=2)

    def by_way(self, heads: np.ndarray) -> np.ndarray:
        """Returns scores `[n, column]`: each way of each layer, then the head of all layers."""
        fixed = self.chosen(heads).mean(axis=0)
        ways = np.stack([self.best, fixed[:, :-1], self.heads.mean(axis=2)], axis=2)
        return np.concatenate([ways.reshape(len(ways), -1), fixed[:, -1:]], axis=1)


def choices(heads: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Returns the head that scores each sample in each split, `[draw, n, layer + 1]`.

    It is the layer's head that is best on the other half of the samples; the last column has the
    best head of all layers. heads: scores `[n, layer, head]`. A head is given by its place among
    all heads of all layers. If heads are equally good, the first one is taken.
    """
    n, layers, count = heads.shape
    flat, first = heads.reshape(n, -1), halves(n, groups)
    best = []
    for half in (first, ~first):
        sums = half @ flat
        by_layer = sums.reshape(-1, layers, count).argmax(axis=2) + count * np.arange(layers)
        best.append(np.concatenate([by_layer, sums.argmax(axis=1)[:, None]], axis=1))
    return np.where(first[:, :, None], best[1][:, None], best[0][:, None])


def score_table(result: Result) -> pd.DataFrame:
    """Returns a row per rule, resolution, way and layer, with chance levels.

    Heads are chosen once, on the data's masks. The next image's mask and maps in random order score
    the same heads; networks of random weights choose their own heads. head_layer and head: the head
    that was chosen most often; chosen: the share of scores that are this head's. strongest: the
    mask without a network that has the highest mean over all images. excess, excess_low,
    excess_high: the mean difference to this mask over images, and its interval.
    """
    constants, groups = _judged(result)
    parts: list[pd.DataFrame] = []
    for rule, resolution, (own, random, other), twins in _scores(result):
        heads = choices(own.heads, groups)
        values, table = own.by_way(heads), _columns(own, heads)
        is_fixed = (table["way"] == WAYS[1]).to_numpy()
        names = {f"{name}_{rule}_{resolution}": name for name in MAPS}
        names = {f"all_{resolution}": "all_foreground"} | names
        blind: Any = constants.rename(columns=names)[list(names.values())]
        means: Any = blind.mean()
        strongest = str(means.idxmax())
        bare = blind[[strongest]].to_numpy()
        ends = []
        for less in (0.0, bare):
            low, high = mean_interval(by_group(values - less, groups))
            low[is_fixed], high[is_fixed] = over_splits(own.chosen(heads) - less, groups).ends
            ends += [low, high]
        table = table.assign(
            n=len(values), value=values.mean(axis=0), low=ends[0], high=ends[1],
            other_image=_mean(other.by_way(heads)), random=_mean(random.by_way(heads)),
            untrained=_untrained([twin.by_way(choices(twin.heads, groups)) for twin in twins]),
            **means, strongest=strongest, excess=(values - bare).mean(axis=0),
            excess_low=ends[2], excess_high=ends[3],
        )  # fmt: skip
        table.insert(0, "rule", rule)
        table.insert(1, "resolution", resolution)
        parts.append(table.astype({"layer": "Int64", "head_layer": "Int64", "head": "Int64"}))
    return pd.concat(parts, ignore_index=True)


def head_table(result: Result) -> pd.DataFrame:
    """Returns a row per rule, resolution, layer and head: its mean, interval and chance levels."""
    parts, (_, groups) = [], _judged(result)
    for rule, resolution, models, twins in _scores(result):
        layer, head = np.indices(models[0].heads.shape[1:]).reshape(2, -1)
        every = (*models, *twins)
        flat, random, other, *untrained = (one.heads.reshape(-1, layer.size) for one in every)
        low, high = mean_interval(by_group(flat, groups))
        columns = {
            "rule": rule, "resolution": resolution, "layer": layer, "head": head,
            "value": flat.mean(axis=0), "low": low, "high": high, "other_image": _mean(other),
            "random": _mean(random), "untrained": _untrained(untrained),
        }  # fmt: skip
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def image_table(result: Result) -> pd.DataFrame:
    """Returns a row per image with an object: the fixed head's score `mass_token`.

    score: the mean over splits. layer, head: the head that scores the image in most of them.
    """
    constants, groups = _judged(result)
    _, _, (own, *_), _ = next(_scores(result))
    heads = choices(own.heads, groups)
    places = [np.bincount(column).argmax() for column in heads[:, :, -1].T]
    score = own.chosen(heads)[:, :, -1].mean(axis=0)
    images = constants[["sample", "label"]].assign(score=score)
    images["layer"], images["head"] = np.divmod(places, own.heads.shape[2])
    return images.reset_index(drop=True)


def _columns(scores: Scores, heads: np.ndarray) -> pd.DataFrame:
    """Returns a row for each column of `by_way`, with the head that was chosen most often."""
    count, rows = scores.heads.shape[2], []
    for layer, column in enumerate(heads.reshape(-1, heads.shape[2]).T):
        often = np.bincount(column)
        place = (*divmod(int(often.argmax()), count), often.max() / len(column))
        where = layer if layer < scores.heads.shape[1] else None
        fixed = (WAYS[1], where, *place)
        blank = [(way, where, None, None, np.nan) for way in (WAYS[0], WAYS[2])]
        rows += [fixed] if where is None else [blank[0], fixed, blank[1]]
    return pd.DataFrame(rows, columns=["way", "layer", "head_layer", "head", "chosen"])


def _scores(result: Result) -> Iterator[tuple[str, str, list[Scores], list[Scores]]]:
    """Yields rule, resolution, the scores of the model, and the scores of its untrained copies.

    The model has three scores: by the data's masks, with patches in random order, and by the next
    image's masks. All are of images with an object; the third score is NaN if the next image has no
    object.
    """
    there = result.table("constants")["all_token"].notna().to_numpy()
    samples, heads = (result.table(f"untrained_{name}") for name in ("samples", "head_samples"))
    twins: list[Any] = [
        (samples[samples["seed"] == seed], heads[heads["seed"] == seed])
        for seed in range(result.meta["untrained"])
    ]
    own = result.table("samples"), result.table("head_samples")

    def scores(tables: tuple[pd.DataFrame, pd.DataFrame], name: str) -> Scores:
        shape = [len(set(tables[1][axis])) for axis in ("sample", "layer", "head")]
        each = tables[1][f"segmentation.{name}"].to_numpy().reshape(shape)
        best = tables[0][f"segmentation.{name}_best"].to_numpy().reshape(shape[0], -1)
        return Scores(each[there], best[there, : shape[1]])

    for rule, resolution in product(RULES, RESOLUTIONS):
        name = f"{rule}_{resolution}"
        models = [scores(own, f"{name}{chance}") for chance in CHANCE]
        yield rule, resolution, models, [scores(each, name) for each in twins]


def _judged(result: Result) -> tuple[pd.DataFrame, np.ndarray | None]:
    """Returns the rows of "constants" of images with an object, and the groups of these images."""
    constants: Any = result.table("constants")
    constants = constants[constants["all_token"].notna()]
    return constants, result.groups_at(constants["sample"])


def _mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean over samples that have values, NaN if none has."""
    there = values[~np.isnan(values).any(axis=1)]
    return there.mean(axis=0) if len(there) else np.full(values.shape[1], np.nan)


def _untrained(values: Sequence[np.ndarray]) -> np.ndarray | float:
    return np.mean([each.mean(axis=0) for each in values], axis=0) if values else np.nan


def constants_of(chunk: batches.Chunk, mass: float, fraction: float) -> experiment.Tables:
    """Returns a row per image: sample, label, and the scores of masks that need no network.

    Columns: `{name}_{resolution}` of the whole image as foreground (name "all"), and
    `{map}_{rule}_{resolution}` of each of `MAPS`. NaN means that the image has no object.
    """
    patch_size = chunk.model.cfg.patch_size
    parts: dict[str, list[Tensor]] = {}
    for batch in chunk.batches():
        assert batch.masks is not None  # the pass has masks
        parts.setdefault("sample", []).append(torch.arange(batch.start, batch.last + 1))
        targets = Targets(batch.masks, patch_size)
        maps = input_maps(batch.inputs.cpu().double(), patch_size)
        shapes = {"mass": mass_mask(maps, mass), "top": top_mask(maps, fraction)}
        whole = torch.ones_like(shapes["top"][:, :1])
        for resolution in RESOLUTIONS:
            every = targets.mean(targets.jaccard(whole, resolution))
            parts.setdefault(f"all_{resolution}", []).append(every[:, 0])
            for rule, shape in shapes.items():
                scores = targets.mean(targets.jaccard(shape, resolution))
                for name, column in zip(MAPS, scores.T, strict=True):
                    parts.setdefault(f"{name}_{rule}_{resolution}", []).append(column)
    if not parts:
        return {"constants": pd.DataFrame({"sample": []})}
    columns = {name: torch.cat(values).numpy() for name, values in parts.items()}
    samples, names = chunk.samples, chunk.samples.names
    labels: list[Any] = samples.labels or [None] * samples.n
    own = [labels[number - samples.start] for number in columns["sample"]]
    if names is not None:
        own = [None if label is None else names[label] for label in own]
    table = pd.DataFrame(columns)
    table.insert(1, "label", pd.Series(own, dtype=object))
    return {"constants": table.infer_objects()}
