"""Maps over the patches of images, read from a cache: attention, atoms, components, roll-out.

`input_maps` are made of the pictures alone. If you score a map against masks, score them too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks, run_options
from crate_interp.measures import attention_map, attention_rollout, input_maps, pca_map
from crate_interp.measures import token_rates as measured_rates
from crate_interp.measures.rates import head_codes
from crate_interp.models.cache import CrateCache
from crate_interp.models.hook_points import check_atoms, check_pattern
from crate_interp.models.hooked import HookedModel, NamesFilter
from crate_interp.probes.segmentation_probe import head_maps, points_of

__all__ = [
    "attention", "attention_map", "attention_rollout", "codes", "components", "contracted",
    "input_maps", "memberships", "pca_map", "rollout", "token_rates", "windowed",
]  # fmt: skip

Grid = tuple[int, int]
Size = int | Sequence[int]  # (rows, columns); an int stands for a square
# the number of a token (0 is CLS), or (row, column) of a patch
Query = int | np.integer | Sequence[int]


def __dir__() -> list[str]:
    return __all__


def attention(
    cache: CrateCache,
    layer: int,
    *,
    query: Query = 0,
    scaled: bool = True,
    cls_key: bool = True,
    grid: Size | None = None,
) -> Float[Tensor, "batch head h w"]:
    """Returns the attention of one query of a layer, per head, over the grid of patches.

    The weights are those of `ci.measures.attention_map`.

    A model without a pattern has other maps: in ToST the `memberships`, the same for every query;
    in CBT the query's row of `A^T A` (`contracted`), scaled to sum to 1.

    Args:
        cache: From `model.run_with_cache(images)`, with attn.hook_pattern of the layer or, if
            scaled or cls_key is False, with attn.hook_q and attn.hook_k.
        layer: The layer's number.
        query: 0 for CLS, or (row, column) of a patch.
        scaled: Whether the scores are divided by sqrt(d_head).
        cls_key: Whether the softmax runs over CLS too.
        grid: Rows and columns of patches, needed if the images do not have the model's own size.

    Raises:
        KeyError: For points that were not cached.
        ValueError: For a layer, query or grid that does not fit, and for scaled or cls_key without
            a pattern.
    """
    _check(cache)
    cfg, whole = cache.model.cfg, scaled and cls_key
    points = points_of(cfg.facts["attention"], whole)
    acts = {point: cache.at(point, layer) for point in points}
    if "attn.hook_pattern" in acts:  # as the model computed it, with the edits of hooks
        _whole_pattern(cache, layer)  # raises for a slice
    count = acts[points[0]].shape[-1 if whole else 1]
    grid = _grid(cache, count - cfg.n_special, grid)
    place = _position(query, grid, cfg.n_special)
    return head_maps(acts, cfg.n_special, place, scaled, cls_key).unflatten(-1, grid)


def codes(
    cache: CrateCache,
    layer: int,
    atoms: int | Sequence[int | np.integer] | Tensor | np.ndarray,
    *,
    point: str = "mlp.hook_post",
    grid: Size | None = None,
) -> Float[Tensor, "batch atom h w"]:
    """Returns how strongly each patch uses some atoms of a layer, over the grid of patches.

    The values are entries of the sparse code.

    Args:
        cache: From `model.run_with_cache(x)`.
        layer: The layer's number.
        atoms: Numbers from 0 to d_mlp - 1.
        point: The hook point of the code, such as "mlp.hook_pre" for the code before the ReLU.
        grid: Rows and columns of patches, needed if the images do not have the model's own size.

    Raises:
        KeyError or ValueError: As `attention` does, and for atoms that the layer does not have.
    """
    _check(cache)
    if point.startswith("mlp."):
        check_atoms(cache.model.cfg, "a map of atoms")
    values = cache.at(point, layer)  # [batch, pos, d_mlp]
    listed: Any = atoms.tolist() if isinstance(atoms, (Tensor, np.ndarray)) else atoms
    wanted = list(listed) if isinstance(listed, (list, tuple, range)) else [listed]
    count = values.shape[-1]
    if not wanted or not all(checks.is_int(atom) and 0 <= atom < count for atom in wanted):
        raise ValueError(f"atoms={atoms!r}: give whole numbers from 0 to {count - 1}.")
    first = cache.model.cfg.n_special
    patches = values[:, first:, wanted].transpose(1, 2)  # [batch, atom, patch]
    return patches.unflatten(-1, _grid(cache, patches.shape[-1], grid))


def components(
    cache: CrateCache,
    layer: int,
    n_components: int = 3,
    *,
    point: str | None = None,
    grid: Size | None = None,
) -> Float[Tensor, "batch component h w"]:
    """Returns the patches' coordinates on the first principal components, over the grid of patches.

    The components are computed over all images of the cache (`ci.measures.pca_map`).

    Args:
        cache: From `model.run_with_cache(x)`.
        layer: The layer's number.
        n_components: How many components.
        point: None for "attn.hook_k" (keys; in CRATE the codes of all heads side by side) or, in a
            model without keys, "attn.hook_u" (the codes); or a point of the stream, such as
            "hook_resid_post".
        grid: Rows and columns of patches, needed if the images do not have the model's own size.

    Raises:
        KeyError or ValueError: As `attention` does.
    """
    _check(cache)
    keys = "attn.hook_k" if hasattr(cache.model.blocks[0].attn, "hook_k") else "attn.hook_u"
    features = cache.at(point or keys, layer).flatten(2)  # [batch, pos, d]
    features = features[:, cache.model.cfg.n_special :]
    return pca_map(features, _grid(cache, features.shape[1], grid), n_components)


def token_rates(
    cache: CrateCache,
    layer: int,
    *,
    subspaces: bool = False,
    eps: float = 0.1,
    point: str = "hook_resid_mid",
    grid: Size | None = None,
) -> Float[Tensor, "batch kind h w"]:
    """Returns what each patch costs in coding rate (`ci.measures.token_rates`), over the grid.

    Args:
        cache: From `model.run_with_cache(x)`.
        layer: The layer's number.
        subspaces: False for R of the stream, one map; True for R^c, a map for each head.
        eps: The precision, above 0.
        point: The point of the stream.
        grid: Rows and columns of patches, needed if the images do not have the model's own size.

    Raises:
        KeyError or ValueError: As `attention` does, and for subspaces of a layer without U.
    """
    _check(cache)
    z: Tensor = cache.at(point, layer)
    u: Any = getattr(cache.model.blocks[layer].attn, "U", None)
    if z.ndim != 3 or z.shape[-1] != cache.model.cfg.d_model:
        raise ValueError(f"point={point!r}: give a point of the stream, such as 'hook_resid_mid'.")
    if subspaces and u is None:
        raise ValueError(f"layer {layer} has no subspaces U: its queries and keys are two codes.")
    tokens = head_codes(z, u.detach()) if subspaces else z[:, None]
    costs = measured_rates(tokens, eps)[..., cache.model.cfg.n_special :]
    return costs.unflatten(-1, _grid(cache, costs.shape[-1], grid))


def memberships(
    cache: CrateCache, layer: int, *, grid: Size | None = None
) -> Float[Tensor, "batch head h w"]:
    """Returns how far each patch belongs to each subspace of a layer of ToST, over the grid.

    The values are Pi: 0 to 1, and they sum to 1 over the heads.

    Args:
        cache: From `model.run_with_cache(x)`.
        layer: The layer's number.
        grid: Rows and columns of patches, needed if the images do not have the model's own size.

    Raises:
        KeyError or ValueError: As `attention` does.
    """
    _check(cache)
    pi = cache.at("attn.hook_pi", layer)[..., cache.model.cfg.n_special :]
    return pi.unflatten(-1, _grid(cache, pi.shape[-1], grid))


def contracted(cache: CrateCache, layer: int) -> Float[Tensor, "batch head query key"]:
    """Returns `A^T A` of a layer of CBT: how much two tokens share their representatives.

    A is the contraction `[rep, pos]`. This is the map that the authors draw. Its rows do not sum to
    1, so it is not an attention pattern: divide by the rows' sums before you take entropies or
    masses. Raises KeyError if attn.hook_contract was not cached.
    """
    _check(cache)
    contract = cache.at("attn.hook_contract", layer)
    return contract.mT @ contract


def rollout(
    cache: CrateCache, *, query: Query = 0, grid: Size | None = None
) -> Float[Tensor, "batch h w"]:
    """Returns each patch's share in a query, by roll-out through all layers, over the grid.

    The shares are those of `ci.measures.attention_rollout`. In CRATE the sparse step rewrites the
    stream between layers, which roll-out ignores.

    Args:
        cache: From `model.run_with_cache(x)`.
        query: 0 for CLS, or (row, column) of a patch.
        grid: Rows and columns of patches, needed if the images do not have the model's own size.

    Raises:
        KeyError or ValueError: As `attention` does.
    """
    _check(cache)
    count = len(cache.model.blocks)
    patterns = torch.stack([_whole_pattern(cache, layer) for layer in range(count)], dim=1)
    first = cache.model.cfg.n_special
    grid = _grid(cache, patterns.shape[-1] - first, grid)
    place = _position(query, grid, first)
    return attention_rollout(patterns)[:, place, first:].unflatten(-1, grid)


def windowed(
    model: HookedModel,
    images: Float[Tensor, "batch channels height width"],
    read: Callable[[CrateCache], Tensor],
    *,
    stride: Size | None = None,
    names: NamesFilter = None,
    progress: bool = True,
) -> Float[Tensor, "batch map h w"]:
    """Returns maps of images larger than the model's input, from overlapping windows of that size.

    Where windows overlap, their maps are averaged. Attention sums to 1 within each window, so in a
    window without the object attention goes elsewhere.

    Args:
        model: The model.
        images: The images, preprocessed.
        read: Takes the cache of one window and returns maps `[batch, map, h, w]`, such as `lambda
            cache: ci.maps.attention(cache, 4)`.
        stride: Pixels between windows, one number or (rows, columns), in multiples of the patch;
            None is half a window. The last window of a row ends at the image's edge.
        names: The names_filter for the cache of each window; only one cache is held at a time.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: For images smaller than a window, sides that are not multiples of the patch, and
            a stride that leaves gaps.
    """
    corners = _corners(model, images, stride)
    (height, width), patch = model.cfg.image_size, model.cfg.patch_size
    grid = [side // step for side, step in zip(images.shape[2:], patch, strict=True)]
    seen = torch.zeros(grid, device=images.device)
    total: Tensor | None = None
    for top, left in run_options.tqdm(corners, desc="windows", disable=not progress):
        window = images[:, :, top : top + height, left : left + width]
        with torch.no_grad():
            _, cache = model.run_with_cache(window, names_filter=names, **model.full_options)
        maps = read(cache)
        if maps.ndim != 4:
            raise ValueError(f"read(cache) gave {list(maps.shape)}: return [batch, map, h, w].")
        rows = slice(top // patch[0], top // patch[0] + maps.shape[-2])
        columns = slice(left // patch[1], left // patch[1] + maps.shape[-1])
        total = maps.new_zeros(*maps.shape[:2], *seen.shape) if total is None else total
        total[:, :, rows, columns] += maps
        seen[rows, columns] += 1
    assert total is not None  # there is at least one window
    return total / seen


def _corners(model: HookedModel, images: Tensor, stride: Size | None) -> list[tuple[int, int]]:
    """Returns the top left corner of every window."""
    window, patch = model.cfg.image_size, model.cfg.patch_size
    sides = images.shape[2:] if isinstance(images, Tensor) and images.ndim == 4 else (0, 0)
    if any(side < w or side % p for side, w, p in zip(sides, window, patch, strict=True)):
        sides = f"multiples of the patch {patch}, at least {window} (model.pad(images))"
        shape = list(getattr(images, "shape", []))
        raise ValueError(f"images are {shape}: give [batch, channels, height, width] in {sides}.")
    half = [max(w // 2 // p, 1) * p for w, p in zip(window, patch, strict=True)]
    steps = half if stride is None else checks.size("stride", stride)
    if any(step % p or step > w for step, p, w in zip(steps, patch, window, strict=True)):
        raise ValueError(f"stride={stride}: give multiples of patch {patch}, up to {window}.")
    tops, lefts = (  # the last window of a side ends at the edge
        sorted({*range(0, side - w + 1, step), side - w})
        for side, w, step in zip(sides, window, steps, strict=True)
    )
    return [(top, left) for top in tops for left in lefts]


def _check(cache: CrateCache) -> None:
    """Raises ValueError unless the cache is of a model of images, as the model is now."""
    if not isinstance(cache, CrateCache) or not hasattr(cache.model.cfg, "n_special"):
        raise ValueError("give the cache of model.run_with_cache(images), or cache.visual.")
    cache.check_weights()


def _whole_pattern(cache: CrateCache, layer: int) -> Tensor:
    """Returns the attention of all queries `[batch, head, query, key]`.

    Raises ValueError if the cache holds a slice of the queries, because slicing shifts positions,
    and for a model without a pattern.
    """
    check_pattern(cache.model.cfg, "a roll-out")
    pattern = cache.at("attn.hook_pattern", layer)
    if pattern.shape[-2] != pattern.shape[-1]:
        raise ValueError("the cache lacks tokens: call run_with_cache without pos_slice.")
    return pattern


def _grid(cache: CrateCache, patches: int, grid: Size | None) -> Grid:
    rows, columns = cache.model.cfg.known_grid if grid is None else checks.size("grid", grid)
    if rows * columns != patches:
        sides = f"give grid=(rows, columns), in patches of {cache.model.cfg.patch_size}"
        raise ValueError(f"{patches} patches do not fit the grid {rows} x {columns}: {sides}.")
    return rows, columns


def _position(query: Query, grid: Grid, first: int) -> int:
    """Returns the place of a query among the tokens: CLS, then the patches row by row.

    first: the place of the first patch, 1 unless the model has further special tokens.
    """
    count = grid[0] * grid[1] + first
    place: Any = query
    if isinstance(query, (tuple, list)) and len(query) == 2 and all(map(checks.is_int, query)):
        row, column = query
        if 0 <= row < grid[0] and 0 <= column < grid[1]:
            return first + row * grid[1] + column
    elif checks.is_int(query) and -count <= place < count:
        return int(place)
    known = f"0 for CLS, one of the {count} tokens, or (row, column) of {grid[0]} x {grid[1]}"
    raise ValueError(f"query={query!r}: give {known}.")
