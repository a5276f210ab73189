"""MaskCut the slow way, with a dense eigensolver as CutLER calls it, and pictures to cut."""

import numpy as np
from scipy.linalg import eigh


def affinity_of(features, tau):
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    unit = np.divide(features, norms, out=np.zeros_like(features), where=norms > 0)
    return np.where(unit @ unit.T > tau, 1.0, 1e-5)


def dense_cut(affinity):
    """Returns the second and third eigenpair of (D - A, D), as columns and values."""
    degrees = np.diag(affinity.sum(axis=1))
    values, vectors = eigh(degrees - affinity, degrees, subset_by_index=[1, 2])
    return vectors, values


def flood(sides, start):
    """Returns the 4-connected part of a mask [h, w] that holds a cell, cell by cell."""
    part, waiting = np.zeros_like(sides), [start]
    while waiting:
        y, x = waiting.pop()
        if 0 <= y < sides.shape[0] and 0 <= x < sides.shape[1] and sides[y, x] and not part[y, x]:
            part[y, x] = True
            waiting += [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
    return part


def foreground(vector, grid):
    """The rules of CutLER; of entries that differ by rounding alone the first is the largest."""
    if vector[np.argmax(np.isclose(abs(vector), abs(vector).max(), rtol=1e-8, atol=0))] < 0:
        vector = -vector
    sides = (vector > vector.mean()).reshape(grid)
    seed = np.argmax(abs(vector))
    corners = int(sides[0, 0]) + int(sides[0, -1]) + int(sides[-1, 0]) + int(sides[-1, -1])
    if corners >= 3 or not sides.flat[seed]:
        vector, sides = -vector, ~sides
    seed = np.argmax(np.isclose(vector, vector.max(), rtol=1e-8, atol=0))
    return flood(sides, np.unravel_index(seed, grid))


def iou(one, other):
    return 1.0 if not (one | other).any() else (one & other).sum() / (one | other).sum()


def reference_masks(features, grid, n_masks=3, tau=0.15):
    """Returns the masks [n_masks, h, w], and how far apart the eigenvalues were.

    That is the least relative distance of the second from the third on the way.
    """
    features, painted = np.array(features, dtype=np.float64), np.zeros(grid, dtype=bool)
    masks, parts, gap = [], [], np.inf
    for _ in range(n_masks):
        vectors, values = dense_cut(affinity_of(features, tau))
        gap = min(gap, (values[1] - values[0]) / values[0])
        part = foreground(vectors[:, 0], grid)
        if parts and (part.mean() <= 0.01 or max(iou(part, other) for other in parts) > 0.5):
            break
        masks.append(part & ~painted)
        parts.append(part)
        painted |= part
        features[painted.ravel()] = 0
    missing = [np.zeros(grid, dtype=bool)] * (n_masks - len(masks))
    return np.stack(masks + missing), gap


# per dimension, where a blob has 1; inf: nothing else
NOISES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, np.inf)


def planted(seed, grid, noise):
    """Returns features [h * w, d] of a background and one to four blobs in noise.

    Each has a direction of its own.
    """
    draw = np.random.default_rng([seed, *grid])
    (h, w), d = grid, (32, 96, 384)[seed % 3]
    signal = np.broadcast_to(draw.standard_normal(d), (h, w, d)).copy()
    rows, columns = np.mgrid[:h, :w]
    for _ in range(draw.integers(1, 5)):
        tall, wide = draw.integers(max(2, h // 6), h // 2), draw.integers(max(2, w // 6), w // 2)
        y, x = draw.integers(0, h - tall), draw.integers(0, w - wide)
        if draw.random() < 0.5:
            blob = (rows >= y) & (rows < y + tall) & (columns >= x) & (columns < x + wide)
        else:
            blob = ((rows - y) / tall - 0.5) ** 2 + ((columns - x) / wide - 0.5) ** 2 <= 0.25
        signal[blob] = draw.standard_normal(d)
    picture = (
        draw.standard_normal((h, w, d))
        if np.isinf(noise)
        else signal + noise * draw.standard_normal((h, w, d))
    )
    return picture.reshape(h * w, d)


def has_two_farthest(features):
    """Whether two patches lie equally far out: the side of one of them is the object, by rounding.

    Links are 1 or 1e-5, so that patches with as many of them may have the same place.
    """
    weights = affinity_of(features, 0.15)
    root = 1 / np.sqrt(weights.sum(axis=1))
    laplacian = np.eye(len(weights)) - root[:, None] * weights * root
    second = np.abs(np.linalg.eigh(laplacian)[1][:, 1] * root)
    following, first = np.sort(second)[-2:]
    return bool(first - following < 1e-9 * first)
