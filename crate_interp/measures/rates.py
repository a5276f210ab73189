"""Coding rates: the nats per token that code tokens at a given precision, in total and by subspace.

All rates are sums of 1/2 logdet(I + c G) for a Gram matrix G. X^T X and X X^T give the same
determinant (Sylvester), so Cholesky factors the smaller of the two. Batched LU is slower and can
hang on some CPUs.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from crate_interp.core.device_waits import holds_somewhere
from crate_interp.measures import checks
from crate_interp.measures.checks import Bases, Code, HeadCodes, Tokens

__all__ = [
    "coding_length", "coding_rate", "dictionary_rate_change", "mcr2_coding_rate",
    "official_coding_rate", "rate_reduction", "subspace_coding_rate",
]  # fmt: skip

# A rate from a float32 Gram matrix can be wrong by several per cent without an error. Rounding
# changes each entry of A = I + c G by a multiple of |A_ii A_jj|^(1/2), and logdet A by a multiple
# of the diagonal of B^-1, where B is A scaled to a unit diagonal. The ratio A_ii / (pivot i)^2 is
# at most entry i of that diagonal, and equal to it for the last i. If the ratio is above this limit
# for any i, the sample is computed again. Rates that pass were right to 4e-6 on the streams of the
# embedded models, and to 1.1e-5 on matrices made to be hard. The simpler rule
# max A_ii / min pivot^2 < 1e3 is as safe, but recomputes more samples.
FLOAT32_LIMIT = 1e3
# A rate that is small compared with the rounding of its pivots is not trusted either. This rounding
# grows with the number of pivots. Such rates were off by 0.2 % for identical tokens, and by 100 %
# for tokens near zero. In tests, rates that passed had errors of at most half this limit.
RELATIVE_ERROR = 2e-5
# The limits of the same ratio in float64. Above them, singular values replace Cholesky: they are
# slow but exact. REDONE_LIMIT is for float32 samples computed again, which need fewer digits.
FLOAT64_LIMIT = 1e3
REDONE_LIMIT = 1e9


@checks.in_full_precision
def coding_rate(z: Tokens, eps: float) -> Float[Tensor, "*batch"]:
    """Returns the rate of the tokens as one Gaussian, R(Z; eps).

    `R(Z; eps) = 1/2 logdet(I + d / (N eps^2) Z Z^T)`, where N counts all rows of z and d its
    columns.

    z `[..., pos, d_model]` -> `[...]` in nats per token, >= 0, and 0 only for Z = 0. arXiv
    2306.01129 eq. 1; `eps` is the paper's epsilon, and the formula squares it. An all-zero token
    adds nothing but counts in N. Results have the dtype of z; ill-conditioned float32 samples are
    computed in float64. NaN or Inf in a sample gives NaN. Raises ValueError if eps <= 0 or if there
    are no tokens.
    """
    check_rate(z, eps)
    pos, width = z.shape[-2:]
    flat = z.reshape(-1, pos, width)
    rate = _half_logdet(
        flat[:, None], width / (pos * eps**2), lambda rows: flat[rows, None].double()
    )
    return rate.reshape(z.shape[:-2])


def subspace_coding_rate(z: Tokens, u: Bases, eps: float) -> Float[Tensor, "*batch head"]:
    """Returns the rate of the tokens' codes in each subspace, R^c_k.

    `R^c_k = 1/2 logdet(I + p / (N eps^2) C_k C_k^T)`, where C_k = Z U_k.

    The sum over heads is R^c(Z | U; eps) of arXiv 2306.01129 eq. 2-3. U is used as stored:
    orthonormalise it first to measure the theory's quantity. R^c depends on the tokens only through
    Z^T Z (Z Z^T in the paper, whose tokens are columns), so it cannot tell which token lies in
    which subspace.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.

    Returns:
        `[..., head]` in nats per token, >= 0.

    Raises:
        ValueError: As `coding_rate` does.
    """
    check_rate(z, eps)
    checks.require_floats(u, "head d_model d_head")
    return rate_of_codes(head_codes(z, u), z, u, eps)


@checks.in_full_precision
def rate_of_codes(
    codes: HeadCodes, z: Tokens, u: Bases, eps: float
) -> Float[Tensor, "*batch head"]:
    """Returns `subspace_coding_rate` from given codes `head_codes(z, u)`."""
    pos, width = codes.shape[-2:]
    flat = z.reshape(-1, *z.shape[-2:])
    # the codes of a doubtful sample are computed again too, because rounded codes lose as many
    # digits as a rounded Gram matrix
    again = lambda rows: head_codes(flat[rows].double(), u.double())  # noqa: E731
    rate = _half_logdet(codes.reshape(-1, *codes.shape[-3:]), width / (pos * eps**2), again)
    return rate.reshape(codes.shape[:-2])


def rate_reduction(z: Tokens, u: Bases, eps: float) -> Float[Tensor, "*batch"]:
    """Returns the rate of all tokens minus the rates of their codes in the subspaces.

    `Delta R(Z | U; eps) = R(Z; eps) - sum_k R^c_k(Z | U; eps)`.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.

    Returns:
        `[...]` in nats per token, at most d/2 ln K for complete orthonormal U; it can be negative.
        arXiv 2306.01129 eq. 1.

    Raises:
        ValueError: As `coding_rate` does.
    """
    return coding_rate(z, eps) - subspace_coding_rate(z, u, eps).sum(dim=-1)


@checks.in_full_precision
def mcr2_coding_rate(
    z: Tokens, membership: Shaped[Tensor, "..."], eps: float
) -> Float[Tensor, "*batch"]:
    """Returns R^c of MCR2: the rate of the tokens, computed class by class.

    `R^c(Z | Pi; eps) = sum_k N_k / (2N) logdet(I + d / (N_k eps^2) Z_k Z_k^T)`.

    Args:
        z: `[..., pos, d_model]`.
        membership: The class of each token, integers `[..., pos]`; or weights >= 0 `[..., pos,
            class]`, whose square roots scale the tokens of Z_k and whose sum over tokens is N_k.
            arXiv 2006.08558. Unlike `subspace_coding_rate` it has d and N_k instead of p and N,
            weights each class by N_k / N, and knows which token belongs to which class. A class
            without tokens adds nothing.
        eps: The precision, above 0.

    Returns:
        `[...]` in nats per token, >= 0, and at most R(Z) if the weights of each token sum to 1.

    Raises:
        ValueError: If membership has another shape, or holds negative numbers, NaN or Inf;
            otherwise as `coding_rate` does.
    """
    check_rate(z, eps)
    weights = _weights(membership, z)  # [..., pos, class]
    pos, width = z.shape[-2:]
    count = weights.sum(dim=-2)  # [..., class]
    per_class = width / (count.masked_fill(count == 0, 1) * eps**2)
    # [..., class, pos, d_model], scaled so that the rate of a class is that of I + Z_k^T Z_k
    root = (weights * per_class.unsqueeze(-2)).sqrt().mT.unsqueeze(-1)
    scaled = (z.unsqueeze(-3) * root).reshape(-1, weights.shape[-1], pos, width)

    def again(rows: Tensor) -> Tensor:
        tokens = z.reshape(-1, 1, pos, width)[rows].double()
        exact = (weights.double() * per_class.double().unsqueeze(-2)).sqrt().mT
        return tokens * exact.reshape(-1, *exact.shape[-2:])[rows].unsqueeze(-1)

    rate = _half_logdet(scaled, 1.0, again).reshape(count.shape)
    return (rate * count).sum(dim=-1) / pos


def _weights(membership: Tensor, z: Tokens) -> Float[Tensor, "*batch pos class"]:
    """Returns the membership as weights in the dtype of z."""
    soft = membership.is_floating_point()
    shape = membership.shape[:-1] if soft else membership.shape
    if shape != z.shape[:-1] or 0 in membership.shape or membership.dtype == torch.bool:
        shape = f"{list(membership.shape)} of {membership.dtype} does not fit {list(z.shape)}"
        raise ValueError(f"membership {shape}: give integers or floats [..., pos, class].")
    if not bool((membership >= 0).all()) or not bool(membership.isfinite().all()):
        raise ValueError("membership holds negative numbers, NaN or Inf: give weights >= 0.")
    weights = membership if soft else torch.nn.functional.one_hot(membership.long())
    return weights.to(z.dtype)


def coding_length(z: Tokens, eps: float) -> Float[Tensor, "*batch"]:
    """Returns the number of bits that code all tokens and their basis.

    `(N + d) / ln 2 * R(Z; eps)`: N + d instead of N because the basis is sent too.

    z `[..., pos, d_model]` -> `[...]` in bits, >= 0. Ma et al., TPAMI 2007. Raises ValueError as
    `coding_rate` does.
    """
    return coding_rate(z, eps) * ((z.shape[-2] + z.shape[-1]) / math.log(2))


@checks.in_full_precision
def dictionary_rate_change(
    z: Code, d: Float[Tensor, "d_model d_mlp"], eps: float
) -> Float[Tensor, "*batch"]:
    """Returns how the rate of codes changes when a dictionary decodes them, `R(D Z) - R(Z)`.

    With tokens as rows the decoded codes are Z D^T. For a square D with singular values s the
    change lies between R(s_min Z) - R(Z) and R(s_max Z) - R(Z). arXiv 2306.01129 assumes that
    R(Z^{l+1}) and R(Z^{l+1/2}) are about equal.

    Args:
        z: `[..., pos, d_mlp]`.
        d: `[d_model, d_mlp]`.
        eps: The precision, above 0.

    Returns:
        `[...]` in nats per token, either sign; 0 for orthonormal D.

    Raises:
        ValueError: As `coding_rate` does.
    """
    checks.require_floats(d, "d_model d_mlp")
    return coding_rate(z @ d.mT, eps) - coding_rate(z, eps)


@checks.in_full_precision
def official_coding_rate(
    codes: HeadCodes, eps_squared: float = 0.01
) -> Float[Tensor, "*batch head"]:
    """Returns the R^c of the authors' script: the rate of codes scaled to length one.

    `1/2 logdet(I + p / (N eps_squared) C^T C)`, where C has the rows c_i / |c_i|.

    codes `[..., head, pos, d_head]` -> `[..., head]` in nats per token, at most p/2 ln(1 +
    1/eps_squared) for each head; the sum over heads is the published number. In the
    script (CRATE `vis_utils/coding_rate.py`) `eps` is epsilon squared, the codes are U^T LN(Z^l),
    the CLS token counts, and the mean and unbiased standard deviation over the batch are reported.
    This function differs from the script in one point: an all-zero code adds nothing here, but
    gives NaN in the script. Raises ValueError if eps_squared <= 0 or if there are no tokens.
    """
    return official_rate_and_zeros(codes, eps_squared)[0]


@checks.in_full_precision
def official_rate_and_zeros(
    codes: HeadCodes, eps_squared: float = 0.01
) -> tuple[Float[Tensor, "*batch head"], Float[Tensor, "*batch head"]]:
    """Returns `official_coding_rate` and the number of all-zero codes of each head."""
    if not eps_squared > 0:
        raise ValueError(f"eps_squared={eps_squared}: give a number above 0, such as 0.01.")
    check_rate(codes, eps_squared)
    pos, width = codes.shape[-2:]
    flat = codes.reshape(-1, *codes.shape[-3:])
    again = lambda rows: _unit_rows(flat[rows].double())[0]  # noqa: E731
    unit, zeros = _unit_rows(flat)
    rate = _half_logdet(unit, width / (pos * eps_squared), again)
    return rate.reshape(codes.shape[:-2]), zeros.reshape(codes.shape[:-2])


def _unit_rows(codes: Float[Tensor, "*batch pos d_head"]) -> tuple[Tensor, Float[Tensor, "*batch"]]:
    """Returns rows scaled to length one, and how many rows are zero; zero rows stay zero."""
    norms = torch.linalg.vector_norm(codes, dim=-1, keepdim=True)
    zeros = norms.new_zeros(norms.shape[:-2])
    if not checks.squares_fit(norms):
        codes = codes / checks.largest_entry(codes)
        norms = torch.linalg.vector_norm(codes, dim=-1, keepdim=True)
        zeros = (norms == 0).sum(dim=(-2, -1)).to(norms.dtype)
        norms = norms.masked_fill(norms == 0, 1)
    if codes.requires_grad:
        return codes / norms, zeros
    # `out` has the memory order that the Gram product reads, which saves a copy later
    return torch.div(codes, norms, out=codes.new_empty(codes.shape)), zeros


@checks.in_full_precision
def head_codes(z: Tokens, u: Bases) -> HeadCodes:
    """Returns the tokens in the coordinates of each subspace, C_k = Z U_k."""
    wide = u.transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    codes = (z @ wide).unflatten(-1, (u.shape[0], u.shape[2]))
    # one product, then a copy with the heads first in memory, as the Gram product needs; one
    # product per head is slower, and even more so in bfloat16
    return codes.movedim(-2, 0).contiguous().movedim(0, -3)


@checks.in_full_precision
def in_other_basis(
    codes: Float[Tensor, "batch head pos d_head"], matrix: Float[Tensor, "head d_head d_head"]
) -> Float[Tensor, "batch head pos d_head"]:
    """Returns C_k M_k for each head: codes in the basis Q_k become codes in the basis Q_k M_k."""
    rows = codes.transpose(0, 1)  # [head, batch, pos, d_head], the memory order of `head_codes`
    return torch.bmm(rows.flatten(1, 2), matrix).unflatten(1, rows.shape[1:3]).transpose(0, 1)


def check_rate(z: Tensor, eps: float) -> None:
    """Raises ValueError if there are no tokens, or if eps is not above 0."""
    checks.require_floats(z, "pos width")
    if not eps > 0:
        raise ValueError(f"eps={eps}: give a number above 0, such as 0.1.")
    checks.require_entries(z, "pos width", checks.NO_TOKENS)


def _half_logdet(
    x: Float[Tensor, "samples heads rows columns"], scale: float, again: Callable[[Tensor], Tensor]
) -> Float[Tensor, "samples heads"]:
    """Returns 1/2 logdet(I + scale x^T x) in the dtype of x.

    again: a function that recomputes x in float64 for the samples with the given indices.
    """
    if x.dtype == torch.float64:
        return _half_logdet64(x, scale, FLOAT64_LIMIT)
    rate, doubtful = _cholesky_rate(x.float(), scale, FLOAT32_LIMIT)
    if not holds_somewhere(doubtful):
        return rate.to(x.dtype)
    rows = doubtful.any(dim=-1).nonzero()[:, 0]
    if rate.requires_grad:
        # recomputes all samples, because a failed factorisation would spoil the gradients of the
        # other samples
        rate = _half_logdet64(again(torch.arange(len(x), device=x.device)), scale, REDONE_LIMIT)
    else:
        rate[rows] = _half_logdet64(again(rows), scale, REDONE_LIMIT).float()
    return rate.to(x.dtype)


def _half_logdet64(
    x: Float[Tensor, "samples heads rows columns"], scale: float, limit: float
) -> Float[Tensor, "samples heads"]:
    rate, doubtful = _cholesky_rate(x, scale, limit)
    if not holds_somewhere(doubtful):
        return rate
    if rate.requires_grad:  # a failed factorisation would spoil other samples' gradients
        rate, _ = _cholesky_rate(x.where(~doubtful[..., None, None], 0.0), scale, limit)
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    values = torch.linalg.svdvals(x.where(finite[..., None, None], 0.0))
    exact = 0.5 * torch.log1p(scale * values**2).sum(dim=-1)
    return torch.where(doubtful, exact.where(finite, torch.nan), rate.where(~doubtful, 0.0))


def _cholesky_rate(
    x: Float[Tensor, "samples heads rows columns"], scale: float, limit: float
) -> tuple[Float[Tensor, "samples heads"], Bool[Tensor, "samples heads"]]:
    """Returns the rate from the smaller Gram matrix, and which samples cannot be trusted."""
    if x.transpose(0, 1).is_contiguous() and not x.is_contiguous():
        # heads come first in memory, so the transposed tensor needs no copy
        rate, doubtful = _cholesky_rate(x.transpose(0, 1), scale, limit)
        return rate.T, doubtful.T
    x = x.contiguous()  # one copy instead of one for each side of the product
    rows, columns = x.shape[-2:]
    # [samples, heads, n, n], n = min(rows, columns)
    gram = x @ x.mT if rows < columns else x.mT @ x
    matrix = gram * scale if gram.requires_grad else gram.mul_(scale)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += 1
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    rate = pivots.log().sum(dim=-1)
    with torch.no_grad():
        ratio = (diagonal / pivots**2).amax(dim=-1)
        allowed = rate * (RELATIVE_ERROR / (pivots.shape[-1] * torch.finfo(x.dtype).eps))
        trusted = (ratio <= allowed.clamp(max=limit)) & (failed == 0)  # False for NaN
    return rate, ~trusted
