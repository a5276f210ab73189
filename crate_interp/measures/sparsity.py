"""How sparse a code is, token by token."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import largest_entry, require_floats, squares_fit


def zero_fraction(z: Float[Tensor, "*batch pos d_mlp"], tol: float = 0.0) -> Float[Tensor, "*batch pos"]:
    """The share of entries with |z| <= tol; exact zeros by default.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1], without unit. The mean over tokens is what the authors' script
    counts (CRATE `vis_utils/plot.py` `cal_sparsity`; it plots one minus that and takes the population std over the
    batch). NaN in a token gives NaN. Raises ValueError for tol < 0 and for an empty code.
    """
    _check(z)
    if not tol >= 0:
        raise ValueError(f"tol={tol}: give a number of at least 0.")
    with torch.no_grad():  # a count has no gradient; comparing into numbers, as booleans are slow to sum
        zeros = torch.empty_like(z)
        torch.eq(z, 0, out=zeros) if tol == 0 else torch.le(z.abs(), tol, out=zeros)
    return _valid(zeros.sum(dim=-1) / z.shape[-1], z, z.sum(dim=-1))


def l1_norm(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """The sum of absolute values, `|z|_1`: what ISTA's threshold penalises.

    z `[..., pos, d_mlp]` -> `[..., pos]`, >= 0, in units of the code. Raises ValueError for an empty code.
    """
    _check(z)
    size = z.abs().sum(dim=-1)
    return _valid(size, z, size)


def hoyer(z: Float[Tensor, "*batch pos d_mlp"]) -> Float[Tensor, "*batch pos"]:
    """Hoyer's sparsity `(sqrt(n) - |z|_1 / |z|_2) / (sqrt(n) - 1)`, n = d_mlp: 0 for equal entries, 1 for one entry.

    z `[..., pos, d_mlp]` -> `[..., pos]` in [0, 1]; does not change when z is scaled. Hoyer, JMLR 2004. An all-zero
    token, for which the formula is 0/0, has 1: nothing is sparser. Raises ValueError for a code narrower than 2.
    """
    _check(z)
    width = z.shape[-1]
    if width < 2:
        raise ValueError(f"hoyer needs codes of at least 2 entries, got {width}.")
    l1, l2 = z.abs().sum(dim=-1), torch.linalg.vector_norm(z, dim=-1)
    if not squares_fit(l2):
        scaled = z / largest_entry(z)
        l1, l2 = scaled.abs().sum(dim=-1), torch.linalg.vector_norm(scaled, dim=-1)
    ratio = l1 / l2.masked_fill(l2 == 0, 1)
    value = ((width**0.5 - ratio) / (width**0.5 - 1)).masked_fill(l2 == 0, 1).clamp(0, 1)
    return _valid(value, z, value)


def _valid(
    value: Float[Tensor, "*batch pos"], z: Float[Tensor, "*batch pos d_mlp"], seen: Float[Tensor, "*batch pos"]
) -> Float[Tensor, "*batch pos"]:
    """NaN for a token that holds NaN or Inf; `seen` is finite only where the token is, or its sum overflows."""
    finite = seen.detach().isfinite()
    if not finite.all():
        finite = z.isfinite().all(dim=-1)
    return value.masked_fill(~finite, torch.nan)


def _check(z: Tensor) -> None:
    require_floats(z, "pos d_mlp")
    if 0 in z.shape[-2:]:
        raise ValueError(f"there is no code to measure: the last two axes (pos, d_mlp) are {list(z.shape[-2:])}.")
