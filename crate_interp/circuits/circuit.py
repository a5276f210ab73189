"""A circuit: a frozen list of weighted edges between heads, atoms, embedding and logits."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crate_interp.circuits.circuit_drawing import drawn
from crate_interp.circuits.patching_arguments import Head
from crate_interp.core import checks
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import plain

_NODE = re.compile(r"L(0|[1-9][0-9]{0,8})[HA](0|[1-9][0-9]{0,8})|embed|logits")
LAST = 2**31 - 1  # the layer number of the logits, above that of any layer
_FORMAT = "crate_interp circuit 1"
# Limits of a file; circuits that people read have a few hundred edges.
_MOST_BYTES, _MOST_EDGES, _MOST_NOTE, _DEEPEST = 2**24, 20_000, 10_000, 20


@dataclass(frozen=True)
class Edge:
    """An edge from one node to a later one, with a weight.

    Nodes are "embed", "L3H1" (head 1 of layer 3), "L3A17" (atom 17 of layer 3) and "logits".
    """

    source: str
    target: str
    weight: float


@dataclass(frozen=True)
class Circuit:
    """Weighted edges, with a note and meta on their origin; the edges are stored as a tuple.

    Raises ValueError if a name is not that of a node, an edge does not go to a later node, a weight
    is not a finite number, or two edges connect the same nodes.
    """

    edges: Sequence[Edge]
    note: str = ""
    meta: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.edges, (list, tuple)):
            raise ValueError(
                f"edges={checks.shown(self.edges)}: give a list of Edge(source, target, weight)."
            )
        object.__setattr__(self, "edges", tuple(self.edges))
        for edge in self.edges:
            _check_edge(edge)
        pairs = [(edge.source, edge.target) for edge in self.edges]
        if len(set(pairs)) < len(pairs):
            raise ValueError("two edges connect the same nodes: give each pair of nodes one edge.")

    def nodes(self) -> list[str]:
        """Returns every node once, from the embedding to the logits."""
        names = {name for edge in self.edges for name in (edge.source, edge.target)}
        return sorted(names, key=lambda name: (*place_of(name), number_of(name)))

    def heads(self) -> list[Head]:
        """Returns (layer, head) of the nodes that are heads."""
        heads = [name for name in self.nodes() if name.startswith("L") and "H" in name]
        return [(place_of(name)[0], number_of(name)) for name in heads]

    def to_networkx(self) -> Any:
        """Returns a networkx.DiGraph with `weight` on edges and `layer` on nodes.

        The layer of the embedding is -1, that of the logits LAST.
        """
        import networkx

        graph = networkx.DiGraph(note=self.note)
        graph.add_nodes_from((name, {"layer": place_of(name)[0]}) for name in self.nodes())
        graph.add_weighted_edges_from(
            (edge.source, edge.target, edge.weight) for edge in self.edges
        )
        return graph

    def save(self, path: str | Path) -> Path:
        """Writes the circuit as JSON, makes the folder if there is none, and returns the path.

        Raises ValueError for a circuit that `load` would not read back.
        """
        edges = [[edge.source, edge.target, float(edge.weight)] for edge in self.edges]
        content = {"format": _FORMAT, "note": self.note, "edges": edges, "meta": self.meta}
        _check(content)
        text = json.dumps(content, indent=1) + "\n"
        if len(text) > _MOST_BYTES:
            raise ValueError(
                f"the circuit needs more than {_MOST_BYTES >> 20} MiB: save circuit.largest(), or "
                "shorten its meta."
            )
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """Returns the circuit that `save` wrote.

        Raises ValueError for any other file, and for one of more than 16 MiB or 20,000 edges.
        """
        try:
            content = _read(Path(path))
            edges = [Edge(*edge) for edge in content["edges"]]
            return cls(edges, content["note"], content["meta"])
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{plain(repr(str(path)))} holds no circuit: {error}") from None

    def largest(self, count: int = 1000) -> "Circuit":
        """Returns a circuit of the `count` largest edges, by absolute weight; its note says so.

        A circuit of at most `count` edges is returned as it is. Raises ValueError unless the count
        is a whole number of at least 1.
        """
        checks.count("count", count)
        if len(self.edges) <= count:
            return self
        by_size = sorted(self.edges, key=lambda edge: -abs(edge.weight))
        words = f"the {count:,} largest of {len(self.edges):,} edges: {self.note or 'circuit'}"
        return Circuit(by_size[:count], words, self.meta)

    def svg(self) -> str:
        """Returns a drawing, layers from left to right.

        A wider edge has a larger absolute weight. Blue edges have a weight of at least 0,
        orange dashed edges a weight below 0. If there are more than 1,000 edges, only the 1,000
        largest are drawn, and the title says so. `ci.viz.circuit` draws a circuit for a paper.
        """
        shown = self.largest()
        places = {name: place_of(name) for name in shown.nodes()}
        edges = [(edge.source, edge.target, float(edge.weight)) for edge in shown.edges]
        return drawn(places, edges, plain(shown.note or "circuit"))

    def _repr_html_(self) -> str:
        return self.svg()


def head_name(layer: int, head: int) -> str:
    """Returns the name of a head, such as "L3H1", as in `model.all_head_labels`."""
    return f"L{int(layer)}H{int(head)}"


def place_of(name: str) -> tuple[int, int]:
    """Returns (layer, kind): kind is 1 for atoms, else 0; "embed" has layer -1, "logits" LAST.

    Raises ValueError if the name is not a node.
    """
    match = _NODE.fullmatch(name) if isinstance(name, str) else None
    if not match:
        raise ValueError(
            f"{checks.shown(name)} is not a node: give 'embed', 'logits', a head such as 'L3H1' or "
            "an atom such as 'L3A17'."
        )
    if name in ("embed", "logits"):
        return (-1, 0) if name == "embed" else (LAST, 0)
    return int(match[1]), int("A" in name)


def number_of(name: str) -> int:
    """Returns the number of a head or atom in its layer; 0 for other nodes."""
    return int(re.findall(r"\d+", name)[-1]) if name.startswith("L") else 0


def _check_edge(edge: Any) -> None:
    if not isinstance(edge, Edge):
        raise ValueError(f"{checks.shown(edge)} is not an edge: give Edge(source, target, weight).")
    forward = place_of(edge.source) < place_of(edge.target)
    words = f"the edge {edge.source} -> {edge.target}"
    if not checks.is_number(edge.weight):
        weight = checks.shown(edge.weight)
        raise ValueError(f"{words} has the weight {weight}: give a finite number.")
    if not forward:
        raise ValueError(f"{words} does not go to a later node: give edges that go forward.")


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a file; raises ValueError for content that `save` never writes."""
    if not path.is_file():
        raise ValueError("there is no such file.")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"the file is larger than {_MOST_BYTES >> 20} MiB.")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("Circuit.save did not write this file.")
    _check(content)
    return content


def _check(content: dict[str, Any]) -> None:
    """Raises ValueError for edges, a note or meta that a circuit's file cannot hold."""
    edges, note, meta = (content.get(name) for name in ("edges", "note", "meta"))
    if not isinstance(edges, list) or not all(isinstance(e, list) and len(e) == 3 for e in edges):
        raise ValueError("the edges are not a list of [source, target, weight].")
    if len(edges) > _MOST_EDGES:
        raise ValueError(f"there are {len(edges):,} edges; at most {_MOST_EDGES:,} are allowed.")
    if not isinstance(note, str) or len(note) > _MOST_NOTE:
        raise ValueError(f"the note is not a text of at most {_MOST_NOTE:,} characters.")
    if not isinstance(meta, dict) or _is_deep(meta):
        raise ValueError(f"meta is not an object nested at most {_DEEPEST} deep.")


def _is_deep(value: Any) -> bool:
    """Tells whether lists and objects are nested deeper than `_DEEPEST`."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
