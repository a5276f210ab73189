"""The level of all tests, adjustments for many tests at once, and the words for intervals."""

from typing import Any

import numpy as np
from jaxtyping import Float

from crate_interp.stats.bootstrap import RESAMPLES, groups, resampled, standardised

LEVEL = 0.05  # an adjusted p up to this level shows a difference
# Resamples of few skewed samples know too little of the tail. Three columns of 32 lognormal samples
# show an effect that is not there in 6 % of cases without the factor 1 - 4 / n, with it in 4 %.
UNSEEN = 4
# The error of a resample counts as at least this share of the samples' own. Without this floor, a
# column that is mostly 0 would hide what the other columns show.
LEAST_ERROR = 0.3


def signs(low: object, high: object) -> Any:
    """Returns 1 where an interval lies above 0 ("shown to rise"), -1 below 0, and 0 elsewhere.

    low, high: numbers or arrays, NaN where there is no interval; the sign there is 0.
    """
    with np.errstate(invalid="ignore"):
        return (np.asarray(low) > 0).astype(int) - (np.asarray(high) < 0)


def interval_words(
    low: float, high: float, form: str = "+.3g", before: str = "95 % interval ", of: str = "samples"
) -> str:
    """Returns an interval as words, such as "95 % interval +0.1 to +0.3".

    form: the format of a number. of: what there are too few of if an end is unknown, or both are
    infinite: then the words are "too few samples for an interval".
    """
    if np.isnan([low, high]).any() or np.isinf([low, high]).all():
        return f"too few {of} for an interval"
    return f"{before}{low:{form}} to {high:{form}}"


def holm(p: np.ndarray) -> np.ndarray:
    """Returns p-values adjusted for multiple tests: findings with p <= 0.05 hold jointly at 95 %.

    Holm's step-down: the i-th smallest of m p-values is multiplied by m - i + 1, then raised to
    at least the adjusted p before it, and limited to 1. NaN stays NaN and is not counted. p-values
    may have any shape and may be dependent. Reference: Holm (1979).
    """
    flat = np.asarray(p, dtype=float).reshape(-1)
    adjusted = np.full(flat.shape, np.nan)
    order = np.argsort(flat)[: int((~np.isnan(flat)).sum())]  # NaN comes last
    steps = flat[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted.reshape(np.shape(p))


def max_t(
    values: Float[np.ndarray, "sample column"], alone: Float[np.ndarray, "column"]
) -> Float[np.ndarray, "column"]:
    """Returns p of "the mean is 0", two-sided and adjusted over all columns, from resamples.

    alone: each column's p by itself; the adjusted p is at least this. Columns are put in the order
    of |t|, largest first, where t = (1 - 4 / n) mean / error. p of a column with t > 0 is twice the
    share of resamples in which the largest t* = (mean* - mean) / error*, of this column and of
    those after it, is at least t; for t < 0 it is the same with all signs changed. p is at least
    that of the column before. So all columns with p <= 0.05 hold jointly at 95 %. The smallest p is
    2 / 10,001; four samples or fewer show nothing. p is NaN for a column without spread, or with
    fewer than two samples; such a column does not count. Reference: Romano and Wolf (2005),
    step-down maximum t; the factor and the least error* are ours.
    """
    columns = values.shape[1]
    t, p, draws = np.full(columns, np.nan), np.full(columns, np.nan), np.zeros((RESAMPLES, columns))
    for there, group in groups(values):
        n = int(there.sum())
        if n < 2:
            continue
        mean, error, scaled = standardised(values[np.ix_(there, group)])
        t[group] = max(1 - UNSEEN / n, 0.0) * mean / np.where(error > 0, error, np.nan)
        least = LEAST_ERROR / n**0.5  # the error of `scaled` is 1 / sqrt(n)
        for part, means, errors in resampled(scaled):
            draws[part][:, group] = means / np.maximum(errors, least)
    order = np.argsort(-np.abs(t))[: int((~np.isnan(t)).sum())]  # NaN comes last
    last_first = draws[:, order[::-1]]
    counts = [
        (np.maximum.accumulate(sign * last_first, axis=1)[:, ::-1] >= sign * t[order]).sum(axis=0)
        for sign in (1, -1)
    ]
    found = np.minimum(2 * (1 + np.where(t[order] > 0, *counts)) / (RESAMPLES + 1), 1.0)
    p[order] = np.maximum(np.maximum.accumulate(found), alone[order])
    return p
