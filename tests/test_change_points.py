"""The largest two-segment F: against SciPy, its invariances, and its p by circular shifts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import f_oneway

from crate_interp.training.change_points import SHIFTS, change_point, largest_f


def slow(values):
    """The largest F of SciPy's analysis of variance over all cuts, and its cut."""
    cuts = range(2, len(values) - 1)
    found = [f_oneway(values[:cut], values[cut:]).statistic for cut in cuts]
    return max(found), cuts[int(np.argmax(found))]


@given(st.integers(0, 2**32 - 1), st.sampled_from([7, 11, 23]))
def test_it_is_the_analysis_of_variance(seed, n):
    values = np.random.default_rng(seed).normal(size=n)
    f, at = largest_f(values[None])
    wanted = slow(values)
    assert f[0] == pytest.approx(wanted[0], rel=1e-9) and at[0] == wanted[1]
    moved, _ = largest_f((5.0 - 3.0 * values)[None])
    assert moved[0] == pytest.approx(f[0], rel=1e-6)


def test_a_change_of_slope_is_found():
    rng = np.random.default_rng(0)
    values = np.concatenate([np.full(29, -2.0), np.full(17, 1.0)]) + 0.1 * rng.normal(size=46)
    found = change_point(values)
    assert found is not None and found.at == 29
    assert found.before == pytest.approx(-2, abs=0.1) and found.after == pytest.approx(1, abs=0.1)
    assert found.p == pytest.approx(2 / 46)  # itself, and the shift that exchanges the segments


def test_what_does_not_change():
    still = change_point(np.full(13, 0.3))
    assert still is not None and still.f == 0 and still.p == 1
    # a wave comes back: every shift of it is as good
    wave = change_point(np.sin(2 * np.pi * np.arange(24) / 24))
    assert wave is not None and wave.p > 0.05
    assert change_point(np.arange(6.0)) is None
    assert change_point(np.array([*range(9), np.nan])) is None


def test_two_constant_segments_have_no_end():
    found = change_point(np.array([1.0] * 5 + [2.0] * 8))
    assert found is not None and np.isinf(found.f) and found.at == 5 and found.p == 2 / 13


def test_p_is_uniform_where_nothing_changes():
    rng = np.random.default_rng(1)
    p = np.array([change_point(rng.normal(size=31)).p for _ in range(600)])
    for level in (0.1, 0.3, 0.5):
        share = (p <= level).mean()
        assert abs(share - level) < 4 * np.sqrt(level * (1 - level) / 600) + 1 / 31, level


def test_long_series_take_shifts_by_chance():
    values = np.random.default_rng(2).normal(size=2003)
    one, again = change_point(values), change_point(values)
    assert one == again and (one.p * (SHIFTS + 1)) == pytest.approx(round(one.p * (SHIFTS + 1)))
