"""Reports and every page of the library: what all must be; browser.py finds known faults."""

import re

import pandas as pd
import pytest
import torch

import crate_interp as ci
from browser import driven, looked_over, low_contrast, opened, overflow  # noqa: F401
from conftest import LAYERS, make
from crate_interp import reports
from pictures import looked_at, results, views
from selection import few
from texts import Page

# their figures, of layers and of heads, are drawn as those of all other probes
FEW = {"probes": ["sparsity", "compression"], "progress": False}


@pytest.fixture(scope="module")
def data():
    return torch.randn(6, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model():
    return make(model_name="mine & <yours>")


def quick_audit(*given, **more):
    """Without the grid and the twins, which take most of the time and add no kind of element."""
    return ci.audit(*given, **more | {"grid": False, "untrained": 0})


@pytest.fixture(scope="module")
def report(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "deep" / "er"
    state = torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "run_audit", quick_audit)
        path = ci.report(model, data, out, untrained=2, audit=True, **FEW)
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state moved"
    return path


@pytest.fixture(scope="module")
def page(report):
    # a word that is explained stays in its sentence
    return Page(re.sub("</?abbr[^>]*>", "", report.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def pages(report):
    return report, report.parent / "audit" / "audit.html"


def test_it_is_one_file_that_works_offline(report, page):
    text = report.read_text(encoding="utf-8")
    assert 'href="audit/audit.html"' in text
    assert report.name == "report.html" and len(text) < 2_000_000
    assert not any(tag in ("script", "link", "iframe") for tag, _ in page.tags)
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name) or ""
            own = ("data:", "#", "audit/audit.html")
            assert not value or value.startswith(own), (tag, value)
    assert "@import" not in text and not re.search(r"url\((?!#|['\"]?data:)", text)


def test_it_is_readable(report, page):
    text = report.read_text(encoding="utf-8")
    for look in ('name="viewport"', "color-scheme: light dark", "currentColor"):
        assert look in text
    pictures = [a for tag, a in page.tags if a.get("role") == "img" and tag != "b"]
    assert all(len(a.get("alt") or a.get("aria-label") or "") > 20 for a in pictures)
    statistics = ci.SweepResult.load(report.parent).meta["statistics"]
    captions = [tag for tag, _ in page.tags if tag == "figcaption"]
    # two layers' maps of images, a chart of the change at attention, and one of each statistic
    maps = sum(a.get("class") == "map" for _, a in page.tags)
    assert maps % 2 == 0 and len(pictures) == len(captions) == maps + 1 + len(statistics)
    anchors = {a["id"] for _, a in page.tags if "id" in a}
    links = [a["href"][1:] for tag, a in page.tags if tag == "a" and a["href"].startswith("#")]
    assert set(links) <= anchors
    words = " ".join(page.words)
    assert "--untrained 2 --probes sparsity,compression --audit" in words
    for said in ("mine & <yours>", "untrained, 2 seeds", "Settings: eps = 0.1"):
        assert said in words


def test_tables(report, model, data):
    table = pd.read_csv(report.parent / "layers.csv")
    result = ci.sweep(model, data, **FEW)
    wanted = result.layers()
    pd.testing.assert_frame_equal(table[wanted.columns], wanted, check_dtype=False, rtol=1e-12)
    twins = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        twins.append(ci.sweep(ci.HookedCrate(model.cfg).eval(), data, **FEW).layers())
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


@pytest.mark.parametrize("which", few((1, 0)))
def test_the_pages_fit_both_widths_and_are_read_in_both_schemes(driven, pages, which):  # noqa: F811
    assert looked_over(driven, pages[which]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [views, results])
def test_every_page_fits_and_is_read_at_both_widths_in_both_schemes(driven, tmp_path, kind):  # noqa: F811
    """As it comes and unfolded, without a request or a complaint; `make pictures` has more data."""
    pages = views(tmp_path) if kind is views else results(tmp_path, 12, untrained=0)
    for name, (page, words) in pages.items():
        wrong = looked_at(driven, page, words, tmp_path / name)
        assert not [each for each in wrong if "GPU stall" not in each], name  # WebGL's
        assert page.stat().st_size < 3e6, name


@pytest.mark.parametrize("width", few((390, 1200)))
def test_a_sign_opens_its_card_and_escape_closes_it(driven, pages, width):  # noqa: F811
    with opened(driven, pages[1], width, "dark") as shown:
        signs = shown.page.locator(".sign button")
        last = LAYERS - 1
        box = signs.nth(last).bounding_box()
        assert box is not None and box["x"] + box["width"] < width  # the last layer is not cut
        card = shown.page.locator(f"#compresses-{last}")
        assert not card.is_visible()
        signs.nth(last).click()
        assert card.is_visible() and f"layer {last}" in card.inner_text()
        assert overflow(shown.page) == [] and low_contrast(shown.page) == []
        shown.page.keyboard.press("Escape")
        assert not card.is_visible()


HEAD = '<!doctype html><meta name="viewport" content="width=device-width"><body>'


def test_a_wide_page_is_found_and_a_scroller_is_not(driven):  # noqa: F811
    wide = "<p style='width: 900px'>a line</p>"
    with opened(driven, HEAD + wide, 390) as shown:
        assert any("p." in words for words in overflow(shown.page))
        assert "px wide, the window 390" in overflow(shown.page)[0]
    with opened(driven, f"{HEAD}<div style='overflow-x: auto'>{wide}</div>", 390) as shown:
        assert overflow(shown.page) == []


@pytest.mark.parametrize(
    "body, ratio",
    [
        ("<p style='color: #777; background: #fff'>text</p>", 4.48),  # by the formula of WCAG
        ("<p style='color: #000; opacity: .4'>text</p>", 2.85),  # #999 on white
        ("<div style='background: #000'><p style='color: #333'>text</p></div>", 1.66),
        ("<svg><rect width=90 height=90 fill='#000'/><text x=9 y=50 fill='#333'>text</text></svg>",
         1.66),
        ("<select style='color: #bbb; background: #fff'><option>text</select>", 1.92),
    ],
)  # fmt: skip
def test_texts_that_are_hard_to_read_are_found(driven, body, ratio):  # noqa: F811
    with opened(driven, HEAD + body) as shown:
        (words,) = low_contrast(shown.page)
        assert float(words.split("contrast ")[1].split(":")[0]) == pytest.approx(ratio, abs=0.02)


def test_texts_that_are_easy_to_read_or_hidden_are_not(driven):  # noqa: F811
    fine = (
        "<p style='color: #767676'>text</p>"  # 4.54
        "<p style='color: #fff; display: none'>text</p><details><p style='color: #fff'>a</details>"
        "<div style='background: #00000080'><p style='color: #fff; background: #000'>text</div>"
        "<svg><text y=20 x=9 fill='#000'>text</text></svg>"
    )
    with opened(driven, HEAD + fine) as shown:
        assert low_contrast(shown.page) == []
