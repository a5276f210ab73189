"""Maps over the patches of images, read from a cache: attention of any query, atoms, principal components, roll-out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from crate_interp import checks
from crate_interp.measures import attention_map, attention_rollout, pca_map

Grid = tuple[int, int]


def attention(
    cache: Any,
    layer: int,
    *,
    query: Any = 0,
    scaled: bool = True,
    cls_key: bool = True,
    grid: Any = None,
) -> Float[Tensor, "batch head h w"]:
    """What one query of a layer attends to, per head, over the grid of patches (`ci.measures.attention_map`).

    cache: of `model.run_with_cache(images)`, with attn.hook_pattern of the layer, or where scaled or cls_key is False with attn.hook_q
    and attn.hook_k. query: 0 for CLS, or (row,
    column) of a patch. grid: rows and columns of patches, needed where the images were not of the model's own size.
    Raises KeyError for points that were not cached, ValueError for a layer, query or grid that does not fit.
    """
    if scaled and cls_key:  # what the model computed, with the edits that hooks made
        pattern = _whole_pattern(cache, layer)
        grid = _grid(cache, pattern.shape[-1] - 1, grid)
        return pattern[:, :, _position(query, grid), 1:].unflatten(-1, grid)
    q, k = (_point(cache, layer, f"attn.hook_{role}").transpose(1, 2) for role in "qk")
    grid = _grid(cache, q.shape[2] - 1, grid)
    return attention_map(q, k, _position(query, grid), scaled, cls_key).unflatten(-1, grid)


def codes(
    cache: Any, layer: int, atoms: Any, *, point: str = "mlp.hook_post", grid: Any = None
) -> Float[Tensor, "batch atom h w"]:
    """How strongly each patch uses some atoms of a layer's dictionary: entries of the sparse code over the grid.

    atoms: their numbers, 0 to d_mlp - 1. point: another code, such as "mlp.hook_pre" before the ReLU. Raises as `attention`.
    """
    values = _point(cache, layer, point)  # [batch, pos, d_mlp]
    wanted: Any = atoms.tolist() if isinstance(atoms, (Tensor, np.ndarray)) else atoms
    wanted = list(wanted) if isinstance(wanted, (list, tuple, range)) else [wanted]
    if not wanted or not all(
        checks.is_int(atom) and 0 <= atom < values.shape[-1] for atom in wanted
    ):
        raise ValueError(f"atoms={atoms!r}: give whole numbers from 0 to {values.shape[-1] - 1}.")
    patches = values[:, 1:, wanted].transpose(1, 2)  # [batch, atom, patch]
    return patches.unflatten(-1, _grid(cache, patches.shape[-1], grid))


def components(
    cache: Any, layer: int, n_components: int = 3, *, point: str = "attn.hook_k", grid: Any = None
) -> Float[Tensor, "batch component h w"]:
    """The patches' codes on their first principal components over all images of the cache (`ci.measures.pca_map`).

    point: "attn.hook_k" (keys; in CRATE the codes of all heads side by side), or one of the stream, "hook_resid_post". Raises
    as `attention`.
    """
    features = _point(cache, layer, point).flatten(2)[:, 1:]  # [batch, patch, d]
    return pca_map(features, _grid(cache, features.shape[1], grid), n_components)


def rollout(cache: Any, *, query: Any = 0, grid: Any = None) -> Float[Tensor, "batch h w"]:
    """What reaches one query through the attention of all layers (`ci.measures.attention_rollout`), over the grid.

    query: as in `attention`; in CRATE the sparse step re-codes the stream between layers, which no roll-out sees. Raises as `attention`.
    """
    count = len(cache.model.blocks)
    patterns = torch.stack([_whole_pattern(cache, layer) for layer in range(count)], dim=1)
    grid = _grid(cache, patterns.shape[-1] - 1, grid)
    return attention_rollout(patterns)[:, _position(query, grid), 1:].unflatten(-1, grid)


def windowed(
    model: Any,
    images: Any,
    read: Callable[[Any], Any],
    *,
    stride: Any = None,
    names: Any = None,
    progress: bool = True,
) -> Float[Tensor, "batch map h w"]:
    """Maps of images larger than the model's, from overlapping windows of its own size; where windows overlap, their mean.

    images `[batch, channels, height, width]`. read(cache) -> maps `[batch, map, h, w]` of one window, such as `lambda cache:
    ci.maps.attention(cache, 4)`. stride: pixels between windows, or (rows, columns), multiples of the patch, None for half a
    window; the last window of a row ends at the edge. names: names_filter of the caches, one of which is held at a time.
    Attention is a share within its window: a window without the object attends elsewhere. Raises ValueError for images smaller
    than a window, sides that are no multiples of the patch, a stride that leaves gaps.
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        got = f"shape {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images are [batch, channels, height, width], got {got}.")
    (tall, wide), (height, width) = images.shape[2:], model.cfg.image_size
    patch = model.cfg.patch_size
    if tall < height or wide < width or tall % patch[0] or wide % patch[1]:
        raise ValueError(
            f"images are {tall} x {wide}: windows of {height} x {width} need at least that, in multiples of the patch {patch}; "
            "model.pad(images) makes multiples."
        )
    half = [max(side // 2 // p, 1) * p for side, p in zip((height, width), patch, strict=True)]
    steps = half if stride is None else checks.size("stride", stride)
    if any(
        step % p or step > side for step, p, side in zip(steps, patch, (height, width), strict=True)
    ):
        raise ValueError(
            f"stride={stride}: give a multiple of the patch {patch}, at most a window, {height} x {width}."
        )
    corners = [
        (top, left)
        for top in _starts(tall, height, steps[0])
        for left in _starts(wide, width, steps[1])
    ]
    total: Any = None
    seen = torch.zeros(tall // patch[0], wide // patch[1], device=images.device)
    for top, left in tqdm(corners, desc="windows", disable=not progress):
        window = images[:, :, top : top + height, left : left + width]
        with torch.no_grad():
            _, cache = model.run_with_cache(window, names_filter=names, **model.full_options)
        maps = read(cache)
        if maps.ndim != 4:
            raise ValueError(
                f"read(cache) gave shape {list(maps.shape)}: maps of one window are [batch, map, h, w]."
            )
        rows = slice(top // patch[0], top // patch[0] + maps.shape[-2])
        columns = slice(left // patch[1], left // patch[1] + maps.shape[-1])
        total = maps.new_zeros(*maps.shape[:2], *seen.shape) if total is None else total
        total[:, :, rows, columns] += maps
        seen[rows, columns] += 1
    return total / seen


def _starts(length: int, window: int, step: int) -> list[int]:
    """Where windows begin along one side; the last one ends at the edge."""
    return sorted({*range(0, length - window + 1, step), length - window})


def _point(cache: Any, layer: int, point: str) -> Tensor:
    if not cache.model.has_cls:
        raise ValueError(
            "maps over patches are read from the cache of a model of images; of a CLIP give cache.visual."
        )
    return cache.at(point, layer)


def _whole_pattern(cache: Any, layer: int) -> Tensor:
    """The attention of all queries `[batch, head, query, key]`; a slice of them has another token in each one's place."""
    pattern = _point(cache, layer, "attn.hook_pattern")
    if pattern.shape[-2] != pattern.shape[-1]:
        raise ValueError(
            f"the cache holds {pattern.shape[-2]} of {pattern.shape[-1]} tokens: run_with_cache without pos_slice."
        )
    return pattern


def _grid(cache: Any, patches: int, grid: Any) -> Grid:
    own = cache.model.cfg.grid
    found = own if grid is None else checks.size("grid", grid)
    if found[0] * found[1] != patches:
        raise ValueError(
            f"there are {patches} patches, the grid is {found[0]} x {found[1]}: give grid=(rows, columns), the image's sides "
            f"divided by the patch {cache.model.cfg.patch_size}."
        )
    return found


def _position(query: Any, grid: Grid) -> int:
    """Where a query is among the tokens: CLS, then the patches row by row."""
    count = grid[0] * grid[1] + 1
    if checks.is_int(query):
        if not -count <= query < count:
            raise ValueError(f"query={query}: there are {count} tokens, 0 (CLS) to {count - 1}.")
        return int(query)
    if (
        not isinstance(query, (tuple, list))
        or len(query) != 2
        or not all(checks.is_int(place) for place in query)
    ):
        raise ValueError(
            f"query={query!r}: give 0 for CLS, the number of a token, or (row, column) of a patch."
        )
    row, column = query
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(
            f"query={query}: the grid has rows 0 to {grid[0] - 1} and columns 0 to {grid[1] - 1}."
        )
    return 1 + row * grid[1] + column
