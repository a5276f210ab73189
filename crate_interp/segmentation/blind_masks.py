"""Scores of masks that need no network: the whole image, and a centred map."""

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_interp.data import Samples
from crate_interp.measures import mass_mask, top_mask
from crate_interp.probes.segmentation_probe import RESOLUTIONS, Targets
from crate_interp.results.kinds import Tables
from crate_interp.sweeps.runs.batches import Chunk

LEAST = 4  # fewest images with an object


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
            f"{kept} of {len(constants)} images have an object: give at least {LEAST}, two in each "
            "half."
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
    # integers first, so that mirrored patches get the same bits and only the tie rule decides
    rows, columns = ((2 * torch.arange(side) + 1 - side) / side * 2 for side in grid)
    return torch.exp(-(rows[:, None] ** 2 + columns**2) / 2).flatten()
