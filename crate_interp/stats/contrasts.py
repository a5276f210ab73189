"""Differences and their intervals over samples, groups of samples, or networks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped

from crate_interp.stats.bootstrap import CONFIDENCE, RESAMPLES, studentised

PerLayer = Float[np.ndarray, "layer"]
Networks = Float[np.ndarray, "network layer"]
Samples = Shaped[np.ndarray, "layer"] | float
Groups = Int[np.ndarray, "n"] | None  # the group of each sample; None: samples are independent
Sums = Float[np.ndarray, "g c"]
FEWEST = 10  # with fewer groups there is no interval
# sums over samples are kept for so many groups; of more, every 64th are taken together
MOST_GROUPS = 64
OF_GROUPS = ("between", "cross", "sizes", "groups")  # the columns of `columns_of_sums`
_AT_ONCE = 2**23 // RESAMPLES  # columns that are bootstrapped at a time: 64 MB of draws


@dataclass(frozen=True)
class Difference:
    """A difference in each layer, its standard error, its 95 % interval, and p of "no difference".

    p is two-sided and not adjusted. NaN means unknown. All fields but the value are NaN if no
    variation was measured. `paired_shares` leaves the error unknown.
    """

    value: PerLayer
    error: PerLayer
    low: PerLayer
    high: PerLayer
    p: PerLayer

    @property
    def ends(self) -> tuple[PerLayer, PerLayer]:
        """Returns the ends of the interval."""
        return self.low, self.high

    def towards(self, sign: int) -> PerLayer:
        """Returns p where the difference has this sign and p is known, and 1 elsewhere."""
        return np.where((sign * self.value > 0) & ~np.isnan(self.p), self.p, 1.0)


@dataclass(frozen=True)
class Spread:
    """A group of networks that differ from one another, which makes a difference uncertain.

    values: one mean per network. share: the factor that multiplies the variance of these means. It
    is 1 / k for the mean of k networks, and 1 for a single further network.
    """

    values: Networks
    share: float


def paired(values: Float[np.ndarray, "sample layer"]) -> Difference:
    """Returns the mean of paired differences, its bootstrap-t interval, and two-sided p.

    p is twice the smaller one-sided p, at most 1. Differences that are all equal, and a single
    difference, show no spread: interval and p are NaN.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    for start in range(0, values.shape[1], _AT_ONCE):
        found = studentised(values[:, start : start + _AT_ONCE])
        p = np.minimum(2 * np.minimum(found.above(0.0), found.below(0.0)), 1.0)
        parts.append((found.mean, found.error, *found.interval(), p))
    return Difference(*(np.concatenate(parts, axis=1) if parts else np.zeros((5, 0))))


def without_test(value: PerLayer, error: PerLayer | float = np.nan) -> Difference:
    """Returns a difference without interval and p; an error of 0 means that it is exact."""
    blank = np.full(value.shape, np.nan)
    return Difference(value, np.broadcast_to(error, value.shape), blank, blank, blank)


def contrast(
    value: PerLayer,
    spreads: Sequence[Spread],
    variance: PerLayer | float = 0.0,
    samples: Samples = np.inf,
) -> Difference:
    """Returns a difference of means over networks, with Welch's interval and p.

    The uncertainty has two sources. One is the networks: spread i, a group of k_i networks, adds
    v_i = share * sd^2 (sd with ddof 1) to the variance v. The other is the samples: `variance` is
    the variance of means over as many samples as `samples` says. The half width is
    t sqrt(v + variance), where t is the quantile of Student's t. Its degrees of freedom are those
    of Welch and Satterthwaite, v^2 / sum(v_i^2 / (k_i - 1)), but at most samples - 1 where
    `variance` is above 0.

    Spreads with the same networks count as one spread, with the sum of their shares. Where nothing
    varies, interval and p are NaN. A spread of fewer than two networks makes everything but the
    value NaN.
    """
    from scipy.special import stdtr, stdtrit

    value = np.asarray(value, dtype=float)
    if any(len(spread.values) < 2 for spread in spreads):
        return without_test(value)
    shares: dict[int, float] = {}
    for spread in spreads:
        shares[id(spread.values)] = shares.get(id(spread.values), 0.0) + spread.share
    groups = {id(spread.values): spread.values for spread in spreads}
    variances = [
        shares[key] * (((values - centre(values)) ** 2).sum(axis=0) / (len(values) - 1))
        for key, values in groups.items()
    ]
    parts = np.stack(variances)
    more = np.array([[len(values) - 1] for values in groups.values()], dtype=float)
    total, terms = parts.sum(axis=0), (parts**2 / more).sum(axis=0)
    freedom = np.divide(total**2, terms, where=terms > 0, out=np.full(value.shape, more.min()))
    # without this limit, intervals from two samples would contain the true value in only 87 % of
    # cases
    of_samples = np.where(np.asarray(variance) > 0, np.asarray(samples) - 1, np.inf)
    freedom = np.minimum(freedom, of_samples)
    error = np.sqrt(total + variance)
    varies = np.where(error > 0, error, np.nan)
    half = stdtrit(freedom, (1 + CONFIDENCE) / 2) * varies
    p = 2 * stdtr(freedom, -np.abs(value) / varies)
    return Difference(value, error, value - half, value + half, p)


def against_networks(
    mean: PerLayer, error: PerLayer, networks: Networks, samples: Samples = np.inf
) -> Difference:
    """Returns one network's mean minus the mean of other networks, tested as by `contrast`.

    mean, error: the one network's mean, and the standard error of this mean. samples: the number of
    samples in this mean. For s other networks the value is mean - mean(networks), and the half
    width is t_{s-1} sqrt(sd^2 (1 + 1/s) + error^2). Everything is NaN for fewer than two networks,
    or if the error is NaN.
    """
    s = len(networks)
    if s < 2:
        return without_test(np.full(np.shape(mean), np.nan))
    value = np.where(np.isnan(error), np.nan, mean - centre(networks))
    return contrast(value, [Spread(networks, 1 + 1 / s)], np.square(error), samples)


def centre(values: Networks) -> PerLayer:
    """Returns the mean over networks, without rounding error if all are equal."""
    return np.where((values == values[0]).all(axis=0), values[0], values.mean(axis=0))


def by_group(values: Shaped[np.ndarray, "n c"], groups: Groups) -> Shaped[np.ndarray, "free c"]:
    """Returns one value per group, in place of one per sample, for intervals and tests of the mean.

    Groups are independent, samples of a group are not. With m the mean over all N samples, S_g the
    sum and n_g the number of samples of group g, the value is m + G/N (a_g - mean(a)), where
    a_g = (S_g - n_g m) / (1 - n_g / N). So the mean over groups is the mean over samples, and the
    bootstrap-t of these values resamples groups. The divisor is that of the jackknife (CR3, Bell
    and McCaffrey 2002): without it a group that holds much of the data pulls m to itself, hides how
    far it lies off, and intervals are too narrow. If the 22 groups have 7 to 104 samples with a
    correlation of .35 to .75 from one to the next, 95 % intervals contain the true mean in 93 to 96
    % of cases (tests/benchmarks/bench_coverage.py).

    groups: the group of each sample; None, or all different, returns the values as they are. A NaN
    is left out. For fewer than 10 groups only the mean is returned, as a single row: they are too
    few for an interval.
    """
    if groups is None:
        return values
    names, group = np.unique(groups, return_inverse=True)
    if len(names) == len(groups):
        return values
    values = np.asarray(values, dtype=float)
    there = ~np.isnan(values)
    total, n = (np.zeros((len(names), values.shape[1])) for _ in range(2))
    np.add.at(total, group, np.where(there, values, 0.0))
    np.add.at(n, group, there)
    return of_sums(total, n)


def of_sums(total: Sums, n: Sums) -> Float[np.ndarray, "free c"]:
    """Returns the values of `by_group`, from the sum and the number of values of each group."""
    every = n.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # of a column without values
        mean = total.sum(axis=0) / every
        if len(total) < FEWEST:
            return mean[None]
        away = np.where(n > 0, (total - n * mean) / (1 - n / every), np.nan)
        count = (n > 0).sum(axis=0)
        away -= np.nansum(away, axis=0) / count
        found = mean + count / every * away
    few = count < FEWEST
    found[0, few], found[1:, few] = mean[few], np.nan
    return found


def mean_error(values: Shaped[np.ndarray, "n c"]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the standard error of each column's mean, and the number of values in it.

    A NaN is left out; the error of fewer than two values is NaN.
    """
    table = pd.DataFrame(values)
    return table.sem().to_numpy(float), table.count().to_numpy()


def columns_of_sums(total: Float[np.ndarray, "g c"], n: Int[np.ndarray, "g"]) -> dict[str, Any]:
    """Returns columns that add up over parts of the data, for `intervals.interval_of_sums`.

    total, n: the sum and the number of samples of each group of a part. between: sum_g S_g^2.
    cross: sum_g S_g n_g. sizes: sum_g n_g^2. groups: how many there are; a group of which two parts
    have samples counts twice.
    """
    return {
        "between": (total**2).sum(axis=0), "cross": (total * n[:, None]).sum(axis=0),
        "sizes": int((n**2).sum()), "groups": len(n),
    }  # fmt: skip
