"""The steps from which layers are derived: gradient steps on R^c, attention, denoising and ISTA.

Rules (a) to (e) are compared in arXiv 2411.17182, appendix A. With one head, or with a complete
orthonormal set of heads, each rule except (e) acts only on the singular values s of the codes C_k =
Z U_k. Below, x = a s^2, a = p / (N eps^2), and kappa is the step size.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import checks, gradients, lasso, rates

__all__ = [
    "attention_step", "first_order_step", "gradient_step", "ista_step", "neumann_step",
    "paper_mssa", "paper_posterior_mean", "posterior_mean", "subspace_attention",
    "third_order_step",
]  # fmt: skip


def gradient_step(
    z: Float[Tensor, "*batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
    kappa: float,
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the tokens after rule (a), `Z - kappa grad R^c(Z)`.

    Singular values s of the codes become s (1 - kappa a / (1 + x)), where a = p / (N eps^2) and x =
    a s^2.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z. For orthonormal U, R^c falls if
    0 < kappa < 8 / (9 a). Raises ValueError as `coding_rate` does.
    """
    return z - kappa * gradients.subspace_coding_rate_gradient(z, u, eps)


def neumann_step(
    z: Float[Tensor, "*batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
    kappa: float,
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the tokens after rule (b), `Z - kappa neumann_gradient(Z)`.

    Singular values s of the codes become s (1 - kappa a (1 - x)), where a = p / (N eps^2) and x = a
    s^2. They grow if x > 1.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z. Raises ValueError as
    `coding_rate` does.
    """
    return z - kappa * gradients.neumann_gradient(z, u, eps)


@checks.in_full_precision
def first_order_step(
    z: Float[Tensor, "*batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
    kappa: float,
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the tokens after rule (c), `Z - kappa a sum_k C_k U_k^T`.

    Singular values s of the codes become s (1 - kappa a), where a = p / (N eps^2).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z. Raises ValueError as
    `coding_rate` does.
    """
    return z - kappa * _scale(z, u, eps) * gradients.written(rates.head_codes(z, u), u)


@checks.in_full_precision
def third_order_step(
    z: Float[Tensor, "*batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
    kappa: float,
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the tokens after rule (d), `Z + kappa a^2 sum_k C_k C_k^T C_k U_k^T`.

    Singular values s of the codes become s (1 + kappa a x), where a = p / (N eps^2) and x = a s^2.
    R^c rises.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z. Raises ValueError as
    `coding_rate` does.
    """
    codes = rates.head_codes(z, u)
    return z + kappa * _scale(z, u, eps) ** 2 * gradients.written(codes @ (codes.mT @ codes), u)


def attention_step(
    z: Float[Tensor, "*batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
    kappa: float,
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the tokens after rule (e), which is CRATE-C, or CRATE-N for a negative kappa.

    `Z + kappa a^2 sum_k softmax(C_k C_k^T) C_k U_k^T`, where a = p / (N eps^2).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z. Raises ValueError as
    `coding_rate` does.
    """
    return z + kappa * _scale(z, u, eps) * paper_mssa(z, u, eps)


@checks.in_full_precision
def paper_mssa(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns MSSA as the paper defines it.

    `a sum_k softmax(C_k C_k^T) C_k U_k^T`, where a = p / (N eps^2).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like z. arXiv 2306.01129 eq. 11. The
    official code, which the hooked models run, has a LayerNorm before MSSA, the scale 1 / sqrt(p)
    in the softmax, and a learned matrix with bias in place of a [U_1 .. U_K]. Raises ValueError as
    `coding_rate` does.
    """
    return _scale(z, u, eps) * gradients.written(subspace_attention(rates.head_codes(z, u)), u)


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
    z: Float[Tensor, "*batch pos d_mlp"],
    y: Float[Tensor, "*batch pos d_model"],
    d: Float[Tensor, "d_model d_mlp"],
    eta: float,
    lambd: float,
) -> Float[Tensor, "*batch pos d_mlp"]:
    """Returns a code after one proximal gradient step of the non-negative lasso.

    `ReLU(z - eta D^T (D z - y) - eta lambd)`, with tokens as rows.

    z `[..., pos, d_mlp]`, y `[..., pos, d_model]`, d `[d_model, d_mlp]` -> like z, >= 0. arXiv
    2306.01129 eq. 17, which starts at z = y. From z >= 0, `lasso_objective` does not rise if eta <=
    1 / |D|_2^2. Raises ValueError if the shapes of z, y and d do not fit each other.
    """
    lasso.check_lasso(z, y, d)
    return torch.relu(z - eta * ((z @ d.mT - y) @ d) - eta * lambd)


def _scale(z: Tensor, u: Tensor, eps: float) -> float:
    rates.check_rate(z, eps)
    return u.shape[-1] / (z.shape[-2] * eps**2)


def posterior_mean(
    x: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], sigma: float
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the expected clean token given a noisy one, E[z | x].

    `E[z | x] = sum_k w_k U_k U_k^T x / (1 + s^2)` with
    `w = softmax_k(|U_k^T x|^2 / (2 s^2 (1 + s^2)))` and s = sigma.

    x `[..., pos, d_model]`, u `[head, d_model, d_head]` with orthonormal columns -> like x. This
    is exact if x = z + s noise and z is from an equal mixture of N(0, U_k U_k^T). By Tweedie's
    formula E[z | x] is also x + s^2 grad log q(x), where q is the density of x. Raises ValueError
    if sigma is not above 0.
    """
    return _weighted_projection(x, u, sigma, 1 + sigma**2) / (1 + sigma**2)


def paper_posterior_mean(
    x: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], sigma: float
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the paper's form of the posterior mean, an approximation for small noise.

    `sum_k w_k U_k U_k^T x` with `w = softmax_k(|U_k^T x|^2 / (2 s^2))` and s = sigma.

    x `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like x. arXiv 2306.01129 eq. 6. It lacks
    the two factors 1 / (1 + s^2) of `posterior_mean`, which is exact. Raises ValueError if sigma is
    not above 0.
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
