"""The denoiser that attention stands for: the posterior mean of a mixture of subspaces."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import in_full_precision, require_floats
from crate_interp.measures.rates import head_codes


def posterior_mean(
    x: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], sigma: float
) -> Float[Tensor, "*batch pos d_model"]:
    """The clean token expected from a noisy one: `E[z | x] = sum_k w_k U_k U_k^T x / (1 + s^2)`, s = sigma,
    `w = softmax_k(|U_k^T x|^2 / (2 s^2 (1 + s^2)))`.

    x `[..., pos, d_model]`, u `[head, d_model, d_head]` with orthonormal columns -> like x. Exact for x = z + s noise, z from
    an equal mixture of N(0, U_k U_k^T); by Tweedie's formula it is x + s^2 grad log q(x). Raises ValueError for sigma <= 0.
    """
    return _weighted_projection(x, u, sigma, 1 + sigma**2) / (1 + sigma**2)


def paper_posterior_mean(
    x: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], sigma: float
) -> Float[Tensor, "*batch pos d_model"]:
    """`sum_k w_k U_k U_k^T x` with `w = softmax_k(|U_k^T x|^2 / (2 s^2))`: the paper's form for small noise.

    x `[..., pos, d_model]`, u `[head, d_model, d_head]` -> like x. arXiv 2306.01129 eq. 6. Different from `posterior_mean`, which is
    exact: the factors 1 / (1 + s^2) are missing. Raises ValueError for sigma <= 0.
    """
    return _weighted_projection(x, u, sigma, 1.0)


@in_full_precision
def _weighted_projection(x: Tensor, u: Tensor, sigma: float, spread: float) -> Tensor:
    require_floats(x, "pos d_model")
    require_floats(u, "head d_model d_head")
    if not sigma > 0:
        raise ValueError(
            f"sigma={sigma}: give a number above 0, the standard deviation of the noise."
        )
    codes = head_codes(x, u)  # [..., head, pos, d_head]
    weights = (codes.square().sum(dim=-1) / (2 * sigma**2 * spread)).softmax(
        dim=-2
    )  # [..., head, pos]
    return torch.einsum("...kn,...knp,kdp->...nd", weights, codes, u)
