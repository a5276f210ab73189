"""Drawings of circuits: what a figure for a paper and an SVG hold, and what both schemes show."""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch

import crate_interp as ci
from conftest import refuses
from crate_interp.circuits import Circuit, Edge
from crate_interp.viz.figures.circuit_figures import BOX, bend, layout

EDGES = (
    Edge("embed", "L0H1", 0.5),
    Edge("L0H1", "L0A12", -0.25),
    Edge("L0H1", "logits", 2.0),
    Edge("L0A12", "L1H0", 1.0),
    Edge("L1H0", "logits", 0.4),
)


def parts(figure):
    (axes,) = figure.axes
    edges = [one for one in axes.patches if isinstance(one, PathPatch)]
    boxes = [one for one in axes.patches if isinstance(one, FancyBboxPatch)]
    return axes, edges, boxes, [text.get_text() for text in axes.texts]


def test_a_figure_has_every_node_and_edge_by_its_weight():
    figure = ci.viz.circuit(Circuit(EDGES, note="paths of $x"), dpi=50.0)
    axes, edges, boxes, words = parts(figure)
    assert figure.dpi == 50 and axes.get_title() == "paths of $x"
    assert len(edges) == len(EDGES) and len(boxes) == 5
    assert {"embed", "L0H1", "L0A12", "L1H0", "logits"} < set(words)
    assert {"layer 0", "atoms of layer 0", "layer 1"} < set(words)
    assert "widest edge: 2; dashed: below 0" in words
    widths = [one.get_linewidth() for one in edges]  # from the smallest weight to the largest
    assert widths == sorted(widths) and widths[-1] == 3.5
    dashed = [one.get_linestyle() == "--" for one in edges]
    assert dashed == [True, False, False, False, False]
    assert edges[0].get_edgecolor()[:3] != edges[1].get_edgecolor()[:3]


def test_a_figure_is_one_column_wide_and_nothing_lies_outside():
    """Three columns fit into 3.35 inches, with words of at least 6 points."""
    edges = [Edge(f"L0H{i}", f"L1H{j}", 1.0) for i in range(4) for j in range(3)]
    figure = ci.viz.circuit(Circuit([*edges, Edge("L1H0", "logits", 2.0)]))
    axes, *_ = parts(figure)
    assert figure.get_figwidth() < 3.35
    assert min(text.get_fontsize() for text in axes.texts) >= 6
    figure.canvas.draw()
    whole = figure.bbox
    for one in (*axes.texts, *axes.patches, axes.title):
        box = one.get_window_extent()
        assert box.x0 >= whole.x0 and box.x1 <= whole.x1, one
        assert box.y0 >= whole.y0 and box.y1 <= whole.y1 + 1, one


def test_it_draws_into_axes_and_without_a_title():
    figure = Figure(figsize=(6, 2))
    left, right = figure.subplots(1, 2)
    positive = Circuit(EDGES[:1])
    assert ci.viz.circuit(positive, ax=right, title="") is figure
    assert not left.patches and len(right.patches) == 3 and right.get_title() == ""
    assert ci.viz.circuit(positive, title="mine").axes[0].get_title() == "mine"
    assert ci.viz.circuit(positive).axes[0].get_title() == "Circuit of 2 nodes"
    assert "widest edge: 0.5" in parts(ci.viz.circuit(positive))[3]


def test_words_of_strangers_stay_inside_and_the_formulas_of_others_stay_formulas():
    """A title is plain, on lines that fit; what else a caller's figure has is left alone."""
    for words in ("word " * 60, "e" * 300, "$\\nonsense$ \x1b[31m\x00 <b>"):
        for drawn in (
            ci.viz.circuit(Circuit(EDGES[:1]), title=words),
            ci.viz.circuit(Circuit(EDGES[:1], note=words)),
        ):
            drawn.canvas.draw()  # a formula or a missing letter would raise
            box = drawn.axes[0].title.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= drawn.bbox.x1
    figure = Figure()
    left, right = figure.subplots(1, 2)
    figure.suptitle("$x^2$")
    left.set_title("$x^2$")
    ci.viz.circuit(Circuit(EDGES[:1]), ax=right, title="$x^2$")
    texts = (left.title, *figure.texts, right.title)
    assert [text.get_parse_math() for text in texts] == [True, True, False]


def test_edges_without_weight_are_not_said_to_have_one():
    figure = ci.viz.circuit(Circuit([Edge("L0H0", "logits", 0.0)]))
    _, (edge,), _, words = parts(figure)
    assert "widest edge: 0" in words and edge.get_linewidth() == pytest.approx(0.6)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="ax is a Figure: give one matplotlib Axes"):
        ci.viz.circuit(Circuit(EDGES), ax=Figure())
    refuses("a circuit without edges to draw", lambda: ci.viz.circuit(Circuit(())))


def test_arcs_stay_inside_the_drawing():
    """The curve of an edge around many columns, by points on it."""
    names = ["embed", *[f"L{layer}H0" for layer in range(12)], "logits"]
    spots, width, height = layout({name: (place, 0) for place, name in enumerate(names)})
    assert all(x + BOX[0] <= width and y + BOX[1] <= height for x, y in spots.values())
    for pair in (("embed", "logits"), ("L0H0", "L5H0")):
        shown = [
            Edge(*pair, 1.0),
            *(Edge(*one, 1.0) for one in zip(names, names[1:], strict=False)),
        ]
        bottom, top = ci.viz.circuit(Circuit(shown)).axes[0].get_ylim()
        p0, p1, p2, p3 = bend(spots[pair[0]], spots[pair[1]])
        for t in (step / 50 for step in range(51)):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
            y = sum(w * p[1] for w, p in zip(weights, (p0, p1, p2, p3), strict=True))
            assert top + 19.9 <= y <= bottom
    # no arc, no room for one
    assert ci.viz.circuit(Circuit([Edge("embed", "L0H0", 1.0)])).axes[0].get_ylim()[1] == 0


def test_colours_of_an_svg_follow_the_page():
    """Every colour is a property of pages/colours.css, with a fallback that no scheme needs."""
    svg = Circuit(EDGES).svg()
    colours = re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)
    assert {"none", "currentColor"} < set(colours)
    assert all(re.match(r"none|currentColor|var\(--\w+, .+\)$", one) for one in colours)
    css = Path(ci.__file__).parent / "viz" / "templates" / "styles" / "colours.css"
    known = set(re.findall(r"(--\w+):", css.read_text(encoding="utf-8")))
    assert set(re.findall(r"var\((--\w+)", svg)) <= known
