"""Gradients of the coding rates in closed form, and the approximation that becomes attention."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import checks, rates, spectra

__all__ = [
    "coding_rate_gradient", "neumann_gradient", "neumann_invalid", "subspace_coding_rate_gradient",
]  # fmt: skip


@checks.in_full_precision
def coding_rate_gradient(
    z: Float[Tensor, "*batch pos d_model"], eps: float
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the gradient of `coding_rate` with respect to the tokens.

    The gradient is `a Z (I + a Z^T Z)^{-1}` = a (I + a Z Z^T)^{-1} Z, where a = d / (N eps^2)
    (arXiv 2306.01129, appendix).

    z `[..., pos, d_model]` -> like z, in nats per unit of z. The gradient points towards higher
    rates: a step against it compresses. `<Z, grad>` is at most the rank of Z, because it is the
    sum of a s^2 / (1 + a s^2) over the singular values s of Z. Computed in float64. NaN or Inf in a
    sample gives NaN. Raises ValueError as `coding_rate` does.
    """
    rates.check_rate(z, eps)
    pos, width = z.shape[-2:]
    return _solved(z.double(), width / (pos * eps**2)).to(z.dtype)


@checks.in_full_precision
def subspace_coding_rate_gradient(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the gradient of R^c, summed over heads, with respect to the tokens.

    `sum_k a C_k (I + a C_k^T C_k)^{-1} U_k^T`, where C_k = Z U_k and a = p / (N eps^2).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z, in nats per unit of z. arXiv
    2306.01129, before eq. 9; the paper derives MSSA from a step against this gradient. Computed in
    float64. NaN or Inf in a sample gives NaN. Raises ValueError as `coding_rate` does.
    """
    rates.check_rate(z, eps)
    scale = u.shape[-1] / (z.shape[-2] * eps**2)
    wide = u.double()
    return written(_solved(rates.head_codes(z.double(), wide), scale), wide).to(z.dtype)


@checks.in_full_precision
def neumann_gradient(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the first two terms of the Neumann series of R^c's gradient.

    `sum_k (a C_k - a^2 C_k C_k^T C_k) U_k^T`, where C_k = Z U_k and a = p / (N eps^2).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z, in nats per unit of z. arXiv
    2306.01129 eq. 9. It approximates the gradient only if a |C_k|_2^2 < 1; beyond that its sign
    flips: see `neumann_invalid`. Computed in float64. Raises ValueError as `coding_rate` does.
    """
    rates.check_rate(z, eps)
    scale = u.shape[-1] / (z.shape[-2] * eps**2)
    wide = u.double()
    codes = rates.head_codes(z.double(), wide) * scale**0.5
    return (written(codes - codes @ (codes.mT @ codes), wide) * scale**0.5).to(z.dtype)


@checks.in_full_precision
def neumann_invalid(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch head"]:
    """Returns the share of the eigenvalues of `a C_k^T C_k` that exceed 1; a = p / (N eps^2).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head]` in [0, 1], among the
    min(N, p) eigenvalues x of each head. Above 1 the Neumann step has the wrong size or sign: it
    shrinks directions with x < 1 and lengthens directions with x > 1, but the exact step shrinks
    all directions. Not differentiable. NaN or Inf in a sample gives NaN. Raises ValueError as
    `coding_rate` does.
    """
    rates.check_rate(z, eps)
    scale = u.shape[-1] / (z.shape[-2] * eps**2)
    values = spectra.singular_values(rates.head_codes(z.double(), u.double())).square() * scale
    share = (values > 1).double().mean(dim=-1)
    return share.masked_fill(~values.isfinite().all(dim=-1), torch.nan).to(z.dtype)


def _solved(
    x: Float[Tensor, "*batch rows columns"], scale: float
) -> Float[Tensor, "*batch rows columns"]:
    """Returns `scale X (I + scale X^T X)^{-1}`, and NaN for a matrix that is not finite.

    QR of X stacked on I gives `[X; I] = [Q1; Q2] R` and X (I + X^T X)^{-1} = Q1 Q2^T. This avoids
    the Gram matrix, which would square the condition number.
    """
    if x.shape[-2] < x.shape[-1]:
        return _solved(x.mT, scale).mT
    finite = x.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(*x.shape[:-2], -1, -1)
    q, _ = torch.linalg.qr(torch.cat([x.where(finite, 0.0) * scale**0.5, eye], dim=-2))
    upper, lower = q[..., : x.shape[-2], :], q[..., x.shape[-2] :, :]
    return (upper @ lower.mT * scale**0.5).masked_fill(~finite, torch.nan)


def written(
    codes: Float[Tensor, "*batch head pos d_head"], u: Float[Tensor, "head d_model d_head"]
) -> Tensor:
    """Returns the codes written to the stream, `sum_k C_k U_k^T` `[..., pos, d_model]`."""
    wide = u.transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    return codes.transpose(-3, -2).flatten(-2) @ wide.T
