"""Maps over patches: attention of one query, attention roll-out, and principal components."""

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp.measures.checks import all_finite, in_full_precision, require_floats

__all__ = ["attention_map", "attention_rollout", "pca_map", "pca_mask"]


@in_full_precision
def attention_map(
    queries: Float[Tensor, "*batch head pos d_head"],
    keys: Float[Tensor, "*batch head key_pos d_head"],
    query: int = 0,
    scaled: bool = True,
    cls_key: bool = True,
    special: int = 1,
) -> Float[Tensor, "*batch head patch"]:
    """Returns how much one query attends to each patch.

    `softmax_j(s <q_query, k_j>)`, where s = 1 / sqrt(d_head), or 1 with scaled=False.

    queries, keys `[..., head, pos, d_head]` with CLS first -> `[..., head, patch]` in [0, 1]. In
    CRATE both are the codes. query: the position of the query, 0 for CLS. cls_key: whether the
    softmax runs over CLS too; the weight of CLS is never returned. scaled=False, cls_key=False is
    arXiv 2308.16271 eq. 10. scaled=True, cls_key=True is what the model computes (hook_pattern) and
    what DINO `visualize_attention.py` draws. special: the number of tokens before the patches, CLS
    first; all these tokens are treated as CLS is. Leaving CLS out changes neither the order of the
    patches nor their ratios; the scale changes their ratios. Raises ValueError if the shapes
    differ, if `query` is not a position, or if there is no patch.
    """
    require_floats(queries, "head pos d_head")
    require_floats(keys, "head pos d_head")
    if queries.shape != keys.shape:
        raise ValueError(
            f"queries {list(queries.shape)} and keys {list(keys.shape)} differ in shape: "
            "give both as [..., head, pos, d_head]."
        )
    count = keys.shape[-2]
    if count <= special:
        raise ValueError(
            f"{count} tokens hold no patch to attend to. Give CLS and at least one patch."
        )
    if not -count <= query < count:
        raise ValueError(f"query={query}: give a position from 0 (CLS) to {count - 1}.")
    logits = einsum(queries[..., query, :], keys, "... head p, ... head pos p -> ... head pos")
    if scaled:
        logits = logits * keys.shape[-1] ** -0.5
    if cls_key:
        return logits.softmax(dim=-1)[..., special:]
    return logits[..., special:].softmax(dim=-1)


@in_full_precision
def attention_rollout(
    patterns: Float[Tensor, "*batch layer head query key"],
) -> Float[Tensor, "*batch query key"]:
    """Returns how attention spreads through all layers, by attention roll-out.

    `prod_l (1/2 I + 1/2 mean_k A_k^l)`, the last layer leftmost.

    patterns `[..., layer, head, query, key]` -> `[..., query, key]` in [0, 1]; rows sum to 1. arXiv
    2005.00928. Roll-out counts the residual branch as half of every layer. In CRATE the sparse step
    rewrites the stream after each MSSA, which roll-out ignores. Raises ValueError if there are no
    layers, heads or tokens, or if the patterns are not square.
    """
    require_floats(patterns, "layer head query key")
    if 0 in patterns.shape[-4:] or patterns.shape[-1] != patterns.shape[-2]:
        raise ValueError(
            f"patterns have shape {list(patterns.shape)}. "
            "Give [..., layer, head, pos, pos], not empty."
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
    """Returns each token's coordinates on the first principal components of all images' tokens.

    `(f_i - mean) . v_c`.

    features `[image, pos, d]` without CLS, row-major over `grid` (h, w) -> `[image, n_components,
    h, w]` in units of the features, either sign, largest variance first. The sign is fixed: the
    mean over the border of the grid is below 0, because the border is assumed to be background; if
    that mean is 0 up to rounding, the largest entry of v_c is positive. arXiv 2308.16271 App. B.2,
    whose first step does not subtract the mean. Components of equal variance are not unique. Raises
    ValueError if the grid does not fit, if features hold NaN or Inf, or if n_components is below 1
    or above d.
    """
    _check_features(features, grid)
    if not 1 <= n_components <= features.shape[-1]:
        raise ValueError(
            f"n_components={n_components}: give a number of at least 1, and of at most the "
            f"{features.shape[-1]} dimensions of the features."
        )
    tokens = features.detach().double().flatten(0, 1)  # [image * pos, d]
    tokens = tokens - tokens.mean(dim=0)
    vectors = torch.linalg.eigh(tokens.T @ tokens).eigenvectors
    basis = vectors.flip(-1)[:, :n_components]  # [d, component], largest variance first
    maps = (tokens @ basis).T.unflatten(-1, (len(features), *grid))  # [component, image, h, w]
    edge = torch.ones(grid, dtype=torch.bool, device=maps.device)
    edge[1:-1, 1:-1] = False
    border = maps[..., edge].flatten(1).mean(dim=1)
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
    tokens are alike. CRATE `vis_utils` scales the map to [0, 1] and cuts it at 0.5. There the
    sign is the one that the solver returned; here the sign makes the border background. Raises
    ValueError as `pca_map` does.
    """
    first = pca_map(features, grid, 1).flatten(1)
    middle = (first.min() + first.max()) / 2
    spread = first.max() - first.min()
    # a spread this small is the rounding of equal tokens
    flat = spread <= 1e-6 * features.abs().max()
    return (first > middle) & ~flat


def _check_features(features: Tensor, grid: tuple[int, int]) -> None:
    require_floats(features, "image pos d")
    if features.ndim != 3 or 0 in features.shape or features.shape[1] != grid[0] * grid[1]:
        raise ValueError(
            f"features {list(features.shape)} do not fit a grid of {grid[0]} x {grid[1]}: "
            f"give [image, {grid[0] * grid[1]}, d], without CLS."
        )
    if not all_finite(features):
        raise ValueError("features hold NaN or Inf: leave out such images.")
