"""95 % intervals of means, shares, ratios, paired shares, and choices made on half the samples."""

from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Shaped

from crate_interp.stats import bootstrap, contrasts
from crate_interp.stats.contrasts import Difference, Groups

SPLITS = 50
_Z = NormalDist().inv_cdf((1 + bootstrap.CONFIDENCE) / 2)
_HALVINGS = 60  # halving an interval of length 2 this often reaches the last bit of a double
Numbers = Float[np.ndarray, "..."]
Ends = tuple[Numbers, Numbers]
Values = Float[np.ndarray, "n c"]
Column = Float[np.ndarray, "column"]
Counts = int | Shaped[np.ndarray, "..."]


def student_interval(mean: Numbers, error: Numbers, n: Counts) -> Ends:
    """Returns the ends of the interval of means over n samples, `mean +- t error`.

    error: the standard error of the mean. t: the quantile of Student's t with n - 1 degrees of
    freedom. NaN for n < 2.
    """
    from scipy.special import stdtrit

    n = np.asarray(n)
    quantile = stdtrit(np.maximum(n - 1, 1), (1 + bootstrap.CONFIDENCE) / 2)
    half = quantile * np.where(n > 1, error, np.nan)
    return mean - half, mean + half


def interval_of_sums(sums: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, low and high by Student's t, for each row of sums over samples.

    Columns of sums: n, the number of samples; total, the sum of the samples; squares, the sum of
    their squares. With the columns of `columns_of_sums` too, the interval is over groups.
    """
    n, total, squares = (sums[name].to_numpy(float) for name in ("n", "total", "squares"))
    mean = total / n
    if "groups" in sums:
        between, cross, sizes, groups = (sums[name].to_numpy(float) for name in contrasts.OF_GROUPS)
        off = np.maximum(between - 2 * mean * cross + mean**2 * sizes, 0)  # sum_g (S_g - n_g m)^2
        error = np.sqrt(off * groups / np.maximum(groups - 1, 1)) / n
        error = np.where(groups < contrasts.FEWEST, np.nan, error)
        return mean, *student_interval(mean, error, groups)
    variance = np.maximum(squares - total * mean, 0) / np.maximum(n - 1, 1)
    return mean, *student_interval(mean, np.sqrt(variance / n), n)


def mean_interval(values: Shaped[np.ndarray, "n c"]) -> Ends:
    """Returns the ends `[column]` of the interval of the mean of each column over samples.

    Bool values get `share_interval`. Other values get the bootstrap-t (`paired`), which is infinite
    for two or three samples. NaN for n < 2, and where all values are equal: they show no spread.
    """
    if values.dtype == bool:
        return share_interval(values.sum(axis=0), len(values) if len(values) > 1 else 0)
    return contrasts.paired(values).ends


def share_interval(successes: Counts, n: Counts) -> Ends:
    """Returns the ends of the exact interval of a share, x successes of n; NaN for n = 0.

    The ends are in [0, 1]. The interval contains the true share in at least 95 % of cases, for
    every share and n; Wilson's interval contains some shares in only 85 % of cases. Reference:
    Clopper and Pearson (1934).
    """
    from scipy.special import betaincinv

    x, n = np.broadcast_arrays(np.asarray(successes, dtype=float), np.asarray(n, dtype=float))
    n, tail = np.where(n > 0, n, np.nan), (1 - bootstrap.CONFIDENCE) / 2
    low = betaincinv(np.maximum(x, 1), n - x + 1, tail)
    high = betaincinv(x + 1, np.maximum(n - x, 1), 1 - tail)
    return np.where(x == 0, 0 * n, low), np.where(x == n, 1.0, high)


def linearised_ratio(above: Values, below: Float[np.ndarray, "n #c"]) -> Values:
    """Returns one value per sample; the mean of the values is R = sum(above) / sum(below).

    The values are R + (above - R below) / mean(below), which is to first order the contribution of
    each sample to the ratio (delta method), so an interval of their mean is an interval of R. They
    are NaN where the sum of `below` is 0.
    """
    share = below.mean(axis=0)
    share = np.where(share == 0, np.nan, share)
    ratio = above.mean(axis=0) / share
    return ratio + (above - ratio * below) / share


def paired_shares(values: Values) -> Difference:
    """Returns, for each column, the difference of two paired shares.

    A column holds 1, 0 or -1 for each of n samples, and its mean is the difference. Let b be the
    number of samples with 1, and c that of samples with -1. The interval from low to high, in [-1,
    1], is the 95 % score interval of the true (b - c) / n. It holds every difference D with
    |b - c - n D| <= 1.96 sqrt(n (2 q + D (1 - D))), where q is the maximum-likelihood estimate of
    the share of -1, given D (Tango 1998, Statistics in Medicine 17). p is the two-sided p of the
    exact sign test (McNemar's) that 1 and -1 are equally likely among the b + c samples that
    differ; it is 1 if no sample differs.
    """
    from scipy.special import bdtr

    n, blank = len(values), np.full(values.shape[1], np.nan)
    more, less = ((values == sign).sum(axis=0).astype(float) for sign in (1, -1))
    middle, ends = (more - less) / n, []
    for far in (-1.0, 1.0):
        inside, outside = middle, np.full_like(middle, far)
        for _ in range(_HALVINGS):
            half = (inside + outside) / 2
            near = _within(more, less, n, half)
            inside, outside = np.where(near, half, inside), np.where(near, outside, half)
        ends.append(np.where(_within(more, less, n, np.full_like(middle, far)), far, inside))
    p = 2 * bdtr(np.minimum(more, less), (more + less).astype(int), 0.5)
    p = np.where(more + less > 0, np.minimum(p, 1.0), 1.0)
    return Difference(middle, blank, ends[0], ends[1], p)


def _within(values: np.ndarray, less: np.ndarray, n: int, difference: np.ndarray) -> np.ndarray:
    """Tells whether a true difference is within 1.96 standard errors of the counted difference."""
    # the likeliest q for this difference is the positive root of a q^2 + b q + c
    a, b = 2 * n, (2 * n - values + less) * difference - values - less
    c = -less * difference * (1 - difference)
    q = (np.sqrt(np.maximum(b**2 - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = n * (2 * q + difference * (1 - difference))
    return (values - less - n * difference) ** 2 <= _Z**2 * np.maximum(variance, 0.0)


def halves(
    n: int, groups: Groups = None, draws: int = SPLITS, seed: int = 0
) -> Bool[np.ndarray, "draw n"]:
    """Returns which of n samples are in the first half, in each of some random splits.

    A group goes to one side as a whole, and half of the groups, rounded down, go to the first.

    Args:
        n: how many samples there are.
        groups: which group a sample belongs to; None means that each is a group by itself.
        draws: how many splits.
        seed: the seed of the splits.

    Raises:
        ValueError: if there is one group alone.
    """
    names, member = np.unique(np.arange(n) if groups is None else groups, return_inverse=True)
    if len(names) < 2:
        raise ValueError("the samples are all of one group: a split takes samples of two.")
    random = np.random.default_rng(seed)
    first = np.arange(len(names)) < len(names) // 2
    return np.stack([random.permutation(first) for _ in range(draws)])[:, member]


def over_splits(scores: Float[np.ndarray, "draw n c"], groups: Groups = None) -> Difference:
    """Returns the mean over samples and splits of scores `[draw, n, column]`, with its interval.

    In each split a choice was made on one half of the samples and scored on the other. The number
    is the mean over splits. Its variance is that of the samples, whose scores are averaged over
    splits (as `studentised` has it), plus the variance between the means of splits. The latter
    variance is not divided by the number of splits: more splits of the same samples only show what
    these samples choose, and other samples would choose anew. The interval is Student's
    (`contrast`). groups: as in `halves`; samples then are groups (`by_group`).
    """
    values = contrasts.by_group(scores.mean(axis=0), groups)
    samples, spread = bootstrap.studentised(values), contrasts.Spread(scores.mean(axis=1), 1.0)
    return contrasts.contrast(samples.mean, [spread], samples.error**2, float(len(values)))


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

    form: the format of a number. of: the noun in "too few samples for an interval", which is
    returned if an end is unknown or both are infinite.
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


def max_t(values: Float[np.ndarray, "sample column"], alone: Column) -> Column:
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
    t, p = np.full((2, columns), np.nan)
    draws = np.zeros((bootstrap.RESAMPLES, columns))
    for there, group in bootstrap.groups(values):
        n = int(there.sum())
        if n < 2:
            continue
        mean, error, scaled = bootstrap.standardised(values[np.ix_(there, group)])
        t[group] = max(1 - UNSEEN / n, 0.0) * mean / np.where(error > 0, error, np.nan)
        least = LEAST_ERROR / n**0.5  # the error of `scaled` is 1 / sqrt(n)
        for part, means, errors in bootstrap.resampled(scaled):
            draws[part][:, group] = means / np.maximum(errors, least)
    order = np.argsort(-np.abs(t))[: int((~np.isnan(t)).sum())]  # NaN comes last
    last_first = draws[:, order[::-1]]
    counts = [
        (np.maximum.accumulate(sign * last_first, axis=1)[:, ::-1] >= sign * t[order]).sum(axis=0)
        for sign in (1, -1)
    ]
    found = np.minimum(2 * (1 + np.where(t[order] > 0, *counts)) / (bootstrap.RESAMPLES + 1), 1.0)
    p[order] = np.maximum(np.maximum.accumulate(found), alone[order])
    return p
