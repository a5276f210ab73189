"""Ranks that need no threshold."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import in_full_precision, require_floats
from crate_interp.measures.spectra import singular_values

__all__ = [
    "effective_rank",
    "stable_rank",
]


@in_full_precision
def stable_rank(w: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    """Returns how many directions of a matrix carry as much as its strongest.

    `|W|_F^2 / |W|_2^2`.

    w `[..., rows, columns]` -> `[...]`, dimensionless, 1 to the rank; 0 for a matrix of zeros. It
    does not depend on the scale of w, and is about m n / (sqrt m + sqrt n)^2 for a Gaussian m x n
    matrix. JoMA, arXiv 2310.00535, figure 7. NaN or Inf gives NaN. Raises ValueError if the matrix
    is empty.
    """
    values = _values(w)
    largest = values[..., :1]
    share = values / largest.masked_fill(largest == 0, 1)
    return share.square().sum(dim=-1).to(w.dtype)


@in_full_precision
def effective_rank(z: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch"]:
    """Returns how many directions the tokens fill.

    `exp(H)`, where H is the entropy of the singular values scaled to sum to one.

    z `[..., pos, d_model]` -> `[...]`, dimensionless, 1 to the rank; 0 for zeros. It does not
    depend on the scale of z. Roy and Vetterli, EUSIPCO 2007. NaN or Inf gives NaN. Raises
    ValueError if z has no tokens or no dimensions.
    """
    values = _values(z)
    total = values.sum(dim=-1, keepdim=True)
    share = values / total.masked_fill(total == 0, 1)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return rank.masked_fill(total[..., 0] == 0, 0).to(z.dtype)


def _values(x: Tensor) -> Float[Tensor, "*batch rank"]:
    require_floats(x, "rows columns")
    if 0 in x.shape[-2:]:
        raise ValueError(f"the matrix is empty: the last two axes are {list(x.shape[-2:])}.")
    return singular_values(x.double())
