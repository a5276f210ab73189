"""MaskCut: finds objects one after another, as normalised cuts of the graph of patch features."""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from crate_interp.core import checks
from crate_interp.measures.checks import all_finite, require_floats
from crate_interp.measures.spectra import TIE, Floats, first_largest, second

__all__ = ["maskcut", "normalised_cut"]

Bools = NDArray[np.bool_]
_AFFINITIES = ("cosine", "inner")
_WEAK = 1e-5  # CutLER's weight between unlike tokens; it keeps the graph connected
_EXACT = 4  # above this many borderline cosines per token, all are computed in float64


def maskcut(
    features: Float[Tensor, "*batch pos d"],
    grid: tuple[int, int],
    n_masks: int = 3,
    tau: float = 0.15,
    affinity: str = "cosine",
) -> Bool[Tensor, "*batch n_masks h w"]:
    """Returns masks of objects, each from the second eigenvector of a normalised cut.

    `(D - A) v = lambda D v`, where A is the affinity of the tokens and D = diag(A 1).

    The foreground is the side v > mean(v), unless it has 3 or more corners of the grid: then it is
    the other side. A part is the 4-connected piece of the foreground that holds the foreground's
    most extreme entry of v. A mask is a part without the earlier masks. The features of its tokens
    are set to 0 for later cuts. The search ends when a part after the first has at most 1 % of the
    tokens, or an IoU above 1/2 with an earlier part (parts, unlike masks, may overlap): the next
    cut would be the same again. It also ends when lambda is 1, because then no cut is better than
    another (all tokens are alike, or all features are 0). The remaining masks are then False.

    Source: CutLER `maskcut/maskcut.py`, with fixed rules where its result is left to chance. The
    sign of v makes its largest absolute entry positive; CutLER takes the sign from LAPACK. Of equal
    entries (to 1e-9) the first counts as the largest, and an entry equal to the mean is not above
    it. A part is compared with all earlier parts; CutLER compares it with the last part only, so
    that a rejected part returns in the next round. No CRF follows. Computed in float64 on the CPU,
    without gradient.

    Args:
        features: `[..., pos, d]` without CLS, row-major over `grid`.
        grid: Rows and columns of patches (h, w).
        n_masks: How many masks, at most.
        tau: The threshold of the affinity.
        affinity: "cosine": A_ij = 1 if cos(f_i, f_j) > tau, else 1e-5 (CutLER, arXiv 2301.11320).
            "inner": A_ij = <f_i, f_j>, or 0 if that is below tau (arXiv 2308.16271, on the codes of
            all heads side by side); a token of degree 0 is background and left out of the cut.

    Returns:
        bool `[..., n_masks, h, w]` on the device of the features.

    Raises:
        ValueError: If the grid does not fit, if there are fewer than 2 tokens, if features hold NaN
            or Inf, if n_masks is below 1, if tau is not finite, if tau is negative with
            affinity="inner" (a cut needs weights >= 0), or if affinity is neither "cosine" nor
            "inner".
    """
    require_floats(features, "pos d")
    *batch, pos, d = features.shape
    pair = isinstance(grid, (tuple, list)) and len(grid) == 2
    if not pair or grid[0] * grid[1] != pos or pos < 2:
        shape = f"{pos} tokens (features {list(features.shape)})"
        raise ValueError(f"grid={grid} does not fit {shape}: give (rows, columns), without CLS.")
    checks.count("n_masks", n_masks)
    checks.one_of("affinity", affinity, _AFFINITIES)
    finite = isinstance(tau, (int, float)) and math.isfinite(tau)
    if not finite or (affinity == "inner" and tau < 0):
        raise ValueError(f"tau={tau}: give a finite number, of at least 0 for affinity='inner'.")
    if not all_finite(features):
        raise ValueError("features hold NaN or Inf: leave out such images.")
    images = features.detach().cpu().double().reshape(math.prod(batch), pos, d).numpy()
    masks = np.zeros((len(images), n_masks, *grid), dtype=bool)
    for masks_of_image, image in zip(masks, images, strict=True):
        _cut_out(masks_of_image, image, tau, affinity)
    return torch.from_numpy(masks).reshape(*batch, n_masks, *grid).to(features.device)


def normalised_cut(
    affinity: Float[Tensor, "pos pos"],
) -> tuple[Float[Tensor, " pos"], Float[Tensor, ""]]:
    """Returns the second smallest generalised eigenpair (v, lambda) of a normalised cut.

    `(D - A) v = lambda D v`, where D = diag(A 1). The smallest eigenpair is v = 1 with lambda = 0.

    affinity `[pos, pos]`, symmetric, >= 0, without a row of zeros -> v `[pos]` with v^T D v = 1 and
    lambda `[]` in [0, 2], both float64 and solved to rounding. The largest absolute entry of v is
    positive; of entries that agree to 1e-9 the first counts as the largest. Shi and Malik 2000.

    v is not unique if several eigenvalues equal lambda (to 1e-9). Then v is the D-orthogonal
    projection of cos(i^2), i = 0, 1, ..., on the space of their eigenvectors. For a graph in
    pieces, whose lambda is 0, v separates the piece with the second most tokens (the first such
    piece) from the rest.

    Raises ValueError if the matrix is not square with at least 2 tokens, if it is not symmetric, if
    it holds NaN, Inf or a negative number, or if a row holds only zeros.
    """
    require_floats(affinity, "pos pos")
    if affinity.ndim != 2 or affinity.shape[0] != affinity.shape[1] or len(affinity) < 2:
        raise ValueError(f"an affinity is [pos, pos] with pos > 1, got {list(affinity.shape)}.")
    weights = affinity.detach().cpu().double().numpy()
    valid = np.isfinite(weights).all() and weights.min() >= 0
    if not valid or not np.array_equal(weights, weights.T):
        raise ValueError("an affinity must be symmetric, finite and >= 0: use (A + A.T) / 2.")
    empty = np.flatnonzero(~weights.any(axis=1))
    if len(empty):
        raise ValueError(f"token {empty[0]} has weight 0 to every token: leave it out.")
    half = int(np.frexp(weights.max())[1]) // 2  # v depends on the scale of A, lambda does not
    weights = np.ascontiguousarray(np.ldexp(weights, -2 * half))
    vector, value = second(weights, np.sqrt(weights.sum(axis=1)))
    v = torch.from_numpy(np.ldexp(vector, -half)).to(affinity.device)
    return v, torch.tensor(value, dtype=torch.float64, device=affinity.device)


def _cut_out(masks: Bools, features: Floats, tau: float, affinity: str) -> None:
    """Writes the masks of one image into `masks` `[n_masks, h, w]`, all False at first."""
    # painted_weight: the weight between any token and a token whose features were set to 0
    if affinity == "cosine":
        weights, painted_weight = _cosine_affinity(features, tau), 1.0 if tau < 0 else _WEAK
    else:
        weights, painted_weight = _inner_affinity(features, tau), 0.0
    painted = np.zeros(masks.shape[1:], dtype=bool)
    parts: list[Bools] = []
    for mask in masks:
        if parts:
            weights[parts[-1].ravel()] = painted_weight
            weights[:, parts[-1].ravel()] = painted_weight
        part = _foreground(weights, painted.shape)
        if part is None:
            return
        small = bool(parts) and 100 * part.sum() <= part.size
        if small or any(2 * (part & other).sum() > (part | other).sum() for other in parts):
            return
        mask[:] = part & ~painted
        painted |= part
        parts.append(part)


def _foreground(weights: Floats, grid: tuple[int, ...]) -> Bools | None:
    """Returns the foreground's part `[h, w]` with the most extreme entry, or None without a cut."""
    from scipy import ndimage  # slow to import, and no model needs it

    degree = weights @ np.ones(len(weights))
    joined = np.flatnonzero(degree)
    if len(joined) < 2:
        return None
    if len(joined) < len(weights):
        weights = weights[np.ix_(joined, joined)]
    vector, value = second(weights, np.sqrt(degree[joined]))
    if value > 1 - TIE:
        return None
    sides = np.zeros(grid, dtype=bool)
    above = vector > vector.mean() + TIE * np.abs(vector).max()
    # the vector's entry of largest absolute value is positive, and so above the mean
    sides.flat[joined] = above
    if sides[[0, 0, -1, -1], [0, -1, 0, -1]].sum() >= 3:
        vector = -vector
        sides.flat[joined] = ~above
    labels = np.empty(grid, dtype=np.int32)
    ndimage.label(sides, output=labels)
    return labels == labels.flat[joined[first_largest(vector)]]


def _cosine_affinity(features: Floats, tau: float) -> Floats:
    """Returns 1 where the cosine is above tau and 1e-5 elsewhere.

    A token of zeros has the cosine 0 with all tokens. The cosines are computed in float32, which
    takes half the time, and again in float64 if they are too close to tau.
    """
    norms = np.sqrt(np.einsum("pd,pd->p", features, features))
    if not (norms.min() > 1e-30 and norms.max() < 1e30):
        # some rows are too short or too long to be squared, or to fit float32
        features = features * _scale(np.abs(features).max(axis=1, keepdims=True, initial=0))
        norms = np.linalg.norm(features, axis=1)
        norms[norms == 0] = 1
    norms = norms[:, None]
    narrow = features.astype(np.float32) / norms.astype(np.float32)
    cosines = narrow @ narrow.T
    tau = min(max(tau, -2.0), 2.0)  # no cosine is beyond 2, and 2 fits float32
    # bounds the error of a float32 dot product of unit vectors, in any order of summation
    doubt = (features.shape[1] + 16) * 2.0**-24
    above = cosines > np.float32(tau + doubt)
    near = np.flatnonzero((cosines > np.float32(tau - doubt)) ^ above)
    if len(near) > _EXACT * len(features):
        unit = features / norms
        above = unit @ unit.T > tau
    else:
        rows, columns = np.divmod(near, len(features))
        left, right = features[rows] / norms[rows], features[columns] / norms[columns]
        above.flat[near] = np.einsum("cd,cd->c", left, right) > tau
    # 0 and 1 become 1e-5 and 1, exactly, in half the time of np.where
    weights = above.astype(np.float64)
    weights *= 1 - _WEAK
    weights += _WEAK
    return weights


def _inner_affinity(features: Floats, tau: float) -> Floats:
    """Returns the inner products, with 0 in place of those below tau."""
    scale = _scale(np.abs(features).max(keepdims=True, initial=0))
    scaled = features * scale
    inner = scaled @ scaled.T
    # the threshold may overflow to infinity, which no product reaches
    with np.errstate(over="ignore"):
        return np.where(inner >= tau * scale * scale, inner, 0.0)


def _scale(largest: Floats) -> Floats:
    """Returns the power of two that brings a number near 1.

    Products of numbers scaled by it neither overflow nor vanish.
    """
    return np.ldexp(1.0, -np.frexp(largest)[1].clip(-1000, 1000))
