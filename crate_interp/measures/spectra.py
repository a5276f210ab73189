"""Spectra of tokens and of their codes, ranks, and rates at many precisions from one spectrum."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import checks, rates
from crate_interp.measures.checks import Bases, Tokens

__all__ = ["effective_rank", "rate_of_spectrum", "spectrum", "stable_rank", "subspace_spectrum"]


@checks.in_full_precision
def spectrum(z: Tokens) -> Float[Tensor, "*batch rank"]:
    """Returns the eigenvalues of `Z^T Z`, descending: the squared singular values of the tokens.

    z `[..., pos, d_model]` -> `[..., min(pos, d_model)]`, >= 0, in squared units of z. Computed
    from singular values in float64, because an eigenvalue solver loses eigenvalues below 1e-16 of
    the largest. NaN or Inf in a sample gives NaN. Raises ValueError if there are no tokens.
    """
    checks.require_entries(z, "pos width", checks.NO_TOKENS)
    return singular_values(z.double()).square().to(z.dtype)


@checks.in_full_precision
def subspace_spectrum(z: Tokens, u: Bases) -> Float[Tensor, "*batch head rank"]:
    """Returns the eigenvalues of `C_k^T C_k` for each head, descending; C_k = Z U_k.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head, min(pos, d_head)]`, >= 0,
    in squared units of the codes. NaN or Inf in a sample gives NaN. Raises ValueError if there are
    no tokens.
    """
    checks.require_entries(z, "pos width", checks.NO_TOKENS)
    checks.require_floats(u, "head d_model d_head")
    return singular_values(rates.head_codes(z.double(), u.double())).square().to(z.dtype)


def rate_of_spectrum(
    spectrum: Float[Tensor, "*batch rank"],
    n_tokens: int,
    width: int,
    eps: float | Sequence[float] | Tensor,
) -> Float[Tensor, "..."]:
    """Returns the coding rate of a spectrum at one or many precisions.

    `1/2 sum_i ln(1 + width / (n_tokens eps^2) lambda_i)`.

    spectrum `[..., rank]` -> `[...]` in nats per token, >= 0, for one eps; `[..., eps]` for a list
    of eps, so that R on a grid costs one decomposition. width: d for `coding_rate`, p for
    `subspace_coding_rate`. Raises ValueError if an eps is not above 0, if no eps is given, if
    n_tokens or width is below 1, or if the spectrum is negative.
    """
    checks.require_floats(spectrum, "rank")
    grid = torch.as_tensor(eps, dtype=torch.float64, device=spectrum.device)
    if grid.ndim > 1 or not grid.numel() or not bool((grid > 0).all()):
        raise ValueError(f"eps={eps}: give numbers above 0, such as 0.1 or [0.01, 0.1, 1.0].")
    if n_tokens < 1 or width < 1:
        raise ValueError(f"n_tokens={n_tokens}, width={width}: give numbers of at least 1.")
    if bool((spectrum < 0).any()):
        raise ValueError("the spectrum has negative values: give squared singular values.")
    scale = width / (n_tokens * grid.square())
    rate = 0.5 * torch.log1p(spectrum.double().unsqueeze(-1) * scale.reshape(-1)).sum(dim=-2)
    return rate.reshape((*spectrum.shape[:-1], *grid.shape)).to(spectrum.dtype)


def singular_values(x: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rank"]:
    """Returns `torch.linalg.svdvals`, with NaN for a matrix that holds NaN or Inf.

    LAPACK raises an error for such a matrix.
    """
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    values = torch.linalg.svdvals(x.where(finite[..., None, None], 0.0))
    return values.masked_fill(~finite.unsqueeze(-1), torch.nan)


@checks.in_full_precision
def stable_rank(w: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    """Returns how many directions of a matrix are about as strong as its strongest direction.

    `|W|_F^2 / |W|_2^2`.

    w `[..., rows, columns]` -> `[...]`, dimensionless, 1 to the rank; 0 for a matrix of zeros. It
    does not depend on the scale of w, and is about m n / (sqrt m + sqrt n)^2 for a Gaussian m x n
    matrix. JoMA, arXiv 2310.00535, figure 7. NaN or Inf gives NaN. Raises ValueError if the matrix
    is empty.
    """
    values = _matrix_values(w)
    largest = values[..., :1]
    share = values / largest.masked_fill(largest == 0, 1)
    return share.square().sum(dim=-1).to(w.dtype)


@checks.in_full_precision
def effective_rank(z: Tokens) -> Float[Tensor, "*batch"]:
    """Returns how many directions the tokens fill.

    `exp(H)`, where H is the entropy of the singular values scaled to sum to one.

    z `[..., pos, d_model]` -> `[...]`, dimensionless, 1 to the rank; 0 for zeros. It does not
    depend on the scale of z. Roy and Vetterli, EUSIPCO 2007. NaN or Inf gives NaN. Raises
    ValueError if z has no tokens or no dimensions.
    """
    values = _matrix_values(z)
    total = values.sum(dim=-1, keepdim=True)
    share = values / total.masked_fill(total == 0, 1)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return rank.masked_fill(total[..., 0] == 0, 0).to(z.dtype)


def _matrix_values(x: Tensor) -> Float[Tensor, "*batch rank"]:
    checks.require_entries(x, "rows columns", "the matrix is empty")
    return singular_values(x.double())
