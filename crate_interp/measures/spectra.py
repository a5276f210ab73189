"""Spectra of tokens and of their codes, ranks, and rates at many precisions from one spectrum."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from crate_interp.measures import checks, rates
from crate_interp.measures.checks import Bases, Tokens

__all__ = ["effective_rank", "rate_of_spectrum", "spectrum", "stable_rank", "subspace_spectrum"]


@checks.in_full_precision
def spectrum(z: Tokens) -> Float[Tensor, "*batch rank"]:
    """Returns the eigenvalues of `Z^T Z`, descending: the squared singular values of the tokens.

    z `[..., pos, d_model]` -> `[..., min(pos, d_model)]`, >= 0, in squared units of z. Computed
    from singular values in float64, because an eigenvalue solver loses eigenvalues below 1e-16 of
    the largest. NaN or Inf in a sample gives NaN. Raises ValueError if there are no tokens.
    """
    checks.require_entries(z, "pos width", checks.NO_TOKENS)
    return singular_values(z.double()).square().to(z.dtype)


@checks.in_full_precision
def subspace_spectrum(z: Tokens, u: Bases) -> Float[Tensor, "*batch head rank"]:
    """Returns the eigenvalues of `C_k^T C_k` for each head, descending; C_k = Z U_k.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head, min(pos, d_head)]`, >= 0,
    in squared units of the codes. NaN or Inf in a sample gives NaN. Raises ValueError if there are
    no tokens.
    """
    checks.require_entries(z, "pos width", checks.NO_TOKENS)
    checks.require_floats(u, "head d_model d_head")
    return singular_values(rates.head_codes(z.double(), u.double())).square().to(z.dtype)


def rate_of_spectrum(
    spectrum: Float[Tensor, "*batch rank"],
    n_tokens: int,
    width: int,
    eps: float | Sequence[float] | Tensor,
) -> Float[Tensor, "..."]:
    """Returns the coding rate of a spectrum at one or many precisions.

    `1/2 sum_i ln(1 + width / (n_tokens eps^2) lambda_i)`.

    Args:
        spectrum: `[..., rank]`.
        n_tokens: The number of tokens N.
        width: The d of `coding_rate`, the p of `subspace_coding_rate`.
        eps: One precision, or a list.

    Returns:
        `[...]` in nats per token, >= 0, for one eps; `[..., eps]` for a list of eps, so that R on a
        grid costs one decomposition.

    Raises:
        ValueError: If an eps is not above 0, if no eps is given, if n_tokens or width is below 1,
            or if the spectrum is negative.
    """
    checks.require_floats(spectrum, "rank")
    grid = torch.as_tensor(eps, dtype=torch.float64, device=spectrum.device)
    if grid.ndim > 1 or not grid.numel() or not bool((grid > 0).all()):
        raise ValueError(f"eps={eps}: give numbers above 0, such as 0.1 or [0.01, 0.1, 1.0].")
    if n_tokens < 1 or width < 1:
        raise ValueError(f"n_tokens={n_tokens}, width={width}: give numbers of at least 1.")
    if bool((spectrum < 0).any()):
        raise ValueError("the spectrum has negative values: give squared singular values.")
    scale = width / (n_tokens * grid.square())
    rate = 0.5 * torch.log1p(spectrum.double().unsqueeze(-1) * scale.reshape(-1)).sum(dim=-2)
    return rate.reshape((*spectrum.shape[:-1], *grid.shape)).to(spectrum.dtype)


def singular_values(x: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rank"]:
    """Returns `torch.linalg.svdvals`, with NaN for a matrix that holds NaN or Inf.

    LAPACK raises an error for such a matrix.
    """
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    values = torch.linalg.svdvals(x.where(finite[..., None, None], 0.0))
    return values.masked_fill(~finite.unsqueeze(-1), torch.nan)


@checks.in_full_precision
def stable_rank(w: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    """Returns how many directions of a matrix are about as strong as its strongest direction.

    `|W|_F^2 / |W|_2^2`.

    w `[..., rows, columns]` -> `[...]`, dimensionless, 1 to the rank; 0 for a matrix of zeros. It
    does not depend on the scale of w, and is about m n / (sqrt m + sqrt n)^2 for a Gaussian m x n
    matrix. JoMA, arXiv 2310.00535, figure 7. NaN or Inf gives NaN. Raises ValueError if the matrix
    is empty.
    """
    values = _matrix_values(w)
    largest = values[..., :1]
    share = values / largest.masked_fill(largest == 0, 1)
    return share.square().sum(dim=-1).to(w.dtype)


@checks.in_full_precision
def effective_rank(z: Tokens) -> Float[Tensor, "*batch"]:
    """Returns how many directions the tokens fill.

    `exp(H)`, where H is the entropy of the singular values scaled to sum to one.

    z `[..., pos, d_model]` -> `[...]`, dimensionless, 1 to the rank; 0 for zeros. It does not
    depend on the scale of z. Roy and Vetterli, EUSIPCO 2007. NaN or Inf gives NaN. Raises
    ValueError if z has no tokens or no dimensions.
    """
    values = _matrix_values(z)
    total = values.sum(dim=-1, keepdim=True)
    share = values / total.masked_fill(total == 0, 1)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return rank.masked_fill(total[..., 0] == 0, 0).to(z.dtype)


def _matrix_values(x: Tensor) -> Float[Tensor, "*batch rank"]:
    checks.require_entries(x, "rows columns", "the matrix is empty")
    return singular_values(x.double())


Floats = NDArray[np.float64]
TIE = 1e-9  # numbers with a relative difference below this count as equal
# The matrix has a norm of at most 2, so a residual this small is rounding.
_CONVERGED = 16 * np.finfo(np.float64).eps
_STEPS = 300  # limit of steps; 4 to 70 have been needed so far


def first_largest(values: Floats) -> int:
    """Returns the index of the first entry that is the largest up to rounding.

    Without this tolerance, rounding would choose among equal entries.
    """
    return int(np.argmax(values >= values.max() - TIE * np.abs(values).max()))


def second(weights: Floats, root: Floats) -> tuple[Floats, float]:
    """Returns (v, lambda) of `normalised_cut` for a valid matrix with entries not far from 1.

    root: the square roots of the degrees.
    """
    from scipy.sparse.csgraph import connected_components

    # a token with positive weight to all others makes the graph connected
    one = weights[0].all()
    pieces = np.zeros(1, dtype=int) if one else connected_components(weights, directed=False)[1]
    if pieces.max() > 0:
        value, vector = 0.0, _second_piece(pieces, root)
    else:
        # a float32 inverse takes half the time and is enough to precondition the float64 residual
        either = (_inverse_krylov(weights, root, dtype) for dtype in (np.float32, np.float64))
        value, vector = next(filter(None, either), None) or _dense(weights, root)
    vector = vector / root
    return vector * np.sign(vector[first_largest(np.abs(vector))]), value


def _second_piece(pieces: NDArray[np.int32], root: Floats) -> Floats:
    """Returns the unit vector of eigenvalue 0 that separates the second largest piece."""
    # pieces are numbered in the order of their first tokens, so the first of equal pieces wins
    second = np.argsort(-np.bincount(pieces), kind="stable")[1]
    inside = pieces == second
    share = (root[inside] ** 2).sum() / (root**2).sum()
    vector = np.where(inside, 1 - share, -share) * root
    return vector / np.linalg.norm(vector)


def _inverse_krylov(
    weights: Floats, root: Floats, dtype: type[np.floating]
) -> tuple[float, Floats] | None:
    """Returns the second smallest eigenpair of `L = I - D^-1/2 A D^-1/2`, or None if not converged.

    The method is generalised Davidson (Morgan and Scott 1986): the residual times an approximate
    inverse of L enlarges the space. Close eigenvalues near 0, which come from pieces joined by weak
    edges, are found in a few steps; Lanczos on L needs hundreds. The residual is computed from L in
    float64, even if the inverse is float32. The start has a component along every eigenvector, so a
    multiple eigenvalue contributes only the projection of the start on its space.
    """
    inverse = _inverse(weights, root, dtype)
    if inverse is None:
        return None
    from scipy.linalg import get_blas_funcs

    # symv reads only half of the matrix, and reading takes most of a product's time
    (times,) = get_blas_funcs(("symv",), dtype=np.float64)
    null = root / np.linalg.norm(root)
    steps = min(_STEPS, len(root) - 1)
    basis, images = np.empty((steps, len(root))), np.empty((steps, len(root)))
    small = np.zeros((steps, steps))
    new = _start(root)
    for step in range(steps):
        for _ in range(2):  # the second pass removes what rounding left in the first
            new = new - (null @ new) * null
            new = new - (basis[:step] @ new) @ basis[:step]
        length = np.linalg.norm(new)
        if not length > 0:
            return None
        basis[step] = new / length
        images[step] = basis[step] - times(1.0, weights.T, basis[step] / root, lower=True) / root
        small[step, : step + 1] = small[: step + 1, step] = basis[: step + 1] @ images[step]
        values, vectors = np.linalg.eigh(small[: step + 1, : step + 1])
        # the first vector of the basis is the start
        mix, image = _projected(values, vectors, vectors[0])
        vector = mix @ basis[: step + 1]
        residual = mix @ images[: step + 1] - image @ basis[: step + 1]
        if np.linalg.norm(residual) <= _CONVERGED:
            return float(values[0]), vector
        new = inverse(residual)
    return None


def _projected(values: Floats, vectors: Floats, start: Floats) -> tuple[Floats, Floats]:
    """Returns x, the start's projection on the least eigenvalue's space, and the matrix times x.

    The projection is scaled to length 1. Eigenvalues that agree to 1e-9 count as equal.
    """
    tied = values <= values[0] + TIE * abs(values[0])
    share = start[tied] / np.linalg.norm(start[tied])
    return vectors[:, tied] @ share, vectors[:, tied] @ (values[tied] * share)


def _start(root: Floats) -> Floats:
    """Returns a start vector without a pattern, the same on every machine."""
    return np.cos(np.arange(len(root)) ** 2.0) * root


def _inverse(
    weights: Floats, root: Floats, dtype: type[np.floating]
) -> Callable[[Floats], Floats] | None:
    """Returns a function that multiplies by the inverse of L, whose eigenvalue 0 is set to 1.

    The factored matrix is `D - A + d d^T / sum(d)`. Returns None if Cholesky fails.
    """
    from scipy.linalg import cho_factor, get_blas_funcs

    degree = root**2
    matrix = weights.astype(dtype)
    matrix *= -1
    matrix.flat[:: len(root) + 1] += degree
    # several times as fast as np.outer and cho_solve
    add_outer, solve = get_blas_funcs(("syr", "trsv"), dtype=dtype)
    matrix = add_outer(
        1 / degree.sum(), degree.astype(dtype), a=matrix.T, lower=True, overwrite_a=True
    )
    try:
        factor, _ = cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
    except np.linalg.LinAlgError:
        return None

    def inverse(residual: Floats) -> Floats:
        half = solve(factor, (root * residual).astype(dtype), lower=True)
        return root * solve(factor, half, lower=True, trans=1)

    return inverse


def _dense(weights: Floats, root: Floats) -> tuple[float, Floats]:
    """Returns the eigenpair from LAPACK, for matrices too close to singular for Cholesky."""
    from scipy.linalg import eigh

    null = root / np.linalg.norm(root)
    # 3 is added to the eigenvalue 0, so that it becomes the largest
    laplacian = np.eye(len(root)) - weights / np.outer(root, root) + 3 * np.outer(null, null)
    least = [0, min(len(root) - 1, 7)]
    values, vectors = eigh(laplacian, subset_by_index=least, check_finite=False)
    start = _start(root)
    vector, _ = _projected(values, vectors, (start - (null @ start) * null) @ vectors)
    return float(values[0]), vector
