"""95 % intervals of means, shares and ratios over any number of samples."""

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped

from crate_interp.stats.contrasts import paired
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
    """Returns mean, low and high by Student's t for rows of a count, a sum and a sum of squares.

    n: the count. total, squares: the sums of the samples and of their squares.
    """
    n, total, squares = (sums[name].to_numpy(float) for name in ("n", "total", "squares"))
    mean = total / n
    variance = np.maximum(squares - total * mean, 0) / np.maximum(n - 1, 1)
    return mean, *student_interval(mean, np.sqrt(variance / n), n)


def mean_interval(values: Shaped[np.ndarray, "n c"]) -> Ends:
    """Returns the ends `[column]` of the interval of the mean of each column over samples.

    For bool values it is `share_interval`, for others the bootstrap-t (`paired`), which is infinite
    for two or three samples. NaN for n < 2.
    """
    if values.dtype == bool:
        return share_interval(values.sum(axis=0), len(values) if len(values) > 1 else 0)
    return paired(values).ends


def share_interval(
    successes: int | Shaped[np.ndarray, "..."], n: int | Shaped[np.ndarray, "..."]
) -> Ends:
    """Returns the ends of the exact interval of a share, x successes of n; NaN for n = 0.

    In [0, 1]. It covers at least 95 % for every share and n, whereas Wilson's interval covers some
    shares in only .85. Reference: Clopper and Pearson (1934).
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
    """Returns values by sample whose mean is the ratio R of two sums, of `above` and of `below`.

    They are R + (above - R below) / mean(below), to first order the contribution of each sample to
    the ratio (delta method), so an interval of their mean is an interval of R. NaN where the sum of
    `below` is 0.
    """
    share = below.mean(axis=0)
    share = np.where(share == 0, np.nan, share)
    ratio = above.mean(axis=0) / share
    return ratio + (above - ratio * below) / share
