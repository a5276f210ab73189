"""Finds the largest step of a series beyond a smooth trend, by a test whose noise has a memory."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

FEWEST = 20  # values of a series; with fewer, only huge steps could be told from noise
SIMULATIONS = 999
LONGEST = 400  # longer series are averaged in blocks
_SHORTEST = 3  # the fewest values before and after a step
_CUTS = 100  # at most so many places of a step are tried
_DECAYS = (
    0.03,
    0.06,
    0.12,
    0.25,
    0.5,
    1.0,
    2.0,
)  # of an exponential trend, in lengths of the series
_MEMORIES = np.linspace(-0.5, 0.95, 30)  # of simulated noise: phi in x_t = phi x_(t-1) + e_t


class Change(NamedTuple):
    """Where a series has its largest step: `at` is the index of the first value after it.

    f: how much better the series is fitted with the step. p: see `change_point`. before, after: the
    means of the values on both sides.
    """

    at: int
    f: float
    p: float
    before: float
    after: float


class Fit(NamedTuple):
    """Series fitted with a smooth trend alone, and with a step besides.

    rest: what the trend alone leaves, `[series, n]`. f: `[series]`. at: the places of the steps.
    """

    rest: np.ndarray
    f: np.ndarray
    at: np.ndarray


def fitted(values: Float[np.ndarray, "series n"]) -> Fit:
    """Fits each series with `a + b t + c exp(-t / (tau n))`, then with a step besides.

    F = (n - 5) (W_0 - W_1) / W_1, with W_0 and W_1 the least sums of squares without and with the
    step, over seven tau from .03 to 2 and over the places of the step. F is infinite if the step
    leaves nothing and the trend does, and 0 if the trend leaves nothing.
    """
    n = values.shape[-1]
    trends, steps, cuts = _designs(n)
    rest, least, stepped = np.empty_like(values), *np.full((2, len(values)), np.inf)
    at = np.zeros(len(values), dtype=int)
    for trend, step in zip(trends, steps, strict=True):
        left = values - (values @ trend) @ trend.T
        squares = (left**2).sum(axis=-1)
        gains = (left @ step.T) ** 2
        place = gains.argmax(axis=-1)
        with_step = squares - gains[np.arange(len(values)), place]
        better = squares < least
        rest[better], least = left[better], np.where(better, squares, least)
        at = np.where(with_step < stepped, cuts[place], at)
        stepped = np.minimum(with_step, stepped)
    total = (values**2).sum(axis=-1)
    least = np.where(least > 1e-20 * total, least, 0.0)  # below, it is rounding error
    stepped = np.where(stepped > 1e-20 * total, stepped, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        f = np.where(least > 0, (n - 5) * (least - stepped) / stepped, 0.0)
    return Fit(rest, f, at)


def change_point(values: Float[np.ndarray, "n"]) -> Change | None:
    """Returns the largest step of a series beyond a smooth trend; None for fewer than 20 values.

    p compares F with those of 999 series without a step, whose noise has the memory that the rest
    of this series has beside its trend: (1 + the number of F at least as large) / 1000. The memory
    phi of x_t = phi x_(t-1) + e_t is the smallest of 30 values up to .95 whose simulated rests are
    in half of the cases as like their neighbours as this rest. So neither a drift, nor a decay, nor
    slow noise counts as a step. tests/benchmarks/bench_change_points.py prints how often p is at
    most .05 where there is no step, and how often it finds one. A series of more than 400 values is
    averaged in blocks.
    """
    if len(values) < FEWEST or not np.isfinite(values).all():
        return None
    starts = np.unique(np.linspace(0, len(values), min(len(values), LONGEST) + 1).astype(int))
    means = np.add.reduceat(values, starts[:-1]) / np.diff(starts)
    fit = fitted(means[None])
    (f,), at = fit.f, starts[fit.at[0]]
    memory = likeness(fit.rest)[0] if f else 0.0
    p = p_values(np.array([f]), np.array([memory]), len(means))[0]
    return Change(int(at), float(f), float(p), values[:at].mean(), values[at:].mean())


def p_values(
    f: Float[np.ndarray, "series"], memory: Float[np.ndarray, "series"], n: int
) -> Float[np.ndarray, "series"]:
    """Returns the p of series of n values, by their F and by `likeness` of their rests."""
    halves, largest = _null(n)
    row = np.minimum(np.searchsorted(halves, memory), len(_MEMORIES) - 1)
    as_large = [
        SIMULATIONS - np.searchsorted(largest[one], value * (1 - 1e-9))
        for one, value in zip(row, f, strict=True)
    ]
    return (1 + np.array(as_large)) / (1 + SIMULATIONS)


def likeness(rest: Float[np.ndarray, "series n"]) -> Float[np.ndarray, "series"]:
    """Returns how like its neighbour each value is, `sum x_t x_(t-1) / sum x_t^2`."""
    return (rest[:, 1:] * rest[:, :-1]).sum(axis=-1) / (rest**2).sum(axis=-1)


def noise(phi: float, series: int, n: int, random: np.random.Generator) -> np.ndarray:
    """Returns series of `x_t = phi x_(t-1) + e_t` with normal e, `[series, n]`."""
    drawn = random.normal(size=(series, n))
    drawn[:, 0] /= (1 - phi**2) ** 0.5
    for t in range(1, n):
        drawn[:, t] += phi * drawn[:, t - 1]
    return drawn


@lru_cache(maxsize=8)
def _designs(n: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Returns orthonormal trends `[n, 3]` and, for each, unit steps `[cut, n]` beside it."""
    t = np.arange(n) / n
    cuts = np.arange(_SHORTEST, n - _SHORTEST + 1)
    cuts = cuts[np.unique(np.linspace(0, len(cuts) - 1, min(len(cuts), _CUTS)).astype(int))]
    step = (np.arange(n) >= cuts[:, None]).astype(float)
    trends, steps = [], []
    for decay in _DECAYS:
        trend = np.linalg.qr(np.stack([np.ones(n), t, np.exp(-t / decay)], axis=1))[0]
        beside = step - (step @ trend) @ trend.T
        size = np.linalg.norm(beside, axis=-1, keepdims=True)
        trends.append(trend)
        # where a trend is almost the step itself, they cannot be told apart
        steps.append(np.where(size > 0.03, beside / np.maximum(size, 0.03), 0.0))
    return trends, steps, cuts


@lru_cache(maxsize=8)
def _null(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each memory, the median likeness of rests, and the sorted F `[memory, 999]`."""
    random = np.random.default_rng(n)
    fits = [fitted(noise(phi, SIMULATIONS, n, random)) for phi in _MEMORIES]
    halves = [np.median(likeness(fit.rest)) for fit in fits]
    return np.maximum.accumulate(halves), np.sort([fit.f for fit in fits], axis=-1)
