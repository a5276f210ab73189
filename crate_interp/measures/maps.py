"""Maps over patches: attention, roll-out, principal components, and maps of the picture alone.

A network's map has to beat the maps made of the picture alone.
"""

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp.measures import checks

__all__ = ["attention_map", "attention_rollout", "input_maps", "pca_map", "pca_mask"]

MAPS = {
    "centre": "a centred map",
    "border_colour": "a map of colour contrast to the border",
    "mean_colour": "a map of colour contrast to the mean",
    "local_variance": "a map of local variance",
    "colour_clusters": "a map of two colour clusters",
}
_ROUNDS = 100  # the most rounds of k-means


@checks.in_full_precision
def attention_map(
    queries: checks.HeadCodes,
    keys: Float[Tensor, "*batch head key_pos d_head"],
    query: int = 0,
    scaled: bool = True,
    cls_key: bool = True,
    special: int = 1,
) -> Float[Tensor, "*batch head patch"]:
    """Returns how much one query attends to each patch.

    `softmax_j(s <q_query, k_j>)`, where s = 1 / sqrt(d_head), or 1 with scaled=False.

    In CRATE query and key are both the codes. With scaled=True and cls_key=True the map is what the
    model computes (hook_pattern) and what DINO `visualize_attention.py` draws; it sums to 1 minus
    the weight of CLS. With scaled=False and cls_key=False it is arXiv 2308.16271 eq. 10, and sums
    to 1. Leaving CLS out changes neither the order of the patches nor their ratios; the scale
    changes their ratios.

    Args:
        queries: `[..., head, pos, d_head]` with CLS first; in CRATE the codes.
        keys: Like the queries.
        query: The position of the query, 0 for CLS.
        scaled: Whether the scores are divided by sqrt(d_head).
        cls_key: Whether the softmax runs over CLS too; the weight of CLS is never returned.
        special: The number of tokens before the patches, CLS first; all these tokens are treated as
            CLS is.

    Returns:
        `[..., head, patch]` in [0, 1].

    Raises:
        ValueError: If the shapes differ, if `query` is not a position, or if there is no patch.
    """
    checks.require_floats(queries, "head pos d_head")
    checks.require_floats(keys, "head pos d_head")
    if queries.shape != keys.shape:
        shapes = f"{list(queries.shape)} and keys {list(keys.shape)}"
        raise ValueError(f"queries {shapes} differ: give both as [..., head, pos, d_head].")
    count = keys.shape[-2]
    if count <= special:
        raise ValueError(f"{count} tokens hold no patch to attend to: give CLS and a patch.")
    if not -count <= query < count:
        raise ValueError(f"query={query}: give a position from 0 (CLS) to {count - 1}.")
    logits = einsum(queries[..., query, :], keys, "... head p, ... head pos p -> ... head pos")
    if scaled:
        logits = logits * keys.shape[-1] ** -0.5
    if cls_key:
        return logits.softmax(dim=-1)[..., special:]
    return logits[..., special:].softmax(dim=-1)


@checks.in_full_precision
def attention_rollout(patterns: Float[Tensor, "*batch layer head query key"]) -> checks.Pattern:
    """Returns how attention spreads through all layers, by attention roll-out.

    `prod_l (1/2 I + 1/2 mean_k A_k^l)`, the last layer leftmost.

    patterns `[..., layer, head, query, key]` -> `[..., query, key]` in [0, 1]; rows sum to 1. arXiv
    2005.00928. Roll-out counts the residual branch as half of every layer. In CRATE the sparse step
    rewrites the stream after each MSSA, which roll-out ignores. Raises ValueError if there are no
    layers, heads or tokens, or if the patterns are not square.
    """
    checks.require_floats(patterns, "layer head query key")
    if 0 in patterns.shape[-4:] or patterns.shape[-1] != patterns.shape[-2]:
        raise ValueError(f"patterns {list(patterns.shape)}: give [..., layer, head, pos, pos].")
    mixed = patterns.mean(dim=-3)  # [..., layer, query, key]
    mixed = (mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)) / 2
    rolled = mixed[..., 0, :, :]
    for layer in range(1, mixed.shape[-3]):
        rolled = mixed[..., layer, :, :] @ rolled
    return rolled


@checks.in_full_precision
def pca_map(
    features: Float[Tensor, "image pos d"], grid: tuple[int, int], n_components: int = 3
) -> Float[Tensor, "image n_components h w"]:
    """Returns each token's coordinates on the first principal components of all images' tokens.

    `(f_i - mean) . v_c`.

    The sign is fixed: the mean over the border of the grid is below 0, because the border is
    assumed to be background; if that mean is 0 up to rounding, the largest entry of v_c is
    positive. arXiv 2308.16271 App. B.2, whose first step does not subtract the mean. Components of
    equal variance are not unique.

    Args:
        features: `[image, pos, d]` without CLS, row-major over `grid` (h, w).
        grid: Rows and columns of patches, needed if the images do not have the model's own size.
        n_components: How many components.

    Returns:
        `[image, n_components, h, w]` in units of the features, either sign, largest variance first.

    Raises:
        ValueError: If the grid does not fit, if features hold NaN or Inf, or if n_components is
            below 1 or above d.
    """
    checks.require_floats(features, "image pos d")
    if features.ndim != 3 or 0 in features.shape or features.shape[1] != grid[0] * grid[1]:
        shape = f"{list(features.shape)} do not fit a grid of {grid[0]} x {grid[1]}"
        raise ValueError(f"features {shape}: give [image, patch, d], without CLS.")
    if not checks.all_finite(features):
        raise ValueError("features hold NaN or Inf: leave out such images.")
    if not 1 <= n_components <= features.shape[-1]:
        raise ValueError(f"n_components={n_components}: give 1 to {features.shape[-1]}.")
    tokens = features.detach().double().flatten(0, 1)  # [image * pos, d]
    tokens = tokens - tokens.mean(dim=0)
    few = n_components <= len(tokens) < tokens.shape[1]  # then the other Gram matrix is small
    gram = tokens @ tokens.T if few else tokens.T @ tokens
    basis = torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, :n_components]  # largest first
    if few:
        basis = torch.linalg.qr(tokens.T @ basis).Q
    maps = (tokens @ basis).T.unflatten(-1, (len(features), *grid))  # [component, image, h, w]
    border = maps[..., _ring(grid)].flatten(1).mean(dim=1)
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))[0]
    noise = 1e-9 * maps.flatten(1).abs().amax(dim=1)
    sign = torch.where(border.abs() > noise, -border.sign(), largest.sign())
    return (maps * sign[:, None, None, None]).transpose(0, 1).to(features.dtype)


def pca_mask(
    features: Float[Tensor, "image pos d"], grid: tuple[int, int]
) -> Bool[Tensor, "image pos"]:
    """Returns the tokens in the upper half of the range of the first principal component.

    `m_i > (min + max) / 2`, where m is the first map of `pca_map`.

    features `[image, pos, d]` without CLS -> bool `[image, pos]`. The minimum and maximum are over
    all images together, so the mask of an image can be empty. It is empty for all images if all
    tokens are alike. CRATE `vis_utils` scales the map to [0, 1] and cuts it at 0.5. Its sign is
    whatever the solver returned; here the sign makes the border background. Raises ValueError as
    `pca_map` does.
    """
    first = pca_map(features, grid, 1).flatten(1)
    middle = (first.min() + first.max()) / 2
    spread = first.max() - first.min()
    # a spread this small is the rounding of equal tokens
    flat = spread <= 1e-6 * features.abs().max()
    return (first > middle) & ~flat


@checks.in_full_precision
def input_maps(
    images: Float[Tensor, "batch channels height width"], patch_size: tuple[int, int]
) -> Float[Tensor, "batch map patch"]:
    """Returns five maps over the patches that need no network, made of the pictures alone.

    `mean over the patch of |colour - reference|^2`, summed over channels, for each reference colour
    below; all values are >= 0, in the squared unit of the pixels. If a network's map fits a mask no
    better than the best of these maps, it need not know what an object is.

    images: preprocessed pictures `[batch, channels, height, width]` -> `[batch, map, patch]`, patch
    by patch as the model takes them. The maps are, in this order (`MAPS` in this module has their
    names):

    * centre: no colour, but a Gaussian around the middle of the grid, the same for every picture. *
    border_colour: the mean colour of the frame, the outermost pixels of the picture. * mean_colour:
    the mean colour of the picture. * local_variance: the mean colour of the patch itself. *
    colour_clusters: the mean colour of the background, found by two clusters of the patches' mean
    colours. The background is the cluster with the larger share at the border.

    Raises ValueError for images that are not floats of that shape, or whose sides are not multiples
    of the patch.
    """
    checks.require_floats(images, "batch channels height width")
    height, width = patch_size
    fits = images.ndim == 4 and height > 0 < width and 0 not in images.shape[1:]
    if not fits or images.shape[2] % height or images.shape[3] % width:
        sides = f"[batch, channels, height, width] in multiples of {height} x {width}"
        raise ValueError(f"images are {list(images.shape)}: give {sides}.")
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
    patch farthest from this colour, so that nothing is random. The background is the cluster with
    the larger share at the border of the grid, or the first cluster if both shares are equal.
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
