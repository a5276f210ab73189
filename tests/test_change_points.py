"""The largest step beyond a trend: a slow second form, its invariances, and its p."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crate_interp.training.watch_result import (
    FEWEST,
    LONGEST,
    change_point,
    fitted,
    likeness,
    noise,
    remembering,
    spread,
)

DECAYS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)


def slow(values):
    """F and the place of the step, by least squares for each decay and each place."""
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


def test_two_constant_segments_have_no_end():
    found = change_point(np.array([1.0] * 11 + [2.0] * 18))
    assert found is not None and np.isinf(found.f) and found.at == 11 and found.p == 1 / 400


def test_a_place_is_one_of_the_whole_series():
    late = np.arange(1201) >= 900
    found = change_point(late + 0.1 * np.random.default_rng(1).normal(size=1201))
    assert found is not None and abs(found.at - 900) <= 1201 / 100 + 1201 / LONGEST
    assert found == change_point(late + 0.1 * np.random.default_rng(1).normal(size=1201))


def test_what_a_series_without_a_step_is_made_of():
    shocks = np.array([[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]])
    assert remembering(0.5, shocks).tolist() == [[1.0, 0.5, 2.25], [0.0, -1.0, -0.5]]
    assert spread(np.array([[3.0, 0, 0], [1, -1, 1], [2, 0, 2]])).tolist() == [1, 3, 2]
    assert likeness(np.array([[1.0, 1, 1], [1, -1, 1]])) == pytest.approx([2 / 3, -2 / 3])
    even = noise(0.7, 4000, 31, np.random.default_rng(3))
    assert even.std(axis=0) == pytest.approx(0.51**-0.5, rel=0.05)  # from the first value on


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
