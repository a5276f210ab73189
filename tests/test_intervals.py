"""Intervals, splits in halves, paired shares: closed forms, slow forms, how often they hold."""

import warnings

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binomtest

import crate_interp as ci
from comparing import made
from conftest import refuses
from crate_interp.stats import bootstrap, contrasts
from crate_interp.stats.bootstrap import RESAMPLES, studentised
from crate_interp.stats.contrasts import against_networks, paired
from crate_interp.stats.intervals import (
    SPLITS,
    halves,
    holm,
    mean_interval,
    over_splits,
    paired_shares,
    share_interval,
)
from crate_interp.stats.verdicts import within
from selection import few


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def slow(values):
    """t* of a column, resample by resample, from the rows themselves."""
    n, random = len(values), np.random.default_rng(0)
    found = []
    for counts in random.multinomial(n, np.full(n, 1 / n), size=RESAMPLES):
        rows = np.repeat(values, counts)
        off = rows.mean() - values.mean()
        error = 0.0 if (rows == rows[0]).all() else rows.std(ddof=1) / n**0.5
        found.append(off / error if error else np.copysign(np.inf, off) if abs(off) > 1e-9 else 0.0)
    return np.sort(found)


@pytest.mark.parametrize("n", few([3, 5, 29]))
def test_draws_are_those_of_a_loop_over_resamples(n):
    values = normal(n, n) ** 2 + 7
    found = studentised(values[:, None])
    wanted = slow(values)
    assert_allclose(found.draws[:, 0], wanted, rtol=1e-6, atol=1e-6)
    assert found.mean[0] == pytest.approx(values.mean())
    assert found.error[0] == pytest.approx(scipy.stats.sem(values))
    low, high = found.interval()
    place = int(0.025 * (RESAMPLES + 1))
    assert low[0] == pytest.approx(values.mean() - wanted[-place] * scipy.stats.sem(values))
    assert high[0] == pytest.approx(values.mean() - wanted[place - 1] * scipy.stats.sem(values))


def test_p_values_count_draws_and_agree_with_the_interval():
    values = np.random.default_rng(3).lognormal(size=(23, 7))
    found = studentised(values)
    low, high = found.interval()
    for bound in np.linspace(0, 5, 31):
        t = (values.mean(axis=0) - bound) / scipy.stats.sem(values)
        above, below = found.above(bound), found.below(bound)
        assert_allclose(above, (1 + (found.draws >= t).sum(0)) / (RESAMPLES + 1))
        assert_allclose(below, (1 + (found.draws <= t).sum(0)) / (RESAMPLES + 1))
        assert ((above <= 0.025) == (low > bound)).all()
        assert ((below <= 0.025) == (high < bound)).all()
    each = found.above(np.arange(7) / 3)
    assert each[4] == found.above(4 / 3)[4]
    assert (found.above(-np.inf) == 0).all() and (found.above(np.inf) == 1).all()
    assert (found.below(np.inf) == 0).all() and (found.below(-np.inf) == 1).all()


def test_rows_without_spread_show_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nearly = np.full((13, 1), 0.3)
        nearly[::2] = 0.1 + 0.2  # equal up to rounding
        for rows in (np.full((13, 1), 0.1), nearly, np.full((1, 1), 0.1)):
            same = studentised(rows)
            assert same.mean[0] == rows[0, 0] and np.isnan(same.interval()).all()
            assert np.isnan([f(b) for f in (same.above, same.below) for b in (-5, 0.1, 5)]).all()
            assert (same.above(-np.inf)[0], same.below(-np.inf)[0]) == (0, 1)
        none = studentised(np.full((5, 1), np.nan))
        assert np.isnan([none.mean, *none.interval(), none.above(0.0)]).all()
        endless = studentised(np.array([[1.0], [2.0], [np.inf]]))
        assert np.isnan([*endless.interval(), endless.above(0.0)]).all()
        for n in (2, 3):  # a ninth of the resamples of three rows, or more, has no error
            few = studentised(normal(4, n, 2))
            low, high = few.interval()
            assert (low == -np.inf).all() and (high == np.inf).all()
            assert (few.above(few.mean - 9 * few.error) > 0.025).all()


def test_a_row_that_is_nan_is_left_out_of_its_column():
    values = normal(5, 17, 5)
    there = np.arange(17) % 3 > 0
    values[~there, 1] = np.nan
    values[~there, 3] = np.nan
    values[4, 2] = np.nan
    found = studentised(values)
    pair = studentised(values[there][:, [1, 3]])
    assert_allclose(found.draws[:, [1, 3]], pair.draws, rtol=1e-9)
    single = studentised(np.delete(values[:, 2:3], 4, axis=0))
    assert_allclose(found.interval()[0][2], single.interval()[0][0], rtol=1e-9)
    whole = studentised(values[:, [0, 4]])
    assert_allclose(found.draws[:, [0, 4]], whole.draws, rtol=1e-9)
    assert (found.mean[1], found.error[1]) == (pair.mean[0], pair.error[0])


@given(st.integers(0, 2**31), st.floats(0.001, 1000), st.floats(-1000, 1000))
def test_intervals_follow_shifts_and_scales(seed, scale, shift):
    values = normal(seed, 11, 2) ** 3
    low, high = mean_interval(values)
    size = scale * np.abs(values).max() + abs(shift)
    close = dict(rtol=1e-6, atol=1e-9 * size)
    assert_allclose(mean_interval(scale * values + shift)[0], scale * low + shift, **close)
    assert_allclose(mean_interval(-values)[1], -low, **close)
    assert_allclose(mean_interval(-values)[0], -high, **close)


def test_intervals_do_not_depend_on_other_columns_or_on_how_much_is_held(monkeypatch):
    values = normal(2, 31, 3)
    whole = mean_interval(values)
    alone = mean_interval(values[:, 1:2])
    assert_allclose(alone, [bound[1:2] for bound in whole], rtol=1e-9)
    for held in (31 * 17, 2 * RESAMPLES):  # some resamples, then some columns at a time
        monkeypatch.setattr(bootstrap, "_NUMBERS", held)
        monkeypatch.setattr(contrasts, "_AT_ONCE", max(1, held // RESAMPLES))
        assert_allclose(mean_interval(values), whole, rtol=1e-9)
    assert [end.shape for end in mean_interval(values[:, :0])] == [(0,), (0,)]


def test_shares_are_scipys_and_bools_get_them():
    for n in (1, 7, 64):
        low, high = share_interval(np.arange(n + 1), n)
        for x in range(n + 1):
            wanted = scipy.stats.binomtest(x, n).proportion_ci(method="exact")
            assert (low[x], high[x]) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    assert np.isnan(share_interval(np.arange(2), 0)).all()
    right = np.arange(29)[:, None] % np.array([2, 3, 29]) == 1
    np.testing.assert_array_equal(mean_interval(right), share_interval(right.sum(axis=0), 29))
    assert np.isnan(mean_interval(right[:1])).all()
    assert (np.array(mean_interval(right)) != np.array(mean_interval(right.astype(float)))).any()


def test_one_network_against_random_ones():
    """Two samples of sizes 1 and s, and the error of the one: Student's prediction interval."""
    twins, own, error = normal(7, 5, 3), np.array([0.5, 3.0, -9.0]), np.array([0.0, 0.7, 0.2])
    found = against_networks(own, error, twins)
    for c in range(3):
        spread = (twins[:, c].var(ddof=1) * 6 / 5 + error[c] ** 2) ** 0.5
        assert found.value[c] == pytest.approx(own[c] - twins[:, c].mean())
        wanted = scipy.stats.t.interval(0.95, 4, found.value[c], spread)
        assert (found.low[c], found.high[c]) == pytest.approx(wanted)
        above = 2 * scipy.stats.t.sf(found.value[c] / spread, 4)
        assert found.p[c] == pytest.approx(min(above, 2 - above))
        assert found.towards(1)[c] == pytest.approx(above if found.value[c] > 0 else 1)
        assert found.towards(-1)[c] == pytest.approx(2 - above if found.value[c] < 0 else 1)
    # with no error of its own it is the test of two samples, one of which has a single member
    test = scipy.stats.ttest_ind([own[0]], twins[:, 0])
    assert found.p[0] == pytest.approx(test.pvalue)


def test_networks_that_do_not_vary_or_are_too_few():
    own, error = np.array([0.3, 0.1, 0.0, 0.3]), np.array([0.0, 0.0, 0.0, np.nan])
    found = against_networks(own, error, np.full((3, 4), 0.1))
    assert_allclose(found.value, [0.2, 0, -0.1, np.nan])
    # networks that are all equal show no spread, so there is neither an interval nor a test
    assert np.isnan([*found.ends, found.p]).all()
    assert (np.array([found.towards(1), found.towards(-1)]) == 1).all()
    few = against_networks(own, error, np.full((1, 4), 0.1))
    assert np.isnan([few.value, *few.ends, few.p]).all()
    assert (np.array([few.towards(1), few.towards(-1)]) == 1).all()


def test_holm_by_hand():
    p = np.array([[0.01, np.nan], [0.04, 0.03], [0.005, 0.9]])
    # sorted .005 .01 .03 .04 .9 times 5 4 3 2 1: .025 .04 .09 .08 -> .09, .9
    assert_allclose(holm(p), [[0.04, np.nan], [0.09, 0.09], [0.025, 0.9]])
    assert holm(np.array([0.6, 0.7])).tolist() == [1, 1]
    assert holm(np.array([])).shape == (0,) and np.isnan(holm(np.array([np.nan]))).all()


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
    refuses("samples of two", lambda: halves(3, np.zeros(3, dtype=int)))


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


N, LAYERS = 41, 3


def seeds(*which, shift=0.0, count=20):
    """Networks whose layers differ from seed to seed by far more than their samples vary."""
    found = []
    for seed in which:
        random = np.random.default_rng(seed)
        values = {f"a.s{k}": random.normal(size=(N, 1)) / 9 + random.normal(size=LAYERS)
                  for k in range(count)}  # fmt: skip
        values["a.s1"] += shift
        found.append(made(values, name=f"seed {seed}"))
    return found


def test_two_untrained_networks_are_no_finding_though_they_differ():
    twins = seeds(*range(5))
    result = ci.compare(*seeds(8), *seeds(9), untrained=(twins, twins))
    table = result.table()
    assert table["holds"].sum() > 50  # of 60: about these two networks alone it is true
    assert "No evidence of a difference" in result.headline()
    assert "largest" not in result.headline()
    assert "+" not in result.text().replace(" +", "") and "ooo" in result.text()
    # beside it: what the first two untrained networks differ in, compared in the same way
    alike = ci.compare(twins[0], twins[1]).table()
    assert_allclose(table["untrained_p"], alike["p"])
    assert f"and {alike['holds'].sum()} between two untrained" in result.headline()


def test_a_number_that_never_varies_is_decided_by_its_signs_alone():
    """Resamples of equal values show nothing: a sign test needs 6 of them, and p is never 0."""
    for value, sign in ((0.7, 1), (1.0, 1), (0.5 - 1e-12, 1), (0.4, -1), (1.01, -1)):
        for n in (1, 5, 6, 13):
            same = np.full((1, n), value)
            found = within(same, (0.5, 1.0), studentised(same.T), np.array([n]))
            right, wrong = (found.kept, found.broken)[::sign]
            assert right[0] == pytest.approx(2 * 0.5**n) and wrong[0] == 2


Z = 1.959963984540054


def column(more, less, n):
    return np.repeat([1.0, -1.0, 0.0], [more, less, n - more - less])[:, None]


def numbers(values):
    found = paired_shares(values)
    return tuple(float(one[0]) for one in (found.low, found.high, found.p))


def likeliest(more, less, n, difference):
    """The share of -1 that makes the counts likeliest, by search."""
    low, high = max(0.0, -difference), (1 - difference) / 2

    def unlikely(q):
        shares = np.array([q + difference, q, 1 - 2 * q - difference])
        counts = np.array([more, less, n - more - less])
        with np.errstate(divide="ignore"):
            return -sum(
                c * np.log(max(s, 1e-300)) for c, s in zip(counts, shares, strict=True) if c
            )

    return minimize_scalar(unlikely, bounds=(low, high), options={"xatol": 1e-13}).x


def slow_ends(more, less, n):
    """The ends by root finding on the score."""

    def score(difference):
        q = likeliest(more, less, n, difference)
        error = np.sqrt(n * (2 * q + difference * (1 - difference)))
        return (more - less - n * difference) / error

    middle = (more - less) / n
    return (
        brentq(lambda at: score(at) - Z, -1 + 1e-9, middle - 1e-9),
        brentq(lambda at: score(at) + Z, middle + 1e-9, 1 - 1e-9),
    )


@pytest.mark.parametrize("counts", [(12, 2, 50), (2, 0, 197), (0, 3, 31), (5, 7, 23), (1, 1, 13)])
def test_against_a_search_of_the_likelihood(counts):
    low, high, p = numbers(column(*counts))
    assert_allclose([low, high], slow_ends(*counts), atol=1e-5)
    more, less, _ = counts
    assert p == pytest.approx(binomtest(more, more + less).pvalue)


def test_closed_forms():
    """Without a flip the ends are z^2 / (n + z^2); if all flip, the far end is 1."""
    low, high, p = numbers(column(0, 0, 200))
    assert high == pytest.approx(Z**2 / (200 + Z**2)) and low == -high and p == 1
    low, high, p = numbers(column(29, 0, 29))
    assert high == 1 and low == pytest.approx((29 - Z**2) / (29 + Z**2)) and p == 0.5**28
    # of few flips the interval leaves out 0, the exact test does not: demos/docs/pages/how/edits.md
    low, high, p = numbers(column(4, 0, 200))
    assert (f"{low:.4f}", f"{high:.4f}", p) == ("0.0008", "0.0503", 0.125)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 40))
def test_better_and_worse_are_mirrored(more, less, same):
    n = more + less + same or 1
    one, two = (numbers(column(*given, n)) for given in ((more, less), (less, more)))
    assert one[0] == pytest.approx(-two[1], abs=1e-12) and one[2] == pytest.approx(two[2])
    assert -1 <= one[0] <= (more - less) / n <= one[1] <= 1
