"""Every page of the library: what all of them must be; and that browser.py finds known faults."""

import pytest
import torch

import crate_interp as ci
from browser import driven, looked_over, low_contrast, opened, overflow  # noqa: F401
from conftest import LAYERS, make
from pictures import looked_at, results, views
from selection import few


@pytest.fixture(scope="module")
def report(driven, tmp_path_factory):  # noqa: F811
    data = torch.randn(4, 3, 6, 20, generator=torch.Generator().manual_seed(3))
    out = tmp_path_factory.mktemp("pages")
    probes = ["compression", "sparsity"]
    return ci.report(
        make(n_heads=2), data, out, untrained=0, audit=True, probes=probes, progress=False
    )


@pytest.fixture(scope="module")
def pages(report):
    assert 'href="audit/audit.html"' in report.read_text()
    return report, report.parent / "audit" / "audit.html"


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
