"""Bootstrap-t of means over samples: intervals and one-sided p-values."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Shaped

CONFIDENCE = 0.95  # level of every interval
RESAMPLES = 10_000
_ROUNDING = 1e-12
_NUMBERS = 2**23  # numbers in the table of draws made at a time: 64 MB
Bounds = float | int | np.ndarray  # one bound for all columns, or [column]


@dataclass(frozen=True)
class Studentised:
    """Means of columns, their standard errors, and bootstrap-t draws.

    mean `[column]`. error `[column]`: the standard error of the mean, sd / sqrt(n) with ddof 1; 0
    where all rows are equal, NaN for fewer than two rows. draws `[resample, column]`: the
    bootstrap-t quantities t* = (mean* - mean) / error*, in ascending order. A resample whose rows
    are all equal has no error, so that t* is infinite: with two or three rows, or with one rare
    value, the interval may be infinite.
    """

    mean: Float[np.ndarray, "c"]
    error: Float[np.ndarray, "c"]
    draws: Float[np.ndarray, "resample c"] = field(repr=False)

    def interval(self, level: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
        """Returns the two ends of an interval of the mean; each end is mean - q error.

        q is the k-th largest draw for the lower end and the k-th smallest draw for the upper end,
        where k = (resamples + 1) (1 - level) / 2 rounded down. Both ends are NaN for fewer than two
        rows, and where all rows are equal: they show no spread. Reference: Efron and Tibshirani
        (1993), section 12.5.
        """
        place = int((len(self.draws) + 1) * (1 - level) / 2 + 1e-9)
        if not 0 < level < 1 or not place:
            raise ValueError(f"level={level}: give a share below 1 - 2e-4, such as 0.95.")
        ends = []
        for draw in (self.draws[-place], self.draws[place - 1]):
            blank = np.full(self.mean.shape, np.nan)
            ends.append(self.mean - np.multiply(draw, self.error, where=self.error > 0, out=blank))
        return ends[0], ends[1]

    def above(self, bound: Bounds, sign: int = 1) -> np.ndarray:
        """Returns p `[column]` of "the true mean is at most `bound`"; small if the mean is above.

        p is one-sided, (1 + count of t* >= t) / (resamples + 1) with t = (mean - bound) / error. It
        is at most 0.025 exactly where the lower end of the 95 % interval is above the bound. It is
        0 for a bound of -inf and 1 for a bound of inf. For any other bound it is NaN for fewer than
        two rows, and where all rows are equal: they show no spread. sign: -1 for `below`.
        """
        bounds = np.broadcast_to(np.asarray(bound, dtype=float), self.mean.shape)
        endless, spread = np.isinf(bounds), self.error > 0
        distance = sign * (self.mean - np.where(endless, 0.0, bounds))
        t = np.divide(distance, self.error, where=spread, out=np.zeros_like(self.mean))
        count = (sign * self.draws >= t).sum(axis=0)
        p = np.where(spread, (1 + count) / (len(self.draws) + 1), np.nan)
        return np.where(endless, np.where(sign * bounds < 0, 0.0, 1.0), p)

    def below(self, bound: Bounds) -> np.ndarray:
        """Returns p `[column]` of "the true mean is at least `bound`"; small if the mean is below.

        It is `above` for the negated values and the negated bound.
        """
        return self.above(bound, sign=-1)


def studentised(values: Shaped[np.ndarray, "n c"]) -> Studentised:
    """Returns the bootstrap-t of each column's mean, from 10,000 resamples of rows with seed 0.

    A row is a sample. Columns are resampled together, so that they can be compared. A row that is
    NaN in a column is left out of that column; columns that lack the same rows are still resampled
    together. A column with an infinite value has no error and no interval (NaN).
    """
    values = np.asarray(values, dtype=float)
    columns = values.shape[1]
    mean, error = np.full(columns, np.nan), np.full(columns, np.nan)
    draws = np.full((RESAMPLES, columns), np.nan)
    for there, group in groups(values):
        if not there.any():
            continue
        mean[group], error[group], scaled = standardised(values[np.ix_(there, group)])
        if len(scaled) < 2:
            continue
        for part, means, errors in resampled(scaled):
            still = np.where(means == 0, 0.0, np.copysign(np.inf, means))
            draws[part][:, group] = np.divide(means, errors, where=errors > 0, out=still)
    draws.sort(axis=0)
    return Studentised(mean, error, draws)


def standardised(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns each column's mean, its standard error, and the rows with mean 0 and variance 1.

    The error is as in `Studentised`. Rows that differ by rounding alone count as equal.
    """
    n, finite = len(rows), np.isfinite(rows).all(axis=0)
    with np.errstate(invalid="ignore"):
        same = np.ptp(rows, axis=0) <= _ROUNDING * np.abs(rows).max(axis=0)
        # the mean of equal rows may differ from their value by rounding
        mean = np.where(same, rows[0], rows.mean(axis=0))
    centred = np.where(finite & ~same, rows, 0.0) - np.where(finite & ~same, mean, 0.0)
    spread = np.sqrt((centred**2).sum(axis=0) / max(n - 1, 1))
    error = np.where(finite & (n > 1), spread / np.sqrt(n), np.nan)
    return mean, error, centred / np.where(spread > 0, spread, 1.0)


def groups(values: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields sets of rows `[n]`, each with the columns that have values in exactly these rows."""
    masks, which = np.unique(~np.isnan(values), axis=1, return_inverse=True)
    for place, there in enumerate(masks.T):
        yield there, np.flatnonzero(which.reshape(-1) == place)


def resampled(rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yields means and their errors of some resamples at a time, for rows of `standardised`."""
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
        variance[variance <= 1e-12 * second] = 0  # rounding error of equal rows
        means[np.abs(means) < 1e-12] = 0
        yield slice(start, stop), means, np.sqrt(variance / n)


@lru_cache(maxsize=2)
def _counts(n: int) -> np.ndarray:
    """Returns how often each of n rows is drawn, `[resample, n]`, the same for every table."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return drawn.astype(np.int16)  # fits, because n is at most 838 here
