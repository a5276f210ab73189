"""Intervals and families of tests: every interval holds the truth in 93 % of experiments."""

import math
from contextlib import contextmanager
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, multinomial

import crate_interp as ci
from crate_interp.circuits import circuit_scores
from crate_interp.stats import bootstrap, intervals
from crate_interp.stats.contrasts import Spread, against_networks, contrast, paired
from crate_interp.sweeps import findings
from crate_interp.training.watch_result import FEWEST, change_point, fitted, noise
from selection import few_of

COUNTS = (2, 4, 8, 32, 256)
LEAST = 0.93
many = pytest.mark.parametrize("n", few_of(COUNTS, [8]))


def independent(n):
    """A result of n samples that are not grouped, without tables."""
    empty = {name: pd.DataFrame() for name in ci.SweepResult.STORED}
    return ci.SweepResult(empty, {"n_samples": n, "unit": "images", "data": []})


def covered(ends, truth):
    low, high = ends
    return ((low <= truth) & (truth <= high)).mean()


@many
def test_students(n):
    values = np.random.default_rng(n).normal(3, 2, size=(n, 4000))
    mean, error = values.mean(axis=0), values.std(axis=0, ddof=1) / n**0.5
    sums = {"n": n, "total": values.sum(axis=0), "squares": (values**2).sum(axis=0)}
    assert covered(intervals.student_interval(mean, error, n), 3) >= LEAST
    assert covered(intervals.interval_of_sums(pd.DataFrame(sums))[1:], 3) >= LEAST
    rows = pd.DataFrame({"mean": mean, "std": error * n**0.5, "n": n})
    assert covered(independent(n).mean_ends(rows), 3) >= LEAST


@many
def test_a_change_in_a_headline(n):
    random, layers = np.random.default_rng(n), 4000
    before = random.uniform(90, 110, size=(n, layers))
    after = before * random.normal(1.05, 0.1, size=before.shape)
    change = findings._change(independent(n), range(layers), pd.DataFrame(before), after)
    assert covered((change.low, change.high), 0.05) >= LEAST


@pytest.mark.parametrize(
    "columns", [400, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@many
def test_the_bootstrap_t(n, columns):
    """Of skewed samples as well: lognormal ones, of which Student's interval covers .83 at 8."""
    random = np.random.default_rng(n)
    values = random.normal(size=(n, columns))
    assert covered(paired(values).ends, 0) >= LEAST
    below = random.gamma(4, 0.25, size=(n, columns))
    above = 0.7 * below + 0.1 * values
    assert covered(intervals.mean_interval(intervals.linearised_ratio(above, below)), 0.7) >= LEAST
    skewed = np.exp(values)
    assert covered(intervals.mean_interval(skewed), np.exp(0.5)) >= (0.92 if n >= 32 else 0.88)


@many
def test_paired_shares(n):
    """Exactly where there are few outcomes, else by drawing them."""
    shares = [(0.005, 0.005), (0.02, 0.05), (0.1, 0.1), (0.3, 0.1), (0.1, 0.3), (0.4, 0.4)]
    random = np.random.default_rng(n)
    for one, other in shares:
        odds = [one, other, 1 - one - other]
        if n <= 32:
            counts = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
            weights = multinomial.pmf(counts, n, odds)
        else:
            counts, weights = random.multinomial(n, odds, size=2000), np.full(2000, 1 / 2000)
        values = np.stack([np.repeat([1.0, -1.0, 0.0], each) for each in counts], axis=1)
        low, high = intervals.paired_shares(values).ends
        held = (low <= one - other) & (one - other <= high)
        assert weights[held].sum() >= LEAST, odds


@many
def test_groups_of_networks(n):
    random = np.random.default_rng(n)
    for spread in (1, 3, 10):
        one, two = random.normal(size=(n, 4000)), spread * random.normal(size=(n, 4000))
        spreads = [Spread(one, 1 / n), Spread(two, 1 / n)]
        found = contrast(one.mean(axis=0) - two.mean(axis=0), spreads)
        assert covered(found.ends, 0) >= LEAST, spread


@many
@pytest.mark.parametrize("networks", COUNTS)
def test_one_network_against_others(n, networks):
    """Samples scatter by 0.1 to 30 times as much as networks; their error is measured as well."""
    random = np.random.default_rng([n, networks])
    for scatter in (0.1, 1, 3, 30):
        values = scatter * n**0.5 * random.normal(size=(n, 3000))
        own = random.normal(size=3000) + values.mean(axis=0)
        error = values.std(axis=0, ddof=1) / n**0.5
        others = random.normal(size=(networks, 3000))
        found = against_networks(own, error, others, np.full(3000, n))
        assert covered(found.ends, 0) >= LEAST, scatter


@pytest.mark.parametrize(
    "experiments", [60, pytest.param(200, marks=pytest.mark.slow)], ids=["few", "many"]
)
@many
def test_scores_of_a_circuit(n, experiments):
    """Of a largest ratio among equal ones too, whose resampled quantiles cover .77 at 32."""
    random = np.random.default_rng(n)
    held = {"faithfulness": 0, "completeness": 0, "minimality": 0}
    truth = {"faithfulness": 0.75, "completeness": 0.15, "minimality": 0.1}

    def drawn(*means):
        return np.array(means) + 0.5 * random.normal(size=(n, len(means)))

    for _ in range(experiments):
        gaps, costs = drawn(0.2, -0.3, 0.3, 0.1, 0.1, 0.2), drawn(0.2, 0.6, -1, 1)
        span, own = drawn(2), drawn(1.5)
        above = {"faithfulness": own, "completeness": gaps, "minimality": costs}
        parts = circuit_scores._Parts(span, above)
        for name, (low, high) in circuit_scores._intervals(parts).items():
            held[name] += low <= truth[name] <= high
    assert min(held.values()) >= LEAST * experiments, held


DRAWN = {
    "normal": lambda random, size: random.normal(size=size),
    "t": lambda random, size: random.standard_t(3, size=size),
    "lognormal": lambda random, size: random.lognormal(size=size) - np.exp(0.5),
    "zeros": lambda random, size: np.where(random.random(size) < 0.8, 0, random.normal(size=size)),
}


@contextmanager
def resamples(count):
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
    return sum(
        (intervals.max_t(table, paired(table).p) <= intervals.LEVEL).any() for table in tables
    )


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
        found.append(intervals.max_t(values, paired(values).p) <= intervals.LEVEL)
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
        draws.append(off / np.maximum(error, intervals.LEAST_ERROR * own))
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


def test_a_column_of_mostly_zeros_does_not_hide_the_others():
    """One sample of 31 differs: a third of the resamples have no spread, so t* has a bound."""
    values = np.random.default_rng(7).normal(size=(31, 3)) + [1.5, 0, 0]
    values[:, 2] = np.eye(31)[4]
    assert joint(values)[0] <= 0.01
    # that one sample has t = 1, so its largest t* is 1 / LEAST_ERROR
    t = values[:, 0].mean() / (values[:, 0].std(ddof=1) / math.sqrt(31))
    assert 1 / intervals.LEAST_ERROR < (1 - intervals.UNSEEN / 31) * t


DECAYS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)


def slow(values):
    n = len(values)
    t = np.arange(n) / n
    left, stepped = [], []
    for decay in DECAYS:
        trend = [np.ones(n), t, np.exp(-t / decay)]
        left.append(_squares(trend, values))
        for cut in range(3, n - 2):
            stepped.append((_squares([*trend, np.arange(n) >= cut], values), cut))
    best, cut = min(stepped)
    return (n - 5) * (min(left) - best) / best, cut


def _squares(columns, values):
    design = np.stack(columns, axis=1).astype(float)
    found = np.linalg.lstsq(design, values, rcond=None)[0]
    return ((values - design @ found) ** 2).sum()


@given(st.integers(0, 2**32 - 1), st.sampled_from([23, 31]))
def test_it_is_least_squares(seed, n):
    values = np.random.default_rng(seed).normal(size=n)
    fit = fitted(values[None])
    wanted = slow(values)
    assert fit.f[0] == pytest.approx(wanted[0], rel=1e-6) and fit.at[0] == wanted[1]
    t = np.arange(n) / n
    left = fit.leverage[0]
    assert (left > 0).all() and (left < 1 + 1e-12).all() and left.sum() == pytest.approx(3)
    for moved in (5.0 - 3.0 * values, values + 7 * t - 2):
        assert fitted(moved[None]).f[0] == pytest.approx(fit.f[0], rel=1e-6)


def test_a_change_of_slope_is_found():
    random = np.random.default_rng(0)
    values = np.concatenate([np.full(29, -2.0), np.full(17, 1.0)]) + 0.1 * random.normal(size=46)
    found = change_point(values)
    assert found is not None and found.at == 29 and found.p == 1 / 400
    assert found.before == pytest.approx(-2, abs=0.1) and found.after == pytest.approx(1, abs=0.1)


def test_what_does_not_step():
    still = change_point(np.full(23, 0.3))
    assert still is not None and still.f == 0 and still.p == 1
    t = np.arange(37) / 37
    for smooth in (2 * t, np.exp(-t / 0.25), 3 - np.exp(-t / 0.5)):
        trend = change_point(smooth)
        assert trend is not None and trend.f == 0 and trend.p == 1
    assert change_point(np.arange(FEWEST - 1.0)) is None
    assert change_point(np.array([*range(29), np.nan])) is None


def test_noise_in_few_values_is_too_little():
    values = np.zeros(29)
    values[[7, 8]] = 1, -1
    assert change_point(values) is None
    values[11:] += 9  # now it is a step
    found = change_point(values)
    assert found is not None and found.at == 11 and found.p <= 0.05


@pytest.mark.parametrize("series", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["memory", "fading"])
def test_noise_that_remembers_or_fades_is_no_step(kind, series):
    """Where there is none; and where there is one, it is found."""
    n, random = 37, np.random.default_rng(1)
    t = np.arange(n)
    phi, deviation = (0.7, np.ones(n)) if kind == "memory" else (0.0, np.cos(np.pi * t / 75) ** 2)
    drawn = noise(phi, series, n, random) * deviation + 3 * np.exp(-t / 7)
    p = np.array([one.p for values in drawn if (one := change_point(values)) is not None])
    assert len(p) > 0.9 * series
    for level in (0.05, 0.1, 0.3):
        chance = 3 * np.sqrt(level * (1 - level) / series)
        assert (p <= level).mean() <= 1.2 * level + chance
    late = t >= 15
    drawn = noise(0.0, 20, n, random) * deviation + 8 * late
    assert sum(one is not None and one.p <= 0.05 for one in map(change_point, drawn)) > 9
