"""Spectra of tokens and of their codes, and rates at many precisions from one decomposition."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import in_full_precision, require_floats
from crate_interp.measures.rates import head_codes

__all__ = [
    "rate_of_spectrum",
    "spectrum",
    "subspace_spectrum",
]


@in_full_precision
def spectrum(z: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch rank"]:
    """Returns the eigenvalues of `Z^T Z`, descending: the squared singular values of the tokens.

    z `[..., pos, d_model]` -> `[..., min(pos, d_model)]`, >= 0, in squared units of z. Computed
    from singular values in float64, because an eigenvalue solver loses those below 1e-16 of the
    largest. NaN or Inf in a sample gives NaN. Raises ValueError if there are no tokens.
    """
    _check(z)
    return singular_values(z.double()).square().to(z.dtype)


@in_full_precision
def subspace_spectrum(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "*batch head rank"]:
    """Returns the eigenvalues of `C_k^T C_k` for each head, descending; C_k = Z U_k.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head, min(pos, d_head)]`, >= 0,
    in squared units of the codes. NaN or Inf in a sample gives NaN. Raises ValueError if there are
    no tokens.
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
    """Returns the coding rate of a spectrum at one or many precisions.

    `1/2 sum_i ln(1 + width / (n_tokens eps^2) lambda_i)`.

    spectrum `[..., rank]` -> `[...]` in nats per token, >= 0, for one eps; `[..., eps]` for a list
    of them, so that R on a grid costs one decomposition. width: d for `coding_rate`, p for
    `subspace_coding_rate`. Raises ValueError if an eps is not above 0 or none is given, if n_tokens
    or width is below 1, or if the spectrum is negative.
    """
    require_floats(spectrum, "rank")
    grid = torch.as_tensor(eps, dtype=torch.float64, device=spectrum.device)
    if grid.ndim > 1 or not grid.numel() or not bool((grid > 0).all()):
        raise ValueError(f"eps={eps}: give numbers above 0, such as 0.1 or [0.01, 0.1, 1.0].")
    if n_tokens < 1 or width < 1:
        raise ValueError(f"n_tokens={n_tokens}, width={width}: give numbers of at least 1.")
    if bool((spectrum < 0).any()):
        raise ValueError(
            "the spectrum has negative values: give squared singular values, as `spectrum` does."
        )
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


def _check(z: Tensor) -> None:
    require_floats(z, "pos d_model")
    if 0 in z.shape[-2:]:
        raise ValueError(
            "there are no tokens to measure: the last two axes (pos, width) are "
            f"{list(z.shape[-2:])}."
        )
