"""The report: one self-contained page, its pictures and tables, and what is refused."""

import re

import pandas as pd
import pytest
import torch

import crate_interp as ci
from browser import driven, opened  # noqa: F401
from conftest import make
from texts import Page


@pytest.fixture(scope="module")
def data():
    return torch.randn(6, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model():
    return make(model_name="mine & <yours>")


@pytest.fixture(scope="module")
def report(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "deep" / "er"
    state = torch.random.get_rng_state()
    path = ci.report(model, data, out, untrained=2, progress=False)
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state moved"
    return path


@pytest.fixture(scope="module")
def page(report):
    # a word that is explained stays in its sentence
    return Page(re.sub("</?abbr[^>]*>", "", report.read_text(encoding="utf-8")))


def test_it_is_one_file_that_works_offline(report, page):
    text = report.read_text(encoding="utf-8")
    assert report.name == "report.html" and len(text) < 2_000_000
    assert not any(tag in ("script", "link", "iframe") for tag, _ in page.tags)
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("data:", "#")), (tag, value)
    assert "@import" not in text and not re.search(r"url\((?!#|['\"]?data:)", text)


def test_it_is_readable(report, page):
    text = report.read_text(encoding="utf-8")
    assert (
        'name="viewport"' in text and "color-scheme: light dark" in text and "currentColor" in text
    )
    pictures = [
        a for tag, a in page.tags if tag == "img" or (tag == "svg" and a.get("role") == "img")
    ]
    assert all(len(a.get("alt") or a.get("aria-label") or "") > 20 for a in pictures)
    statistics = ci.SweepResult.load(report.parent).meta["statistics"]
    captions = [tag for tag, _ in page.tags if tag == "figcaption"]
    # attention in two layers, a chart of the change at attention, and one of each statistic
    assert len(pictures) == len(captions) == 2 + 1 + len(statistics)
    anchors = {a["id"] for _, a in page.tags if "id" in a}
    links = [a["href"][1:] for tag, a in page.tags if tag == "a" and a["href"].startswith("#")]
    assert set(links) <= anchors
    words = " ".join(page.words)
    assert "--untrained 2" in words and "--probes" not in words
    assert (
        "mine & <yours>" in words
        and "untrained, 2 seeds" in words
        and "Settings: eps = 0.1" in words
    )


def test_tables(report, model, data):
    table = pd.read_csv(report.parent / "layers.csv")
    result = ci.sweep(model, data, progress=False)
    wanted = result.layers()
    pd.testing.assert_frame_equal(table[wanted.columns], wanted, check_dtype=False, rtol=1e-12)
    twins = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        twins.append(ci.sweep(ci.HookedCrate(model.cfg).eval(), data, progress=False).layers())
    merged = pd.concat(twins).groupby(["probe", "statistic", "layer"])["mean"]
    for row in table.itertuples():
        key = (row.probe, row.statistic, row.layer)
        assert row.untrained_mean == pytest.approx(merged.mean()[key])
        assert (row.untrained_min, row.untrained_max) == (
            pytest.approx(merged.min()[key]),
            pytest.approx(merged.max()[key]),
        )
    samples = pd.read_parquet(report.parent / "samples.parquet")
    pd.testing.assert_frame_equal(samples, result.samples())
