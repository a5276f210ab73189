"""Differences and their intervals: paired over samples, or over networks, trained or untrained."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from crate_interp.stats.bootstrap import CONFIDENCE, studentised

LEVEL = 0.05  # of an adjusted p below which a difference holds


@dataclass(frozen=True)
class Difference:
    """A difference in each layer, its standard error, its 95 % interval, and p against "none".

    p is two-sided and not adjusted. NaN where nothing that varies was measured.
    """

    value: Float[np.ndarray, "layer"]
    error: Float[np.ndarray, "layer"]
    low: Float[np.ndarray, "layer"]
    high: Float[np.ndarray, "layer"]
    p: Float[np.ndarray, "layer"]


@dataclass(frozen=True)
class Spread:
    """Networks whose scatter makes a difference uncertain.

    values: the mean of each network. share: what their variance is multiplied by, 1 / k for the
    mean of k networks and 1 for a network more.
    """

    values: Float[np.ndarray, "network layer"]
    share: float


def paired(values: Float[np.ndarray, "sample layer"]) -> Difference:
    """Returns the mean of paired differences, its bootstrap-t interval and two-sided p.

    p is twice the smaller of the one-sided ones, at most 1. Differences that are all equal are
    certain: p is 1 if they are 0, else 0. A single sample has no interval, and p is NaN.
    """
    found = studentised(values)
    low, high = found.interval()
    p = np.minimum(2 * np.minimum(found.above(0.0), found.below(0.0)), 1.0)
    p = np.where((found.error == 0) & (found.mean == 0), 1.0, p)
    p = np.where(np.isnan(found.error), np.nan, p)
    return Difference(found.mean, found.error, low, high, p)


def certain(value: Float[np.ndarray, "layer"]) -> Difference:
    """Returns a difference of what has no samples: its error is 0, and no p is known."""
    blank = np.full(value.shape, np.nan)
    return Difference(value, np.zeros(value.shape), blank, blank.copy(), blank.copy())


def contrast(
    value: Float[np.ndarray, "layer"],
    spreads: Sequence[Spread],
    variance: Float[np.ndarray, "layer"] | float = 0.0,
) -> Difference:
    """Returns a difference of means over networks with Welch's interval and p.

    The half width is t sqrt(v + variance), v the sum of share * sd^2 over the spreads (sd with
    ddof 1), t the quantile of Student's t with Welch's and Satterthwaite's degrees of freedom,
    v^2 / sum((share * sd^2)^2 / (k - 1)). variance: what comes on top, of samples. Where nothing
    varies the interval is the value, and p is 0, or 1 for a value of 0. Spreads of the same
    networks count as one, with the sum of their shares. A spread of fewer than two networks gives
    NaN.
    """
    from scipy.special import stdtr, stdtrit

    value = np.asarray(value, dtype=float)
    if any(len(spread.values) < 2 for spread in spreads):
        blank = np.full(value.shape, np.nan)
        return Difference(value, blank, blank.copy(), blank.copy(), blank.copy())
    shares: dict[int, float] = {}
    for spread in spreads:
        shares[id(spread.values)] = shares.get(id(spread.values), 0.0) + spread.share
    groups = {id(spread.values): spread.values for spread in spreads}
    parts = np.stack([shares[key] * _variance(values) for key, values in groups.items()])
    more = np.array([[len(values) - 1] for values in groups.values()], dtype=float)
    total, terms = parts.sum(axis=0), (parts**2 / more).sum(axis=0)
    freedom = np.divide(total**2, terms, where=terms > 0, out=np.full(value.shape, more.min()))
    error = np.sqrt(total + variance)
    half = stdtrit(freedom, (1 + CONFIDENCE) / 2) * error
    endless = np.where(value == 0, 0.0, np.inf)
    t = np.divide(np.abs(value), error, where=error > 0, out=endless)
    p = np.where(np.isnan(error + value), np.nan, np.minimum(2 * stdtr(freedom, -t), 1.0))
    return Difference(value, error, value - half, value + half, p)


def centre(values: Float[np.ndarray, "network layer"]) -> Float[np.ndarray, "layer"]:
    """Returns the mean over networks, without a rounding where all are equal."""
    return np.where((values == values[0]).all(axis=0), values[0], values.mean(axis=0))


def _variance(values: Float[np.ndarray, "network layer"]) -> Float[np.ndarray, "layer"]:
    return ((values - centre(values)) ** 2).sum(axis=0) / (len(values) - 1)
