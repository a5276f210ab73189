"""Percentile intervals of means over resampled samples."""

import numpy as np

RESAMPLES, CONFIDENCE = 2000, 0.95
_NUMBERS = 2**23  # of the table of draws that is held at a time: 64 MB


def intervals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends `[column]` of a 95 % interval of the mean of `[n, column]` over samples.

    2,000 resamples, seed 0; NaN for n < 2.

    All columns are resampled together, so that columns of the same samples can be compared.
    """
    n = len(values)
    if n < 2:
        return np.full(values.shape[1], np.nan), np.full(values.shape[1], np.nan)
    # around the mean of all: if no value differs, no resample does, not even by an ulp
    centre = np.where((values == values[0]).all(axis=0), values[0], values.mean(axis=0))
    random, share = np.random.default_rng(0), np.full(n, 1 / n)
    at_once = max(1, _NUMBERS // n)
    means = np.concatenate(
        [
            random.multinomial(n, share, size=min(at_once, RESAMPLES - start))
            @ (values - centre)
            / n
            for start in range(0, RESAMPLES, at_once)
        ]
    )
    low, high = np.quantile(centre + means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return low, high
