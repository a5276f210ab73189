"""MaskCut: objects as normalised cuts of the graph of patch features, one after another."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, eigh, get_blas_funcs
from scipy.ndimage import label
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from crate_interp.measures.checks import all_finite, require_floats

_AFFINITIES = ("cosine", "inner")
_WEAK = 1e-5  # CutLER's weight of two tokens that are not alike: it keeps the graph in one piece
_TIE = 1e-9  # numbers this close, relatively, are taken for equal
_CONVERGED = (
    16 * np.finfo(np.float64).eps
)  # of a residual where the matrix has norm 2 at most: it is rounding by then
_STEPS = 300  # seen: 4 to 70
_EXACT = 4  # borderline cosines per token, above which all are computed in float64


def maskcut(
    features: Float[Tensor, "*batch pos d"],
    grid: tuple[int, int],
    n_masks: int = 3,
    tau: float = 0.15,
    affinity: str = "cosine",
) -> Bool[Tensor, "*batch n_masks h w"]:
    """Masks of objects, each from the second eigenvector of a normalised cut: `(D - A) v = lambda D v`, D = diag(A 1).

    features `[..., pos, d]` without CLS, row-major over `grid` (h, w) -> bool `[..., n_masks, h, w]`, on their device. "cosine": A_ij = 1
    where cos(f_i, f_j) > tau, else 1e-5 (CutLER, arXiv 2301.11320). "inner": A_ij = <f_i, f_j>, 0 below tau (arXiv 2308.16271 on the codes
    of all heads side by side); a token of degree 0 is background and left out of the cut. The foreground is v > mean(v), or what is left
    of it where it has 3 corners of the grid or more; the mask is the 4-connected part that holds the largest entry, without the masks
    before it, whose tokens have features 0 from then on. A later part of 1 % of the tokens or less, or with an IoU above 1/2 with one
    before it (all as cut, overlaps included), is not found: it and all that follow are False, as the next cut would be the same again.

    CutLER `maskcut/maskcut.py`, but for what it leaves to chance. v has the sign that makes its largest absolute entry positive, there
    LAPACK's. The first of equal entries (to 1e-9) is the largest, and an entry equal to the mean is not above it. A mask is compared with
    all before it, there with the last alone, so that one rejected comes back in the next round. No CRF follows. Nothing is found where
    lambda is 1 (tokens all alike, features all 0): no cut is better than another. Computed in float64 on the CPU; without gradient.
    Raises ValueError for a grid that does not fit, fewer than 2 tokens, NaN or Inf, n_masks < 1, a tau that is not finite (or < 0 with
    "inner": a cut needs weights >= 0), and another affinity.
    """
    _check(features, grid, n_masks, tau, affinity)
    *batch, pos, d = features.shape
    images = features.detach().cpu().double().reshape(math.prod(batch), pos, d).numpy()
    masks = np.zeros((len(images), n_masks, *grid), dtype=bool)
    for found, image in zip(masks, images, strict=True):
        _cut_out(found, image, tau, affinity)
    return torch.from_numpy(masks).reshape(*batch, n_masks, *grid).to(features.device)


def normalised_cut(
    affinity: Float[Tensor, "pos pos"],
) -> tuple[Float[Tensor, " pos"], Float[Tensor, ""]]:
    """The second smallest generalised eigenpair of `(D - A) v = lambda D v`, D = diag(A 1), whose smallest is 0 with v = 1.

    affinity `[pos, pos]`, symmetric, >= 0, no row all 0 -> v `[pos]` with v^T D v = 1 and its largest absolute entry positive (the first of
    those equal to 1e-9), lambda `[]` in [0, 2]; float64. Solved to the residual of rounding. Where several eigenvalues equal lambda (to
    1e-9) v is not unique: it is the D-orthogonal projection of cos(i^2), i = 0, 1, ..., on their space; but of a graph in pieces, where
    lambda is 0, v parts the piece with the second most tokens (the first of those) from the rest. Shi and Malik 2000. Raises ValueError
    for other matrices.
    """
    require_floats(affinity, "pos pos")
    if affinity.ndim != 2 or affinity.shape[0] != affinity.shape[1] or len(affinity) < 2:
        raise ValueError(
            f"an affinity is [pos, pos] of 2 tokens or more, got {list(affinity.shape)}."
        )
    weights = affinity.detach().cpu().double().numpy()
    if (
        not np.isfinite(weights).all()
        or weights.min() < 0
        or not np.array_equal(weights, weights.T)
    ):
        raise ValueError(
            "an affinity is symmetric, finite and >= 0: symmetrise with (A + A.T) / 2, clamp with min=0."
        )
    empty = np.flatnonzero(~weights.any(axis=1))
    if len(empty):
        raise ValueError(
            f"token {empty[0]} has no weight to any, not to itself: leave it out of the affinity."
        )
    half = int(np.frexp(weights.max())[1]) // 2  # v depends on the scale of A, lambda does not
    weights = np.ascontiguousarray(np.ldexp(weights, -2 * half))
    vector, value = _second(weights, np.sqrt(weights.sum(axis=1)))
    device = affinity.device
    return torch.from_numpy(np.ldexp(vector, -half)).to(device), torch.tensor(
        value, dtype=torch.float64, device=device
    )


def _cut_out(
    masks: NDArray[np.bool_], features: NDArray[np.float64], tau: float, affinity: str
) -> None:
    """Writes the masks of one image, `[n_masks, h, w]` and all False as given."""
    weights = (
        _cosine_affinity(features, tau) if affinity == "cosine" else _inner_affinity(features, tau)
    )
    painted_weight = (
        0.0 if affinity == "inner" else 1.0 if tau < 0 else _WEAK
    )  # of features 0 to any
    painted = np.zeros(masks.shape[1:], dtype=bool)
    parts: list[NDArray[np.bool_]] = []
    for mask in masks:
        if parts:
            weights[parts[-1].ravel()] = painted_weight
            weights[:, parts[-1].ravel()] = painted_weight
        part = _foreground(weights, painted.shape)
        if part is None:
            return
        if parts and (100 * part.sum() <= part.size or any(_alike(part, other) for other in parts)):
            return
        mask[:] = part & ~painted
        painted |= part
        parts.append(part)


def _alike(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> bool:
    return bool(2 * (one & other).sum() > (one | other).sum())


def _foreground(weights: NDArray[np.float64], grid: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """The part that holds the seed, `[h, w]`, of the better side of the cut; None where there is no cut."""
    degree = weights @ np.ones(len(weights))
    joined = np.flatnonzero(degree)
    if len(joined) < 2:
        return None
    if len(joined) < len(weights):
        weights = weights[np.ix_(joined, joined)]
    vector, value = _second(weights, np.sqrt(degree[joined]))
    if value > 1 - _TIE:
        return None
    sides = np.zeros(grid, dtype=bool)
    above = vector > vector.mean() + _TIE * np.abs(vector).max()
    sides.flat[joined] = (
        above  # the seed, the largest absolute entry, is among them by the sign of the vector
    )
    if sides[[0, 0, -1, -1], [0, -1, 0, -1]].sum() >= 3:
        vector = -vector
        sides.flat[joined] = ~above
    labels = np.empty(grid, dtype=np.int32)
    label(sides, output=labels)
    return labels == labels.flat[joined[_first_largest(vector)]]


def _first_largest(values: NDArray[np.float64]) -> int:
    """The index of the largest entry; of those equal but for rounding the first, or rounding would choose the part."""
    return int(np.argmax(values >= values.max() - _TIE * np.abs(values).max()))


def _cosine_affinity(features: NDArray[np.float64], tau: float) -> NDArray[np.float64]:
    """1 where the cosine is above tau, 1e-5 elsewhere. A token of zeros has the cosine 0 with all.

    The cosines are computed in float32, half the time; those too close to tau for that again, in float64.
    """
    norms = np.sqrt(np.einsum("pd,pd->p", features, features))
    if not (
        norms.min() > 1e-30 and norms.max() < 1e30
    ):  # too short or long for squares, or for float32
        features = features * _scale(np.abs(features).max(axis=1, keepdims=True, initial=0))
        norms = np.linalg.norm(features, axis=1)
        norms[norms == 0] = 1
    norms = norms[:, None]
    narrow = features.astype(np.float32) / norms.astype(np.float32)
    cosines = narrow @ narrow.T
    tau = min(max(tau, -2.0), 2.0)  # beyond them all the same, and a float32
    doubt = (
        features.shape[1] + 16
    ) * 2.0**-24  # bounds the error of a dot product of unit vectors, in any order
    above = cosines > np.float32(tau + doubt)
    near = np.flatnonzero((cosines > np.float32(tau - doubt)) ^ above)
    if len(near) > _EXACT * len(features):
        unit = features / norms
        above = unit @ unit.T > tau
    else:
        rows, columns = np.divmod(near, len(features))
        above.flat[near] = (
            np.einsum("cd,cd->c", features[rows] / norms[rows], features[columns] / norms[columns])
            > tau
        )
    weights = above.astype(
        np.float64
    )  # 0 and 1 to 1e-5 and 1, exactly, in half the time of np.where
    weights *= 1 - _WEAK
    weights += _WEAK
    return weights


def _inner_affinity(features: NDArray[np.float64], tau: float) -> NDArray[np.float64]:
    scale = _scale(np.abs(features).max(keepdims=True, initial=0))
    scaled = features * scale
    inner = scaled @ scaled.T
    with np.errstate(over="ignore"):  # an infinite threshold, which nothing reaches, is right
        return np.where(inner >= tau * scale * scale, inner, 0.0)


def _scale(largest: NDArray[np.float64]) -> NDArray[np.float64]:
    """The power of two that brings a number near 1: products of numbers so scaled neither overflow nor vanish."""
    return np.ldexp(1.0, -np.frexp(largest)[1].clip(-1000, 1000))


def _second(
    weights: NDArray[np.float64], root: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """`normalised_cut` of a matrix that is known to be one, of entries not far from 1; root: of the degrees."""
    whole = weights[0].all()  # a token joined to all joins all
    pieces = np.zeros(1, dtype=int) if whole else connected_components(weights, directed=False)[1]
    if pieces.max() > 0:
        value, vector = 0.0, _second_piece(pieces, root)
    else:
        # single precision is a preconditioner for double, and takes half the time
        value, vector = (
            _inverse_krylov(weights, root, np.float32)
            or _inverse_krylov(weights, root, np.float64)
            or _dense(weights, root)
        )
    vector = vector / root
    return vector * np.sign(vector[_first_largest(np.abs(vector))]), value


def _second_piece(pieces: NDArray[np.int32], root: NDArray[np.float64]) -> NDArray[np.float64]:
    """The unit vector in the space of eigenvalue 0 that is constant on one piece and on all others together."""
    second = np.argsort(-np.bincount(pieces), kind="stable")[
        1
    ]  # pieces are numbered by their first tokens
    inside = pieces == second
    share = (root[inside] ** 2).sum() / (root**2).sum()
    vector = np.where(inside, 1 - share, -share) * root
    return vector / np.linalg.norm(vector)


def _inverse_krylov(
    weights: NDArray[np.float64], root: NDArray[np.float64], dtype: type[np.floating]
) -> tuple[float, NDArray[np.float64]] | None:
    """The second smallest eigenpair of `L = I - D^-1/2 A D^-1/2`, or None where it did not converge.

    Generalised Davidson (Morgan and Scott 1986): the residual times an inverse of L enlarges the space. That finds close eigenvalues
    near 0, of pieces that weak edges join, in a few steps, where Lanczos on L needs hundreds; the residual is of L in float64, whatever
    the inverse. From a start with all eigenvectors in it, only the projection of the start on a multiple eigenvalue's space comes up.
    """
    inverse = _inverse(weights, root, dtype)
    if inverse is None:
        return None
    (times,) = get_blas_funcs(
        ("symv",), dtype=np.float64
    )  # reads half the matrix, which is what a product costs
    null = root / np.linalg.norm(root)
    steps = min(_STEPS, len(root) - 1)
    basis, images, small = (
        np.empty((steps, len(root))),
        np.empty((steps, len(root))),
        np.zeros((steps, steps)),
    )
    new = _start(root)
    for step in range(steps):
        for _ in range(2):  # once leaves what rounding takes for orthogonal
            new = new - (null @ new) * null
            new = new - (basis[:step] @ new) @ basis[:step]
        length = np.linalg.norm(new)
        if not length > 0:
            return None
        basis[step] = new / length
        images[step] = basis[step] - times(1.0, weights.T, basis[step] / root, lower=True) / root
        small[step, : step + 1] = small[: step + 1, step] = basis[: step + 1] @ images[step]
        values, vectors = np.linalg.eigh(small[: step + 1, : step + 1])
        mix, image = _projected(values, vectors, vectors[0])  # the first of the basis is the start
        vector = mix @ basis[: step + 1]
        residual = mix @ images[: step + 1] - image @ basis[: step + 1]
        if np.linalg.norm(residual) <= _CONVERGED:
            return float(values[0]), vector
        new = inverse(residual)
    return None


def _projected(
    values: NDArray[np.float64], vectors: NDArray[np.float64], start: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The projection of the start on the eigenvectors of the least value, scaled to length 1, and the matrix times it."""
    tied = values <= values[0] + _TIE * abs(values[0])
    share = start[tied] / np.linalg.norm(start[tied])
    return vectors[:, tied] @ share, vectors[:, tied] @ (values[tied] * share)


def _start(root: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers without pattern, the same on every machine."""
    return np.cos(np.arange(len(root)) ** 2.0) * root


def _inverse(
    weights: NDArray[np.float64], root: NDArray[np.float64], dtype: type[np.floating]
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]] | None:
    """The inverse of L with its eigenvalue 0 raised to 1, by Cholesky of `D - A + d d^T / sum(d)`; None where that fails."""
    degree = root**2
    matrix = weights.astype(dtype)
    matrix *= -1
    matrix.flat[:: len(root) + 1] += degree
    add_outer, solve = get_blas_funcs(
        ("syr", "trsv"), dtype=dtype
    )  # several times as fast as np.outer and cho_solve
    matrix = add_outer(
        1 / degree.sum(), degree.astype(dtype), a=matrix.T, lower=True, overwrite_a=True
    )
    try:
        factor, _ = cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError:
        return None

    def inverse(residual: NDArray[np.float64]) -> NDArray[np.float64]:
        half = solve(factor, (root * residual).astype(dtype), lower=True)
        return root * solve(factor, half, lower=True, trans=1)

    return inverse


def _dense(
    weights: NDArray[np.float64], root: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """The same pair from LAPACK, for matrices so near to falling apart that Cholesky cannot tell."""
    null = root / np.linalg.norm(root)
    laplacian = (
        np.eye(len(root)) - weights / np.outer(root, root) + 3 * np.outer(null, null)
    )  # 0 becomes the largest
    values, vectors = eigh(
        laplacian, subset_by_index=[0, min(len(root) - 1, 7)], check_finite=False
    )
    start = _start(root)
    return float(values[0]), _projected(values, vectors, (start - (null @ start) * null) @ vectors)[
        0
    ]


def _check(features: Any, grid: Any, n_masks: Any, tau: Any, affinity: Any) -> None:
    require_floats(features, "pos d")
    pos = features.shape[-2]
    sides = (
        [side for side in grid if isinstance(side, int) and side > 0]
        if isinstance(grid, (tuple, list))
        else []
    )
    if len(sides) != 2 or sides[0] * sides[1] != pos:
        raise ValueError(
            f"grid={grid} does not fit {pos} tokens (features {list(features.shape)}): give (rows, columns) "
            f"with rows * columns = {pos}, and features without CLS."
        )
    if pos < 2:
        raise ValueError(
            f"a cut parts 2 tokens or more, features {list(features.shape)} have {pos}: take a finer grid."
        )
    if not isinstance(n_masks, int) or n_masks < 1:
        raise ValueError(f"n_masks={n_masks}: give a whole number of at least 1.")
    if affinity not in _AFFINITIES:
        raise ValueError(
            f"affinity={affinity!r}: give 'cosine' (CutLER) or 'inner' (arXiv 2308.16271)."
        )
    if not isinstance(tau, (int, float)) or not math.isfinite(tau):
        raise ValueError(f"tau={tau}: give a finite number, such as 0.15.")
    if affinity == "inner" and tau < 0:
        raise ValueError(
            f"tau={tau} keeps negative inner products, and a cut needs weights >= 0: give tau >= 0."
        )
    if not all_finite(features):
        bad = ~features.isfinite().all(dim=-1).all(dim=-1)  # [*batch]
        where = tuple(bad.nonzero()[0].tolist())
        image = f"at batch index {', '.join(map(str, where))} " if where else ""
        raise ValueError(
            f"features {image}hold NaN or Inf: leave such images out, or find where they come from."
        )
