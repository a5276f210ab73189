"""The page of a graph in Chromium: by pointer, touch and keys, and as it is saved."""

import numpy as np
import pytest
import torch
from PIL import Image

import crate_interp as ci
from browser import driven, opened, overflow  # noqa: F401
from conftest import make

TEXT = "In the beginning was the Word, and the"


@pytest.fixture(scope="module")
def graph():
    return ci.graph(ci.load("crate-tiny-lm"), TEXT, most=80)


@pytest.fixture(scope="module")
def page(graph, tmp_path_factory):
    return ci.viz.graph(graph).save(tmp_path_factory.mktemp("graph") / "text.html")


@pytest.fixture(scope="module")
def of_picture():
    model = ci.load("crate-tiny-fashion")
    names = ci.circuits.atom_names(model, "embedded:fashion", limit=32, progress=False)
    images = model.preprocess(ci.data.embedded("fashion")[:1]["image"])
    return ci.graph(model, images, names=names)


@pytest.fixture(scope="module")
def picture_page(of_picture, tmp_path_factory):
    return ci.viz.graph(of_picture).save(tmp_path_factory.mktemp("graph") / "picture.html")


@pytest.mark.parametrize("family", ["tost", "tost-ista", "cbt"])
def test_a_model_whose_heads_have_no_scores_has_a_page(family):
    model = make(family, image_size=(16, 16), patch_size=2)
    image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))
    graph = ci.graph(model, image, tests=family == "cbt")
    assert graph.answer in ci.viz.graph(graph).html() and not graph.looks()


def largest(graph):
    nodes = graph.table("nodes")
    return nodes[nodes["atom"] >= 0].nlargest(1, "influence").iloc[0]


def test_pointing_at_a_node_shows_what_feeds_it(driven, page, graph):  # noqa: F811
    node = largest(graph)
    with opened(driven, page) as shown:
        assert shown.page.inner_text("#name") == graph.answer
        shown.page.hover(f"[data-id='{node['node']}']")
        words = shown.page.inner_text("#card")
        assert f"L{node['layer']}A{node['atom']}" in words and "the answer really" in words
        edges = graph.table("edges")
        weights = edges[edges["target"] == node["node"]].groupby("source")["weight"].sum()
        codes = weights[~weights.index.str.startswith("B")]
        strongest = codes.abs().idxmax()
        first = shown.page.inner_text("#fed li").replace("\u2212", "-")
        assert f"{codes[strongest]:.3g}".rstrip("0") in first.replace("+", "")
        # pointing elsewhere lets go, a click holds
        shown.page.hover("h1")
        assert shown.page.inner_text("#name") == graph.answer
        shown.page.click(f"[data-id='{node['node']}']")
        shown.page.hover("h1")
        assert f"L{node['layer']}A{node['atom']}" in shown.page.inner_text("#name")
        assert not shown.wrong and not shown.asked


def test_keys_follow_edges_and_pin(driven, page, graph):  # noqa: F811
    with opened(driven, page) as shown:
        shown.page.focus("#canvas")
        shown.page.keyboard.press("ArrowDown")
        edges = graph.table("edges")
        into = edges[(edges["target"] == "logit") & ~edges["source"].str.startswith("B")]
        strongest = into.groupby("source")["weight"].sum().abs().idxmax()
        assert strongest.split("@")[0] in shown.page.inner_text("#name")
        shown.page.keyboard.press("p")
        assert shown.page.is_visible("#pinned li") and "pins=" in shown.page.url
        shown.page.keyboard.press("Escape")
        assert shown.page.inner_text("#name") == graph.answer
        assert not shown.wrong


def test_keys_scroll_a_fresh_page(driven, page, graph):  # noqa: F811
    with opened(driven, page, 1280, height=500) as shown:
        shown.page.keyboard.press("ArrowDown")
        while not shown.page.evaluate("scrollY"):  # pages forbid eval, which waiting takes
            shown.page.wait_for_timeout(50)
        assert shown.page.inner_text("#name") == graph.answer


SLIDE = """values => {
  for (const [id, value] of Object.entries(values)) {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event('input'));
  }
  return ['node', 'edge'].map(name => document.querySelectorAll(`.${name}`).length);
}"""


def test_sliders_hide_and_the_address_keeps(driven, page, picture_page):  # noqa: F811
    for path in (page, picture_page):
        with opened(driven, path) as shown:
            edges = [shown.page.evaluate(SLIDE, {"edges": share})[1] for share in (10, 50, 100)]
            assert 0 < edges[0] < edges[1] < edges[2]
            every = shown.page.evaluate(SLIDE, {"nodes": 100})[0]
            squares = shown.page.locator("path.node").count()
            few = shown.page.evaluate(SLIDE, {"nodes": 30, "edges": 10})
            assert few[0] < every and few[1] < edges[1]
            if path is picture_page:  # the text's three squares all hold much
                assert shown.page.locator("path.node").count() < squares
            assert "nodes=30" in shown.page.url and "edges=10" in shown.page.url
            shown.page.reload()
            assert shown.page.locator(".node").count() == few[0]
            assert not shown.wrong


def test_a_held_node_outlives_the_sliders(driven, page, picture_page):  # noqa: F811
    for path in (page, picture_page):
        with opened(driven, path) as shown:
            shown.page.evaluate(SLIDE, {"nodes": 100})
            order = "[...drawn].sort((a, b) => b.influence - a.influence)"
            least = f"{order}.findLast(one => one.kind === 'code')"
            name = shown.page.evaluate(f"(choose({least}, true), state.chosen.id)")
            few = shown.page.evaluate(SLIDE, {"nodes": 20})[0]
            assert shown.page.locator(f".node.chosen[data-id='{name}']").count() == 1
            shown.page.reload()
            assert shown.page.locator(f".node.chosen[data-id='{name}']").count() == 1
            shown.page.click("#close")  # what was kept for the panel alone goes with it
            assert shown.page.locator(".node").count() == few - 1
            assert shown.page.locator("#drawing.focus").count() == 0 and not shown.wrong


def test_layers_with_codes_of_patches_have_a_sheet(driven, picture_page, of_picture):  # noqa: F811
    nodes, special = of_picture.table("nodes"), of_picture.meta["special"]
    layers = nodes["layer"][(nodes["atom"] >= 0) & (nodes["pos"] >= special)].unique()
    with opened(driven, picture_page) as shown:
        shown.page.evaluate(SLIDE, {"nodes": 100})
        sheets = shown.page.locator(".sheet").evaluate_all(
            "all => all.map(n => [+n.dataset.layer, n.firstChild.getBoundingClientRect().top])"
        )
        order = [layer for layer, _ in sorted(sheets, key=lambda sheet: -sheet[1])]
        assert order == [-1, *sorted(layers)] and 0 < len(layers) < nodes["layer"].max()
        plates = shown.page.locator(".plate").count()  # codes of CLS, and CLS itself
        assert plates == nodes["layer"][(nodes["pos"] == 0) & (nodes["atom"] >= -1)].nunique()
        node = largest(of_picture)
        shown.page.hover(f".node[data-id='{node['node']}']")
        assert shown.page.get_attribute(".sheet.chosen", "data-layer") == str(node["layer"])
        marked = shown.page.locator("#prompt .has").evaluate_all(
            "all => all.map(n => +n.dataset.pos)"
        )
        placed = shown.page.locator(".node").evaluate_all(IDS)
        wanted = {int(name.split("@")[1]) for name in placed if "@" in name}
        assert set(marked) == {pos for pos in wanted if pos >= special} and not shown.wrong


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_panel_is_in_view_after_any_click(driven, picture_page, page, size):  # noqa: F811
    for path in (picture_page, page):
        with opened(driven, path, size[0], height=size[1], touch=size[0] < 500) as shown:
            assert shown.page.locator("#drawing").bounding_box()["y"] < 300
            answer = shown.page.inner_text(".finding p >> nth=0")
            assert 0 < len(answer.split()) <= 20
            names = shown.page.locator(".node").evaluate_all(IDS)
            for name in [*names[:: max(1, len(names) // 8)], "logit", "logit"]:
                shown.page.click(f".node[data-id='{name}']")
                words, top, bottom, seen = shown.page.evaluate(
                    """name => {
                      const box = document.getElementById('name').getBoundingClientRect();
                      const node = document.querySelector(`.node[data-id="${name}"]`);
                      const {x, y, width, height} = node.getBoundingClientRect();
                      const hit = document.elementFromPoint(x + width / 2, y + height / 2);
                      return [nameOf(nodeOf(name)), box.top, box.bottom,
                        hit?.closest('#drawing') != null];
                    }""",
                    name,
                )
                assert words == shown.page.inner_text("#name")
                assert 0 <= top < bottom <= size[1] and seen, name
            assert overflow(shown.page) == [] and not shown.wrong


def test_the_panel_follows_a_page_that_is_scrolled(driven, picture_page):  # noqa: F811
    with opened(driven, picture_page, 1280, height=500) as shown:
        shown.page.evaluate("scrollTo(0, 400)")
        x, y, words = shown.page.evaluate(
            """() => {
              const node = drawn.find(one => one.kind === 'embedding' && shown.nodes.has(one));
              const {x, y, width, height} = document.querySelector(`[data-id="${node.id}"]`)
                .getBoundingClientRect();
              return [x + width / 2, y + height / 2, nameOf(node)];
            }"""
        )
        assert 0 < y < 500  # the square is seen, the panel's place at the top is not
        shown.page.mouse.click(x, y)
        box = shown.page.locator("#name").bounding_box()
        assert shown.page.inner_text("#name") == words and 0 <= box["y"] < 480
        assert shown.page.evaluate("scrollY") == 400


def test_targets_are_large_and_the_nearest_node_wins(driven, picture_page):  # noqa: F811
    for width in (1280, 390):
        with opened(driven, picture_page, width, height=1600, touch=width < 500) as shown:
            small = shown.page.evaluate(
                """() => {
                  for (const fold of document.querySelectorAll('details')) fold.open = true;
                  return [...document.querySelectorAll('.touch, .graph button, .graph input')]
                    .map(made => [made.id || made.textContent, made.getBoundingClientRect()])
                    .filter(([, box]) => box.width && Math.min(box.width, box.height) < 23.9)
                    .map(([name]) => name);
                }"""
            )
            assert small == []
            points = shown.page.evaluate(
                """() => [...document.querySelectorAll('.touch')].map(touch => {
                  const {x, y, width, height} = touch.getBoundingClientRect();
                  return [touch.dataset.of, x + width / 2, y + height / 2];
                })"""
            )
            for _, x, y in points[::7]:
                for at in ((x - 9, y - 3), (x + 9, y - 3)):  # between two nodes of a row
                    found = shown.page.evaluate(
                        "([x, y]) => under({clientX: x, clientY: y}).id", list(at)
                    )
                    away = {of: np.hypot(px - at[0], py - at[1]) for of, px, py in points}
                    assert away[found] < min(away.values()) + 0.1


def test_examples_of_a_code_are_in_view(driven, picture_page, of_picture):  # noqa: F811
    table = of_picture.table("examples")
    node = largest(of_picture)
    own = table[(table["layer"] == node["layer"]) & (table["atom"] == node["atom"])]
    with opened(driven, picture_page, 1280, height=800) as shown:
        shown.page.hover(f".node[data-id='{node['node']}']")
        words = shown.page.inner_text("#examples")
        assert len(own) and all(f"{value:.3g}".rstrip("0") in words for value in own["value"])
        box = shown.page.locator("#examples").bounding_box()
        assert box["height"] > 0 and box["y"] + box["height"] <= 800


IDS = "all => all.map(made => made.dataset.id)"
GROUPS = "state.groups.map(({name, nodes}) => [name, nodes.map(node => node.id)])"


def test_like_nodes_are_grouped_and_changes_stay_in_the_address(driven, page):  # noqa: F811
    with opened(driven, page) as shown:
        first = shown.page.evaluate(GROUPS)
        assert first and all(len(nodes) > 1 for _, nodes in first)
        assert len({name for name, _ in first}) == len(first)
        assert len({node for _, nodes in first for node in nodes}) == sum(len(n) for _, n in first)
        assert all(len({node[:2] for node in nodes}) == 1 for _, nodes in first)
        shown.page.reload()
        assert shown.page.evaluate(GROUPS) == first and "group=" not in shown.page.url
        shown.page.click("#pins summary")
        row = shown.page.locator("#groups li").first
        row.get_by_role("button", name="Mark").click()
        marked = shown.page.locator(".node.member").evaluate_all(IDS)
        assert marked and set(marked) <= set(first[0][1]) and "group=" not in shown.page.url
        row.locator("input").fill("mine: yes")
        row.locator("input").press("Enter")
        shown.page.locator("#groups li").nth(1).get_by_role("button", name="Dissolve").click()
        wanted = [["mine  yes", first[0][1]], *first[2:]]
        shown.page.reload()
        assert shown.page.evaluate(GROUPS) == wanted
        assert shown.page.locator(".node.member").count() == len(marked)
        for _ in wanted:  # none at all is a choice too
            shown.page.locator("#groups li button >> text=Dissolve").first.click()
        shown.page.reload()
        assert shown.page.evaluate(GROUPS) == [] and not shown.wrong


def test_pinned_nodes_become_a_group(driven, page, graph):  # noqa: F811
    name = largest(graph)["node"]
    with opened(driven, page) as shown:
        before = shown.page.evaluate(GROUPS)
        shown.page.click(f".node[data-id='{name}']")
        shown.page.click("#pin")
        shown.page.fill("#group-name", "cause")
        shown.page.click("#group")
        shown.page.reload()
        assert shown.page.evaluate(GROUPS) == [*before, ["cause", [name]]]
        assert shown.page.locator(".node.member").count() == 1 and not shown.wrong


def test_how_sure_opens_and_keeps_the_pins(driven, page, graph):  # noqa: F811
    name = largest(graph)["node"]
    with opened(driven, page) as shown:
        shown.page.click(f".node[data-id='{name}']")
        shown.page.click("#pin")
        shown.page.click("text=How sure? >> nth=0")
        shown.page.wait_for_timeout(100)
        assert shown.page.is_visible("#sure")
        assert shown.page.evaluate("state.pins.map(node => node.id)") == [name]


def test_a_stack_is_saved_with_its_picture(driven, picture_page, tmp_path):  # noqa: F811
    with opened(driven, picture_page) as shown:
        shown.page.evaluate(SLIDE, {"nodes": 100})
        for kind in ("svg", "png"):
            with shown.page.expect_download() as download:
                shown.page.click(f"#save-{kind}")
            download.value.save_as(tmp_path / f"graph.{kind}")
        assert not shown.wrong and not shown.asked
    svg = (tmp_path / "graph.svg").read_text()
    with Image.open(tmp_path / "graph.png") as saved:
        pixels = np.asarray(saved.convert("RGB")).astype(int)
    with opened(driven, tmp_path / "graph.svg") as alone:
        sheets, whole = alone.page.locator(".sheet"), alone.page.locator("svg").bounding_box()
        assert svg.count("data:image/webp") == sheets.count() > 1
        box = sheets.first.bounding_box()
    y = int((box["y"] - whole["y"] + box["height"] / 2) / whole["height"] * len(pixels))
    x = int((box["x"] - whole["x"] + box["width"] / 2) / whole["width"] * pixels.shape[1])
    around = pixels[y - 30 : y + 30, x - 60 : x + 60]
    assert around.std(axis=(0, 1)).min() > 10  # the picture of the input's sheet, not bare ground
