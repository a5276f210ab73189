"""From a map over tokens to a mask, between tokens and pixels, and how well a mask fits."""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp import checks
from crate_interp.measures.checks import all_finite, require_floats


def mass_mask(map: Float[Tensor, "*batch pos"], mass: Any = 0.6) -> Bool[Tensor, "*batch pos"]:
    """The fewest tokens that together hold a share of a map's mass, `sum_{i in M} a_i >= mass sum_i a_i`, largest first.

    map `[..., pos]` of numbers >= 0 -> bool `[..., pos]`; of equal values the lower index wins; of a map of zeros no token. DINO
    `visualize_attention.py` (there the sums are float32, and a tie at the edge may keep one token more). What papers call "the top
    60 %" is this in the code they share, and `top_mask` by their words: 8 tokens or 60 of 100 where ten hold four fifths. Raises
    ValueError for a share outside (0, 1], negative values, NaN or Inf, no tokens.
    """
    _check_map(map)
    _check_share(mass, "mass")
    if bool((map < 0).any()):
        raise ValueError(
            "a map has negative values, which hold no mass: give attention, or use top_mask."
        )
    values, order = map.double().sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(dim=-1) - values
    wanted = (
        mass * values.sum(dim=-1, keepdim=True) * (1 - 1e-12)
    )  # a sum in another order may end an ulp higher
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before < wanted)


def top_mask(map: Float[Tensor, "*batch pos"], fraction: Any = 0.6) -> Bool[Tensor, "*batch pos"]:
    """The tokens with the largest values: `floor(fraction pos + 1/2)` of them, at least one.

    map `[..., pos]` -> bool `[..., pos]`; of equal values the lower index wins. arXiv 2308.16271 App. B.3 by its words ("top 60 % of
    entries"); the code it follows keeps a share of the mass: `mass_mask`. Raises ValueError for a share outside (0, 1], NaN or Inf, no
    tokens.
    """
    _check_map(map)
    _check_share(fraction, "fraction")
    kept = max(1, int(fraction * map.shape[-1] + 0.5 + 1e-9))  # 0.145 x 100 is 14.499999999999998
    order = map.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :kept], True)


def jaccard(
    mask: Bool[Tensor, "*batch pos"], target: Bool[Tensor, "*other target_pos"]
) -> Float[Tensor, "*broadcast"]:
    """Intersection over union, `|A and B| / |A or B|`.

    mask, target bool `[..., pos]`, leading axes broadcast -> float64 `[...]` in [0, 1]; 1 where both are empty. Raises ValueError
    for masks that are not bool, last axes that differ and leading ones that do not broadcast.
    """
    for name, tensor in (("mask", mask), ("target", target)):
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"jaccard takes bool masks, {name} is {got}: make one with mass_mask, or map > threshold."
            )
    if not mask.ndim or not target.ndim or mask.shape[-1] != target.shape[-1]:
        raise ValueError(
            f"mask {list(mask.shape)} and target {list(target.shape)} have different last axes (tokens)."
        )
    try:
        torch.broadcast_shapes(mask.shape, target.shape)
    except RuntimeError:
        raise ValueError(
            f"mask {list(mask.shape)} and target {list(target.shape)} do not broadcast."
        ) from None
    both = (mask & target).sum(dim=-1).double()
    either = (mask | target).sum(dim=-1).double()
    return torch.where(either == 0, 1.0, both / either.clamp(min=1))


def random_jaccard(fraction: float, target_fraction: float) -> float:
    """What a random mask scores: `P f / (P + f - P f)`, for a mask of a share P and a target of a share f.

    In [0, 1]; the ratio of the expected intersection and union, which many tokens reach. The chance level of `jaccard`; all
    foreground is P = 1, f itself. Raises ValueError for shares outside [0, 1] and for two shares of 0.
    """
    both = fraction * target_fraction
    if not (0 <= fraction <= 1 and 0 <= target_fraction <= 1) or fraction + target_fraction == 0:
        raise ValueError(
            f"shares {fraction} and {target_fraction}: give two in [0, 1], not both 0."
        )
    return both / (fraction + target_fraction - both)


def token_mask(
    mask: Bool[Tensor, "*batch height width"], patch_size: int | tuple[int, int]
) -> Bool[Tensor, "*batch patch"]:
    """The patches of which more than half the pixels are in a mask of pixels: share > 1/2.

    mask bool `[..., height, width]` -> bool `[..., patch]`, row-major. Raises ValueError for a mask that is not bool, and sides that
    are no multiples of the patch.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim < 2:
        got = (
            f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        )
        raise ValueError(f"a mask of pixels is bool [..., height, width], got {got}.")
    height, width = checks.size("patch_size", patch_size)
    if mask.shape[-2] % height or mask.shape[-1] % width:
        raise ValueError(
            f"a mask of {mask.shape[-2]} x {mask.shape[-1]} pixels has no whole patches of {height} x {width}."
        )
    blocks = rearrange(mask, "... (h p1) (w p2) -> ... (h w) (p1 p2)", p1=height, p2=width)
    return 2 * blocks.sum(dim=-1) > height * width


def pixel_mask(
    mask: Bool[Tensor, "*batch patch"],
    grid: int | tuple[int, int],
    patch_size: int | tuple[int, int],
) -> Bool[Tensor, "*batch height width"]:
    """A mask of patches at the resolution of pixels: each pixel has what its patch has (nearest neighbour).

    mask bool `[..., patch]`, row-major over `grid` (rows, columns) -> bool `[..., height, width]`. Raises ValueError where the grid
    does not fit.
    """
    grid, patch_size = checks.size("grid", grid), checks.size("patch_size", patch_size)
    if (
        not isinstance(mask, Tensor)
        or mask.dtype != torch.bool
        or not mask.ndim
        or mask.shape[-1] != grid[0] * grid[1]
    ):
        got = (
            f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        )
        raise ValueError(f"a mask of patches is bool [..., {grid[0]} x {grid[1]}], got {got}.")
    wide = mask.unflatten(-1, grid)  # [..., h, w]
    return wide.repeat_interleave(patch_size[0], dim=-2).repeat_interleave(patch_size[1], dim=-1)


def _check_map(map: Any) -> None:
    require_floats(map, "pos")
    if map.shape[-1] == 0:
        raise ValueError(f"there is no token to choose from: the map has shape {list(map.shape)}.")
    if not all_finite(map):
        raise ValueError("a map holds NaN or Inf: a mask cannot say so.")


def _check_share(value: Any, name: str) -> None:
    if not checks.is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r}: give a share above 0 and at most 1.")
