"""Splits of samples in halves: one half to choose on, the other to score the choice."""

import numpy as np
from jaxtyping import Bool, Float, Int

from crate_interp.stats.bootstrap import studentised
from crate_interp.stats.contrasts import Difference, Spread, contrast
from crate_interp.stats.groups import by_group

SPLITS = 50


def halves(
    n: int, groups: Int[np.ndarray, "n"] | None = None, draws: int = SPLITS, seed: int = 0
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


def over_splits(
    scores: Float[np.ndarray, "draw n c"], groups: Int[np.ndarray, "n"] | None = None
) -> Difference:
    """Returns the mean over samples and splits of scores `[draw, n, column]`, with its interval.

    In each split a choice was made on one half of the samples and scored on the other. The number
    is the mean over splits. Its variance is that of the samples, whose scores are averaged over
    splits (as `studentised` has it), plus the variance between the means of splits. The latter
    counts whole, not divided by the number of splits: more splits of the same samples only tell
    what these samples choose, and other samples would choose anew. The interval is Student's
    (`contrast`). groups: as in `halves`; samples then are groups (`by_group`).
    """
    values = by_group(scores.mean(axis=0), groups)
    samples, spread = studentised(values), Spread(scores.mean(axis=1), 1.0)
    return contrast(samples.mean, [spread], samples.error**2, float(len(values)))
