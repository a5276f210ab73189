"""Coding rates: how many nats a set of tokens needs at a given precision, as a whole and against subspaces.

All are sums of 1/2 logdet(I + c G) for a Gram matrix G, computed by Cholesky on the smaller of the two Grams
(Sylvester: both have the same determinant). Batched LU is never used: it is slower and can hang on some CPUs.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# A float32 Gram can be wrong by per cents without failing. Where the largest diagonal of I + c G over the smallest
# squared pivot is below this, the error was at most about 1e-6 on every stream tried; above, the sample is redone.
FLOAT32_LIMIT = 1e3
FLOAT64_LIMIT = 1e10  # beyond it a float64 Cholesky loses digits too: singular values, slow and exact


def coding_rate(z: Float[Tensor, "*batch pos d_model"], eps: float) -> Float[Tensor, "*batch"]:
    """The rate of the tokens as one Gaussian: `R(Z; eps) = 1/2 logdet(I + d / (N eps^2) Z Z^T)`.

    z `[..., pos, d_model]` -> `[...]` in nats; >= 0, 0 iff Z = 0. N counts all rows of z, d its columns. Paper:
    arXiv 2306.01129 eq. 1; eps is the paper's, squared inside. An all-zero token adds nothing but counts in N.
    Results have the dtype of z; ill-conditioned float32 samples are computed in float64. NaN or Inf in z gives NaN.
    Raises ValueError for eps <= 0 and for no tokens.
    """
    _check(z, eps)
    pos, width = z.shape[-2:]
    return _half_logdet(z, width / (pos * eps**2))


def subspace_coding_rate(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch head"]:
    """The rate of the tokens seen by each subspace: `R^c_k = 1/2 logdet(I + p / (N eps^2) C_k C_k^T)`, C_k = Z U_k.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head]` in nats; >= 0. The sum over heads is
    R^c(Z | U; eps) of arXiv 2306.01129 eq. 2-3. U is used as stored: orthonormalise it first to measure the theory's
    object. R^c depends on Z Z^T only: it cannot tell which token lies in which subspace. Errors as in `coding_rate`.
    """
    _check(z, eps)
    codes = head_codes(z, u)
    pos, width = codes.shape[-2:]
    return _half_logdet(codes, width / (pos * eps**2))


def rate_reduction(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"], eps: float
) -> Float[Tensor, "*batch"]:
    """`Delta R(Z | U; eps) = R(Z; eps) - sum_k R^c_k(Z | U; eps)`.

    -> `[...]` in nats; at most d/2 ln K for complete orthonormal U, and can be negative. Paper: arXiv 2306.01129
    eq. 1. Errors as in `coding_rate`.
    """
    return coding_rate(z, eps) - subspace_coding_rate(z, u, eps).sum(dim=-1)


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
    if not eps_squared > 0:
        raise ValueError(f"eps_squared={eps_squared}: give a number above 0, the script's own is 0.01.")
    _check(codes, eps_squared)
    pos, width = codes.shape[-2:]
    norms = torch.linalg.vector_norm(codes, dim=-1, keepdim=True)
    unit = codes / norms.masked_fill(norms == 0, 1)
    return _half_logdet(unit, width / (pos * eps_squared))


def head_codes(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "*batch head pos d_head"]:
    """The tokens in the coordinates of each subspace, C_k = Z U_k, by one matrix product."""
    wide = u.transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    return (z @ wide).unflatten(-1, (u.shape[0], u.shape[2])).transpose(-3, -2)


def _check(z: Tensor, eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"eps={eps}: give a number above 0, such as 0.1.")
    if 0 in z.shape[-2:]:
        raise ValueError(f"there are no tokens to measure: the last two axes (pos, width) are {list(z.shape[-2:])}.")


def _half_logdet(x: Float[Tensor, "*batch rows columns"], scale: float) -> Float[Tensor, "*batch"]:
    """1/2 logdet(I + scale x^T x), in the dtype of x."""
    flat = x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)  # [samples, rows, columns]
    if flat.dtype == torch.float64:
        return _half_logdet64(flat, scale).reshape(x.shape[:-2])
    low = flat.float()
    rate, doubtful = _cholesky_rate(low, scale, FLOAT32_LIMIT)
    if doubtful.any():
        if rate.requires_grad:  # a failed factor would poison the gradient of its neighbours
            rate = _half_logdet64(flat.double(), scale).float()
        else:
            rate[doubtful] = _half_logdet64(flat[doubtful].double(), scale).float()
    return rate.to(x.dtype).reshape(x.shape[:-2])


def _half_logdet64(x: Float[Tensor, "samples rows columns"], scale: float) -> Float[Tensor, "samples"]:
    rate, doubtful = _cholesky_rate(x, scale, FLOAT64_LIMIT)
    if not doubtful.any():
        return rate
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    exact = 0.5 * torch.log1p(scale * torch.linalg.svdvals(x.where(finite[:, None, None], 0.0)) ** 2).sum(dim=-1)
    return torch.where(doubtful, exact.where(finite, torch.nan), rate.where(~doubtful, 0.0))


def _cholesky_rate(
    x: Float[Tensor, "samples rows columns"], scale: float, limit: float
) -> tuple[Float[Tensor, "samples"], Tensor]:
    """The rate by Cholesky of the smaller Gram, and which samples it cannot be trusted for."""
    rows, columns = x.shape[-2:]
    gram = x @ x.mT if rows < columns else x.mT @ x  # [samples, n, n], n = min(rows, columns)
    matrix = gram * scale
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += 1
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    with torch.no_grad():
        ratio = diagonal.amax(dim=-1) / pivots.amin(dim=-1) ** 2
        doubtful = (failed != 0) | ~(ratio <= limit)
    return pivots.log().sum(dim=-1), doubtful
