"""What comparisons and audits lead with: what exceeds noise, of planted numbers."""

import numpy as np
import pytest

import crate_interp as ci
from comparing import made
from crate_interp.stats.bootstrap import studentised
from crate_interp.stats.verdicts import within

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
    assert "no evidence of a difference" in result.headline()
    assert "largest" not in result.headline()
    assert "+" not in result.text().replace(" +", "") and "ooo" in result.text()
    # beside it: what the first two untrained networks differ in, compared in the same way
    alike = ci.compare(twins[0], twins[1]).table()
    np.testing.assert_allclose(table["untrained_p"], alike["p"])
    assert f"differ in {alike['holds'].sum()}." in result.headline()


def test_a_number_that_never_varies_is_decided_by_its_signs_alone():
    """Resamples of equal values show nothing: a sign test needs 6 of them, and p is never 0."""
    for value, sign in ((0.7, 1), (1.0, 1), (0.5 - 1e-12, 1), (0.4, -1), (1.01, -1)):
        for n in (1, 5, 6, 13):
            same = np.full((1, n), value)
            found = within(same, (0.5, 1.0), studentised(same.T), np.array([n]))
            right, wrong = (found.kept, found.broken)[::sign]
            assert right[0] == pytest.approx(2 * 0.5**n) and wrong[0] == 2
