"""Makes masks from maps over tokens, converts them to pixels and back, and scores how they fit.

A map has patches only: `measures.attention_map` and `head_maps` of
crate_interp/probes/segmentation_probe.py leave out CLS before it becomes a mask.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.measures.checks import all_finite, require_floats

__all__ = ["jaccard", "mass_mask", "pixel_mask", "random_jaccard", "token_mask", "top_mask"]


def mass_mask(map: Float[Tensor, "*batch pos"], mass: float = 0.6) -> Bool[Tensor, "*batch pos"]:
    """Returns the fewest tokens that together hold at least a share `mass` of a map's mass.

    `sum_{i in M} a_i >= mass sum_i a_i` for the mask M of the map a.

    map `[..., pos]` of numbers >= 0 -> bool `[..., pos]`. If values are equal, the lower index
    wins; a map of zeros gives no token. Source: DINO `visualize_attention.py`, whose float32 sums
    may keep one token more if values tie at the edge of the mask. Some papers say "the top 60 %",
    which describes `top_mask`, but compute `mass_mask`. The two masks differ: if ten of 100 tokens
    share four fifths of the mass equally, then at 60 % `mass_mask` keeps 8 tokens and `top_mask`
    60. Raises ValueError if mass is outside (0, 1], if the map holds negative values, NaN or Inf,
    or if there are no tokens.
    """
    _check_map(map)
    checks.share("mass", mass)
    if bool((map < 0).any()):
        raise ValueError("the map has negative values. Give attention weights, or use top_mask.")
    values, order = map.double().sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(dim=-1) - values
    # 1e-12 below the share, because a sum in another order may be an ulp higher
    wanted = mass * values.sum(dim=-1, keepdim=True) * (1 - 1e-12)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before < wanted)


def top_mask(map: Float[Tensor, "*batch pos"], fraction: float = 0.6) -> Bool[Tensor, "*batch pos"]:
    """Returns the tokens with the largest values, a share `fraction` of all tokens.

    It keeps `floor(fraction pos + 1/2)` tokens, at least one.

    map `[..., pos]` -> bool `[..., pos]`; of equal values the lower index wins. This follows the
    text of arXiv 2308.16271 App. B.3 ("top 60 % of entries"); the code that the paper follows keeps
    a share of the mass instead, as `mass_mask` does. Raises ValueError if fraction is outside (0,
    1], if the map holds NaN or Inf, or if there are no tokens.
    """
    _check_map(map)
    checks.share("fraction", fraction)
    kept = max(1, int(fraction * map.shape[-1] + 0.5 + 1e-9))  # 0.145 x 100 is 14.499999999999998
    order = map.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :kept], True)


def jaccard(
    mask: Bool[Tensor, "*batch pos"], target: Bool[Tensor, "*other target_pos"]
) -> Float[Tensor, "*broadcast"]:
    """Returns the intersection over union of two masks, `|A and B| / |A or B|`.

    mask, target bool `[..., pos]`, whose leading axes broadcast -> float64 `[...]` in [0, 1]; 1 if
    both are empty. Raises ValueError if a mask is not bool, if the last axes differ, or if the
    leading axes do not broadcast.
    """
    if not _is_mask(mask, 1) or not _is_mask(target, 1) or mask.shape[-1] != target.shape[-1]:
        both = f"{_described(mask)} and {_described(target)}"
        raise ValueError(f"jaccard takes two bool masks of the same tokens, got {both}.")
    both = (mask & target).sum(dim=-1).double()
    either = (mask | target).sum(dim=-1).double()
    return torch.where(either == 0, 1.0, both / either.clamp(min=1))


def random_jaccard(fraction: float, target_fraction: float) -> float:
    """Returns the chance level of `jaccard` for a random mask of share P and a target of share f.

    The level is `P f / (P + f - P f)`, in [0, 1], the ratio of the expected intersection to the
    expected union; `jaccard` approaches it for many tokens. If the mask is all foreground (P = 1),
    the level is f. Raises ValueError if a share is outside [0, 1], or if both are 0.
    """
    both = fraction * target_fraction
    if not (0 <= fraction <= 1 and 0 <= target_fraction <= 1) or fraction + target_fraction == 0:
        raise ValueError(f"{fraction=}, {target_fraction=}: give shares in [0, 1], not both 0.")
    return both / (fraction + target_fraction - both)


def token_mask(
    mask: Bool[Tensor, "*batch height width"], patch_size: int | tuple[int, int]
) -> Bool[Tensor, "*batch patch"]:
    """Returns the patches that a mask of pixels covers by more than half, `share > 1/2`.

    mask bool `[..., height, width]` -> bool `[..., patch]`, row-major. Raises ValueError if the
    mask is not bool, or if its sides are not multiples of the patch's sides.
    """
    if not _is_mask(mask, 2):
        raise ValueError(f"a mask must be bool [..., height, width], got {_described(mask)}.")
    height, width = checks.size("patch_size", patch_size)
    if mask.shape[-2] % height or mask.shape[-1] % width:
        shape = f"{mask.shape[-2]} x {mask.shape[-1]} pixels"
        raise ValueError(f"a mask of {shape} does not divide into patches of {height} x {width}.")
    blocks = rearrange(mask, "... (h p1) (w p2) -> ... (h w) (p1 p2)", p1=height, p2=width)
    return 2 * blocks.sum(dim=-1) > height * width


def pixel_mask(
    mask: Bool[Tensor, "*batch patch"],
    grid: int | tuple[int, int],
    patch_size: int | tuple[int, int],
) -> Bool[Tensor, "*batch height width"]:
    """Returns a mask of patches enlarged to pixels (nearest neighbour).

    Each pixel has the value of its patch.

    Args:
        mask: Bool `[..., patch]`, row-major over `grid`.
        grid: Rows and columns of patches.
        patch_size: The side of a patch in pixels.

    Returns:
        bool `[..., height, width]`.

    Raises:
        ValueError: If the mask is not bool or does not fit the grid.
    """
    grid, patch_size = checks.size("grid", grid), checks.size("patch_size", patch_size)
    if not _is_mask(mask, 1) or mask.shape[-1] != grid[0] * grid[1]:
        size = f"{grid[0]} x {grid[1]}"
        raise ValueError(f"a mask of patches must be bool [..., {size}], got {_described(mask)}.")
    wide = mask.unflatten(-1, grid)  # [..., h, w]
    return wide.repeat_interleave(patch_size[0], dim=-2).repeat_interleave(patch_size[1], dim=-1)


def _is_mask(mask: object, axes: int) -> bool:
    """Tells whether an object is a mask of at least so many axes."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim >= axes


def _described(mask: object) -> str:
    return f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def _check_map(map: Tensor) -> None:
    require_floats(map, "pos")
    if map.shape[-1] == 0:
        raise ValueError(f"there is no token to choose from: the map has shape {list(map.shape)}.")
    if not all_finite(map):
        raise ValueError("the map holds NaN or Inf: leave out such maps.")
