"""Draws statistics of windows of texts, and counts how often intervals of their mean hold it.

Windows are as those of embedded:held-out-text: 22 texts of 7 to 104 windows. A statistic has the
values that crate-tiny-lm has there (layer 2), in an order in which neighbouring windows of a text
are correlated and texts are independent.
"""

from functools import cache

import numpy as np
from scipy.special import ndtr

import crate_interp as ci
from crate_interp.stats.contrasts import by_group
from crate_interp.stats.intervals import mean_interval

SIZES = (
    15, 7, 10, 16, 14, 21, 15, 18, 12, 12, 16, 16, 12, 9, 8, 11, 7, 15, 16, 11, 10, 104,
)  # fmt: skip
STATISTICS = (
    "compression.official_rate", "compression.subspace_rate_mid", "sparsity.zero_fraction",
    "sparsity.hoyer",
)  # fmt: skip
LAYER = 2
GROUPS = np.repeat(np.arange(len(SIZES)), SIZES)


@cache
def measured():
    """A sweep of all windows."""
    model = ci.load("crate-tiny-lm")
    return ci.sweep(model, "embedded:held-out-text", controls=0, progress=False)


def correlated(random, memory, columns):
    """Normal numbers [window, column]; windows of a text have the correlation memory^distance."""
    fresh, rows = random.standard_normal((len(GROUPS), columns)), []
    for number, group in enumerate(GROUPS):
        again = number > 0 and group == GROUPS[number - 1]
        row = fresh[number]
        rows.append(memory * rows[-1] + (1 - memory**2) ** 0.5 * row if again else row)
    return np.stack(rows)


def covered_texts(random, name, memory, columns):
    """The shares of intervals over texts, and over windows, that hold the true mean."""
    table = measured().samples()
    values = np.sort(table.loc[table["layer"] == LAYER, name].to_numpy())
    places = (ndtr(correlated(random, memory, columns)) * len(values)).astype(int)
    drawn, truth = values[places.clip(0, len(values) - 1)], values.mean()
    ends = mean_interval(by_group(drawn, GROUPS)), mean_interval(drawn[:, : columns // 8])
    texts, windows = (((low <= truth) & (truth <= high)).mean() for low, high in ends)
    return texts, windows
