"""The denoiser that attention stands for: the posterior mean of a mixture of subspaces."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import checks, rates

__all__ = ["paper_posterior_mean", "posterior_mean"]


def posterior_mean(
    x: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], sigma: float
) -> Float[Tensor, "*batch pos d_model"]:
    """Returns the clean token that is expected given a noisy one, E[z | x].

    `E[z | x] = sum_k w_k U_k U_k^T x / (1 + s^2)` with
    `w = softmax_k(|U_k^T x|^2 / (2 s^2 (1 + s^2)))` and s = sigma.

    x `[..., pos, d_model]`, u `[head, d_model, d_head]` with orthonormal columns -> like x. Exact
    for x = z + s noise with z from an equal mixture of N(0, U_k U_k^T); by Tweedie's formula it is
    x + s^2 grad log q(x). Raises ValueError if sigma is not above 0.
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
