"""The page of a graph in Chromium, by pointer and keys. Skips without one: tests/SKIPS.md."""

import pytest
import torch

import crate_interp as ci
from browser import driven, opened
from conftest import make

assert driven  # the fixture

TEXT = "In the beginning was the Word, and the"


@pytest.fixture(scope="module")
def graph():
    return ci.graph(ci.load("crate-tiny-lm"), TEXT, most=80)


@pytest.fixture(scope="module")
def page(graph, tmp_path_factory):
    return ci.viz.graph(graph).save(tmp_path_factory.mktemp("graph") / "text.html")


def largest(graph):
    nodes = graph.table("nodes")
    return nodes[nodes["atom"] >= 0].nlargest(1, "influence").iloc[0]


def test_pointing_at_a_node_shows_what_feeds_it(driven, page, graph):  # noqa: F811
    node = largest(graph)
    with opened(driven, page) as shown:
        assert shown.page.inner_text("#name") == graph.answer
        shown.page.hover(f"[data-id='{node['node']}']")
        words = shown.page.inner_text("#card")
        assert f"L{node['layer']}A{node['atom']}" in words and "really changes by" in words
        edges = graph.table("edges")
        weights = edges[edges["target"] == node["node"]].groupby("source")["weight"].sum()
        codes = weights[~weights.index.str.startswith("B")]
        strongest = codes.abs().idxmax()
        first = shown.page.inner_text("#fed li")
        assert f"{codes[strongest]:.3g}".rstrip("0") in first.replace("+", "")
        # pointing elsewhere lets go, a click holds
        shown.page.hover("h1")
        assert shown.page.inner_text("#name") == graph.answer
        shown.page.click(f"[data-id='{node['node']}']")
        shown.page.hover("h1")
        assert f"L{node['layer']}A{node['atom']}" in shown.page.inner_text("#name")
        assert not shown.wrong and not shown.asked


def test_a_nodes_colour_is_its_effect_or_hollow(driven, graph, tmp_path):  # noqa: F811
    nodes = graph.table("nodes")
    effect = -nodes["attribution"].where(nodes.index % 2 == 0)
    other = ci.AttributionGraph({**graph.stored, "nodes": nodes.assign(effect=effect)}, graph.meta)
    path = ci.viz.graph(other).save(tmp_path / "graph.html")
    with opened(driven, path) as shown:
        marks = "document.querySelectorAll('.node'), one => [one.dataset.id, one.classList.value]"
        looks = dict(shown.page.evaluate(f"Array.from({marks})"))
        for row in nodes.assign(effect=effect).query("atom >= 0").itertuples():
            hollow = row.effect != row.effect
            amount = row.attribution if hollow else row.effect
            assert ("slope" in looks[row.node].split()) == hollow
            assert ("below" in looks[row.node].split()) == (amount < 0)


def test_keys_follow_edges_and_pin(driven, page, graph):  # noqa: F811
    with opened(driven, page) as shown:
        shown.page.focus("#canvas")
        shown.page.keyboard.press("ArrowDown")
        edges = graph.table("edges")
        into = edges[(edges["target"] == "logit") & ~edges["source"].str.startswith("B")]
        strongest = into.groupby("source")["weight"].sum().abs().idxmax()
        assert strongest.split("@")[0] in shown.page.inner_text("#name")
        shown.page.keyboard.press("p")
        assert shown.page.is_visible("#pins") and "pins=" in shown.page.url
        shown.page.keyboard.press("Escape")
        assert shown.page.inner_text("#name") == graph.answer
        assert not shown.wrong


def test_sliders_hide_and_the_address_keeps(driven, page):  # noqa: F811
    with opened(driven, page) as shown:
        every = shown.page.locator(".node").count()
        lines = shown.page.locator(".edge").count()
        shown.page.evaluate(
            "for (const [id, value] of [['nodes', 30], ['edges', 10]]) {"
            " document.getElementById(id).value = value;"
            " document.getElementById(id).dispatchEvent(new Event('input')); }"
        )
        fewer = shown.page.locator(".node").count()
        assert fewer < every and shown.page.locator(".edge").count() < lines
        assert "nodes=30" in shown.page.url and "edges=10" in shown.page.url
        shown.page.reload()
        assert shown.page.locator(".node").count() == fewer
        assert not shown.wrong


def test_pins_become_a_group(driven, page, graph):  # noqa: F811
    node = largest(graph)["node"]
    with opened(driven, page) as shown:
        shown.page.click(f"[data-id='{node}']")
        shown.page.click("#pin")
        shown.page.fill("#group-name", "what matters")
        shown.page.click("#group")
        assert "what matters: " in shown.page.inner_text("#groups")
        assert shown.page.locator(".ring").count() == 1
        shown.page.reload()
        assert "what matters: " in shown.page.inner_text("#groups")
        shown.page.click("#groups button")
        assert shown.page.locator(".ring").count() == 0 and not shown.wrong


def test_a_figure_has_a_mark_for_each_node(graph):
    axes = ci.viz.graph_figure(graph, most=11).axes[0]
    assert len(axes.collections) >= 12 and len(axes.lines) > 11
    assert axes.get_yticklabels()[-1].get_text() == "answer" and not axes.images


def test_a_figure_of_an_image_has_a_sheet_for_each_layer():
    model = ci.load("crate-tiny-fashion")
    image = model.preprocess(ci.data.embedded("fashion")[:1]["image"])[0]
    graph = ci.graph(model, image, most=60)
    axes = ci.viz.graph_figure(graph, most=13).axes[0]
    layers = graph.meta["settings"]["shape"][0]
    drawn = graph.table("nodes").query("atom >= 0").groupby("layer").size().clip(upper=13 // layers)
    assert len(axes.images) == layers + 1 and len(axes.collections) > drawn.sum()
    words = {text.get_text().strip() for text in axes.texts}
    assert {"input", "layer 0", f"layer {layers - 1}", "CLS", "'Ankle boot'"} <= words


def test_the_explorer_links_to_a_graph_beside_it(tmp_path):
    model = make("crate")
    sample = torch.randn(1, 3, 6, 20)
    with torch.no_grad():
        _, cache = model.run_with_cache(sample)
    assert '<a href="graph.html">' in ci.viz.explore(cache, sample, graph="graph.html").html()
    assert "Why this answer" not in ci.viz.explore(cache, sample).html()
    with pytest.raises(ValueError, match="give the name of a page beside this one"):
        ci.viz.explore(cache, sample, graph="javascript:alert(1)")
