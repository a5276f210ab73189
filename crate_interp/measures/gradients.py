"""Gradients of the coding rates in closed form, and the steps from which layers are derived.

Rules (a) to (e) are compared in arXiv 2411.17182, appendix A. With one head, or with a complete
orthonormal set of heads, each rule except (e) acts only on the singular values s of the codes C_k =
Z U_k. Below, x = a s^2, a = p / (N eps^2), and kappa is the step size.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import checks, lasso, rates, spectra
from crate_interp.measures.checks import Bases, Code, HeadCodes, Tokens

__all__ = [
    "attention_step", "coding_rate_gradient", "first_order_step", "gradient_step", "ista_step",
    "neumann_gradient", "neumann_invalid", "neumann_step", "paper_mssa", "paper_posterior_mean",
    "posterior_mean", "subspace_attention", "subspace_coding_rate_gradient", "third_order_step",
    "token_rates",
]  # fmt: skip


@checks.in_full_precision
def coding_rate_gradient(z: Tokens, eps: float) -> Tokens:
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
def token_rates(z: Tokens, eps: float) -> Float[Tensor, "*batch pos"]:
    """Returns what each token costs: how much the rate falls if the token becomes zero.

    `R(Z) - R(Z without z_i) = -1/2 ln [(I + a Z Z^T)^{-1}]_ii` with a = d / (N eps^2), by the
    matrix determinant lemma. N stays, since an all-zero token counts in it. The parts do not add up
    to R: what tokens share is in none of them.

    Of the codes of a head, `token_rates(Z U_k, eps)` is what each token costs in its R^c. Computed
    in float64 from the matrix of tokens, because the smaller one of features loses what is left of
    a token beside the others. NaN or Inf in a sample gives NaN.

    Args:
        z: `[..., pos, d_model]`, or codes `[..., head, pos, d_head]`.
        eps: The precision, above 0.

    Returns:
        `[..., pos]` in nats per token, >= 0, and 0 only for an all-zero token. Our own; the rate is
        that of arXiv 2306.01129 eq. 1.

    Raises:
        ValueError: As `coding_rate` does.
    """
    rates.check_rate(z, eps)
    pos, width = z.shape[-2:]
    bad = ~z.isfinite().all(dim=-1).all(dim=-1)[..., None]
    wide = z.double().masked_fill(bad[..., None], 0)
    eye = torch.eye(pos, dtype=torch.float64, device=z.device)
    factor = torch.linalg.cholesky(eye + width / (pos * eps**2) * (wide @ wide.mT))
    inverse = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    costs = -0.5 * inverse.square().sum(dim=-2).log()
    return costs.masked_fill(bad, torch.nan).to(z.dtype)


@checks.in_full_precision
def subspace_coding_rate_gradient(z: Tokens, u: Bases, eps: float) -> Tokens:
    """Returns the gradient of R^c, summed over heads, with respect to the tokens.

    `sum_k a C_k (I + a C_k^T C_k)^{-1} U_k^T`, where C_k = Z U_k and a = p / (N eps^2).

    Computed in float64. NaN or Inf in a sample gives NaN.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.

    Returns:
        like z, in nats per unit of z. arXiv 2306.01129, before eq. 9; the paper derives MSSA from a
        step against this gradient.

    Raises:
        ValueError: As `coding_rate` does.
    """
    scale = _scale(z, u, eps)
    wide = u.double()
    return written(_solved(rates.head_codes(z.double(), wide), scale), wide).to(z.dtype)


@checks.in_full_precision
def neumann_gradient(z: Tokens, u: Bases, eps: float) -> Tokens:
    """Returns the first two terms of the Neumann series of R^c's gradient.

    `sum_k (a C_k - a^2 C_k C_k^T C_k) U_k^T`, where C_k = Z U_k and a = p / (N eps^2).

    These terms approximate the gradient only if a |C_k|_2^2 < 1; beyond that their sign flips: see
    `neumann_invalid`. Computed in float64.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.

    Returns:
        like z, in nats per unit of z. arXiv 2306.01129 eq. 9.

    Raises:
        ValueError: As `coding_rate` does.
    """
    scale = _scale(z, u, eps)
    wide = u.double()
    codes = rates.head_codes(z.double(), wide) * scale**0.5
    return (written(codes - codes @ (codes.mT @ codes), wide) * scale**0.5).to(z.dtype)


@checks.in_full_precision
def neumann_invalid(z: Tokens, u: Bases, eps: float) -> Float[Tensor, "*batch head"]:
    """Returns the share of the eigenvalues of `a C_k^T C_k` that exceed 1; a = p / (N eps^2).

    Above 1 the Neumann step has the wrong size or sign: it shrinks directions with x < 1 and
    lengthens directions with x > 1, but the exact step shrinks all directions. Not differentiable.
    NaN or Inf in a sample gives NaN.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.

    Returns:
        `[..., head]` in [0, 1], among the min(N, p) eigenvalues x of each head.

    Raises:
        ValueError: As `coding_rate` does.
    """
    scale = _scale(z, u, eps)
    values = spectra.singular_values(rates.head_codes(z.double(), u.double())).square() * scale
    share = (values > 1).double().mean(dim=-1)
    return share.masked_fill(~values.isfinite().all(dim=-1), torch.nan).to(z.dtype)


def _scale(z: Tensor, u: Tensor, eps: float) -> float:
    """Returns a = p / (N eps^2)."""
    rates.check_rate(z, eps)
    return u.shape[-1] / (z.shape[-2] * eps**2)


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


def written(codes: HeadCodes, u: Bases) -> Tensor:
    """Returns the codes written to the stream, `sum_k C_k U_k^T` `[..., pos, d_model]`."""
    wide = u.transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    return codes.transpose(-3, -2).flatten(-2) @ wide.T


def gradient_step(z: Tokens, u: Bases, eps: float, kappa: float) -> Tokens:
    """Returns the tokens after rule (a), `Z - kappa grad R^c(Z)`.

    Singular values s of the codes become s (1 - kappa a / (1 + x)), where a = p / (N eps^2) and x =
    a s^2.

    For orthonormal U, R^c falls if 0 < kappa < 8 / (9 a).

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.
        kappa: The length of the step.

    Returns:
        like z.

    Raises:
        ValueError: As `coding_rate` does.
    """
    return z - kappa * subspace_coding_rate_gradient(z, u, eps)


def neumann_step(z: Tokens, u: Bases, eps: float, kappa: float) -> Tokens:
    """Returns the tokens after rule (b), `Z - kappa neumann_gradient(Z)`.

    Singular values s of the codes become s (1 - kappa a (1 - x)), where a = p / (N eps^2) and x = a
    s^2. They grow if x > 1.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.
        kappa: The length of the step.

    Returns:
        like z.

    Raises:
        ValueError: As `coding_rate` does.
    """
    return z - kappa * neumann_gradient(z, u, eps)


@checks.in_full_precision
def first_order_step(z: Tokens, u: Bases, eps: float, kappa: float) -> Tokens:
    """Returns the tokens after rule (c), `Z - kappa a sum_k C_k U_k^T`.

    Singular values s of the codes become s (1 - kappa a), where a = p / (N eps^2).

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.
        kappa: The length of the step.

    Returns:
        like z.

    Raises:
        ValueError: As `coding_rate` does.
    """
    return z - kappa * _scale(z, u, eps) * written(rates.head_codes(z, u), u)


@checks.in_full_precision
def third_order_step(z: Tokens, u: Bases, eps: float, kappa: float) -> Tokens:
    """Returns the tokens after rule (d), `Z + kappa a^2 sum_k C_k C_k^T C_k U_k^T`.

    Singular values s of the codes become s (1 + kappa a x), where a = p / (N eps^2) and x = a s^2.
    R^c rises.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.
        kappa: The length of the step.

    Returns:
        like z.

    Raises:
        ValueError: As `coding_rate` does.
    """
    codes = rates.head_codes(z, u)
    return z + kappa * _scale(z, u, eps) ** 2 * written(codes @ (codes.mT @ codes), u)


def attention_step(z: Tokens, u: Bases, eps: float, kappa: float) -> Tokens:
    """Returns the tokens after rule (e), which is CRATE-C, or CRATE-N for a negative kappa.

    `Z + kappa a^2 sum_k softmax(C_k C_k^T) C_k U_k^T`, where a = p / (N eps^2).

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.
        kappa: The length of the step.

    Returns:
        like z.

    Raises:
        ValueError: As `coding_rate` does.
    """
    return z + kappa * _scale(z, u, eps) * paper_mssa(z, u, eps)


@checks.in_full_precision
def paper_mssa(z: Tokens, u: Bases, eps: float) -> Tokens:
    """Returns MSSA as the paper defines it.

    `a sum_k softmax(C_k C_k^T) C_k U_k^T`, where a = p / (N eps^2).

    The official code, which the hooked models run, has a LayerNorm before MSSA, the scale 1 /
    sqrt(p) in the softmax, and a learned matrix with bias in place of a [U_1 .. U_K].

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.

    Returns:
        like z. arXiv 2306.01129 eq. 11.

    Raises:
        ValueError: As `coding_rate` does.
    """
    return _scale(z, u, eps) * written(subspace_attention(rates.head_codes(z, u)), u)


@checks.in_full_precision
def subspace_attention(
    codes: Float[Tensor, "*batch pos d_head"], scale: float = 1.0
) -> Float[Tensor, "*batch pos d_head"]:
    """Returns the output of a head of attention whose query, key and value are the same code.

    `softmax(scale C C^T) C`.

    codes `[..., pos, d_head]` -> like codes. arXiv 2306.01129 eq. 11, in rows; the official code
    has scale = 1 / sqrt(p). Raises ValueError if there are no tokens.
    """
    rates.check_rate(codes, 1.0)
    return (scale * codes @ codes.mT).softmax(dim=-1) @ codes


@checks.in_full_precision
def ista_step(
    z: Code, y: Tokens, d: Float[Tensor, "d_model d_mlp"], eta: float, lambd: float
) -> Code:
    """Returns a code after one proximal gradient step of the non-negative lasso.

    `ReLU(z - eta D^T (D z - y) - eta lambd)`, with tokens as rows.

    From z >= 0, `lasso_objective` does not rise if eta <= 1 / |D|_2^2.

    Args:
        z: `[..., pos, d_mlp]`.
        y: `[..., pos, d_model]`.
        d: `[d_model, d_mlp]`.
        eta: The length of the step.
        lambd: The weight of the sparsity term.

    Returns:
        like z, >= 0. arXiv 2306.01129 eq. 17, which starts at z = y.

    Raises:
        ValueError: If the shapes of z, y and d do not fit each other.
    """
    lasso.check_lasso(z, y, d)
    return torch.relu(z - eta * ((z @ d.mT - y) @ d) - eta * lambd)


def posterior_mean(x: Tokens, u: Bases, sigma: float) -> Tokens:
    """Returns the expected clean token given a noisy one, E[z | x].

    `E[z | x] = sum_k w_k U_k U_k^T x / (1 + s^2)` with `w = softmax_k(|U_k^T x|^2 / (2 s^2 (1 +
    s^2)))` and s = sigma.

    This is exact if x = z + s noise and z is from an equal mixture of N(0, U_k U_k^T). By Tweedie's
    formula E[z | x] is also x + s^2 grad log q(x), where q is the density of x.

    Args:
        x: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]` with orthonormal columns.
        sigma: The standard deviation s of the noise, above 0.

    Returns:
        like x.

    Raises:
        ValueError: If sigma is not above 0.
    """
    return _weighted_projection(x, u, sigma, 1 + sigma**2) / (1 + sigma**2)


def paper_posterior_mean(x: Tokens, u: Bases, sigma: float) -> Tokens:
    """Returns the paper's form of the posterior mean, an approximation for small noise.

    `sum_k w_k U_k U_k^T x` with `w = softmax_k(|U_k^T x|^2 / (2 s^2))` and s = sigma.

    This form lacks the two factors 1 / (1 + s^2) of `posterior_mean`, which is exact.

    Args:
        x: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        sigma: The standard deviation s of the noise, above 0.

    Returns:
        like x. arXiv 2306.01129 eq. 6.

    Raises:
        ValueError: If sigma is not above 0.
    """
    return _weighted_projection(x, u, sigma, 1.0)


@checks.in_full_precision
def _weighted_projection(x: Tensor, u: Tensor, sigma: float, spread: float) -> Tensor:
    checks.require_floats(x, "pos d_model")
    checks.require_floats(u, "head d_model d_head")
    if not sigma > 0:
        raise ValueError(f"sigma={sigma}: give the standard deviation of the noise, above 0.")
    codes = rates.head_codes(x, u)  # [..., head, pos, d_head]
    energy = codes.square().sum(dim=-1)  # [..., head, pos]
    weights = (energy / (2 * sigma**2 * spread)).softmax(dim=-2)
    return torch.einsum("...kn,...knp,kdp->...nd", weights, codes, u)
