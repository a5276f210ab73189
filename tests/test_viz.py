"""Figures: what they draw is what was measured."""

import numpy as np
import pytest
import torch
from scipy import stats

import crate_interp as ci
from conftest import BATCH, HEADS, LAYERS, make, refuses


@pytest.fixture(scope="module", params=["crate", "crate-alpha"])
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def data():
    return torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def result(model, data):
    return ci.sweep(model, data, progress=False)


@pytest.fixture(scope="module")
def twins(data):
    return [ci.sweep(make(seed=seed), data, progress=False) for seed in (5, 6)]


def lines(figure):
    """The lines of a figure but for the dotted one of chance."""
    every = figure.axes[0].get_lines()
    return [line for line in every if len(line.get_xdata()) and line.get_linestyle() != ":"]


def test_a_statistic_per_sample(result, twins):
    figure = ci.viz.layers(result, "compression.rate_pre", twins)
    mean, dashed = lines(figure)
    rows = result.layers().query("statistic == 'rate_pre'")
    np.testing.assert_allclose(mean.get_ydata(), rows["mean"])
    assert list(mean.get_xdata()) == list(range(LAYERS + 1))
    expected = np.mean([t.layers().query("statistic == 'rate_pre'")["mean"] for t in twins], axis=0)
    np.testing.assert_allclose(dashed.get_ydata(), expected)
    assert dashed.get_linestyle() == "--"


def bands(axes):
    """Lower and upper ends of each band that is drawn, from its outline."""
    found = []
    for band in axes.collections:
        if len(band.get_paths()) and len(points := band.get_paths()[0].vertices) > 2:
            places = sorted(set(points[:, 0]))
            ends = [[points[points[:, 0] == x, 1].min() for x in places]]
            found.append([*ends, [points[points[:, 0] == x, 1].max() for x in places]])
    return found


def test_the_band_of_every_line_is_the_interval_of_its_mean(model, data):
    """Against SciPy's own interval, sample by sample."""
    results = [ci.sweep(model, part, progress=False) for part in (data, data[:3], data[1:])]
    figure = ci.viz.layers(results, "sparsity.zero_fraction", labels=["a", "b", "c"])
    drawn = bands(figure.axes[0])
    assert len(drawn) == 3
    for result, (low, high) in zip(results, drawn, strict=True):
        table = result.samples().dropna()
        for layer, own in table.groupby("layer")["sparsity.zero_fraction"]:
            wanted = stats.t.interval(0.95, len(own) - 1, own.mean(), stats.sem(own))
            assert (low[layer], high[layer]) == pytest.approx(wanted, rel=1e-6)
    alone = bands(ci.viz.layers(results[0], "sparsity.zero_fraction").axes[0])
    np.testing.assert_allclose(alone, drawn[:1])
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    drawn = ["a", "b", "c", "95 % interval of the mean, n = 3 to 5 images", "a ReLU of noise"]
    assert words == drawn


def test_attention_on_image(model, images):
    _, cache = model.run_with_cache(images)
    figure = ci.viz.attention_on_image(cache, -1, images)
    assert len(figure.axes) == BATCH * (HEADS + 1)
    panel = figure.axes[(HEADS + 1) + 1 + 3]  # second image, fourth head
    (shown,) = panel.get_images()  # the map alone: a bright picture below it would look attended
    (picture,) = figure.axes[HEADS + 1].get_images()
    expected = cache["pattern", LAYERS - 1][1, 3, 0, 1:].reshape(3, 4)
    np.testing.assert_allclose(shown.get_array(), expected)
    assert shown.get_extent() == [0, 20, 6, 0] and shown.get_alpha() is None
    assert np.asarray(picture.get_array()).shape == (6, 20, 3)
    itself = cache["pattern", LAYERS - 1][1, 3, 0, 0]
    assert f"max {expected.max():.2g}\nCLS {itself:.2g}" == panel.get_xlabel()
    refuses("does not belong to images", lambda: ci.viz.attention_on_image(cache, 0, images[:1]))
    _, cache = model.run_with_cache(images, names_filter="hook_embed")
    with pytest.raises(KeyError, match="the cache lacks 'blocks.0.attn.hook_pattern'"):
        ci.viz.attention_on_image(cache, 0, images)
