"""Kendall's tau: closed forms, scipy, invariances, and the published tables."""

import math
from pathlib import Path

import kendall
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

TABLES = Path(kendall.__file__).parent / "data" / "srr_tables.csv"
lists = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=13)


def test_tau_of_known_lists():
    assert kendall.tau_b([1, 1, 1, 2], [1, 2, 3, 4]) == pytest.approx(3 / math.sqrt(18))
    assert kendall.tau_b([1, 2, 3, 5], [2, 3, 5, 7]) == 1
    assert kendall.tau_b([7, 5, 3], [2, 3, 5]) == -1
    assert kendall.tau_b([3, 3, 3], [2, 3, 5]) == 0


@settings(max_examples=30, deadline=None)
@given(lists)
def test_tau_is_scipys_where_that_is_defined(pairs):
    x, y = zip(*pairs, strict=True)
    ours, signed = kendall.tau_b(x, y), kendall.tau_b([-value for value in x], y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert ours == 0
    else:
        assert ours == pytest.approx(scipy.stats.kendalltau(x, y).statistic)
    assert signed == pytest.approx(-ours)
    assert kendall.tau_b(np.exp(x) + 3, np.power(y, 3)) == pytest.approx(ours)


def test_standard_error_is_that_of_permutations():
    assert kendall.standard_error(31) == pytest.approx(0.127, abs=5e-4)
    random = np.random.default_rng(0)
    draws = [kendall.tau_b(range(7), random.permutation(7)) for _ in range(2000)]
    assert np.std(draws) == pytest.approx(kendall.standard_error(7), rel=0.05)


def test_granulated_compares_along_one_axis_only():
    rows = [
        {"width": width, "rate": rate, "gap": 10 * width + rate, "m": width - 10 * rate, "n": rate}
        for width in (1, 2, 3)
        for rate in (1, 2)
    ]
    psi, draws = kendall.granulated(pd.DataFrame(rows), ("width", "rate"), "m")
    assert psi == {"width": 1, "rate": -1}
    assert (draws == 0).all()
    assert kendall.granulated(pd.DataFrame(rows), ("width", "rate"), "n")[0]["width"] == 0


@pytest.fixture(scope="module")
def published():
    return pd.read_csv(TABLES)


def test_published_psi_is_the_mean_of_four_but_for_misprints(published):
    means = published[["batch", "lr", "drop", "type"]].mean(axis=1)
    wrong = (means - published["psi"]).abs() > 6e-4
    assert (wrong == (published["misprint"] == "yes")).all()
    assert published[wrong]["measure"].tolist() == [
        "l2-norm-init", "pac-bayes-init", "fro/spec", "param-norm",
    ]  # fmt: skip


@pytest.mark.parametrize(("number", "networks"), [(1, 31), (5, 32)])
def test_published_tau_lie_on_the_lattice_of_so_many_networks(published, number, networks):
    """Without ties tau is (pairs - 2 k) / pairs; the number of parameters has ties."""
    rows = published[(published["table"] == number) & (published["measure"] != "params")]

    def fit(n):
        pairs = n * (n - 1) // 2
        lattice = np.arange(-pairs, pairs + 1, 2) / pairs
        return sum(np.abs(lattice - tau).min() < 5.1e-4 for tau in rows["overall"])

    assert [n for n in range(20, 54) if fit(n) >= 20] == [networks]
