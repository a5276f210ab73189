"""Paired shares: how much more often one of two networks is right on the same samples.

If the networks differ on few samples, a bootstrap has almost no spread, and its interval excludes 0
far too often.
"""

from statistics import NormalDist

import numpy as np
from jaxtyping import Float

from crate_interp.stats.contrasts import Difference
from crate_interp.stats.significance import CONFIDENCE

_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_HALVINGS = 60  # halving an interval of length 2 this often reaches the last bit of a double


def paired_shares(values: Float[np.ndarray, "n c"]) -> Difference:
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


def _within(more: np.ndarray, less: np.ndarray, n: int, difference: np.ndarray) -> np.ndarray:
    """Tells whether a true difference is within 1.96 standard errors of the counted difference."""
    # the likeliest q for this difference is the positive root of a q^2 + b q + c
    a, b = 2 * n, (2 * n - more + less) * difference - more - less
    c = -less * difference * (1 - difference)
    q = (np.sqrt(np.maximum(b**2 - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = n * (2 * q + difference * (1 - difference))
    return (more - less - n * difference) ** 2 <= _Z**2 * np.maximum(variance, 0.0)
