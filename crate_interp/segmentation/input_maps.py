"""Maps that need no network, because they are made of the picture alone, and their scores."""

from typing import Any

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from crate_interp.data import Samples
from crate_interp.measures import mass_mask, top_mask
from crate_interp.probes.segmentation_probe import RESOLUTIONS, RULES, Targets
from crate_interp.results.kinds import Tables
from crate_interp.sweeps.runs.batches import Chunk

MAPS = {
    "centre": "a centred map",
    "border_colour": "a map of colour contrast to the border",
    "mean_colour": "a map of colour contrast to the mean",
    "local_variance": "a map of local variance",
    "colour_clusters": "a map of two colour clusters",
}
WITHOUT_NETWORK = {"all_foreground": "all foreground"} | MAPS
LEAST = 4  # fewest images with an object
_ROUNDS = 100  # the most rounds of k-means


def input_maps(
    images: Float[Tensor, "batch channels height width"], patch_size: tuple[int, int]
) -> Float[Tensor, "batch map patch"]:
    """Returns the maps that `MAPS` names, in its order; all values are >= 0.

    images: the model's input. Colours are those of the input, so distances are between preprocessed
    pixels (divided by the model's std), summed over channels.

    * centre: `centred_map`, the same for every picture.
    * border_colour: the squared distance of each pixel's colour to the mean colour of the frame
      (the outermost pixels of the picture), mean over the patch.
    * mean_colour: the same, to the mean colour of the picture.
    * local_variance: the squared distance to the mean colour of the patch itself.
    * colour_clusters: the squared distance to the mean colour of the background, which is one of
      two clusters of the patches' mean colours (`_background`).
    """
    height, width = patch_size
    pattern = "n c (h p1) (w p2) -> n h w (p1 p2) c"
    pixels = rearrange(images.double(), pattern, p1=height, p2=width)
    grid = (pixels.shape[1], pixels.shape[2])
    pixels = pixels.flatten(1, 2)  # [batch, patch, pixel, channels]
    frame = images.double()[:, :, _ring(images.shape[-2:])].mean(dim=-1)
    colours = pixels.mean(dim=2)
    background = _background(colours, _ring(grid).flatten(), frame)
    maps = (
        centred_map(grid).double().expand(len(images), -1),
        _distance(pixels, frame[:, None, None]).mean(dim=-1),
        _distance(pixels, colours.mean(dim=1)[:, None, None]).mean(dim=-1),
        _distance(pixels, colours[:, :, None]).mean(dim=-1),
        _distance(pixels, background[:, None, None]).mean(dim=-1),
    )
    return torch.stack(maps, dim=1)


def _distance(colours: Tensor, others: Tensor) -> Tensor:
    return ((colours - others) ** 2).sum(dim=-1)


def _ring(grid: tuple[int, ...]) -> Tensor:
    """Returns which places of a grid lie at its border, bool `[h, w]`."""
    ring = torch.ones(*grid, dtype=torch.bool)
    ring[1:-1, 1:-1] = False
    return ring


def _background(
    colours: Float[Tensor, "batch patch channels"], ring: Tensor, frame: Tensor
) -> Float[Tensor, "batch channels"]:
    """Returns the mean colour of the background, the cluster that touches the border most.

    k-means with k = 2. The first cluster starts at the mean colour of the frame, the second at the
    patch farthest from this colour, so that nothing is random. The background is the cluster of
    which the larger share lies at the border of the grid; if both shares are equal, the first.
    """
    far = _distance(colours, frame[:, None]).argmax(dim=1)
    centres = torch.stack([frame, colours[torch.arange(len(colours)), far]], dim=1)
    second = torch.ones(colours.shape[:2], dtype=torch.bool)
    for _ in range(_ROUNDS):
        before = second
        near, away = (_distance(colours, centres[:, which, None]) for which in (0, 1))
        second = away < near
        if torch.equal(before, second):
            break
        members = torch.stack([~second, second], dim=1).double()  # [batch, cluster, patch]
        count = members.sum(dim=2, keepdim=True)
        centres = torch.where(count > 0, members @ colours / count.clamp(min=1), centres)
    first, other = (
        (which & ring).sum(dim=1) / which.sum(dim=1).clamp(min=1) for which in (~second, second)
    )
    return torch.where((other > first)[:, None], centres[:, 1], centres[:, 0])


def centred_map(grid: tuple[int, int]) -> Float[Tensor, "patch"]:
    """Returns a Gaussian around the middle of a grid `[h * w]`.

    Its standard deviation is a quarter of each side.
    """
    # made from integers, so that mirrored patches are exactly equal and only the tie rule decides
    rows, columns = ((2 * torch.arange(side) + 1 - side) / side * 2 for side in grid)
    return torch.exp(-(rows[:, None] ** 2 + columns**2) / 2).flatten()


def constants_of(chunk: Chunk, mass: float, fraction: float) -> Tables:
    """Returns a row per image: sample, label, and the scores of masks that need no network.

    Columns: `{name}_{resolution}` of the whole image as foreground (name "all"), and
    `{map}_{rule}_{resolution}` of each of `MAPS`. NaN means that the image has no object.
    """
    patch_size = chunk.model.cfg.patch_size
    parts: dict[str, list[Tensor]] = {}
    for batch in chunk.batches():
        assert batch.masks is not None  # the stage has masks
        parts.setdefault("sample", []).append(torch.arange(batch.start, batch.last + 1))
        targets = Targets(batch.masks, patch_size)
        maps = input_maps(batch.inputs.cpu(), patch_size)
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
    labels = _labels(chunk.samples)
    table = pd.DataFrame(columns)
    own = [labels[number - chunk.samples.start] for number in columns["sample"]]
    table.insert(1, "label", pd.Series(own, dtype=object))
    return {"constants": table.infer_objects()}


def without_network(constants: pd.DataFrame, rule: str, resolution: str) -> pd.DataFrame:
    """Returns the scores by one rule and resolution, a column for each of `WITHOUT_NETWORK`."""
    columns = {"all_foreground": constants[f"all_{resolution}"]}
    columns |= {name: constants[f"{name}_{rule}_{resolution}"] for name in MAPS}
    return pd.DataFrame(columns)


def check_objects(constants: pd.DataFrame) -> None:
    """Raises ValueError if fewer than 4 images have an object."""
    kept = int(constants["all_token"].notna().to_numpy().sum())
    if kept < LEAST:
        raise ValueError(
            f"{kept} of {len(constants)} images have an object: give at least {LEAST} such images, "
            "two in each half."
        )


def check_maps(constants: pd.DataFrame) -> None:
    """Raises ValueError if an image with an object lacks the scores of a map that needs no network.

    Versions before these maps scored a centred map alone.
    """
    names = [f"{name}_{rule}_{end}" for name in MAPS for rule in RULES for end in RESOLUTIONS]
    judged: Any = constants.reindex(columns=["all_token", *names]).dropna(subset=["all_token"])
    missing = [name for name in MAPS if judged.filter(like=f"{name}_").isna().to_numpy().any()]
    if missing:
        raise ValueError(
            f"the table 'constants' lacks scores of {', '.join(missing)}: an older version "
            "measured it, without maps made of the picture alone. Run ci.segment again, in a new "
            "folder."
        )


def _labels(samples: Samples) -> list[Any]:
    """Returns the names of the labels, one for each image; None if there are no labels."""
    labels: list[Any] = samples.labels or [None] * samples.n
    if samples.names is None:
        return labels
    return [None if label is None else samples.names[label] for label in labels]
