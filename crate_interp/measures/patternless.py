"""Attention without patterns: the rates that TSSA and CBSA descend, and how tokens are dealt out.

A membership pi holds how much each token belongs to each subspace, `[..., head, pos]`. TSSA makes
it with a softmax over heads, so the weights of a token sum to 1. A contraction A holds how much
each representative reads of each token, `[..., head, rep, pos]`. CBSA makes it with a softmax over
tokens, and broadcasts what it computes with the transpose.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import attention, checks, gradients, rates
from crate_interp.measures.checks import HeadCodes

__all__ = [
    "assignment_entropy", "contracted_rate", "contracted_rate_gradient", "contraction_coverage",
    "membership_balance", "membership_share", "representatives_in_use", "subspaces_per_token",
    "variational_rate", "variational_rate_gradient",
]  # fmt: skip

_NO_MEMBERSHIP = "there is no membership to measure"
_NO_CONTRACTION = "there is no contraction to measure"


@checks.in_full_precision
def variational_rate(
    codes: HeadCodes, membership: Float[Tensor, "*batch head pos"], eps: float
) -> Float[Tensor, "*batch head"]:
    """Returns the upper bound of R^c that token statistics attention (TSSA) descends, by subspace.

    `n_k / (2N) sum_j ln(1 + d / eps^2 m_kj)`, where m_kj = sum_i pi_ki c_kij^2 / n_k is the second
    moment of coordinate j of the codes C_k = Z U_k in group k, n_k = sum_i pi_ki, and d = K p.

    As ln(1 + x) is concave, this rate is at least n_k / (2N) logdet(I + d / (n_k eps^2) C_k^T
    diag(pi_k) C_k), which is the term of `mcr2_coding_rate` if the tokens of group k lie in an
    orthonormal U_k. The two are equal if the coordinates of the codes are uncorrelated in each
    group. Unlike `subspace_coding_rate` it has d and n_k instead of p and N, and depends on the
    basis within a subspace. The official code has d / eps^2 = 1, which is eps = sqrt(d), and adds
    1e-8 to n_k. A group without tokens adds nothing. Computed in float64. NaN or Inf in a head
    gives NaN.

    Args:
        codes: `[..., head, pos, d_head]`.
        membership: `[..., head, pos]`.
        eps: The precision, above 0.

    Returns:
        `[..., head]` in nats per token, >= 0; the sum over heads is the bound. arXiv 2412.17810 eq.
        6 to 10.

    Raises:
        ValueError: If membership does not fit the codes or is negative; otherwise as `coding_rate`
            does.
    """
    moment, count, scale = _statistics(codes, membership, eps)
    rate = count / (2 * codes.shape[-2]) * torch.log1p(scale * moment).sum(dim=-1)
    return rate.masked_fill(~rate.isfinite(), torch.nan).to(codes.dtype)


@checks.in_full_precision
def variational_rate_gradient(
    codes: HeadCodes, membership: Float[Tensor, "*batch head pos"], eps: float
) -> HeadCodes:
    """Returns the gradient of `variational_rate`, summed over heads, at fixed memberships.

    `a pi_ki c_kij / (N (1 + a m_kj))`, where a = d / eps^2 and d, m_kj are as in
    `variational_rate`.

    Its product with U_k^T, summed over heads, is the gradient with respect to the tokens. arXiv
    2412.17810 eq. 6 to 10. What the heads of TSSA write before the output matrix is -N times this
    gradient at eps = sqrt(d), so a head steps against it by construction; the learned output matrix
    in place of U_k^T need not. In a causal model each token has different moments, over the tokens
    up to itself, so the steps of all tokens are not the gradient of a single rate. Computed in
    float64. NaN or Inf in a head gives NaN.

    Args:
        codes: `[..., head, pos, d_head]`.
        membership: `[..., head, pos]`.
        eps: The precision, above 0.

    Returns:
        like codes, in nats per unit of the codes.

    Raises:
        ValueError: As `variational_rate` does.
    """
    moment, _, scale = _statistics(codes, membership, eps)
    weight = scale / (codes.shape[-2] * (1 + scale * moment))  # [..., head, d_head]
    slope = membership.double().unsqueeze(-1) * codes.double() * weight.unsqueeze(-2)
    finite = moment.isfinite().all(dim=-1)[..., None, None]
    return slope.masked_fill(~finite, torch.nan).to(codes.dtype)


def assignment_entropy(membership: Float[Tensor, "*batch head pos"]) -> Float[Tensor, "*batch pos"]:
    """Returns the entropy of each token's membership over subspaces, `-sum_k pi_k ln pi_k`.

    membership `[..., head, pos]`, whose weights of a token sum to 1 -> `[..., pos]` in nats, 0 (in
    one subspace) to ln K (evenly in all). `membership_entropy` takes the energy of tokens in the
    subspaces in place of a membership. A token with NaN, Inf or a negative weight has NaN. Raises
    ValueError if there are no heads or no tokens.
    """
    checks.require_entries(membership, "head pos", _NO_MEMBERSHIP)
    return attention.attention_entropy(membership.mT)


def subspaces_per_token(
    membership: Float[Tensor, "*batch head pos"],
) -> Float[Tensor, "*batch pos"]:
    """Returns the number of subspaces that each token effectively belongs to, `1 / sum_k pi_k^2`.

    membership `[..., head, pos]`, whose weights of a token sum to 1 -> `[..., pos]` in subspaces, 1
    (one subspace) to K (evenly in all), as `effective_support` counts keys. A token with NaN or Inf
    has NaN. Raises ValueError if there are no heads or no tokens.
    """
    checks.require_entries(membership, "head pos", _NO_MEMBERSHIP)
    return attention.effective_support(membership.mT)


def membership_share(membership: Float[Tensor, "*batch head pos"]) -> Float[Tensor, "*batch head"]:
    """Returns the share of the tokens that each subspace holds, `n_k / N = 1/N sum_i pi_ki`.

    membership `[..., head, pos]` -> `[..., head]` in [0, 1]. The shares sum to 1 if the weights of
    each token do. NaN or Inf in a head gives NaN. Raises ValueError if there are no heads or no
    tokens.
    """
    checks.require_entries(membership, "head pos", _NO_MEMBERSHIP)
    share = membership.mean(dim=-1)
    return share.masked_fill(~share.isfinite(), torch.nan)


def membership_balance(membership: Float[Tensor, "*batch head pos"]) -> Float[Tensor, "*batch"]:
    """Returns how evenly the subspaces share the tokens.

    The entropy of `n_k / sum_k n_k`, over `ln K`, where n_k = sum_i pi_ki.

    membership `[..., head, pos]` -> `[...]`, dimensionless, 0 (one subspace holds all tokens) to 1
    (all subspaces hold equally many). Balanced subspaces can still have undecided tokens: the
    balance times ln K is at least the mean of `assignment_entropy`. NaN, Inf, a negative n_k or a
    membership of zeros gives NaN. Raises ValueError if there is only one head, or if there are no
    tokens.
    """
    held = membership_share(membership).unsqueeze(-2)  # [..., 1, head]
    heads = held.shape[-1]
    if heads < 2:
        raise ValueError("membership_balance compares heads, but the layer has only one.")
    return attention.attention_entropy(held / held.sum(-1, keepdim=True))[..., 0] / math.log(heads)


def _statistics(codes: Tensor, membership: Tensor, eps: float) -> tuple[Tensor, Tensor, float]:
    """Returns m_kj `[..., head, d_head]` and n_k `[..., head]` in float64, and d / eps^2."""
    _check_fit(codes, membership, "head pos", eps)
    _check_weights(membership)
    weights = membership.double()
    count = weights.sum(dim=-1)
    total = (weights.unsqueeze(-2) @ codes.double().square()).squeeze(-2)
    moment = total / count.masked_fill(count == 0, 1).unsqueeze(-1)
    return moment, count, codes.shape[-3] * codes.shape[-1] / eps**2


@checks.in_full_precision
def contracted_rate(
    codes: HeadCodes, contraction: Float[Tensor, "*batch head rep pos"], eps: float
) -> Float[Tensor, "*batch head"]:
    """Returns the rate of the representatives in each subspace, which CBSA descends.

    `1/2 logdet(I + p / (m eps^2) Q_k Q_k^T)`, where Q_k = A_k C_k holds the codes of the m
    representatives, and C_k = Z U_k the codes of the tokens.

    The sum over heads is the compression term of arXiv 2509.16875 eq. 4 to 7, whose tokens are
    columns. It is `coding_rate` of the codes Q_k, and `subspace_coding_rate` if A is the identity.
    In the official code the representatives are P C + s A C, with pooled codes P C and a learned
    step s: give P + s A for their rate. Computed in float64. NaN or Inf in a head gives NaN.

    Args:
        codes: `[..., head, pos, d_head]`.
        contraction: `[..., head, rep, pos]` of any sign.
        eps: The precision, above 0.

    Returns:
        `[..., head]` in nats per representative, >= 0.

    Raises:
        ValueError: If contraction does not fit the codes; otherwise as `coding_rate` does.
    """
    return rates.coding_rate(_representatives(codes, contraction, eps), eps).to(codes.dtype)


@checks.in_full_precision
def contracted_rate_gradient(
    codes: HeadCodes, contraction: Float[Tensor, "*batch head rep pos"], eps: float
) -> HeadCodes:
    """Returns the gradient of `contracted_rate`, summed over heads, with the contraction fixed.

    `b A_k^T Q_k (I + b Q_k^T Q_k)^{-1}`, where Q_k = A_k C_k and b = p / (m eps^2).

    Its product with U_k^T, summed over heads, is the gradient with respect to the tokens. arXiv
    2509.16875 eq. 7: the representatives' contraction Q_k (I + b Q_k^T Q_k)^{-1}, broadcast with
    A_k^T. CBSA has softmax(Q_k Q_k^T) Q_k in place of the inverse (eq. 8), and steps of learned
    sign. Computed in float64. NaN or Inf in a head gives NaN.

    Args:
        codes: `[..., head, pos, d_head]`.
        contraction: `[..., head, rep, pos]`.
        eps: The precision, above 0.

    Returns:
        like codes, in nats per unit of the codes.

    Raises:
        ValueError: As `contracted_rate` does.
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
    _check_fit(codes, contraction, "head rep pos", eps)
    checks.require_entries(contraction, "rep pos", _NO_CONTRACTION)
    return contraction.double() @ codes.double()


def _check(contraction: Tensor) -> None:
    checks.require_floats(contraction, "head rep pos")
    checks.require_entries(contraction, "rep pos", _NO_CONTRACTION)
    _check_weights(contraction)


def _nonzero(x: Tensor) -> Tensor:
    """Returns x as a divisor: 1 in place of 0."""
    return x.masked_fill(x == 0, 1)


def _inverse(x: Float[Tensor, "*batch head"], contraction: Tensor) -> Float[Tensor, "*batch head"]:
    """Returns 1 / x in the dtype of the contraction; 0 for 0, and NaN for Inf."""
    value = _nonzero(x).reciprocal().masked_fill(x == 0, 0)
    return value.masked_fill(~x.isfinite(), torch.nan).to(contraction.dtype)


def _check_fit(codes: Tensor, weights: Tensor, axes: str, eps: float) -> None:
    """Raises ValueError if weights are not of the heads and tokens of the codes."""
    rates.check_rate(codes, eps)
    checks.require_floats(codes, "head pos d_head")
    checks.require_floats(weights, axes)
    tokens = (*weights.shape[:-2], weights.shape[-1]) if "rep" in axes else tuple(weights.shape)
    if tokens != tuple(codes.shape[:-1]):
        raise ValueError(f"weights {list(weights.shape)} do not fit codes {list(codes.shape)}.")


def _check_weights(weights: Tensor) -> None:
    if bool((weights < 0).any()):
        raise ValueError("there are negative numbers: give weights of at least 0.")
