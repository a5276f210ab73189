"""Every interval that a headline, page or table prints holds the truth in 93 % of experiments.

An experiment draws n samples; the experiments of a line are columns. Intervals of fewer than two
samples are not given.
"""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, multinomial

import crate_interp as ci
from crate_interp.circuits import circuit_scores
from crate_interp.stats.contrasts import Spread, against_networks, contrast, paired
from crate_interp.stats.intervals import (
    interval_of_sums,
    linearised_ratio,
    mean_interval,
    paired_shares,
    share_interval,
    student_interval,
)
from crate_interp.sweeps import findings

COUNTS = (2, 4, 8, 32, 256)
LEAST = 0.93
many = pytest.mark.parametrize(
    "n", [pytest.param(n, marks=[pytest.mark.slow] * (n != 8)) for n in COUNTS]
)


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
    assert covered(student_interval(mean, error, n), 3) >= LEAST
    assert covered(interval_of_sums(pd.DataFrame(sums))[1:], 3) >= LEAST
    rows = pd.DataFrame({"mean": mean, "std": error * n**0.5, "n": n})
    assert covered(independent(n).mean_ends(rows), 3) >= LEAST


@many
def test_a_change_in_a_headline(n):
    """A rate that rises by 5 % on average, in many layers."""
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
    assert covered(mean_interval(linearised_ratio(above, below)), 0.7) >= LEAST
    skewed = np.exp(values)
    assert covered(mean_interval(skewed), np.exp(0.5)) >= (0.92 if n >= 32 else 0.88)


@pytest.mark.parametrize("n", sorted({*COUNTS, *range(2, 48)}))
def test_shares(n):
    """Summed over all outcomes: no chance is left."""
    shares, hits = np.linspace(0.1, 0.9, 17)[:, None], np.arange(n + 1)
    low, high = share_interval(hits, n)
    held = (low <= shares) & (shares <= high)
    assert ((binom.pmf(hits, n, shares) * held).sum(axis=1) >= LEAST).all()


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
        low, high = paired_shares(values).ends
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


def test_one_sample_has_no_interval():
    values = np.zeros((1, 3))
    for ends in (
        mean_interval(values),
        mean_interval(values == 0),
        paired(values).ends,
        student_interval(values[0], values[0], 1),
    ):
        assert np.isnan(ends).all()
