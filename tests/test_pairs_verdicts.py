"""From numbers of networks to verdicts: intervals, adjusted p, whose a property is, the finding."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import pair_verdicts as demo
from pair_verdicts import Interval, Property

SPARSE = Property("sparsity", "sparsity.hoyer", 1, "")
RATE = Property("compression", "rate.change", -1, "", "0", "key")


def table(**values):
    """Rows as the demo makes them: kind_subspaces_state -> source -> a value for each seed."""
    rows = []
    for name, own in values.items():
        kind, subspaces, state = name.split("_")
        rows += [
            dict(kind=kind, subspaces=subspaces, trained=state == "trained", source=source, seed=s)
            | dict(value=value)
            for source, numbers in own.items()
            for s, value in reversed(list(enumerate(numbers)))
        ]
    return pd.DataFrame(rows)


def test_intervals_are_students_and_welchs():
    a, b = np.array([1.0, 2.0, 4.0, 3.0, 2.5]), np.array([0.5, 0.1, 0.7, 0.2, 0.6])
    own = demo.mean_interval(a)
    half = 2.7764451051977987 * np.sqrt(a.var(ddof=1) / 5)  # t of 4 degrees of freedom
    assert (own.low, own.value, own.high) == pytest.approx((a.mean() - half, a.mean(), own.high))
    assert own.high - own.value == pytest.approx(half)
    v, w = a.var(ddof=1) / 5, b.var(ddof=1) / 5
    freedom = (v + w) ** 2 / (v**2 / 4 + w**2 / 4)
    found = demo.welch(a, b)
    from scipy.stats import t

    assert found.value == pytest.approx(a.mean() - b.mean())
    assert found.low == pytest.approx(found.value - t.ppf(0.975, freedom) * np.sqrt(v + w))
    assert found.p == pytest.approx(2 * t.sf(found.value / np.sqrt(v + w), freedom))
    from scipy.stats import ttest_ind

    theirs = ttest_ind(a, b, equal_var=False)
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    same = demo.welch([1.0, 1.0], [2.0, 2.0])  # no spread is no test
    assert same.value == -1 and np.isnan([same.low, same.high, same.p]).all()
    assert np.isnan(demo.mean_interval([0.0, 0.0]).p) and np.isnan(demo.mean_interval([1.0]).low)
    assert np.isnan(demo.welch([1.0], [2.0]).p)


UP, DOWN, NONE = Interval(2, 1, 3, 0.01), Interval(-2, -3, -1, 0.01), Interval(0.1, -1, 1.2, 0.8)


@pytest.mark.parametrize(
    ("gains", "excess", "holds", "whose"),
    [
        ((UP, NONE), UP, True, "CRATE"),
        ((UP, DOWN), UP, True, "CRATE"),
        ((UP, NONE), UP, False, "undecided"),
        ((NONE, UP), DOWN, True, "the ViT"),
        ((NONE, UP), DOWN, False, "undecided"),
        ((UP, UP), UP, True, "more to CRATE"),
        ((UP, UP), DOWN, True, "more to the ViT"),
        ((UP, UP), NONE, False, "both"),
        ((NONE, DOWN), UP, True, "neither"),
        ((DOWN, DOWN), UP, True, "neither"),
    ],
)
def test_a_verdict_follows_from_the_gains_and_the_way_wanted(gains, excess, holds, whose):
    assert demo.verdict(1, gains, excess, holds) == whose
    turned = [Interval(-one.value, -one.high, -one.low, one.p) for one in (*gains, excess)]
    assert demo.verdict(-1, (turned[0], turned[1]), turned[2], holds) == whose


def test_numbers_become_rows_seed_by_seed_and_a_sentence():
    start = [0.1, 0.2, 0.3, 0.4, 0.5]
    up = [0.3, 0.41, 0.52, 0.6, 0.71]  # about 0.2 more, seed by seed, whatever the start
    rate = {"rate.change": [0.0, 0.1, -0.1, 0.05, -0.02]}
    lower = {"rate.change": [-1.0, -0.9, -1.1, -0.98, -1.01]}
    rows = demo.judged(
        table(
            crate__trained={"sparsity.hoyer": up} | lower,
            crate__untrained={"sparsity.hoyer": start} | rate,
            vit_value_trained={"sparsity.hoyer": start},
            vit_value_untrained={"sparsity.hoyer": start[::-1]},
            vit_key_trained=lower,
            vit_key_untrained=rate,
        ),
        (SPARSE, RATE),
    )
    sparse, rates = rows
    assert sparse.gains[0].value == pytest.approx(0.208)
    assert sparse.gains[0].high - sparse.gains[0].low < 0.03  # the starts cancel
    assert sparse.untrained == pytest.approx((0.3, 0.3))
    assert sparse.difference.value == pytest.approx(0.208)
    assert sparse.verdict == "undecided"  # the ViT's gains scatter too much to tell
    assert rates.verdict == "both" and not rates.holds and rates.excess.value == 0
    words = demo.finding(rows, 5)
    assert (
        words.count(". ") == 1 and "to both, by gains that are not told apart: compression" in words
    )
    assert "brings 0 of 2 to CRATE more" in words and "ahead of it in 0" in words
