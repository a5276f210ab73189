"""Contract-and-broadcast attention: the rate that it descends, and the use of representatives.

A contraction A holds how much each representative reads of each token, `[..., head, rep, pos]`.
CBSA makes it with a softmax over tokens, and broadcasts what it computes with the transpose.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import checks, gradients, rates
from crate_interp.measures.checks import HeadCodes

__all__ = [
    "contracted_rate", "contracted_rate_gradient", "contraction_coverage", "representatives_in_use",
]  # fmt: skip

_EMPTY = "there is no contraction to measure"


@checks.in_full_precision
def contracted_rate(
    codes: HeadCodes, contraction: Float[Tensor, "*batch head rep pos"], eps: float
) -> Float[Tensor, "*batch head"]:
    """Returns the rate of the representatives in each subspace, which CBSA descends.

    `1/2 logdet(I + p / (m eps^2) Q_k Q_k^T)`, where Q_k = A_k C_k holds the codes of the m
    representatives, and C_k = Z U_k those of the tokens.

    codes `[..., head, pos, d_head]`, contraction `[..., head, rep, pos]` of any sign -> `[...,
    head]` in nats per representative, >= 0. The sum over heads is the compression term of arXiv
    2509.16875 eq. 4 to 7, whose tokens are columns. It is `coding_rate` of the codes Q_k, and
    `subspace_coding_rate` if A is the identity. In the official code the representatives are P C +
    s A C, with pooled codes P C and a learned step s: give P + s A for their rate. Computed in
    float64. NaN or Inf in a head gives NaN. Raises ValueError if contraction does not fit the
    codes; otherwise as `coding_rate` does.
    """
    return rates.coding_rate(_representatives(codes, contraction, eps), eps).to(codes.dtype)


@checks.in_full_precision
def contracted_rate_gradient(
    codes: HeadCodes, contraction: Float[Tensor, "*batch head rep pos"], eps: float
) -> HeadCodes:
    """Returns the gradient of `contracted_rate`, summed over heads, with the contraction fixed.

    `b A_k^T Q_k (I + b Q_k^T Q_k)^{-1}`, where Q_k = A_k C_k and b = p / (m eps^2).

    codes `[..., head, pos, d_head]`, contraction `[..., head, rep, pos]` -> like codes, in nats per
    unit of the codes. Its product with U_k^T, summed over heads, is the gradient with respect to
    the tokens. arXiv 2509.16875 eq. 7: the representatives' contraction Q_k (I + b Q_k^T Q_k)^{-1},
    broadcast with A_k^T. CBSA has softmax(Q_k Q_k^T) Q_k in place of the inverse (eq. 8), and steps
    of learned sign. Computed in float64. NaN or Inf in a head gives NaN. Raises ValueError as
    `contracted_rate` does.
    """
    slope = gradients.coding_rate_gradient(_representatives(codes, contraction, eps), eps)
    return (contraction.double().mT @ slope).to(codes.dtype)


@checks.in_full_precision
def contraction_coverage(
    contraction: Float[Tensor, "*batch head rep pos"],
) -> Float[Tensor, "*batch head"]:
    """Returns the share of the tokens that the representatives of a head read, taken together.

    `1 / (N sum_j w_j^2)`, where w_j is token j's share of the sum of A over representatives.

    contraction `[..., head, rep, pos]`, >= 0 -> `[..., head]`, dimensionless, 1/N (all
    representatives read one token) to 1 (all tokens are read alike); 0 for zeros. A uniform
    contraction covers all tokens with representatives that are all alike: see
    `representatives_in_use`. NaN or Inf in a head gives NaN. Raises ValueError if there are no
    representatives or no tokens, or if the contraction is negative.
    """
    _check(contraction)
    mass = contraction.double().sum(dim=-2)  # [..., head, pos]
    share = mass / _nonzero(mass.sum(dim=-1, keepdim=True))
    return _inverse(share.square().sum(dim=-1) * share.shape[-1], contraction)


@checks.in_full_precision
def representatives_in_use(
    contraction: Float[Tensor, "*batch head rep pos"],
) -> Float[Tensor, "*batch head"]:
    """Returns the effective number of representatives of a head that read different tokens.

    `m^2 / sum_rs cos^2(a_r, a_s)`, where a_r is the row of A of representative r, and m the number
    of rows that are not zero.

    contraction `[..., head, rep, pos]`, >= 0 -> `[..., head]` in representatives, 1 (all read the
    same tokens) to m (no two read the same token); 0 for zeros. Repeating each row the same number
    of times changes nothing. The mass that a representative broadcasts would not tell them apart:
    it is the sum of its row, which a softmax makes 1. NaN or Inf in a head gives NaN. Raises
    ValueError if there are no representatives or no tokens, or if the contraction is negative.
    """
    _check(contraction)
    rows = contraction.double()
    unit = rows / _nonzero(torch.linalg.vector_norm(rows, dim=-1, keepdim=True))
    used = (rows.amax(dim=-1) > 0).sum(dim=-1)  # [..., head]
    cosines = (unit @ unit.mT).square().sum(dim=(-2, -1))
    return _inverse(cosines / _nonzero(used).square(), contraction)


def _representatives(codes: Tensor, contraction: Tensor, eps: float) -> Tensor:
    """Returns the codes of the representatives, `[..., head, rep, d_head]` in float64."""
    rates.check_rate(codes, eps)
    checks.require_floats(codes, "head pos d_head")
    checks.require_entries(contraction, "rep pos", _EMPTY)
    if (*contraction.shape[:-2], contraction.shape[-1]) != tuple(codes.shape[:-1]):
        shapes = f"{list(contraction.shape)} does not fit codes {list(codes.shape)}"
        raise ValueError(f"contraction {shapes}: give [..., head, rep, pos].")
    return contraction.double() @ codes.double()


def _check(contraction: Tensor) -> None:
    checks.require_floats(contraction, "head rep pos")
    checks.require_entries(contraction, "rep pos", _EMPTY)
    if bool((contraction < 0).any()):
        raise ValueError("contraction holds negative numbers: give weights of at least 0.")


def _nonzero(x: Tensor) -> Tensor:
    """Returns x as a divisor: 1 in place of 0."""
    return x.masked_fill(x == 0, 1)


def _inverse(x: Float[Tensor, "*batch head"], contraction: Tensor) -> Float[Tensor, "*batch head"]:
    """Returns 1 / x in the dtype of the contraction; 0 for 0, and NaN for Inf."""
    value = _nonzero(x).reciprocal().masked_fill(x == 0, 0)
    return value.masked_fill(~x.isfinite(), torch.nan).to(contraction.dtype)
