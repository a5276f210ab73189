"""The difference of two paired shares against a slow likelihood, by symmetry, and by coverage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binomtest

from crate_interp.stats.bootstrap import studentised
from crate_interp.stats.intervals import paired_shares

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


def slow(more, less, n):
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
    np.testing.assert_allclose([low, high], slow(*counts), atol=1e-5)
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


def test_few_flips_leave_out_0_no_more_often_than_asked():
    """One in two hundred flips each way: the bootstrap-t leaves out 0 in a fifth of the cases."""
    random = np.random.default_rng(0)
    flips = random.choice([1.0, -1.0, 0.0], p=[0.005, 0.005, 0.99], size=(200, 500))
    found = paired_shares(flips)
    low, high, p = found.low, found.high, found.p
    assert ((low > 0) | (high < 0)).mean() <= 0.05 and (p <= 0.05).mean() <= 0.05
    ends = studentised(flips[:, :100]).interval()
    assert ((ends[0] > 0) | (ends[1] < 0)).mean() > 0.1
