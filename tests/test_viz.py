"""Figures: what they draw is what was measured."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2 import UndefinedError

import crate_interp as ci
from conftest import BATCH, HEADS, LAYERS, make
from crate_interp.sweeps.text import as_text
from crate_interp.viz.page import render
from crate_interp.viz.summary import summary


@pytest.fixture
def data():
    return torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def result(model, data):
    return ci.sweep(model, data, progress=False)


@pytest.fixture
def twins(data):
    return [ci.sweep(make(seed=seed), data, progress=False) for seed in (5, 6)]


def lines(figure):
    return [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]


def test_a_statistic_per_sample(result, twins):
    figure = ci.viz.layers(result, "compression.rate_pre", twins)
    mean, dashed = lines(figure)
    rows = result.layers().query("statistic == 'rate_pre'")
    np.testing.assert_allclose(mean.get_ydata(), rows["mean"])
    assert list(mean.get_xdata()) == list(range(LAYERS + 1))
    expected = np.mean([t.layers().query("statistic == 'rate_pre'")["mean"] for t in twins], axis=0)
    np.testing.assert_allclose(dashed.get_ydata(), expected)
    assert dashed.get_linestyle() == "--"
    axes = figure.axes[0]
    assert (
        axes.get_xlabel() == "layer"
        and axes.get_ylabel() == "nats"
        and axes.get_title() == "compression.rate_pre"
    )
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["model", "± 1 std over images", "untrained, 2 seeds"]
    band = axes.collections[0].get_datalim(axes.transData)
    assert band.y0 == pytest.approx(
        (rows["mean"] - rows["std"]).min()
    ) and band.y1 == pytest.approx((rows["mean"] + rows["std"]).max())


def test_a_statistic_per_head(result):
    figure = ci.viz.layers(result, "attention.entropy_cls")
    drawn = lines(figure)
    wide = (
        result.heads()
        .query("statistic == 'entropy_cls'")
        .pivot(index="layer", columns="head", values="mean")
    )
    assert len(drawn) == HEADS + 1
    for head in range(HEADS):
        np.testing.assert_allclose(drawn[head].get_ydata(), wide[head])
    np.testing.assert_allclose(drawn[-1].get_ydata(), wide.mean(axis=1))


def test_weights_have_no_band(result):
    figure = ci.viz.layers(result, "alignment.completeness")
    assert len(figure.axes[0].collections) == 0 and len(lines(figure)) == 1


def test_heads(result):
    figure = ci.viz.heads(result, "alignment.energy_head")
    wide = (
        result.heads()
        .query("statistic == 'energy_head'")
        .pivot(index="layer", columns="head", values="mean")
    )
    np.testing.assert_allclose(figure.axes[0].get_images()[0].get_array(), wide)
    with pytest.raises(
        ValueError, match="has one value per layer, not per head: draw it with ci.viz.layers"
    ):
        ci.viz.heads(result, "compression.rate_mid")


def test_unknown_statistics(result):
    with pytest.raises(
        ValueError, match=r"no statistic 'compression.rate_midd'. Did you mean compression.rate_mid"
    ):
        ci.viz.layers(result, "compression.rate_midd")


def test_attention_on_image(model, images):
    _, cache = model.run_with_cache(images)
    figure = ci.viz.attention_on_image(cache, -1, images)
    assert len(figure.axes) == BATCH * (HEADS + 1)
    panel = figure.axes[(HEADS + 1) + 1 + 3]  # second image, fourth head
    underlay, overlay = panel.get_images()
    expected = cache["pattern", LAYERS - 1][1, 3, 0, 1:].reshape(3, 4)
    np.testing.assert_allclose(overlay.get_array(), expected)
    assert overlay.get_extent() == [0, 20, 6, 0] and np.asarray(underlay.get_array()).shape == (
        6,
        20,
        3,
    )
    assert f"max {expected.max():.2f}" in panel.get_title()
    with pytest.raises(ValueError, match="layer=3: the model has layers 0 to 2"):
        ci.viz.attention_on_image(cache, 3, images)
    with pytest.raises(ValueError, match="does not belong to images"):
        ci.viz.attention_on_image(cache, 0, images[:1])
    _, cache = model.run_with_cache(images, names_filter="hook_embed")
    with pytest.raises(KeyError, match="the cache lacks 'blocks.0.attn.hook_pattern'"):
        ci.viz.attention_on_image(cache, 0, images)


def test_summary(result, twins):
    header, rows = summary(result, twins)
    assert header[0] == "layer" and [row[0] for row in rows] == [
        str(layer) for layer in range(LAYERS)
    ]
    value = result.layers().query("statistic == 'subspace_rate_mid' and layer == 1")["mean"].item()
    random = np.mean(
        [
            t.layers().query("statistic == 'subspace_rate_mid' and layer == 1")["mean"].item()
            for t in twins
        ]
    )
    assert rows[1][2] == f"{value:.4g} ({random:.4g})"
    text = as_text(header, rows).splitlines()
    assert len(text) == LAYERS + 1 and len({len(line) for line in text}) == 1


def test_drawing_loads_when_something_is_drawn():
    code = "import sys, crate_interp.viz; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    for path in Path(ci.viz.__file__).parent.glob("*.py"):  # transformers brings jinja2 along
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])]
            names.append(getattr(node, "module", None) or "")
            assert not {name.split(".")[0] for name in names} & {"jinja2", "markupsafe"}, path


def test_the_text_of_a_page_is_escaped_before_it_is_raised():
    page = render("audit.html", **values("<b>x</b> Z^{l+1/2}", "R^c & <i>"))
    assert "<h1>&lt;b&gt;x&lt;/b&gt; Z<sup>l+1/2</sup></h1>" in page
    assert "<dt>R<sup>c</sup> &amp; &lt;i&gt;</dt>" in page
    with pytest.raises(UndefinedError, match="'meta' is undefined"):
        render("audit.html", title="", finding="", caution="", marks={})


def values(title, name):
    """What the page of an audit of nothing needs."""
    settings = {"eps": 0.1, "lasso_tokens": 4}
    meta = {"n_samples": 1, "unit": "images", "n_layers": 0, "untrained": 0, "settings": settings}
    nothing = {"groups": [], "tables": [], "marks": {}, "frames": {}, "nulls": {}}
    return {
        "title": title,
        "finding": "",
        "caution": "",
        "meta": meta,
        "sources": [(name, "")],
        **nothing,
    }
