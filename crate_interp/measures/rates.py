"""Coding rates: how many nats a set of tokens needs at a given precision, as a whole and against subspaces.

All are sums of 1/2 logdet(I + c G) for a Gram matrix G, computed by Cholesky on the smaller of the two Grams
(Sylvester: both have the same determinant). Batched LU is never used: it is slower and can hang on some CPUs.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from crate_interp.measures.checks import (
    in_full_precision,
    largest_entry,
    require_floats,
    squares_fit,
)

# A float32 Gram can be wrong by per cents without failing. Where the largest diagonal of I + c G over the smallest
# squared pivot is below this, the error was at most about 1e-6 on every stream of a model tried (3e-5 on small random
# matrices made to be hard); above, the sample is redone.
FLOAT32_LIMIT = 1e3
# Nor is a sample trusted whose rate is small beside the rounding of its pivots, which grows with their number: tokens
# all alike were off by 0.2 %, tokens near zero by all of it. What is below was right to a tenth of it.
RELATIVE_ERROR = 5e-5
# The same for float64: above, singular values are used, slow and exact. A redone float32 sample needs fewer digits.
FLOAT64_LIMIT = 1e3
REDONE_LIMIT = 1e9


@in_full_precision
def coding_rate(z: Float[Tensor, "*batch pos d_model"], eps: float) -> Float[Tensor, "*batch"]:
    """The rate of the tokens as one Gaussian: `R(Z; eps) = 1/2 logdet(I + d / (N eps^2) Z Z^T)`.

    z `[..., pos, d_model]` -> `[...]` in nats; >= 0, 0 iff Z = 0. N counts all rows of z, d its columns. Paper:
    arXiv 2306.01129 eq. 1; eps is the paper's, squared inside. An all-zero token adds nothing but counts in N.
    Results have the dtype of z; ill-conditioned float32 samples are computed in float64. NaN or Inf in z gives NaN.
    Raises ValueError for eps <= 0 and for no tokens.
    """
    check_rate(z, eps)
    pos, width = z.shape[-2:]
    flat = z.reshape(-1, pos, width)
    rate = _half_logdet(
        flat[:, None], width / (pos * eps**2), lambda rows: flat[rows, None].double()
    )
    return rate.reshape(z.shape[:-2])


def subspace_coding_rate(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch head"]:
    """The rate of the tokens seen by each subspace: `R^c_k = 1/2 logdet(I + p / (N eps^2) C_k C_k^T)`, C_k = Z U_k.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head]` in nats; >= 0. The sum over heads is
    R^c(Z | U; eps) of arXiv 2306.01129 eq. 2-3. U is used as stored: orthonormalise it first to measure the theory's
    object. R^c depends on Z Z^T only: it cannot tell which token lies in which subspace. Errors as in `coding_rate`.
    """
    check_rate(z, eps)
    require_floats(u, "head d_model d_head")
    return rate_of_codes(head_codes(z, u), z, u, eps)


@in_full_precision
def rate_of_codes(
    codes: Float[Tensor, "*batch head pos d_head"],
    z: Float[Tensor, "*batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
) -> Float[Tensor, "*batch head"]:
    """`subspace_coding_rate` for a caller who has the codes `head_codes(z, u)` already."""
    check_rate(z, eps)
    pos, width = codes.shape[-2:]
    flat = z.reshape(-1, *z.shape[-2:])
    # a doubtful sample is projected again too: rounding the codes loses as much as rounding their Gram
    again = lambda rows: head_codes(flat[rows].double(), u.double())  # noqa: E731
    rate = _half_logdet(codes.reshape(-1, *codes.shape[-3:]), width / (pos * eps**2), again)
    return rate.reshape(codes.shape[:-2])


def rate_reduction(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch"]:
    """`Delta R(Z | U; eps) = R(Z; eps) - sum_k R^c_k(Z | U; eps)`.

    -> `[...]` in nats; at most d/2 ln K for complete orthonormal U, and can be negative. Paper: arXiv 2306.01129
    eq. 1. Errors as in `coding_rate`.
    """
    return coding_rate(z, eps) - subspace_coding_rate(z, u, eps).sum(dim=-1)


@in_full_precision
def mcr2_coding_rate(
    z: Float[Tensor, "*batch pos d_model"], membership: Shaped[Tensor, "..."], eps: float
) -> Float[Tensor, "*batch"]:
    """The rate of the tokens class by class: `R^c(Z | Pi; eps) = sum_k N_k / 2N logdet(I + d / (N_k eps^2) Z_k Z_k^T)`.

    z `[..., pos, d_model]`; membership: the class of each token, integers `[..., pos]`, or weights `[..., pos, class]`
    (>= 0), which scale a token by their root and add up to N_k. -> `[...]` in nats; >= 0, at most R(Z) where weights
    sum to one. MCR2, arXiv 2006.08558. Not `subspace_coding_rate`: d and N_k in place of p and N, a weight N_k / N, and
    it knows which token belongs where. A class without tokens adds nothing. Raises ValueError for membership of another
    shape, negative or not finite; others as in `coding_rate`.
    """
    check_rate(z, eps)
    weights = _weights(membership, z)  # [..., pos, class]
    pos, width = z.shape[-2:]
    count = weights.sum(dim=-2)  # [..., class]
    per_class = width / (count.masked_fill(count == 0, 1) * eps**2)
    # [..., class, pos, d_model]: each class' tokens at the scale that makes its rate that of I + Z_k^T Z_k
    root = (weights * per_class.unsqueeze(-2)).sqrt().mT.unsqueeze(-1)
    scaled = (z.unsqueeze(-3) * root).reshape(-1, weights.shape[-1], pos, width)
    again = lambda rows: _weighted(z, weights, per_class, rows)  # noqa: E731
    rate = _half_logdet(scaled, 1.0, again).reshape(count.shape)
    return (rate * count).sum(dim=-1) / pos


def _weighted(
    z: Tensor, weights: Tensor, per_class: Tensor, rows: Tensor
) -> Float[Tensor, "samples class pos width"]:
    """Some samples of `mcr2_coding_rate`, class by class, in float64."""
    tokens = z.reshape(-1, 1, *z.shape[-2:])[rows].double()
    root = (weights.double() * per_class.double().unsqueeze(-2)).sqrt().mT
    return tokens * root.reshape(-1, *root.shape[-2:])[rows].unsqueeze(-1)


def _weights(
    membership: Tensor, z: Float[Tensor, "*batch pos d_model"]
) -> Float[Tensor, "*batch pos class"]:
    """Membership as weights in the dtype of z."""
    if (
        not isinstance(membership, Tensor)
        or membership.dtype == torch.bool
        or membership.is_complex()
    ):
        kind = getattr(membership, "dtype", type(membership).__name__)
        raise ValueError(
            f"membership is {kind}: give integers [..., pos] or float weights [..., pos, class]."
        )
    soft = membership.is_floating_point()
    shape = membership.shape[:-1] if soft else membership.shape
    if shape != z.shape[:-1] or 0 in membership.shape:
        wanted = "float weights [..., pos, class]" if soft else "integers [..., pos]"
        raise ValueError(
            f"membership {list(membership.shape)} does not fit tokens {list(z.shape)}: {wanted} are needed."
        )
    if not bool((membership >= 0).all()) or not bool(membership.isfinite().all()):
        raise ValueError(
            "membership holds negative numbers, NaN or Inf: a class or weight is at least 0."
        )
    return (
        membership.to(z.dtype)
        if soft
        else torch.nn.functional.one_hot(membership.long()).to(z.dtype)
    )


def coding_length(z: Float[Tensor, "*batch pos d_model"], eps: float) -> Float[Tensor, "*batch"]:
    """The bits that code all tokens and their basis: `(N + d) / ln 2 * R(Z; eps)`.

    z `[..., pos, d_model]` -> `[...]` in bits; >= 0. Ma et al., TPAMI 2007: N + d and not N, as the basis is sent too.
    Errors as in `coding_rate`.
    """
    return coding_rate(z, eps) * ((z.shape[-2] + z.shape[-1]) / math.log(2))


@in_full_precision
def dictionary_rate_change(
    z: Float[Tensor, "*batch pos d_mlp"], d: Float[Tensor, "d_model d_mlp"], eps: float
) -> Float[Tensor, "*batch"]:
    """How the rate of codes changes when they are decoded: `R(D Z) - R(Z)`, in rows `Z D^T`.

    z `[..., pos, d_mlp]`, d `[d_model, d_mlp]` -> `[...]` in nats, either sign; 0 for orthonormal D. Within
    R(s_min Z) - R(Z) and R(s_max Z) - R(Z) for a square D with singular values s. arXiv 2306.01129 takes R(Z^{l+1}) and
    R(Z^{l+1/2}) to be about equal. Errors as in `coding_rate`.
    """
    require_floats(d, "d_model d_mlp")
    return coding_rate(z @ d.mT, eps) - coding_rate(z, eps)


@in_full_precision
def official_coding_rate(
    codes: Float[Tensor, "*batch head pos d_head"], eps_squared: float = 0.01
) -> Float[Tensor, "*batch head"]:
    """What the authors' script reports as R^c: the rate of the codes with every token scaled to length one.

    `1/2 logdet(I + p / (N eps_squared) C^T C)` for C with rows c_i / |c_i|. codes `[..., head, pos, d_head]`
    -> `[..., head]` in nats; the sum over heads is the published number; per head at most p/2 ln(1 + 1/eps_squared).
    CRATE `vis_utils/coding_rate.py`, where `eps` is epsilon squared, the codes are U^T LN(Z^l), the CLS token
    counts, and mean and unbiased std over the batch are reported. Different from it: an all-zero code adds nothing
    (the script returns NaN). Errors as in `coding_rate`.
    """
    return official_rate_and_zeros(codes, eps_squared)[0]


@in_full_precision
def official_rate_and_zeros(
    codes: Float[Tensor, "*batch head pos d_head"], eps_squared: float = 0.01
) -> tuple[Float[Tensor, "*batch head"], Float[Tensor, "*batch head"]]:
    """`official_coding_rate`, and how many codes of each head are all zero."""
    if not eps_squared > 0:
        raise ValueError(
            f"eps_squared={eps_squared}: give a number above 0, the script's own is 0.01."
        )
    check_rate(codes, eps_squared)
    pos, width = codes.shape[-2:]
    flat = codes.reshape(-1, *codes.shape[-3:])
    again = lambda rows: _unit_rows(flat[rows].double())[0]  # noqa: E731
    unit, zeros = _unit_rows(flat)
    rate = _half_logdet(unit, width / (pos * eps_squared), again)
    return rate.reshape(codes.shape[:-2]), zeros.reshape(codes.shape[:-2])


def _unit_rows(codes: Float[Tensor, "*batch pos d_head"]) -> tuple[Tensor, Float[Tensor, "*batch"]]:
    """Each row at length one, and how many are rows of zeros, which stay."""
    norms = torch.linalg.vector_norm(codes, dim=-1, keepdim=True)
    zeros = norms.new_zeros(norms.shape[:-2])
    if not squares_fit(norms):
        codes = codes / largest_entry(codes)
        norms = torch.linalg.vector_norm(codes, dim=-1, keepdim=True)
        zeros = (norms == 0).sum(dim=(-2, -1)).to(norms.dtype)
        norms = norms.masked_fill(norms == 0, 1)
    if codes.requires_grad:
        return codes / norms, zeros
    # written in order of the axes, as the Gram wants it: dividing first and copying after is a pass more
    return torch.div(codes, norms, out=codes.new_empty(codes.shape)), zeros


@in_full_precision
def head_codes(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "*batch head pos d_head"]:
    """The tokens in the coordinates of each subspace, C_k = Z U_k."""
    if (
        u.is_contiguous() and z.numel()
    ):  # a product for each head writes its codes together, as their Gram wants them
        rows = z.reshape(-1, z.shape[-1])
        return torch.bmm(rows.expand(len(u), -1, -1), u).unflatten(1, z.shape[:-1]).movedim(0, -3)
    wide = u.transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    return (z @ wide).unflatten(-1, (u.shape[0], u.shape[2])).transpose(-3, -2)


@in_full_precision
def in_other_basis(
    codes: Float[Tensor, "batch head pos d_head"], matrix: Float[Tensor, "head d_head d_head"]
) -> Float[Tensor, "batch head pos d_head"]:
    """C_k M_k for each head: the codes of Q_k M_k from those of Q_k."""
    rows = codes.transpose(
        0, 1
    )  # [head, batch, pos, d_head], as `head_codes` leaves them in memory
    return torch.bmm(rows.flatten(1, 2), matrix).unflatten(1, rows.shape[1:3]).transpose(0, 1)


def check_rate(z: Tensor, eps: float) -> None:
    """ValueError where there is nothing to rate, or no precision to rate it at."""
    require_floats(z, "pos width")
    if not eps > 0:
        raise ValueError(f"eps={eps}: give a number above 0, such as 0.1.")
    if 0 in z.shape[-2:]:
        raise ValueError(
            f"there are no tokens to measure: the last two axes (pos, width) are {list(z.shape[-2:])}."
        )


def _half_logdet(
    x: Float[Tensor, "samples heads rows columns"], scale: float, again: Callable[[Tensor], Tensor]
) -> Float[Tensor, "samples heads"]:
    """1/2 logdet(I + scale x^T x) in the dtype of x; `again(indices)` gives some samples anew, in float64."""
    if x.dtype == torch.float64:
        return _half_logdet64(x, scale, FLOAT64_LIMIT)
    rate, doubtful = _cholesky_rate(x.float(), scale, FLOAT32_LIMIT)
    rows = doubtful.any(dim=-1).nonzero()[:, 0]
    if (
        len(rows) and rate.requires_grad
    ):  # a failed factor would poison the gradient of its neighbours
        rate = _half_logdet64(again(torch.arange(len(x), device=x.device)), scale, REDONE_LIMIT)
    elif len(rows):
        rate[rows] = _half_logdet64(again(rows), scale, REDONE_LIMIT).float()
    return rate.to(x.dtype)


def _half_logdet64(
    x: Float[Tensor, "samples heads rows columns"], scale: float, limit: float
) -> Float[Tensor, "samples heads"]:
    rate, doubtful = _cholesky_rate(x, scale, limit)
    if not doubtful.any():
        return rate
    if rate.requires_grad:  # a failed factor would poison the gradient of its neighbours
        rate, _ = _cholesky_rate(x.where(~doubtful[..., None, None], 0.0), scale, limit)
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    exact = 0.5 * torch.log1p(
        scale * torch.linalg.svdvals(x.where(finite[..., None, None], 0.0)) ** 2
    ).sum(dim=-1)
    return torch.where(doubtful, exact.where(finite, torch.nan), rate.where(~doubtful, 0.0))


def _cholesky_rate(
    x: Float[Tensor, "samples heads rows columns"], scale: float, limit: float
) -> tuple[Float[Tensor, "samples heads"], Bool[Tensor, "samples heads"]]:
    """The rate by Cholesky of the smaller Gram, and which samples it cannot be trusted for."""
    if (
        x.transpose(0, 1).is_contiguous() and not x.is_contiguous()
    ):  # heads first in memory: no copy is needed
        rate, doubtful = _cholesky_rate(x.transpose(0, 1), scale, limit)
        return rate.T, doubtful.T
    x = x.contiguous()  # once, not once for each side of the product
    rows, columns = x.shape[-2:]
    gram = (
        x @ x.mT if rows < columns else x.mT @ x
    )  # [samples, heads, n, n], n = min(rows, columns)
    matrix = gram * scale if gram.requires_grad else gram.mul_(scale)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += 1
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    rate = pivots.log().sum(dim=-1)
    with torch.no_grad():
        ratio = diagonal.amax(dim=-1) / pivots.amin(dim=-1) ** 2
        allowed = rate * (RELATIVE_ERROR / (pivots.shape[-1] * torch.finfo(x.dtype).eps))
        trusted = (ratio <= allowed.clamp(max=limit)) & (failed == 0)  # NaN is not
    return rate, ~trusted
