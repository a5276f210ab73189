"""The explorer in Chromium, by pointer, touch and keys."""

import numpy as np
import pytest
import torch

import crate_interp as ci
from browser import SCHEMES, WIDTHS, drawn, driven, low_contrast, opened, overflow  # noqa: F401
from conftest import HEADS, LAYERS, make, make_lm

ROWS, COLUMNS = 3, 4
CIRCUIT = ci.circuits.Circuit(
    [
        ci.circuits.Edge("L0H1", "L2H3", 0.5),
        ci.circuits.Edge("L0H1", "L1A5", 0.1),
        ci.circuits.Edge("L2H3", "logits", -1.0),
    ]
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    model, generator = make("crate"), torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 6, 20, generator=generator)
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    folder = tmp_path_factory.mktemp("explore")
    page = ci.viz.explore(cache, images, sample=1, circuit=CIRCUIT)
    return cache, page.save(folder / "explore.html")


@pytest.fixture(scope="module")
def once(driven, seen):  # noqa: F811
    with opened(driven, seen[1]) as shown:
        drawn(shown.page)
        yield shown, shown.page.evaluate("({...explorer.state})")


@pytest.fixture
def bench(once):
    """The page of the image as it opens. After the test nothing was asked for or complained of."""
    shown, start = once
    shown.page.mouse.move(0, 0)
    script = """start => {
      document.activeElement.blur();
      Object.assign(explorer.state, start);
      dispatchEvent(new Event('resize'));
    }"""
    shown.page.evaluate(script, start)
    drawn(shown.page)
    yield shown.page
    slow = "willReadFrequently"  # these tests read canvases, the page does not
    assert not shown.asked and not [words for words in shown.wrong if slow not in words]


def spot(page, row, column, place="#surface"):
    box = page.locator(place).bounding_box()
    x = box["x"] + box["width"] * (column + 0.5) / COLUMNS
    return x, box["y"] + box["height"] * (row + 0.5) / ROWS


def alphas(page, head):
    """How opaque the pixels of a head's map are, 0 to 1."""
    script = """head => {
      const canvas = document.querySelectorAll('.tile canvas')[head];
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return [...data.data].filter((_, i) => i % 4 === 3).map(v => v / 255);
    }"""
    return np.array(page.evaluate(script, head))


def test_pointing_at_a_patch_shows_its_row(seen, bench):
    cache, page = seen[0], bench
    top = page.locator("#surface").bounding_box()["y"]
    for row, column in ((0, 0), (2, 3), (1, 2)):
        page.mouse.move(*spot(page, row, column))
        token = 1 + COLUMNS * row + column
        drawn(page, f"explorer.state.query === {token}")
        layer = page.evaluate("explorer.state.layer")
        wanted = cache["pattern", layer][1, :, token].numpy()
        for head in range(HEADS):
            found = np.array(page.evaluate(f"explorer.values({head})"))
            assert np.abs(found - wanted[head]).max() < 0.01 * wanted[head].max()
            patches = wanted[head, 1:]
            most = max(patches.max(), 5 / 13)  # an even map looks even
            assert np.abs(alphas(page, head) - patches / most).max() < 0.01
        words = page.inner_text("#readout")
        assert f"patch ({row}, {column}) gives most" in words and "1/13 = 7.7\xa0%" in words
        assert page.locator("#surface").bounding_box()["y"] == top  # it stays under the pointer


@pytest.mark.slow
def test_arrow_keys_change_layers_and_the_query_stays(seen, bench):
    cache, page = seen[0], bench
    page.evaluate("explorer.state.layer = 0")
    page.mouse.click(*spot(page, 2, 1))
    for key, layer in (
        ("ArrowRight", 1), ("ArrowUp", 2), ("ArrowRight", 2), ("ArrowDown", 1), ("ArrowLeft", 0)
    ):  # fmt: skip
        page.keyboard.press(key)
        drawn(page, f"explorer.state.layer === {layer}")
        assert page.evaluate("explorer.state.query") == 10
        found = np.array(page.evaluate("explorer.values(0)"))
        wanted = cache["pattern", layer][1, 0, 10].numpy()
        assert np.abs(found - wanted).max() < 0.01 * wanted.max()
        assert page.inner_text("#layer-number") == str(layer)
    page.keyboard.press("Shift+ArrowUp")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("]")
    drawn(page, "explorer.state.query === 7")
    head = page.evaluate("explorer.state.head")
    assert page.inner_text("#chosen-name") == f"L0H{head}"
    for _ in range(9):
        page.keyboard.press("Shift+ArrowLeft")
    drawn(page, "explorer.state.query === 0")
    assert "CLS" in page.inner_text("#readout")
    assert page.get_attribute("#cls", "aria-pressed") == "true"
    page.locator("#layer").focus()
    page.keyboard.press("ArrowRight")  # the slider's own key
    drawn(page, "explorer.state.layer === 1")
    page.keyboard.press("[")
    page.keyboard.press("Shift+ArrowRight")
    drawn(page, f"explorer.state.query === 1 && explorer.state.head === {head - 1}")


@pytest.mark.slow
def test_the_address_keeps_what_is_chosen(driven, seen):  # noqa: F811
    _, path = seen
    with opened(driven, path) as shown:
        page = shown.page
        drawn(page)
        page.mouse.click(*spot(page, 2, 2))
        page.check("input[value=from]", force=True)
        drawn(page, "location.hash.includes('mode=from')")
        assert "query=11" in page.url
        page.reload()
        drawn(page, "explorer.state.mode === 'from' && explorer.state.query === 11")
        page.goto("about:blank")
        page.goto(path.resolve().as_uri() + "#layer=99&head=-1&query=<b>&mode=toString&valueOf=1")
        drawn(page)
        assert page.evaluate("explorer.state.layer") < LAYERS and not shown.wrong
        assert page.evaluate("[explorer.state.mode, explorer.state.pinned]") == ["to", False]
        page.evaluate(
            """() => {
              const real = history.replaceState.bind(history);
              window.changes = 0;
              history.replaceState = (...all) => { changes++; real(...all); };
            }"""
        )
        for row, column in ((0, 0), (1, 2), (2, 3)):
            page.mouse.move(*spot(page, row, column))
            drawn(page, f"explorer.state.query === {1 + COLUMNS * row + column}")
        assert page.evaluate("changes") == 0  # pointing does not change the address


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


def test_the_explorer_links_to_a_graph_beside_it(tmp_path):
    model = make("crate")
    sample = torch.randn(1, 3, 6, 20)
    with torch.no_grad():
        _, cache = model.run_with_cache(sample)
    assert '<a href="graph.html">' in ci.viz.explore(cache, sample, graph="graph.html").html()
    assert "Why this answer" not in ci.viz.explore(cache, sample).html()
    with pytest.raises(ValueError, match="give the name of a page beside this one"):
        ci.viz.explore(cache, sample, graph="javascript:alert(1)")
