"""ci.segment: do attention maps segment? Scores of a model, its untrained twins, and chance."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp import checks
from crate_interp.data import Data, Samples
from crate_interp.measures import mass_mask, top_mask
from crate_interp.models.hooked import HookedModel
from crate_interp.models.offload import with_weights
from crate_interp.probes import segmentation
from crate_interp.probes.masks import RESOLUTIONS, Targets
from crate_interp.segmentation.examples import examples, no_examples
from crate_interp.segmentation.result import SegmentResult
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import check_masks, sweep
from crate_interp.sweeps.stream import check_model, samples_of
from crate_interp.sweeps.twins import stacked, with_twins

LEAST = 4  # images with an object
_OF_A_SWEEP = ("format", "result", "seconds", "counts", "statistics")  # not in this result's meta


@with_weights
def segment(
    model: HookedModel,
    data: Data,
    *,
    mass: float = 0.6,
    fraction: float = 0.6,
    query: int = 0,
    scaled: bool = True,
    cls_key: bool = True,
    limit: int | None = None,
    untrained: int = 5,
    batch_size: int = 32,
    progress: bool = True,
) -> SegmentResult:
    """Scores the attention masks of every head against the masks of `data`, beside chance.

    The score is the Jaccard index. data: images with masks, such as "embedded:cutouts",
    "cutouts:DIR", "voc:DIR", "coco:FILE" or a datasets.Dataset with an image and a mask column.
    Masks are made of maps by two rules, "mass" and "top" (`ci.measures.mass_mask`, `top_mask`), and
    judged at two resolutions (`ci.probes.segmentation`).

    A layer is scored in three ways. "best head for each image" is the published mIoU (arXiv
    2308.16271 eq. 13-14): the mask itself chooses the head. "fixed head" takes the head that is
    best on the other half of the images. "mean over heads" takes all.

    Chance levels: the same maps judged by the mask of the next image, which keeps what they know of
    where objects mostly are; the same maps with their patches in random order; both choose the head
    in the same way. Further: `untrained` networks with random weights (seeds 0, 1, ..., their
    mean), all foreground, and a centred map. Intervals are over images, with the chosen heads
    fixed. The data is read once for each network; maps are not kept.

    Raises ValueError, before work starts, if the data has no masks or fewer than 4 images with an
    object, if the model has no CLS token, or if a setting is refused by the measures.
    """
    untrained = checks.count("untrained", untrained, least=0)
    checks.flag("scaled", scaled)
    checks.flag("cls_key", cls_key)
    check_model(model)
    if model.cfg.kind not in ("vision", "mae"):
        raise ValueError("segmentation is read from a model of images with a CLS token.")
    probe = segmentation(mass, fraction, query, scaled, cls_key)
    checks.count("batch_size", batch_size)
    samples = samples_of(model, data, limit)
    check_masks([probe], samples)
    constants = _constants(model, samples, batch_size, mass, fraction)
    options: dict[str, Any] = dict(batch_size=batch_size, controls=0, progress=progress)

    def measure(network: Any, seed: int | None) -> SweepResult:
        return sweep(network, samples, probes=probe, **options)

    own, twins = with_twins(model, untrained, measure, progress)
    result = _result(own, twins, constants)
    settings = own.meta["probes"][probe.name]["settings"]
    shown = examples(result.table("images"), model, samples, settings)
    return SegmentResult({**result.stored, "examples": shown}, result.meta)


def _result(own: SweepResult, twins: list[SweepResult], constants: pd.DataFrame) -> SegmentResult:
    """Returns the result without examples."""
    meta = {name: value for name, value in own.meta.items() if name not in _OF_A_SWEEP}
    tables = {
        "samples": own.samples(),
        "head_samples": own.head_samples(),
        "untrained_samples": stacked([twin.samples() for twin in twins]),
        "untrained_head_samples": stacked([twin.head_samples() for twin in twins]),
        "constants": constants,
        "examples": no_examples(),
    }
    return SegmentResult(tables, meta | {"untrained": len(twins)})


def _constants(
    model: HookedModel, samples: Samples, batch_size: int, mass: float, fraction: float
) -> pd.DataFrame:
    """Returns a row per image: sample, label, and scores of what needs no network.

    all_token, all_pixel: those of all foreground; the others are those of the centred map by each
    rule. NaN stands for an image without an object. Raises ValueError if fewer than 4 have one.
    """
    assert samples.masks is not None  # check_masks has asked
    parts: dict[str, list[Tensor]] = {}
    first, stop = samples.start, samples.start + samples.n
    for start in range(first, stop, batch_size):
        masks = samples.masks(start, min(start + batch_size, stop))
        targets = Targets(masks, model.cfg.patch_size)
        patches = zip(masks.shape[1:], model.cfg.patch_size, strict=True)
        height, width = (side // patch for side, patch in patches)
        centre = centred_map((height, width))
        shapes = {"all": torch.ones_like(centre, dtype=torch.bool)}
        shapes |= {"mass": mass_mask(centre, mass), "top": top_mask(centre, fraction)}
        for name, shape in shapes.items():
            for resolution in RESOLUTIONS:
                mask = shape.expand(len(masks), 1, -1)
                scores = targets.mean(targets.jaccard(mask, resolution))[:, 0]
                parts.setdefault(f"{name}_{resolution}", []).append(scores)
    scores = {name: torch.cat(values).numpy() for name, values in parts.items()}
    kept = int((~np.isnan(scores["all_token"])).sum())
    if kept < LEAST:
        raise ValueError(
            f"{kept} of {samples.n} images have an object: give at least {LEAST}, two in each half."
        )
    columns: dict[str, Any] = {"sample": np.arange(first, stop), "label": _labels(samples)}
    return pd.DataFrame(columns | scores)


def _labels(samples: Samples) -> list[Any]:
    """Returns what the labels are called, one for each image; None where there is none."""
    labels: list[Any] = samples.labels or [None] * samples.n
    if samples.names is None:
        return labels
    return [None if label is None else samples.names[label] for label in labels]


def centred_map(grid: tuple[int, int]) -> Tensor:
    """Returns a Gaussian around the middle of a grid `[h * w]`.

    Its standard deviation is a quarter of each side.
    """
    # integers first: mirrored patches get the same bits, so that only the rule for ties decides
    rows, columns = ((2 * torch.arange(side) + 1 - side) / side * 2 for side in grid)
    return torch.exp(-(rows[:, None] ** 2 + columns**2) / 2).flatten()
