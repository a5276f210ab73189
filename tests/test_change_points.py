"""The largest step beyond a trend: a slow second form, its invariances, and its p."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crate_interp.training.change_points import (
    FEWEST,
    LONGEST,
    change_point,
    fitted,
    likeness,
    noise,
    p_values,
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
    for moved in (5.0 - 3.0 * values, values + 7 * t - 2):
        assert fitted(moved[None]).f[0] == pytest.approx(fit.f[0], rel=1e-6)


def test_a_change_of_slope_is_found():
    random = np.random.default_rng(0)
    values = np.concatenate([np.full(29, -2.0), np.full(17, 1.0)]) + 0.1 * random.normal(size=46)
    found = change_point(values)
    assert found is not None and found.at == 29 and found.p == 1 / 1000
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
    assert found is not None and np.isinf(found.f) and found.at == 11 and found.p == 1 / 1000


def test_a_place_is_one_of_the_whole_series():
    late = np.arange(1201) >= 900
    found = change_point(late + 0.1 * np.random.default_rng(1).normal(size=1201))
    assert found is not None and abs(found.at - 900) <= 1201 / 100 + 1201 / LONGEST
    assert found == change_point(late + 0.1 * np.random.default_rng(1).normal(size=1201))


@pytest.mark.parametrize("phi", [0.0, 0.7, 0.9])
def test_noise_with_a_memory_is_no_step(phi):
    n, series = 31, 600
    course = 3 * np.exp(-np.arange(n) / 7)
    fit = fitted(noise(phi, series, n, np.random.default_rng(1)) + course)
    p = p_values(fit.f, likeness(fit.rest), n)
    for level in (0.05, 0.1, 0.3):
        chance = 3 * np.sqrt(level * (1 - level) / series)
        assert (p <= level).mean() <= 1.2 * level + chance
    # and it finds what there is
    late = np.arange(n) >= 15
    stepped = fitted(noise(phi, series, n, np.random.default_rng(2)) + 8 * late)
    assert (p_values(stepped.f, likeness(stepped.rest), n) <= 0.05).mean() > 0.8
