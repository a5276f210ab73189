"""Finds where the mean of a series changes most, by the largest two-segment F and a shift test."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

SHIFTS, FEWEST = 999, 7  # the most shifts of a test; the fewest values of a series
_SHORTEST = 2  # the fewest values of a segment


class Change(NamedTuple):
    """Where a series changes: `at` is the index of the first value of the second segment.

    f: the F of a fit with two means against a fit with one. p: see `change_point`. before, after:
    the means of the two segments.
    """

    at: int
    f: float
    p: float
    before: float
    after: float


def largest_f(values: Float[np.ndarray, "*series n"]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest F over all cuts of a series into two segments, and the cut that has it.

    F = (n - 2) B / W, with B the sum of squares between the two segments and W the sum of squares
    within them. A segment has at least 2 values. F is infinite if both segments are constant and
    differ, and 0 for a constant series. Both results are `[series]`.
    """
    n = values.shape[-1]
    cuts = np.arange(_SHORTEST, n - _SHORTEST + 1)
    centred = values - values.mean(axis=-1, keepdims=True)
    sums = np.cumsum(centred, axis=-1)[..., cuts - 1]
    between = sums**2 * n / (cuts * (n - cuts))  # holds because a centred series sums to 0
    total = (centred**2).sum(axis=-1, keepdims=True)
    # for a constant series, the total is only rounding error
    constant = total <= n * (1e-12 * np.abs(values).max(axis=-1, keepdims=True)) ** 2
    within = np.where(total - between > 1e-12 * total, total - between, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        f = np.where(between > 1e-12 * total, (n - 2) * between / within, 0.0)
    f = np.where(constant, 0.0, f)
    place = f.argmax(axis=-1)
    return np.take_along_axis(f, place[..., None], axis=-1)[..., 0], cuts[place]


def change_point(values: Float[np.ndarray, "n"], seed: int = 0) -> Change | None:
    """Returns where a series changes its mean most, or None for fewer than 7 values.

    p compares the F of the series with the F of its circular shifts: (1 + the number of shifts
    whose F is at least as large) / (1 + the number of shifts). A series of n values has n - 1
    shifts; if n - 1 > 999, `seed` draws 999 of them. So p is at least 1 / n. A shift keeps the
    values and, except at one place, their neighbours, so slow waves do not count as a change.
    """
    n = len(values)
    if n < FEWEST or not np.isfinite(values).all():
        return None
    shifts = np.arange(1, n)
    if len(shifts) > SHIFTS:
        shifts = np.random.default_rng(seed).choice(shifts, SHIFTS, replace=False)
    (f,), (at,) = largest_f(values[None])
    shifted = values[(np.arange(n) + shifts[:, None]) % n]
    others, _ = largest_f(shifted)
    as_large = int((others >= f * (1 - 1e-9)).sum())
    before, after = values[:at].mean(), values[at:].mean()
    return Change(int(at), float(f), (1 + as_large) / (1 + len(shifts)), before, after)
