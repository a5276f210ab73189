"""Maps over patches that are made of the picture alone: what a map of a network has to beat."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import in_full_precision, require_floats

__all__ = ["input_maps"]

MAPS = {
    "centre": "a centred map",
    "border_colour": "a map of colour contrast to the border",
    "mean_colour": "a map of colour contrast to the mean",
    "local_variance": "a map of local variance",
    "colour_clusters": "a map of two colour clusters",
}
_ROUNDS = 100  # the most rounds of k-means


@in_full_precision
def input_maps(
    images: Float[Tensor, "batch channels height width"], patch_size: tuple[int, int]
) -> Float[Tensor, "batch map patch"]:
    """Returns five maps over the patches that need no network, made of the pictures alone.

    `mean over the patch of |colour - reference|^2`, summed over channels, for each reference colour
    below; all values are >= 0, in the squared unit of the pixels. A map of a network that scores no
    higher against a mask than the best of them need not know what an object is.

    images: preprocessed pictures `[batch, channels, height, width]` -> `[batch, map, patch]`, patch
    by patch as the model takes them. The maps are, in this order (`MAPS` in this module has their
    names):

    * centre: no colour, but a Gaussian around the middle of the grid, the same for every picture.
    * border_colour: the mean colour of the frame, the outermost pixels of the picture.
    * mean_colour: the mean colour of the picture.
    * local_variance: the mean colour of the patch itself.
    * colour_clusters: the mean colour of the background, which is one of two clusters of the
      patches' mean colours: the one of which the larger share lies at the border.

    Raises ValueError for images that are no floats of that shape, or whose sides are no multiples
    of the patch.
    """
    require_floats(images, "batch channels height width")
    height, width = patch_size
    fits = images.ndim == 4 and height > 0 < width and 0 not in images.shape[1:]
    if not fits or images.shape[2] % height or images.shape[3] % width:
        raise ValueError(
            f"images are {list(images.shape)}: give [batch, channels, height, width] with sides in "
            f"multiples of the patch {height} x {width}."
        )
    values = images.double()
    pixels = rearrange(values, "n c (h p1) (w p2) -> n h w (p1 p2) c", p1=height, p2=width)
    grid = (pixels.shape[1], pixels.shape[2])
    pixels = pixels.flatten(1, 2)  # [batch, patch, pixel, channels]
    frame = values[:, :, _ring(images.shape[-2:])].mean(dim=-1)
    colours = pixels.mean(dim=2)
    background = _background(colours, _ring(grid).flatten().to(images.device), frame)
    maps = (
        centred_map(grid).to(values).expand(len(images), -1),
        _distance(pixels, frame[:, None, None]).mean(dim=-1),
        _distance(pixels, colours.mean(dim=1)[:, None, None]).mean(dim=-1),
        _distance(pixels, colours[:, :, None]).mean(dim=-1),
        _distance(pixels, background[:, None, None]).mean(dim=-1),
    )
    return torch.stack(maps, dim=1).to(images.dtype)


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
    second = torch.ones(colours.shape[:2], dtype=torch.bool, device=colours.device)
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
