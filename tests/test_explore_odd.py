"""The explorer in Chromium on texts that are small, odd or hostile. Skips without one."""

import pytest
import torch

import crate_interp as ci
from browser import SCHEMES, WIDTHS, drawn, driven, low_contrast, opened, overflow
from conftest import make, make_lm

assert driven  # the fixture


@pytest.mark.slow
def test_one_token_and_a_circuit_without_edges(driven, tmp_path):  # noqa: F811
    lm, tokens = make_lm("crate-lm"), torch.tensor([[3]])
    page = ci.viz.explore(lm.run_with_cache(tokens)[1], tokens, circuit=ci.circuits.Circuit([]))
    with opened(driven, page.save(tmp_path / "one.html")) as shown:
        for mode, words in (("to", "to itself: 1.0 times"), ("alike", "itself have the cosine 1")):
            shown.page.check(f"input[value={mode}]", force=True)
            drawn(shown.page, f"explorer.state.mode === '{mode}'")
            assert words in shown.page.inner_text("#readout")
        assert shown.page.inner_text("#circuit-note") == "(no edges)"
        assert not shown.wrong


@pytest.mark.slow
def test_a_window_and_a_row_of_zeros(driven, tmp_path):  # noqa: F811
    lm, tokens = make_lm("nanochat-crate"), torch.arange(13)[None]
    cache = lm.run_with_cache(tokens)[1]
    cache.cache_dict["blocks.1.attn.hook_pattern"][:] = 0
    page = ci.viz.explore(cache, tokens).save(tmp_path / "window.html")
    with opened(driven, page) as shown:
        shown.page.goto(page.resolve().as_uri() + "#layer=0&query=12")
        drawn(shown.page, "explorer.state.query === 12")
        assert "1/7 = 0.143" in shown.page.inner_text("#readout")
        assert "at most 7." in shown.page.inner_text("#tiles-words")
        shown.page.keyboard.press("ArrowRight")
        drawn(shown.page, "explorer.state.layer === 1")
        assert "0.0 times the even share" in shown.page.inner_text("#readout")
        assert "0.000 \u00b7 \u22480" in shown.page.inner_text(".tile >> nth=0")
        assert not shown.wrong


@pytest.mark.slow
def test_maps_without_a_pattern(driven, tmp_path):  # noqa: F811
    """Of ToST, whose stream has no CLS, and of CBT, with the representative of the query's cell."""
    for family, size in (("tost", (6, 20)), ("cbt", (6, 15))):
        model = make(family, stem="linear", image_size=size)
        images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
        cache = model.run_with_cache(images)[1]
        path = ci.viz.explore(cache, images).save(tmp_path / f"{family}.html")
        with opened(driven, path) as shown:
            drawn(shown.page)
            page = shown.page
            values = lambda page=page: torch.tensor(page.evaluate("explorer.values(1)"))  # noqa: E731
            page.keyboard.press("Shift+ArrowRight")
            drawn(page, "explorer.state.pinned")
            query = page.evaluate("explorer.state.query")
            layer = page.evaluate("explorer.state.layer")
            if family == "tost":
                wanted = cache["pi", layer, "attn"][0, 1]
                assert "belongs to this subspace" in page.inner_text("#readout")
                assert page.locator("#cls, #cls-key").count() == 0
            else:
                wanted = ci.maps.contracted(cache, layer)[0, 1, query]
                wanted = wanted / wanted.sum()
                assert "shares" in page.inner_text("#readout")
            assert (values() - wanted).abs().max() < 0.005 * wanted.max()
            if family == "cbt":
                page.check("input[value=reads]", force=True)
                drawn(page, "explorer.state.mode === 'reads'")
                side = 3  # query is a token of the square: row and column are thirds of 8 cells
                cell = query // side * 8 // side * 8 + query % side * 8 // side
                assert model.blocks[0].attn.pooling(10)[cell, query] > 0
                wanted = cache["contract", layer, "attn"][0, 1, cell]
                assert (values() - wanted).abs().max() < 0.005 * wanted.max()
                assert f"representative {cell} reads" in page.inner_text("#readout")
            assert not shown.wrong and not shown.asked


class Odd:
    """A tokenizer whose tokens would run, or turn the page around."""

    bos = None
    names = (
        "</script><script>document.title = 'ran'</script>",
        "<img src=x onerror=alert(1)>",
        "\u202egnorw",
        *("\n", "   ", "", "\u05e9\u05dc\u05d5\u05dd", "${1}", "{{ 7 }}"),
    )

    def decode(self, ids):
        return "".join(self.names[number % len(self.names)] for number in ids)


@pytest.mark.slow
def test_a_hostile_token_or_label_does_not_run(driven, tmp_path):  # noqa: F811
    lm = make_lm("crate-lm")
    lm.tokenizer = Odd()
    tokens = torch.arange(9)[None]
    _, cache = lm.run_with_cache(tokens)
    page = ci.viz.explore(cache, tokens, name=Odd.names[0])
    with opened(driven, page.save(tmp_path / "text.html")) as shown:
        drawn(shown.page)
        texts = shown.page.locator("#tokens span").all_text_contents()
        assert texts[:3] == [Odd.names[0], Odd.names[1], "\\u202egnorw"]
        assert texts[3:] == ["\u21b5", "\u2423\u2423\u2423", "\u2205", *Odd.names[6:]]
        assert shown.page.title().endswith(Odd.names[0]) and shown.page.locator("img").count() == 0
        assert not shown.asked and not shown.wrong
        for width in WIDTHS:
            for scheme in SCHEMES:
                shown.page.set_viewport_size({"width": width, "height": 900})
                shown.page.emulate_media(color_scheme=scheme)
                assert overflow(shown.page) + low_contrast(shown.page) == []
