"""The words of the pages: each is explained once, and nothing else of a page changes."""

import re

import torch

import crate_interp as ci
from conftest import make
from crate_interp.viz.pages.page import TERMS, explained

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
