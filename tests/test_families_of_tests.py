"""Families of tests: the level over all columns, closed forms, and what p does not depend on."""

import math
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

import crate_interp as ci
from comparing import made
from crate_interp.stats import bootstrap, intervals
from crate_interp.stats.contrasts import paired
from crate_interp.stats.intervals import LEAST_ERROR, LEVEL, UNSEEN, holm

DRAWN = {
    "normal": lambda random, size: random.normal(size=size),
    "t": lambda random, size: random.standard_t(3, size=size),
    "lognormal": lambda random, size: random.lognormal(size=size) - np.exp(0.5),
    "zeros": lambda random, size: np.where(random.random(size) < 0.8, 0, random.normal(size=size)),
}


@contextmanager
def resamples(count):
    """Fewer resamples than 10,000, for speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "RESAMPLES", count)
        bootstrap._counts.cache_clear()
        yield
    bootstrap._counts.cache_clear()


def joint(values):
    """p of the largest t alone: no column has a p of its own that could raise it."""
    return intervals.max_t(values, np.zeros(values.shape[1]))


def false_families(draw, n, columns, families):
    random = np.random.default_rng([n, columns])
    tables = (draw(random, (n, columns)) for _ in range(families))
    return sum((intervals.max_t(table, paired(table).p) <= LEVEL).any() for table in tables)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize(
    "n, families", [(32, 40), *(pytest.param(n, 400, marks=pytest.mark.slow) for n in (8, 32, 67))]
)
def test_nothing_is_found_where_nothing_is(name, n, families):
    """More than so many of the families once in a thousand times, if the level is .06."""
    with resamples(499):
        assert false_families(DRAWN[name], n, 23, families) <= binom.isf(1e-3, families, 0.06)


def test_one_shifted_column_is_found():
    random, found = np.random.default_rng(0), []
    for _ in range(7):
        values = random.normal(size=(32, 23))
        values[:, 5] += 1.2
        found.append(intervals.max_t(values, paired(values).p) <= LEVEL)
    assert np.sum(found, axis=0)[5] >= 6 and np.sum(found) <= 9


def test_of_five_samples_against_every_resample(monkeypatch):
    """All 5^5 resamples are equally likely, so p is a share of 3,125, in each step."""
    monkeypatch.setattr(intervals, "UNSEEN", 1)
    values = np.array(
        [[1.0, 0.2, 0.7], [2.0, -1.4, 1.1], [2.5, 0.4, -0.1], [1.4, 0, 2], [3, -1, 1]]
    )
    t, draws = [], []
    for column in values.T:
        rows = column[list(product(range(5), repeat=5))]
        error = rows.std(axis=1, ddof=1) / 5**0.5
        own, off = column.std(ddof=1) / 5**0.5, rows.mean(axis=1) - column.mean()
        draws.append(off / np.maximum(error, LEAST_ERROR * own))
        t.append(0.8 * column.mean() / own)
    order = np.argsort(np.abs(t))[::-1]
    wanted = np.zeros(3)
    for place, column in enumerate(order):
        sign = np.sign(t[column])
        largest = np.max([sign * draws[other] for other in order[place:]], axis=0)
        own = min(2 * (largest >= sign * t[column]).mean(), 1)
        wanted[column] = max(own, *wanted[order[:place]], 0)
    assert min(t) < 0 and wanted.min() < 0.5
    np.testing.assert_allclose(joint(values), wanted, atol=4 * 1 / bootstrap.RESAMPLES**0.5)


def test_of_many_samples_it_is_holms_p_or_less():
    values = np.random.default_rng(3).normal(size=(211, 7)) + 0.15
    raw = paired(values)
    alone = np.concatenate([joint(values[:, at : at + 1]) for at in range(7)])
    np.testing.assert_allclose(alone, raw.p, atol=0.03)
    adjusted = intervals.max_t(values, raw.p)
    assert (adjusted >= raw.p).all() and (adjusted <= holm(raw.p) + 0.03).all()
    assert (np.diff(adjusted[np.argsort(raw.p)]) >= -0.01).all()
    held = adjusted <= LEVEL
    assert (np.sign(raw.low[held]) == np.sign(raw.high[held])).all() and held.any()


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.sampled_from([11, 41]))
def test_p_depends_on_no_scale_sign_or_order_of_columns(seed, scale, n):
    random = np.random.default_rng(seed)
    values = random.normal(size=(n, 5)) ** 3
    order = random.permutation(5)
    with resamples(199):
        wanted = joint(values)
        # a resample that rounding moves across t is worth 2 / 200
        close = dict(atol=2.1 / 200)
        np.testing.assert_allclose(joint(scale * values), wanted, **close)
        np.testing.assert_allclose(joint(-values), wanted, **close)
        np.testing.assert_allclose(joint(values[:, order]), wanted[order], **close)
        flat = np.column_stack([values, np.full(n, 3.0), np.zeros(n)])
        np.testing.assert_allclose(joint(flat)[:5], wanted, **close)


def test_p_is_never_0_and_no_spread_is_no_test():
    wide = np.column_stack([np.arange(1, 14.0), np.full(13, 2.0), np.full(13, 0.1 + 0.2)])
    wide[::2, 2] = 0.3  # equal up to rounding
    wide = np.column_stack([wide, np.zeros(13), 1e6 + np.arange(13)])
    found = paired(wide)
    p = intervals.max_t(wide, found.p)
    assert 0 < p[4] <= p[0] <= 0.01
    for none in (found.p, found.low, found.high, p):
        assert np.isnan(none).tolist() == [False, True, True, True, False]
    for few in (np.full((2, 3), 0.7), np.ones((1, 3)), np.full((5, 3), np.nan)):
        assert np.isnan([*paired(few).ends, paired(few).p, joint(few)]).all()
    assert joint(np.zeros((5, 0))).shape == (0,)


def test_samples_that_a_column_lacks_are_left_out():
    values = np.random.default_rng(6).normal(size=(17, 5)) + 0.5
    values[::3, 1] = np.nan
    whole = joint(values)
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(joint(values[:, 1:2]), joint(values[~np.isnan(values[:, 1]), 1:2]))


def test_a_column_of_mostly_zeros_does_not_hide_the_others():
    """One sample of 31 differs: a third of the resamples have no spread, so t* has a bound."""
    values = np.random.default_rng(7).normal(size=(31, 3)) + [1.5, 0, 0]
    values[:, 2] = np.eye(31)[4]
    assert joint(values)[0] <= 0.01
    # that one sample has t = 1, so its largest t* is 1 / LEAST_ERROR
    t = values[:, 0].mean() / (values[:, 0].std(ddof=1) / math.sqrt(31))
    assert 1 / LEAST_ERROR < (1 - UNSEEN / 31) * t


def test_a_comparison_says_how_many_differences_hold_by_chance():
    random = np.random.default_rng(0)
    values = {f"a.s{number}": random.normal(size=(32, 3)) for number in range(10)}
    others = {key: random.normal(size=(32, 3)) for key in values} | {"a.s3": values["a.s3"] - 1}
    others["a.s4"] = values["a.s4"] - random.normal(2, 1, size=(32, 3))
    result = ci.compare(made(values), made(others))
    table = result.table()
    # a.s3 differs by 1 in every sample: no spread, no test
    rows = table[table["statistic"] == "s3"]
    assert rows[["low", "high", "p"]].isna().all(axis=None) and not rows["holds"].any()
    assert table[table["holds"]]["statistic"].nunique() < 4 and (table["p"].dropna() > 0).all()
    words = f" {table['holds'].sum()} of 27 differences hold (by chance at most 1.4)"
    assert words in result.headline()
