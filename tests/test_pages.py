"""Every page of the library: what all of them must be, and the words that they explain."""

import re

import pytest
import torch

import crate_interp as ci
from browser import driven, looked_over, low_contrast, opened, overflow  # noqa: F401
from conftest import LAYERS, make
from crate_interp.viz.pages.page import TERMS, explained
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


GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_button_turns_the_scheme_over_without_a_script(driven, report, scheme):  # noqa: F811
    """In a sandbox that allows nothing, as in the frame of a notebook."""
    with opened(driven, report, 390, scheme) as shown:
        before = shown.page.evaluate(GROUND)
        shown.page.locator("#scheme").check()
        after = shown.page.evaluate(GROUND)
        assert {before, after} == {"rgb(255, 255, 255)", "rgb(20, 23, 26)"}
        assert (before == "rgb(255, 255, 255)") == (scheme == "light")
        assert low_contrast(shown.page) == []
        shown.page.locator("#scheme").uncheck()
        assert shown.page.evaluate(GROUND) == before
    frame = (
        f'<iframe sandbox srcdoc="{_escaped(report.read_text())}" width=390 height=800></iframe>'
    )
    with opened(driven, frame, 600, scheme) as shown:
        inner = shown.page.frame_locator("iframe")
        inner.locator("#scheme").check()
        assert inner.locator(".scheme").inner_text() == ("light" if scheme == "light" else "dark")


def test_print_opens_what_folds(driven, report):  # noqa: F811
    with opened(driven, report) as shown:
        table = shown.page.locator("details table").first
        assert not table.is_visible()
        shown.page.emulate_media(media="print")
        assert table.is_visible() and not shown.page.locator(".scheme").is_visible()


def _escaped(text):
    return text.replace("&", "&amp;").replace('"', "&quot;")


PAGE = (
    "<!doctype html><html><head><title>stream</title></head><body><h1>stream</h1>"
    "<p class='null'>The streams, a stream and the stream; R<sup>c</sup> and R<sup>c</sup>.</p>"
    "<button>null</button><script>const null_ = 'null';</script><p>nulls, by construction</p>"
    "</body></html>"
)


def words(document):
    return re.findall(r'<abbr title="[^"]+">(.*?)</abbr>', document)


def test_the_first_use_of_a_word_is_explained():
    shown = explained(PAGE)
    assert words(shown) == ["stream", "R<sup>c</sup>", "nulls", "by construction"]
    assert f'<abbr title="{TERMS["by construction"][1]}">' in shown
    assert "<title>stream</title>" in shown and "<h1>stream</h1>" in shown
    assert "<button>null</button><script>const null_ = 'null';</script>" in shown
    assert re.sub(r"</?abbr[^>]*>", "", shown) == PAGE


def test_a_page_keeps_its_text():
    model, image = make(), torch.zeros(1, 3, 6, 20)
    with torch.no_grad():
        _, cache = model.run_with_cache(image)
    page = ci.viz.explore(cache, image).html()
    assert "patch" in words(page) and len(words(page)) == len(set(words(page)))
    assert explained(re.sub(r"</?abbr[^>]*>", "", page)) == page
