"""95 % intervals of means, shares and ratios over any number of samples."""

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped

from crate_interp.stats.contrasts import paired
from crate_interp.stats.groups import FEWEST, OF_GROUPS
from crate_interp.stats.significance import CONFIDENCE

Ends = tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]


def student_interval(
    mean: Float[np.ndarray, "..."],
    error: Float[np.ndarray, "..."],
    n: int | Shaped[np.ndarray, "..."],
) -> Ends:
    """Returns the ends of the interval of means over n samples, `mean +- t error`.

    error: the standard error of the mean. t: the quantile of Student's t with n - 1 degrees of
    freedom. NaN for n < 2.
    """
    from scipy.special import stdtrit

    n = np.asarray(n)
    half = stdtrit(np.maximum(n - 1, 1), (1 + CONFIDENCE) / 2) * np.where(n > 1, error, np.nan)
    return mean - half, mean + half


def interval_of_sums(sums: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, low and high by Student's t, for each row of sums over samples.

    Columns of sums: n, the number of samples; total, the sum of the samples; squares, the sum of
    their squares. With the columns of `groups.columns_of_sums` too, the interval is over groups.
    """
    n, total, squares = (sums[name].to_numpy(float) for name in ("n", "total", "squares"))
    mean = total / n
    if "groups" in sums:
        between, cross, sizes, groups = (sums[name].to_numpy(float) for name in OF_GROUPS)
        off = np.maximum(between - 2 * mean * cross + mean**2 * sizes, 0)  # sum_g (S_g - n_g m)^2
        error = np.sqrt(off * groups / np.maximum(groups - 1, 1)) / n
        return mean, *student_interval(mean, np.where(groups < FEWEST, np.nan, error), groups)
    variance = np.maximum(squares - total * mean, 0) / np.maximum(n - 1, 1)
    return mean, *student_interval(mean, np.sqrt(variance / n), n)


def mean_interval(values: Shaped[np.ndarray, "n c"]) -> Ends:
    """Returns the ends `[column]` of the interval of the mean of each column over samples.

    Bool values get `share_interval`. Other values get the bootstrap-t (`paired`), which is infinite
    for two or three samples. NaN for n < 2, and where all values are equal: they show no spread.
    """
    if values.dtype == bool:
        return share_interval(values.sum(axis=0), len(values) if len(values) > 1 else 0)
    return paired(values).ends


def share_interval(
    successes: int | Shaped[np.ndarray, "..."], n: int | Shaped[np.ndarray, "..."]
) -> Ends:
    """Returns the ends of the exact interval of a share, x successes of n; NaN for n = 0.

    The ends are in [0, 1]. The interval contains the true share in at least 95 % of cases, for
    every share and n; Wilson's interval contains some shares in only 85 % of cases. Reference:
    Clopper and Pearson (1934).
    """
    from scipy.special import betaincinv

    x, n = np.broadcast_arrays(np.asarray(successes, dtype=float), np.asarray(n, dtype=float))
    n, tail = np.where(n > 0, n, np.nan), (1 - CONFIDENCE) / 2
    low = betaincinv(np.maximum(x, 1), n - x + 1, tail)
    high = betaincinv(x + 1, np.maximum(n - x, 1), 1 - tail)
    return np.where(x == 0, 0 * n, low), np.where(x == n, 1.0, high)


def linearised_ratio(
    above: Float[np.ndarray, "n c"], below: Float[np.ndarray, "n #c"]
) -> Float[np.ndarray, "n c"]:
    """Returns one value per sample; the mean of the values is R = sum(above) / sum(below).

    The values are R + (above - R below) / mean(below), which is to first order the contribution of
    each sample to the ratio (delta method), so an interval of their mean is an interval of R. They
    are NaN where the sum of `below` is 0.
    """
    share = below.mean(axis=0)
    share = np.where(share == 0, np.nan, share)
    ratio = above.mean(axis=0) / share
    return ratio + (above - ratio * below) / share
