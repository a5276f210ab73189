"""The second eigenpair of a normalised graph, solved to rounding.

SciPy is imported only where it is used, because importing it takes longer than loading a small
model.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
        value, vector = (
            _inverse_krylov(weights, root, np.float32)
            or _inverse_krylov(weights, root, np.float64)
            or _dense(weights, root)
        )
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
