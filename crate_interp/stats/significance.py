"""The level of all intervals and tests, Holm's adjustment, and the words for intervals."""

from typing import Any

import numpy as np

CONFIDENCE = 0.95  # level of every interval
LEVEL = 0.05  # an adjusted p up to this level shows a difference


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
