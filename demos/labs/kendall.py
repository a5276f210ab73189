"""Rank correlation of measures with a gap, overall and along one axis, with a bootstrap."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

DRAWS = 2000


def tau_b(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Returns Kendall's tau-b of two lists; 0 where one of them is constant.

    `sum sign(x_i - x_j) sign(y_i - y_j) / sqrt(pairs untied in x * pairs untied in y)`. Without
    ties it is the tau of arXiv 2411.17182. Raises ValueError for other lengths or NaN.
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    if a.shape != b.shape or a.ndim != 1 or np.isnan(a).any() or np.isnan(b).any():
        raise ValueError(
            f"tau_b of shapes {a.shape} and {b.shape}: give two lists of one length without NaN."
        )
    return float(_tau_of(_signs(a), _signs(b)))


def standard_error(n: int) -> float:
    """Returns tau's deviation for n independent pairs, `sqrt(2 (2n + 5) / (9 n (n - 1)))`."""
    return math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))


def _signs(values: np.ndarray) -> np.ndarray:
    return np.sign(values[..., :, None] - values[..., None, :])


def _tau_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns tau-b from matrices of signs [..., n, n] and [n, n]."""
    pairs = np.sqrt((x * x).sum(axis=(-2, -1)) * (y * y).sum())
    return np.where(pairs > 0, (x * y).sum(axis=(-2, -1)) / np.where(pairs > 0, pairs, 1), 0.0)


def resampled(measures: Any, gap: Sequence[float], seed: int = 0) -> Any:
    """Returns tau-b of each column with the gap in DRAWS resamplings of the networks (rows).

    A network that is drawn twice is tied with itself, which tau-b leaves out.
    """
    columns, target = _signs(measures.to_numpy(float).T), _signs(np.asarray(gap, float))
    random, n = np.random.default_rng(seed), len(target)
    rows = []
    for _ in range(DRAWS):
        chosen = random.integers(0, n, n)
        grid = np.ix_(chosen, chosen)
        rows.append(_tau_of(columns[:, grid[0], grid[1]], target[grid]))
    return pd.DataFrame(rows, columns=measures.columns)


def groups(table: Any, axis: str, axes: Sequence[str], name: str) -> np.ndarray:
    """Returns tau-b of a measure with the gap along one axis, for each setting of the others."""
    others = [other for other in axes if other != axis]
    return np.array([tau_b(rows[name], rows["gap"]) for _, rows in table.groupby(others)])


def granulated(table: Any, axes: Sequence[str], name: str) -> tuple[dict[str, float], np.ndarray]:
    """Returns psi of each axis, and Psi, their mean, in DRAWS resamplings.

    `psi = mean over settings of the other axes of tau along this one`. A resampling draws settings
    with replacement, for each axis apart, since a network out of its group compares with nothing.
    table: a row for each network, with the axes, the measure and `gap`.
    """
    random, psi, total = np.random.default_rng(0), {}, np.zeros(DRAWS)
    for axis in axes:
        each = groups(table, axis, axes, name)
        psi[axis] = float(each.mean())
        total += random.choice(each, size=(DRAWS, len(each))).mean(axis=1) / len(axes)
    return psi, total


def interval(draws: Sequence[float] | np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Returns the percentiles that hold the share `level` of the draws between them."""
    ends = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.percentile(np.asarray(draws, float), ends)
    return float(low), float(high)
