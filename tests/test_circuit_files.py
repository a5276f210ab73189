"""Circuits: files that strangers wrote do no harm, and drawings hold nodes and edges."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch

import crate_interp as ci
from crate_interp.circuits import Circuit, Edge
from crate_interp.core.safe_text import is_plain
from texts import JSON, deep, harmless

pytestmark = pytest.mark.usefixtures("unchecked")

NODES = [["embed", "L0H1", 0.5], ["L0H1", "logits", -1.0]]


def write(path, text=None, **over):
    content = {"format": "crate_interp circuit 1", "note": "", "edges": NODES, "meta": {}} | over
    path.write_text(json.dumps(content) if text is None else text)
    return path


@pytest.mark.parametrize(
    "over",
    [
        dict(edges=[["embed", "L0H1", float("nan")]]),
        dict(edges=[["embed", "L0H1", 10**400]]),
        dict(edges=[["embed", "L" + "9" * 5000 + "H0", 1]]),
        dict(edges=[["embed", "L٣H1", 1]]),
        dict(edges=[["embed", "L0H1\n", 1]]),
        dict(edges=[[deep(300), "L0H1", 1]]),
        dict(edges=NODES * 2),
        dict(edges=[1]),
        dict(note=["a"]),
        dict(format=["crate_interp circuit 1"]),
        dict(text="[" * 10**5),
        dict(text=""),
        dict(text='{"format": 1' + "0" * 5000 + "}"),
    ],
)
def test_a_file_that_no_circuit_wrote_is_refused(over, tmp_path):
    with pytest.raises(ValueError, match="holds no circuit: ") as caught:
        ci.circuits.Circuit.load(write(tmp_path / "c.json", **over))
    assert is_plain(str(caught.value), 1000)


@given(JSON, st.sampled_from(["edges", "note", "meta", "format"]))
def test_every_circuit_file(tmp_path_factory, value, field):
    path = write(tmp_path_factory.getbasetemp() / "any.json", **{field: value})
    try:
        circuit = ci.circuits.Circuit.load(path)
    except ValueError as error:
        assert is_plain(str(error), 1000)
    else:
        assert harmless(circuit._repr_html_() or "") and circuit.save(path) == path
        assert ci.circuits.Circuit.load(path) == circuit


def test_a_drawing_of_many_edges_shows_the_largest(tmp_path):
    edges = [[f"L{layer}A{layer}", "logits", layer] for layer in range(2000)]
    note = "</title><script>\x1b\ud800"
    circuit = ci.circuits.Circuit.load(write(tmp_path / "c.json", edges=edges, note=note))
    svg = circuit.svg()
    assert svg.count("var(--accent, ") == 1000 and "L1999A1999" in svg and ">L5A5<" not in svg
    assert "the 1,000 largest of 2,000 edges: &lt;/title&gt;" in svg and harmless(svg)


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


def test_colours_of_an_svg_follow_the_page():
    """Every colour is a property of pages/colours.css, with a fallback that no scheme needs."""
    svg = Circuit(EDGES).svg()
    colours = re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)
    assert {"none", "currentColor"} < set(colours)
    assert all(re.match(r"none|currentColor|var\(--\w+, .+\)$", one) for one in colours)
    css = Path(ci.__file__).parent / "viz" / "templates" / "styles" / "colours.css"
    known = set(re.findall(r"(--\w+):", css.read_text(encoding="utf-8")))
    assert set(re.findall(r"var\((--\w+)", svg)) <= known
