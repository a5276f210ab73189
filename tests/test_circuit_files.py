"""Files of circuits that strangers wrote: refused with a sentence, drawn without harm."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
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
        dict(edges=[["embed", "L0H1", float("inf")]]),
        dict(edges=[["embed", "L0H1", 10**400]]),
        dict(edges=[["embed", "L0H1", True]]),
        dict(edges=[["embed", "L0H1", "1"]]),
        dict(edges=[["embed", "L0H1", None]]),
        dict(edges=[["embed", "L0H1", [1]]]),
        dict(edges=[["embed", "blocks.0.hook_nothing", 1]]),
        dict(edges=[["embed", "L" + "9" * 5000 + "H0", 1]]),
        dict(edges=[["embed", "L٣H1", 1]]),
        dict(edges=[["embed", "L0H1\n", 1]]),
        dict(edges=[[deep(300), "L0H1", 1]]),
        dict(edges=[[{}, [], 1]]),
        dict(edges=[["L0H1", "embed", 1]]),
        dict(edges=NODES * 2),
        dict(edges={"a": 1}),
        dict(edges="abc"),
        dict(edges=[1]),
        dict(edges=None),
        dict(note=["a"]),
        dict(meta=[]),
        dict(format=["crate_interp circuit 1"]),
        dict(text="[" * 10**5),
        dict(text=""),
        dict(text='{"format": 1' + "0" * 5000 + "}"),
        dict(text="[]"),
    ],
)
def test_a_file_that_no_circuit_wrote_is_refused(over, tmp_path):
    with pytest.raises(ValueError, match="holds no circuit: ") as caught:
        ci.circuits.Circuit.load(write(tmp_path / "c.json", **over))
    assert is_plain(str(caught.value), 1000)


def test_no_file_is_no_circuit(tmp_path):
    for name in ("missing", "."):
        with pytest.raises(ValueError, match="holds no circuit: "):
            ci.circuits.Circuit.load(tmp_path / name)


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
    edges = [[f"L{layer}A{layer}", "logits", layer] for layer in range(20_000)]
    note = "</title><script>\x1b\ud800"
    circuit = ci.circuits.Circuit.load(write(tmp_path / "c.json", edges=edges, note=note))
    svg = circuit.svg()
    assert svg.count("var(--accent, ") == 1000 and "L19999A19999" in svg and ">L5A5<" not in svg
    assert "the 1,000 largest of 20,000 edges: &lt;/title&gt;" in svg and harmless(svg)
