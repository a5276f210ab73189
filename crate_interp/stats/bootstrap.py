"""Intervals and p-values: means over samples, shares, one trained network against random ones."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Shaped

RESAMPLES, CONFIDENCE = 10_000, 0.95
_NUMBERS = 2**23  # of a table of draws that is made at a time: 64 MB
Bounds = float | int | np.ndarray  # one for all columns, or [column]


def student_interval(
    mean: Float[np.ndarray, "..."], std: Float[np.ndarray, "..."], n: int
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Returns the ends of a 95 % interval of means over n samples, by Student's t."""
    from scipy.special import stdtrit

    half = stdtrit(max(n - 1, 1), (1 + CONFIDENCE) / 2) * std / n**0.5
    return mean - half, mean + half


@dataclass(frozen=True)
class Studentised:
    """Means of columns, their standard errors, and how far resampled means are off in their errors.

    mean `[column]`. error `[column]`: the standard error of the mean, sd / sqrt(n) with ddof 1; 0
    where all rows are equal, NaN where there are fewer than two. draws `[resample, column]`: the
    bootstrap-t quantities t* = (mean* - mean) / error*, in ascending order. A resample whose rows
    are all equal has no error, so that t* is infinite: with two or three rows, or with one rare
    value, the interval may be infinite, and honestly so.
    """

    mean: Float[np.ndarray, "c"]
    error: Float[np.ndarray, "c"]
    draws: Float[np.ndarray, "resample c"] = field(repr=False)

    def interval(self, level: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of an interval of the mean, mean - q error with q of the draws.

        q is the k-th draw from above for the lower end and from below for the upper end, k =
        (resamples + 1) (1 - level) / 2 rounded down. Where all rows are equal both ends are their
        value; they are NaN for fewer than two rows. Reference: Efron and Tibshirani (1993), section
        12.5.
        """
        place = int((len(self.draws) + 1) * (1 - level) / 2 + 1e-9)
        if not 0 < level < 1 or not place:
            raise ValueError(f"level={level}: give a share such as 0.95, below 1 - 2e-4.")
        ends = []
        for draw in (self.draws[-place], self.draws[place - 1]):
            step = np.multiply(draw, self.error, where=self.error > 0, out=0 * self.error)
            ends.append(self.mean - step)
        return ends[0], ends[1]

    def above(self, bound: Bounds) -> np.ndarray:
        """Returns p `[column]` against "the true mean is at most `bound`": small if it is above.

        One-sided, (1 + count of t* >= t) / (resamples + 1) with t = (mean - bound) / error. It is
        at most 0.025 exactly where the lower end of the 95 % interval is above the bound. A bound
        of -inf has 0. Fewer than two rows have 1. Where all rows are equal p is 0 if their value is
        at least the bound, and else 1: a value on the bound is within it. There `below` is 0 too,
        so ask whether a claim holds before asking whether it fails.
        """
        return _tail(self.mean, self.error, self.draws, bound, 1)

    def below(self, bound: Bounds) -> np.ndarray:
        """Returns p `[column]` against "the true mean is at least `bound`": small if it is below.

        It is `above` of the negated values and bound.
        """
        return _tail(self.mean, self.error, self.draws, bound, -1)


def _tail(
    mean: np.ndarray, error: np.ndarray, draws: np.ndarray, bound: Bounds, sign: int
) -> np.ndarray:
    """Returns the one-sided p of `above` (sign 1) or `below` (sign -1)."""
    bounds = np.broadcast_to(np.asarray(bound, dtype=float), mean.shape)
    endless = np.isinf(bounds)
    distance = sign * (mean - np.where(endless, 0.0, bounds))
    spread = error > 0
    t = np.divide(distance, error, where=spread, out=np.zeros_like(mean))
    count = (sign * draws >= t).sum(axis=0)
    p = np.where(spread, (1 + count) / (len(draws) + 1), 1.0)
    p = np.where((error == 0) & (distance >= 0), 0.0, p)
    return np.where(endless, np.where(sign * bounds < 0, 0.0, 1.0), p)


def studentised(values: Shaped[np.ndarray, "n c"]) -> Studentised:
    """Returns the bootstrap-t of the mean of each column, from 10,000 resamples of rows, seed 0.

    A row is a sample. Columns are resampled together, so that they can be compared. A row that is
    NaN in a column is left out of that column; columns that lack the same rows are still resampled
    together. A column with an infinite value has no error and no interval (NaN).
    """
    values = np.asarray(values, dtype=float)
    columns = values.shape[1]
    mean, error = np.full(columns, np.nan), np.full(columns, np.nan)
    draws = np.full((RESAMPLES, columns), np.nan)
    for there, group in _groups(values):
        if not there.any():
            continue
        rows = values[np.ix_(there, group)]
        same = (rows == rows[0]).all(axis=0)
        finite = np.isfinite(rows).all(axis=0)
        with np.errstate(invalid="ignore"):
            # around the mean of equal rows there is nothing left, not even an ulp
            mean[group] = np.where(same, rows[0], rows.mean(axis=0))
        if len(rows) < 2:
            continue
        centred = np.where(finite, rows, 0.0) - np.where(finite, mean[group], 0.0)
        spread = np.sqrt((centred**2).sum(axis=0) / (len(rows) - 1))
        error[group] = np.where(finite, spread / np.sqrt(len(rows)), np.nan)
        scaled = centred / np.where(spread > 0, spread, 1.0)
        for part, resampled in _resampled(scaled):
            draws[part][:, group] = resampled
    draws.sort(axis=0)
    return Studentised(mean, error, draws)


def _groups(values: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields which rows there are `[n]`, and the columns that have exactly these."""
    masks, which = np.unique(~np.isnan(values), axis=1, return_inverse=True)
    for place, there in enumerate(masks.T):
        yield there, np.flatnonzero(which.reshape(-1) == place)


def _resampled(rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields t* of some resamples at a time, of `[n, column]` with mean 0 and variance 1."""
    n, columns = rows.shape
    squares = rows**2
    random, share = np.random.default_rng(0), np.full(n, 1 / n)
    at_once = max(1, _NUMBERS // max(n, columns))
    few = n * RESAMPLES <= _NUMBERS
    counts = _counts(n) if few else np.zeros((0, n))
    for start in range(0, RESAMPLES, at_once):
        stop = min(start + at_once, RESAMPLES)
        weights = counts[start:stop] if few else random.multinomial(n, share, size=stop - start)
        weights = weights.astype(float)
        means, second = weights @ rows / n, weights @ squares / n
        variance = (second - means**2) * (n / (n - 1))
        variance[variance <= 1e-12 * second] = 0  # what rounding leaves of equal rows
        means[np.abs(means) < 1e-12] = 0
        still = np.where(means == 0, 0.0, np.copysign(np.inf, means))
        yield (
            slice(start, stop),
            np.divide(means, np.sqrt(variance / n), where=variance > 0, out=still),
        )


@lru_cache(maxsize=2)
def _counts(n: int) -> np.ndarray:
    """Returns how often each of n rows is drawn, `[resample, n]`: the same for every table."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return drawn.astype(np.int16)  # n is at most 838 here


def intervals(values: Shaped[np.ndarray, "n c"]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends `[column]` of a 95 % interval of the mean of `[n, column]` over samples.

    Of bool values it is Wilson's interval of the share (see `wilson`), of others the bootstrap-t of
    `studentised`. NaN for n < 2.
    """
    n, columns = values.shape
    if values.dtype == bool:
        low, high = wilson(values.sum(axis=0), n)
        return (low, high) if n > 1 else (np.full(columns, np.nan), np.full(columns, np.nan))
    at_once = max(1, _NUMBERS // RESAMPLES)
    ends = [
        studentised(values[:, start : start + at_once]).interval()
        for start in range(0, columns, at_once)
    ]
    low, high = np.concatenate(ends, axis=1) if ends else np.zeros((2, 0))
    return low, high


def wilson(successes: int | np.ndarray, n: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of Wilson's 95 % score interval of a share, in [0, 1]; NaN for n = 0.

    (x + z^2/2 +- z sqrt(x (n - x) / n + z^2/4)) / (n + z^2), x successes of n, z = 1.96. Reference:
    Wilson (1927); Brown, Cai and DasGupta (2001), who recommend it for small n.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    x, n = np.broadcast_arrays(np.asarray(successes, dtype=float), np.asarray(n, dtype=float))
    of = np.where(n > 0, n, np.nan)
    half = z * np.sqrt(x * (of - x) / of + z**2 / 4)
    low, high = ((x + z**2 / 2 + sign * half) / (of + z**2) for sign in (-1, 1))
    return np.where(x == 0, 0 * of, low), np.where(x == of, 1.0, high)


def against_networks(
    own_mean: Float[np.ndarray, "c"],
    own_error: Float[np.ndarray, "c"],
    twins: Float[np.ndarray, "s c"],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns difference, low, high, p_above and p_below of a trained network minus a random one.

    Networks are the unit here, not samples: twins holds the mean of each of s random networks, and
    the interval is that of own_mean minus the mean of one more random network. The difference is
    own_mean - mean(twins); the half width is t_{s-1, 0.975} sqrt(sd^2 (1 + 1/s) + own_error^2), sd
    (ddof 1) over networks. p_above is one-sided, of Student's t with s - 1 degrees of freedom,
    against "the difference is at most 0"; p_below against "at least 0". Where nothing varies each
    is 0 or 1, and both are 1 for a difference of 0. Fewer than two twins, or an own_error of NaN:
    NaN and p = 1.
    """
    s = len(twins)
    mean = np.asarray(own_mean, dtype=float)
    if s < 2:
        blank, ones = np.full(mean.shape, np.nan), np.ones(mean.shape)
        return blank, blank.copy(), blank.copy(), ones, ones.copy()
    from scipy.special import stdtr, stdtrit

    same = (twins == twins[0]).all(axis=0)
    centre = np.where(same, twins[0], twins.mean(axis=0))
    variance = ((twins - centre) ** 2).sum(axis=0) / (s - 1)
    error = np.sqrt(variance * (1 + 1 / s) + np.asarray(own_error, dtype=float) ** 2)
    difference = np.where(np.isnan(error), np.nan, mean - centre)
    half = stdtrit(s - 1, (1 + CONFIDENCE) / 2) * error
    certain = np.where(difference == 0, 0.0, np.copysign(np.inf, difference))
    t = np.divide(difference, error, where=error > 0, out=certain)
    p_above, p_below = stdtr(s - 1, -t), stdtr(s - 1, t)
    unknown = np.isnan(difference) | ((error == 0) & (difference == 0))
    p_above, p_below = (np.where(unknown, 1.0, p) for p in (p_above, p_below))
    return difference, difference - half, difference + half, p_above, p_below


def holm(p: np.ndarray) -> np.ndarray:
    """Returns p-values adjusted for their number, so that all at most 0.05 hold together at 95 %.

    Holm's step-down: the i-th smallest of m is multiplied by m - i + 1 and is at least the one
    before it; at most 1. NaN stays NaN and is not counted. Any shape; it holds for dependent
    p-values too. Reference: Holm (1979).
    """
    flat = np.asarray(p, dtype=float).reshape(-1)
    adjusted = np.full(flat.shape, np.nan)
    order = np.argsort(flat)[: int((~np.isnan(flat)).sum())]  # NaN comes last
    steps = flat[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted.reshape(np.shape(p))
