"""The explorer in Chromium, by pointer, touch and keys. Skips without one: tests/SKIPS.md."""

import html

import numpy as np
import pytest
import torch

import crate_interp as ci
from browser import drawn, driven, looked_over, opened
from conftest import HEADS, LAYERS, make

assert driven  # the fixture

ROWS, COLUMNS = 3, 4
TEXT = "In the beginning was the Word,\nand the Word was with God"
CIRCUIT = ci.circuits.Circuit(
    [
        ci.circuits.Edge("L0H1", "L2H3", 0.5),
        ci.circuits.Edge("L0H1", "L1A5", 0.1),
        ci.circuits.Edge("L2H3", "logits", -1.0),
    ]
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """An image model's cache, and its page."""
    model, generator = make("crate"), torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 6, 20, generator=generator)
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    folder = tmp_path_factory.mktemp("explore")
    page = ci.viz.explore(cache, images, sample=1, circuit=CIRCUIT)
    return cache, page.save(folder / "explore.html")


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """A language model's cache, and its page."""
    lm = ci.load("crate-tiny-lm")
    with torch.no_grad():
        _, cache = lm.run_with_cache(TEXT)
    folder = tmp_path_factory.mktemp("explore-text")
    page = ci.viz.explore(cache, TEXT, circuit=CIRCUIT)
    return cache, page.save(folder / "explore.html"), lm.to_str_tokens(TEXT)


@pytest.fixture(scope="module")
def once(driven, seen):  # noqa: F811
    """The page of the image, loaded once, and how it opens."""
    with opened(driven, seen[1]) as shown:
        drawn(shown.page)
        yield shown, shown.page.evaluate("({...explorer.state})")


@pytest.fixture
def bench(once):
    """The page of the image as it opens. After the test nothing was asked for or complained of."""
    shown, start = once
    shown.page.mouse.move(0, 0)
    shown.page.evaluate(
        """start => {
          document.activeElement.blur();
          Object.assign(explorer.state, start);
          dispatchEvent(new Event('resize'));
        }""",
        start,
    )
    drawn(shown.page)
    yield shown.page
    slow = "willReadFrequently"  # these tests read canvases, the page does not
    assert not shown.asked and not [words for words in shown.wrong if slow not in words]


def spot(page, row, column, place="#surface"):
    """The middle of a patch in the window."""
    box = page.locator(place).bounding_box()
    x = box["x"] + box["width"] * (column + 0.5) / COLUMNS
    return x, box["y"] + box["height"] * (row + 0.5) / ROWS


def alphas(page, head):
    """How opaque the pixels of a head's map are, 0 to 1."""
    return np.array(
        page.evaluate(
            """head => {
              const canvas = document.querySelectorAll('.tile canvas')[head];
              const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
              return [...data.data].filter((_, i) => i % 4 === 3).map(v => v / 255);
            }""",
            head,
        )
    )


def test_pointing_at_a_patch_shows_its_row(seen, bench):
    cache, page = seen[0], bench
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
            assert np.abs(alphas(page, head) - patches / patches.max()).max() < 0.01
        words = page.inner_text("#readout")
        assert f"patch ({row}, {column}) gives most" in words and "1/13 = 0.077" in words


def test_columns_cosines_and_scales(seen, bench):
    cache, page = seen[0], bench
    page.mouse.click(*spot(page, 1, 1))
    page.check("input[value=from]", force=True)
    drawn(page, "explorer.state.mode === 'from' && explorer.state.query === 6")
    layer = page.evaluate("explorer.state.layer")
    pattern = cache["pattern", layer][1].numpy()
    found = np.array(page.evaluate("explorer.values(2)"))
    assert np.abs(found - pattern[2, :, 6]).max() < 0.01 * pattern[2].max()
    for scale, most in (("absolute", 1.0), ("head", pattern[2].max())):
        page.check(f"input[value={scale}]", force=True)
        drawn(page, f"explorer.state.scale === '{scale}'")
        assert np.abs(alphas(page, 2) - pattern[2, 1:, 6] / most).max() < 0.01
    page.check("input[value=alike]", force=True)
    drawn(page, "explorer.state.mode === 'alike'")
    codes = cache["q", layer][1, :, 2].numpy()
    unit = codes / np.linalg.norm(codes, axis=1, keepdims=True)
    assert np.abs(np.array(page.evaluate("explorer.values(2)")) - unit @ unit[6]).max() < 2e-3


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
def test_arrow_keys_are_for_layers_again_after_a_click_on_a_choice(bench):
    page = bench
    page.mouse.click(*spot(page, 2, 1))
    page.keyboard.press("ArrowLeft")
    page.locator("input[value=from]").click()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    drawn(page, "explorer.state.mode === 'from' && explorer.state.layer === 1")
    page.locator("input[value=from]").focus()
    page.keyboard.press("ArrowRight")  # who tabbed to it has its own keys
    drawn(page, "explorer.state.mode === 'alike' && explorer.state.layer === 1")


@pytest.mark.slow
def test_hover_shows_a_click_keeps_and_escape_frees(bench):
    page = bench
    page.mouse.move(*spot(page, 0, 1))
    drawn(page, "explorer.state.query === 2")
    page.mouse.click(*spot(page, 0, 1))
    page.mouse.move(*spot(page, 2, 2))
    drawn(page)
    assert page.evaluate("[explorer.state.query, explorer.state.pinned]") == [2, True]
    page.keyboard.press("Escape")
    page.mouse.move(*spot(page, 2, 1))
    drawn(page, "explorer.state.query === 10 && !explorer.state.pinned")
    page.mouse.move(*spot(page, 1, 3, "#map"))  # a key on the large map
    drawn(page, "explorer.state.key === 8")
    words = page.inner_text("#readout")
    value = page.evaluate("explorer.values()[8]")
    assert "patch (1, 3)" in words and f"{value:.3f}" in words


@pytest.mark.slow
def test_nothing_moves_under_the_pointer(driven, seen, read):  # noqa: F811
    for (path, place), width in (((seen[1], "#surface"), 1200), ((read[1], "#tokens"), 1000)):
        with opened(driven, path, width) as shown:
            page, tops = shown.page, set()
            drawn(page)
            box = page.locator(place).bounding_box()
            for step in range(1, 8):
                page.mouse.move(box["x"] + box["width"] * step / 8, box["y"] + box["height"] / 2)
                drawn(page)
                tops.add(round(page.locator(place).bounding_box()["y"]))
            assert len(tops) == 1


@pytest.mark.slow
def test_a_tap_keeps_and_a_second_one_frees(driven, seen):  # noqa: F811
    _, path = seen
    with opened(driven, path, 390, touch=True) as shown:
        page = shown.page
        drawn(page)
        for pinned in ("true", "false"):
            page.locator("#surface").scroll_into_view_if_needed()
            page.touchscreen.tap(*spot(page, 1, 0))
            drawn(page, f"explorer.state.query === 5 && explorer.state.pinned === {pinned}")
        page.locator("#map").scroll_into_view_if_needed()
        page.touchscreen.tap(*spot(page, 2, 3, "#map"))
        drawn(page, "explorer.state.key === 12")
        assert "patch (2, 3)" in page.inner_text("#readout")
        page.locator(".tile").nth(1).tap()
        drawn(page, "explorer.state.head === 1")
        page.locator("#cls").tap()
        drawn(page, "explorer.state.query === 0")
        small = page.evaluate(
            """() => [...document.querySelectorAll('button, select, .slider input, fieldset label')]
              .filter(e => e.checkVisibility() && e.getBoundingClientRect().height < 32)
              .map(e => e.outerHTML)"""
        )
        assert not small


def test_a_circuit_leads_to_its_heads_and_rings_them(bench):
    page = bench
    page.locator('[data-name="L2H3"]').click()
    drawn(page, "explorer.state.layer === 2 && explorer.state.head === 3")
    ringed = "() => [...document.querySelectorAll('.tile')].map(e => e.matches('.ringed'))"
    assert page.evaluate(ringed) == [head == 3 for head in range(HEADS)]
    assert "in the circuit" in page.locator(".tile").nth(3).get_attribute("aria-label")
    page.locator('[data-name="L0H1"]').focus()
    page.keyboard.press("Enter")
    drawn(page, "explorer.state.layer === 0 && explorer.state.head === 1")
    assert page.evaluate(ringed) == [head == 1 for head in range(HEADS)]
    page.locator('[data-name="L1A5"]').click()
    drawn(page, "explorer.state.layer === 1 && explorer.state.atom === 5")
    assert page.inner_text("#atom-name") == "L1A5"
    assert page.locator('[data-name="L1A5"].here').count() == 1
    page.mouse.move(*spot(page, 2, 3))
    drawn(page, "explorer.state.query === 12")
    assert page.inner_text("#atom-name") == "L1A5"
    page.keyboard.press("ArrowRight")
    drawn(page, "explorer.state.layer === 2 && explorer.state.atom === null")


def test_masks_components_and_atoms(seen, bench):
    cache, page = seen[0], bench
    for over, words in (("masks", "MaskCut finds"), ("1", "Component 2")):
        page.select_option("#over", over)
        drawn(page, f"explorer.state.over === '{over}'")
        assert words in page.inner_text("#over-words")
    layer, query = page.evaluate("[explorer.state.layer, explorer.state.query]")
    code = cache["post", layer][1]
    first = page.locator("#atoms button").first.inner_text()
    best = code[query].argmax().item()
    share = code[query, best] / code[query].sum()
    assert f"A{best}" in first and f"{code[query, best]:.3f}" in first
    assert f"{share:.0%}"[:-1] in first
    where = (code[:, best].argmax().item() - 1) if code[1:, best].max() > code[0, best] else None
    place = "CLS" if where is None else f"patch ({where // COLUMNS}, {where % COLUMNS})"
    assert f"largest value is {code[:, best].max():.3f}, at {place}" in page.inner_text(
        "#atom-words"
    )
    page.locator("#atoms button").nth(1).click()
    drawn(page, "explorer.state.atom !== null")
    assert page.inner_text("#atom-name") == (f"L{layer}A{code[query].topk(2).indices[1].item()}")


@pytest.mark.slow
def test_a_text(driven, read):  # noqa: F811
    cache, path, names = read
    with opened(driven, path) as shown:
        page = shown.page
        drawn(page)
        token = names.index(" Word") if " Word" in names else 7
        page.locator("#tokens span").nth(token).hover()
        drawn(page, f"explorer.state.query === {token}")
        layer = page.evaluate("explorer.state.layer")
        wanted = cache["pattern", layer][0, :, token].numpy()
        for head in range(len(wanted)):
            found = np.array(page.evaluate(f"explorer.values({head})"))
            assert np.abs(found - wanted[head]).max() < 0.01 * wanted[head].max()
        assert 0 < page.locator("#lines path").count() <= 200
        table = ci.circuits.logit_lens(cache, position=token).table()
        best = table[(table["layer"] == layer + 1) & (table["rank"] == 0)].iloc[0]
        line = page.locator("#lens li").first.inner_text()
        assert best["answer"].strip() in line and f"{best['probability']:.0%}"[:-1] in line
        assert f"\u201c{best['answer']}\u201d" in line
        assert f"1/{token + 1} = " in page.inner_text("#readout")
        assert f"at most {token + 1}." in page.inner_text("#tiles-words")
        assert page.locator("#tokens br").count() == TEXT.count("\n")
        page.keyboard.press("Shift+ArrowRight")
        drawn(page, f"explorer.state.query === {token + 1} && explorer.state.pinned")
        page.keyboard.press("ArrowRight")
        drawn(page, f"explorer.state.layer === {min(layer + 1, len(cache.model.blocks) - 1)}")
        assert not shown.asked and not shown.wrong


@pytest.mark.slow
def test_twelve_heads_fit_into_their_tiles(driven, tmp_path):  # noqa: F811
    model, images = make("crate", n_heads=12), torch.randn(1, 3, 6, 20)
    twelve = ci.viz.explore(model.run_with_cache(images)[1], images).save(tmp_path / "twelve.html")
    assert looked_over(driven, twelve) == []
    with opened(driven, twelve) as shown:
        drawn(shown.page)
        out = "e => e.scrollWidth > e.clientWidth + 1"
        assert not shown.page.evaluate(f"[...document.querySelectorAll('.tile')].some({out})")


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


@pytest.mark.slow
def test_the_page_works_in_a_frame_without_an_origin(driven, seen):  # noqa: F811
    """As a notebook shows it: no address to change, no storage."""
    _, path = seen
    frame = ci.viz.pages.page.Html("explore", path.read_text())._repr_html_()
    assert 'sandbox="allow-scripts"' in frame and html.escape("<main", quote=False) in frame
    with opened(driven, f"<!doctype html><body>{frame}") as shown:
        inner = shown.page.frames[1]
        inner.wait_for_selector(".tile[aria-pressed=true]")
        before = inner.inner_text("#readout")
        x, y = spot(inner, 1, 1)  # in the window, of the frame's picture
        shown.page.mouse.click(x, y)
        inner.wait_for_selector("#explorer.pinned")
        assert "patch (1, 1)" in inner.inner_text("#readout") != before
        layer = int(inner.inner_text("#layer-number"))
        shown.page.keyboard.press("ArrowLeft" if layer else "ArrowRight")
        shown.page.wait_for_timeout(200)
        assert int(inner.inner_text("#layer-number")) == (layer - 1 if layer else 1)
        assert not shown.asked and not shown.wrong
