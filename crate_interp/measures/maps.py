"""Maps over patches: attention of one query, roll-out through layers, principal components with a fixed sign."""

from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp.measures.checks import all_finite, in_full_precision, require_floats


@in_full_precision
def attention_map(
    queries: Float[Tensor, "*batch head pos d_head"],
    keys: Float[Tensor, "*batch head key_pos d_head"],
    query: int = 0,
    scaled: bool = True,
    cls_key: bool = True,
) -> Float[Tensor, "*batch head patch"]:
    """What one query attends to, over the patches: `softmax_j(s <q_query, k_j>)`, s = 1 / sqrt(d_head) or 1.

    queries, keys `[..., head, pos, d_head]` with CLS first, in CRATE both are the codes -> `[..., head, patch]` in [0, 1]. query: its
    position, 0 for CLS. cls_key: whether CLS is in the sum of the softmax; its own weight is left out either way. scaled=False,
    cls_key=False is arXiv 2308.16271 eq. 10; scaled=True, cls_key=True is what the model computes (hook_pattern) and what DINO
    `visualize_attention.py` draws. Dropping CLS changes no order and no share of the rest, the scale does. Raises
    ValueError for shapes that do not fit, a query that is not there, and no patch.
    """
    require_floats(queries, "head pos d_head")
    require_floats(keys, "head pos d_head")
    if queries.shape != keys.shape:
        raise ValueError(
            f"queries {list(queries.shape)} and keys {list(keys.shape)} differ in shape."
        )
    count = keys.shape[-2]
    if count < 2:
        raise ValueError(
            f"there is no patch to attend to: {count} tokens, of which the first is CLS."
        )
    if not -count <= query < count:
        raise ValueError(f"query={query}: there are {count} tokens, 0 (CLS) to {count - 1}.")
    logits = einsum(queries[..., query, :], keys, "... head p, ... head pos p -> ... head pos")
    if scaled:
        logits = logits * keys.shape[-1] ** -0.5
    if cls_key:
        return logits.softmax(dim=-1)[..., 1:]
    return logits[..., 1:].softmax(dim=-1)


@in_full_precision
def attention_rollout(
    patterns: Float[Tensor, "*batch layer head query key"],
) -> Float[Tensor, "*batch query key"]:
    """Attention followed through the layers: `prod_l (1/2 I + 1/2 mean_k A_k^l)`, the last layer leftmost.

    patterns `[..., layer, head, query, key]` -> `[..., query, key]` in [0, 1], rows sum to 1. arXiv 2005.00928. It takes the residual
    branch for half of every layer; in CRATE the sparse step re-codes the stream after each MSSA, which no roll-out sees. Raises
    ValueError for no layers, heads or tokens, and for patterns that are not square.
    """
    require_floats(patterns, "layer head query key")
    if 0 in patterns.shape[-4:] or patterns.shape[-1] != patterns.shape[-2]:
        raise ValueError(
            f"patterns are [..., layer, head, pos, pos] with at least one of each, got {list(patterns.shape)}."
        )
    mixed = patterns.mean(dim=-3)  # [..., layer, query, key]
    mixed = (mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)) / 2
    rolled = mixed[..., 0, :, :]
    for layer in range(1, mixed.shape[-3]):
        rolled = mixed[..., layer, :, :] @ rolled
    return rolled


@in_full_precision
def pca_map(
    features: Float[Tensor, "image pos d"], grid: tuple[int, int], n_components: int = 3
) -> Float[Tensor, "image n_components h w"]:
    """Tokens on their first principal components, `(f_i - mean) . v_c`, of the tokens of all images together.

    features `[image, pos, d]` without CLS, row-major over `grid` (h, w) -> `[image, n_components, h, w]`, units of the features, either
    sign, largest variance first. Fixed sign: the mean over the border of the grid is below 0 (the border is background); where it is 0
    to rounding, the largest entry of v_c is positive. arXiv 2308.16271 App. B.2, whose first step does not subtract the mean. Of equal
    variances the components are not unique. Raises ValueError for a grid that does not fit, NaN or Inf, and more components than d.
    """
    _check_features(features, grid)
    if not 1 <= n_components <= features.shape[-1]:
        raise ValueError(
            f"n_components={n_components}: features have {features.shape[-1]} dimensions."
        )
    tokens = features.detach().double().flatten(0, 1)  # [image * pos, d]
    tokens = tokens - tokens.mean(dim=0)
    basis = torch.linalg.eigh(tokens.T @ tokens).eigenvectors.flip(-1)[
        :, :n_components
    ]  # [d, component]
    maps = (tokens @ basis).T.unflatten(-1, (len(features), *grid))  # [component, image, h, w]
    border = maps[..., _border(grid).to(maps.device)].flatten(1).mean(dim=1)
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))[0]
    noise = 1e-9 * maps.flatten(1).abs().amax(dim=1)
    sign = torch.where(border.abs() > noise, -border.sign(), largest.sign())
    return (maps * sign[:, None, None, None]).transpose(0, 1).to(features.dtype)


def pca_mask(
    features: Float[Tensor, "image pos d"], grid: tuple[int, int]
) -> Bool[Tensor, "image pos"]:
    """The tokens above the middle of the range of the first principal component: `m_i > (min + max) / 2`, m of `pca_map`.

    features `[image, pos, d]` without CLS -> bool `[image, pos]`; min and max over all images together, so that an image may have
    none. Where all tokens are alike there is none. CRATE `vis_utils` scales to [0, 1] and cuts at 0.5, with whatever sign its solver gave;
    here the border is background. Raises ValueError as `pca_map`.
    """
    first = pca_map(features, grid, 1).flatten(1)
    middle = (first.min() + first.max()) / 2
    spread = first.max() - first.min()
    flat = spread <= 1e-6 * features.abs().max()  # rounding of tokens all alike
    return (first > middle) & ~flat


def _border(grid: tuple[int, int]) -> Bool[Tensor, "h w"]:
    edge = torch.ones(grid, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    return edge


def _check_features(features: Any, grid: tuple[int, int]) -> None:
    require_floats(features, "image pos d")
    if features.ndim != 3 or 0 in features.shape or features.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"features {list(features.shape)} do not fit a grid of {grid[0]} x {grid[1]}: "
            f"give [image, {grid[0] * grid[1]}, d], without CLS."
        )
    if not all_finite(features):
        raise ValueError("features hold NaN or Inf: no component can be computed.")
