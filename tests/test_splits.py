"""Splits in halves: groups stay whole, and intervals hold the spread between splits."""

import numpy as np
import pytest

from crate_interp.stats.contrasts import paired
from crate_interp.stats.intervals import SPLITS, halves, over_splits


def test_a_split_has_half_of_the_samples_and_each_is_another():
    split = halves(11)
    assert split.shape == (SPLITS, 11) and (split.sum(axis=1) == 5).all()
    assert len({tuple(row) for row in split}) > 40  # of 462
    assert (halves(11) == split).all() and (halves(11, seed=1) != split).any()


def test_a_group_goes_to_one_side_as_a_whole():
    groups = np.array([7, 7, 3, 9, 3, 7, 1, 9])
    split = halves(8, groups)
    for name in (7, 3, 9, 1):
        assert (np.ptp(split[:, groups == name].astype(int), axis=1) == 0).all()
    assert {int(row[[0, 2, 3, 6]].sum()) for row in split} == {2}
    with pytest.raises(ValueError, match="samples of two"):
        halves(3, np.zeros(3, dtype=int))


def test_where_every_split_chooses_alike_the_interval_is_that_of_samples():
    values = np.random.default_rng(0).normal(size=(40, 2))
    found = over_splits(np.repeat(values[None], SPLITS, axis=0))
    from scipy.stats import t

    half = t.ppf(0.975, 39) * values.std(axis=0, ddof=1) / 40**0.5
    np.testing.assert_allclose(found.high - found.value, half, rtol=1e-12)


def scored(heads):
    """The scores of the head that is best on the other half, `[draw, n, 1]`."""
    first = halves(len(heads))
    best = [(half @ heads).argmax(axis=1)[:, None] for half in (first, ~first)]
    return np.take_along_axis(heads[None], np.where(first, best[1], best[0])[..., None], axis=2)


@pytest.mark.parametrize("n, gap", [(16, 0.0), (40, 0.15)])
def test_the_interval_holds_the_score_where_the_split_decides(n, gap):
    """36 heads, equally good or evenly apart. The scores of other samples are the truth."""
    random, means = np.random.default_rng(0), 0.3 - gap * np.arange(36) / 35
    tables = means + 0.15 * random.standard_normal((400, n, 36))
    scores = [scored(table) for table in tables]
    truth = np.mean(scores)
    inside = [[low <= truth <= high for low, high in ends] for ends in map(_ends, scores)]
    both, samples_alone = np.mean(inside, axis=0)
    assert both >= 0.93 and samples_alone < 0.87


def _ends(scores):
    """The interval with splits, and that of the samples alone."""
    return [np.ravel(found.ends) for found in (over_splits(scores), paired(scores.mean(axis=0)))]
