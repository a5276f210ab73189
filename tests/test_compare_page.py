"""The figure, the page and the command of a comparison."""

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
import scipy.stats

import crate_interp as ci
from browser import driven, looked_over, low_contrast, opened, overflow  # noqa: F401
from comparing import made, numbers
from conftest import refuses
from crate_interp.comparisons.result import signed, span, verdict

N, LAYERS, R = 23, 4, "compression.rate_pre"


def sweeps(seeds, shift=0.0, name="made"):
    return [
        made(
            {
                R: numbers(seed, N, LAYERS, shift=shift),
                "sparsity.l1": numbers(seed + 50, N, LAYERS),
            },
            heads={"attention.entropy": numbers(seed + 70, N, LAYERS, 3)},
            weights={"alignment.head_overlap": [shift + 0.01 * seed] * LAYERS},
            name=f"{name} {seed}",
        )
        for seed in seeds
    ]


@pytest.fixture(scope="module")
def single():
    twins = (sweeps((1, 2, 3), name="u"), sweeps((4, 5, 6), name="v"))
    return ci.compare(*sweeps((7,), 1.0, "CRATE"), *sweeps((8,), 0.0, "ViT"), untrained=twins)


@pytest.fixture(scope="module")
def groups():
    return ci.compare(sweeps(range(5), 1.0), sweeps(range(9, 13)), names=("five", "four"))


def lines_of(axes):
    return {line.get_label(): line.get_ydata() for line in axes.lines}


def test_the_figure_draws_both_sides_and_their_difference(single):
    figure = ci.viz.compare(single, R)
    above, below = figure.axes
    table = single.table().query("statistic == 'rate_pre'")
    drawn = lines_of(above)
    np.testing.assert_allclose(drawn["a: CRATE 7"], table["a"])
    np.testing.assert_allclose(drawn["b: ViT 8"], table["b"])
    dashed = [line.get_ydata() for line in above.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(dashed[:2], table[["untrained_a", "untrained_b"]].to_numpy().T)
    (line,) = [
        each
        for each in below.lines
        if each.get_linestyle() == "-" and len(each.get_xdata()) == LAYERS
    ]
    np.testing.assert_allclose(line.get_ydata(), table["difference"])
    band = below.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(table["low"].min())
    assert band[:, 1].max() == pytest.approx(table["high"].max())
    assert len(lines_of(below)["holds"]) == table["holds"].sum()
    assert " ".join(above.get_title().split()) == "Coding rate R of all tokens before attention"
    assert ci.viz.compare(single, R, title="").axes[0].get_title() == ""


@pytest.mark.slow
def test_bands_of_groups_are_over_networks(groups):
    figure = ci.viz.compare(groups, R)
    means = groups.networks().query("side == 'a' and statistic == 'rate_pre' and layer == 0")[
        "mean"
    ]
    low, high = scipy.stats.t.interval(0.95, 4, means.mean(), scipy.stats.sem(means))
    first = figure.axes[0].collections[0].get_paths()[0].vertices
    ends = first[first[:, 0] == 0][:, 1]
    assert (ends.min(), ends.max()) == (pytest.approx(low), pytest.approx(high))
    assert any("5 networks" in text.get_text() for text in figure.legends[0].get_texts())


def test_the_figure_draws_into_axes_and_names_what_is_there(single):
    own = matplotlib.figure.Figure()
    assert ci.viz.compare(single, "attention.entropy", ax=own.subplots()) is own
    refuses("'compression.rate' is none of", lambda: ci.viz.compare(single, "compression.rate"))
    some = ci.compare(*sweeps((1,)), made({R: numbers(1, N, LAYERS)}))
    refuses("'sparsity.l1' was not compared: not", lambda: ci.viz.compare(some, "sparsity.l1"))


def test_the_page_holds_every_number_and_the_csv_too(single, tmp_path):
    page = ci.viz.compare_page(single, tmp_path)
    text = page.read_text()
    for words in (
        "CRATE 7 against ViT 8",
        "How sure?",
        "largest t",
        "by chance at most",
        "Two untrained networks",
        "untrained",
    ):
        assert words in text
    csv = pd.read_csv(tmp_path / "differences.csv")
    pd.testing.assert_frame_equal(csv, single.table(), check_dtype=False)
    assert ci.Comparison.load(tmp_path).meta == single.meta
    for row in single.table().to_dict("records"):
        assert f">{row['a']:.4g}<" in text and f">{row['difference']:.4g}<" in text
    assert text.count("<svg") == 3 and "http" not in text.replace("http://www.w3.org", "")


def test_signs_say_which_side_is_higher():
    row = {"p": 0.01, "holds": True, "difference": -2.0, "excess": 1.0, "excess_p": 0.01}
    row |= {"low": -3.0, "high": -1.0}
    nan = float("nan")
    assert verdict(row | {"difference": 0.0, "p": nan}) == "not applicable"
    assert verdict(row) == "broken" and verdict(row | {"p": 0.2}) == "undecided"
    assert verdict(row | {"p": nan}) == "kept"  # of the weights: by untrained networks
    assert verdict(row | {"p": nan, "excess_p": 0.2}) == "undecided"
    assert verdict(row | {"p": nan, "excess_p": nan}) == "not applicable"
    assert (signed(0.0), signed(-1.23456), signed(2.0)) == ("0", "-1.23", "+2")
    assert span(np.array([1.0, np.nan, -2.0])) == "-2 to +1" and span(np.array([np.nan])) == ""


def test_the_text_has_a_sign_for_each_layer(single):
    lines = single.text().splitlines()
    assert len(lines) == 5 and lines[1].split()[0] == R
    table = single.table().query("statistic == 'rate_pre'")
    wanted = np.where(table["excess_p"] <= 0.05, "+", "o")
    assert lines[1].split()[1] == "".join(np.where(table["holds"], wanted, "?"))
