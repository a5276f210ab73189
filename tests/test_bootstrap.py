"""Bootstrap intervals against scipy's, and what they do not depend on."""

import sys

import numpy as np
import pytest
import scipy.stats

from crate_interp.sweeps.bootstrap import intervals


def test_intervals_are_scipys():
    values = np.random.default_rng(1).normal(size=50)
    found = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20000, random_state=0
    )
    wanted = found.confidence_interval
    pairs = np.stack([values, np.full(50, 0.1)], axis=1)
    low, high = intervals(pairs)
    assert (low[0], high[0]) == pytest.approx(
        (wanted.low, wanted.high), abs=0.02
    )  # its own noise: std 0.14 / sqrt(2000)
    assert (low[1], high[1]) == (0.1, 0.1)  # where no value differs, no resample does
    assert np.isnan(intervals(pairs[:1])).all()


def test_intervals_do_not_depend_on_other_columns_or_on_how_many_draws_are_held(monkeypatch):
    values = np.random.default_rng(2).normal(size=(31, 3))
    whole = intervals(values)
    np.testing.assert_allclose(
        intervals(values[:, 1:2]), [bound[1:2] for bound in whole], rtol=1e-12
    )
    monkeypatch.setattr(sys.modules["crate_interp.sweeps.bootstrap"], "_NUMBERS", 31 * 17)
    np.testing.assert_allclose(intervals(values), whole, rtol=1e-12)
