"""Spectra of tokens and of their codes, and rates at many precisions from one decomposition."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import in_full_precision, require_floats
from crate_interp.measures.rates import head_codes


@in_full_precision
def spectrum(z: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch rank"]:
    """The eigenvalues of `Z^T Z`, descending: the squared singular values of the tokens.

    z `[..., pos, d_model]` -> `[..., min(pos, d_model)]`, >= 0, in squared units of z. By singular values in float64: an
    eigenvalue solver loses those below 1e-16 of the largest. NaN or Inf in a sample gives NaN. Raises ValueError for no tokens.
    """
    _check(z)
    return singular_values(z.double()).square().to(z.dtype)


@in_full_precision
def subspace_spectrum(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "*batch head rank"]:
    """The eigenvalues of `C_k^T C_k`, C_k = Z U_k, for each head, descending.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head, min(pos, d_head)]`, >= 0. Errors as in `spectrum`.
    """
    _check(z)
    require_floats(u, "head d_model d_head")
    return singular_values(head_codes(z.double(), u.double())).square().to(z.dtype)


def rate_of_spectrum(
    spectrum: Float[Tensor, "*batch rank"],
    n_tokens: int,
    width: int,
    eps: float | Sequence[float] | Tensor,
) -> Float[Tensor, "..."]:
    """The rate of a spectrum at one or many precisions: `1/2 sum_i ln(1 + width / (n_tokens eps^2) lambda_i)`.

    spectrum `[..., rank]` -> `[...]` in nats for one eps, `[..., eps]` for a list of them: R on a grid for the price of one
    decomposition. width: d for `coding_rate`, p for `subspace_coding_rate`. Raises ValueError for eps <= 0, no eps, fewer than
    one token, and a negative spectrum.
    """
    require_floats(spectrum, "rank")
    grid = torch.as_tensor(eps, dtype=torch.float64, device=spectrum.device)
    if grid.ndim > 1 or not grid.numel() or not bool((grid > 0).all()):
        raise ValueError(f"eps={eps}: give numbers above 0, such as 0.1 or [0.01, 0.1, 1.0].")
    if n_tokens < 1 or width < 1:
        raise ValueError(f"n_tokens={n_tokens}, width={width}: both are at least 1.")
    if bool((spectrum < 0).any()):
        raise ValueError(
            "the spectrum has negative values: give squared singular values, as `spectrum` does."
        )
    scale = width / (n_tokens * grid.square())
    rate = 0.5 * torch.log1p(spectrum.double().unsqueeze(-1) * scale.reshape(-1)).sum(dim=-2)
    return rate.reshape((*spectrum.shape[:-1], *grid.shape)).to(spectrum.dtype)


def singular_values(x: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rank"]:
    """torch.linalg.svdvals, with NaN for a matrix that holds NaN or Inf, where LAPACK raises."""
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    values = torch.linalg.svdvals(x.where(finite[..., None, None], 0.0))
    return values.masked_fill(~finite.unsqueeze(-1), torch.nan)


def _check(z: Tensor) -> None:
    require_floats(z, "pos d_model")
    if 0 in z.shape[-2:]:
        raise ValueError(
            f"there are no tokens to measure: the last two axes (pos, width) are {list(z.shape[-2:])}."
        )
