"""ci.segment: a sweep of the segmentation probe over a model and its untrained twins, and the chance levels of the data."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from crate_interp import checks
from crate_interp.data import Samples
from crate_interp.measures import mass_mask, top_mask
from crate_interp.probes import segmentation
from crate_interp.probes.masks import CHANCE, RESOLUTIONS, RULES, Targets
from crate_interp.segmentation.result import SegmentResult
from crate_interp.segmentation.scores import Scores, fixed, scores_of, summarise
from crate_interp.sweeps.bootstrap import intervals
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import check_masks, sweep
from crate_interp.sweeps.stream import check_batch_size, check_model, samples_of, twin

LEAST = 4  # images with an object


def segment(
    model: Any,
    data: Any,
    *,
    mass: Any = 0.6,
    fraction: Any = 0.6,
    query: Any = 0,
    scaled: bool = True,
    cls_key: bool = True,
    limit: int | None = None,
    untrained: Any = 1,
    batch_size: int = 32,
    progress: bool = True,
) -> SegmentResult:
    """Jaccard indices of the attention masks of every layer and head with the masks of `data`, beside chance.

    data: images with masks, such as "embedded:cutouts", "cutouts:DIR", "voc:DIR", "coco:FILE" or a datasets.Dataset with an image
    and a mask column. Masks are made of maps by two rules, "mass" and "top" (`ci.measures.mass_mask`, `top_mask`), and judged at
    two resolutions (`ci.probes.segmentation`). Three ways to tell the score of a layer: "best head for each image", the published
    mIoU (arXiv 2308.16271 eq. 13-14), for which the mask itself chooses the head; "fixed head", the head that is best on the other
    half of the images; "mean over heads". Chance: the same maps judged by the mask of the next image, which leaves them what they know
    of where objects mostly are, and with their patches in random order, both by the same way of choosing; `untrained` networks of
    random weights (seeds 0, 1, ..., their mean); all foreground; a centred map. Intervals are over images, with the chosen heads as
    they are. One pass over the data for each network; maps are not kept.

    Raises ValueError, before work starts, for data without masks or with fewer than 4 images that have an object, a model without CLS
    token, and for settings as in the measures.
    """
    if not checks.is_int(untrained) or untrained < 0:
        raise ValueError(f"untrained={untrained!r}: give a whole number of at least 0.")
    check_model(model)
    if model.cfg.kind not in ("vision", "mae"):
        raise ValueError("segmentation is read from a model of images with a CLS token.")
    probe = segmentation(mass, fraction, query, scaled, cls_key)
    check_batch_size(batch_size)
    samples = samples_of(model, data, limit)
    check_masks([probe], samples)
    constant = _constants(model, samples, batch_size, mass, fraction)
    options: dict[str, Any] = dict(
        probes=probe, limit=limit, batch_size=batch_size, controls=False, progress=progress
    )
    result = sweep(model, data, **options)
    twins = [
        sweep(twin(model, seed), data, **options)
        for seed in tqdm(range(untrained), desc="untrained twins", disable=not progress)
    ]
    labels: list[Any] = samples.labels or [None] * samples.n
    if samples.names is not None:
        labels = [None if label is None else samples.names[label] for label in labels]
    return _result(result, twins, constant, labels)


def _result(
    result: SweepResult,
    twins: list[SweepResult],
    constant: dict[str, np.ndarray],
    labels: list[Any],
) -> SegmentResult:
    kept = ~np.isnan(constant["all_token"])
    scores: list[pd.DataFrame] = []
    heads: list[pd.DataFrame] = []
    for rule in RULES:
        for resolution in RESOLUTIONS:
            name = f"{rule}_{resolution}"
            facts = {"rule": rule, "resolution": resolution}
            own, random, other = (scores_of(result, f"{name}{chance}") for chance in CHANCE)
            random_nets = [scores_of(twin, name) for twin in twins]
            table = pd.DataFrame([facts | row for row in summarise(own, kept)])
            table["other_image"] = _of_others(other, kept, len(table))
            table["random"] = [row["value"] for row in summarise(random, kept)]
            table["untrained"] = _mean(
                [[row["value"] for row in summarise(net, kept)] for net in random_nets], len(table)
            )
            table["all_foreground"] = constant[f"all_{resolution}"][kept].mean()
            table["centre"] = constant[f"{name}"][kept].mean()
            scores.append(table.astype({"layer": "Int64", "head_layer": "Int64", "head": "Int64"}))
            heads.append(_heads(facts, (own, random, other), random_nets, kept))
    score, place = fixed(scores_of(result, "mass_token").heads[kept])
    shown = [label for label, there in zip(labels, kept, strict=True) if there]
    images = pd.DataFrame({"sample": np.flatnonzero(kept), "label": shown, "score": score})
    images["layer"], images["head"] = place.T
    meta = {
        key: value
        for key, value in result.meta.items()
        if key not in ("seconds", "counts", "statistics")
    }
    meta |= {"untrained": len(twins), "without_object": int((~kept).sum())}
    return SegmentResult(
        pd.concat(scores, ignore_index=True), pd.concat(heads, ignore_index=True), images, meta
    )


def _of_others(other: Scores, kept: np.ndarray, count: int) -> list[float]:
    """Values by the next image's mask, of the images whose next one has an object; NaN for fewer than two of them."""
    both = kept & ~np.isnan(other.best[:, 0])
    return [row["value"] for row in summarise(other, both)] if both.sum() > 1 else [np.nan] * count


def _heads(
    facts: dict[str, str],
    scores: tuple[Scores, Scores, Scores],
    random_nets: list[Scores],
    kept: np.ndarray,
) -> pd.DataFrame:
    """A row for each layer and head: its mean with interval, by the next image's mask, in random order, untrained."""
    own, random, other = scores
    values = own.heads[kept].reshape(int(kept.sum()), -1)  # [n, layer * head]
    low, high = intervals(values)
    layer, head = np.indices(own.heads.shape[1:]).reshape(2, -1)
    table = pd.DataFrame(
        {
            **facts,
            "layer": layer,
            "head": head,
            "value": values.mean(axis=0),
            "low": low,
            "high": high,
        }
    )
    both = kept & ~np.isnan(other.best[:, 0])
    table["other_image"] = other.heads[both].mean(axis=0).reshape(-1) if both.any() else np.nan
    table["random"] = random.heads[kept].mean(axis=0).reshape(-1)
    table["untrained"] = _mean(
        [net.heads[kept].mean(axis=0).reshape(-1) for net in random_nets], len(table)
    )
    return table


def _mean(values: list[Any], count: int) -> np.ndarray:
    return np.mean(values, axis=0) if values else np.full(count, np.nan)


def _constants(
    model: Any, samples: Samples, batch_size: int, mass: float, fraction: float
) -> dict[str, np.ndarray]:
    """Scores `[n]` of what needs no network: all foreground (all_token, all_pixel), and the centred map by each rule.

    NaN where an image has no object; ValueError where fewer than 4 have one.
    """
    assert samples.masks is not None  # check_masks has asked
    found: dict[str, list[Tensor]] = {}
    for start in range(0, samples.n, batch_size):
        masks = samples.masks(start, min(start + batch_size, samples.n))
        targets = Targets(masks, model.cfg.patch_size)
        grid = tuple(
            side // patch for side, patch in zip(masks.shape[1:], model.cfg.patch_size, strict=True)
        )
        centre = centred_map((grid[0], grid[1]))
        shapes = {"all": torch.ones_like(centre, dtype=torch.bool)}
        shapes |= {"mass": mass_mask(centre, mass), "top": top_mask(centre, fraction)}
        for name, shape in shapes.items():
            for resolution in RESOLUTIONS:
                mask = shape.expand(len(masks), 1, -1)
                scores = targets.mean(targets.jaccard(mask, resolution))[:, 0]
                found.setdefault(f"{name}_{resolution}", []).append(scores)
    scores = {name: torch.cat(parts).numpy() for name, parts in found.items()}
    kept = int((~np.isnan(scores["all_token"])).sum())
    if kept < LEAST:
        raise ValueError(
            f"{kept} of {samples.n} images have an object: give {LEAST} at least, two in each half."
        )
    return scores


def centred_map(grid: tuple[int, int]) -> Tensor:
    """A Gaussian around the middle of the grid `[h * w]`, its standard deviation a quarter of each side."""
    # whole numbers first: mirrored patches get the same bits, so that only the rule for ties tells them apart
    rows, columns = ((2 * torch.arange(side) + 1 - side) / side * 2 for side in grid)
    return torch.exp(-(rows[:, None] ** 2 + columns**2) / 2).flatten()
