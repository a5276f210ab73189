"""A circuit: a frozen list of weighted edges between heads, atoms, embedding and logits."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from crate_interp.circuits.drawing import drawn
from crate_interp.circuits.runs import Head
from crate_interp.files import write_text

_NODE = re.compile(r"L(0|[1-9]\d*)[HA](0|[1-9]\d*)|embed|logits")
LAST = 2**31 - 1  # the layer of the logits, after any other
_FORMAT = "crate_interp circuit 1"


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
    """Edges, with a note and meta that say where they come from. The edges are kept as a tuple.

    Raises ValueError if a name is no node, an edge does not go to a later node, a weight is not a
    finite number, or two edges connect the same nodes.
    """

    edges: Sequence[Edge]
    note: str = ""
    meta: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.edges, (list, tuple)):
            raise ValueError(f"edges={self.edges!r}: give a list of Edge(source, target, weight).")
        object.__setattr__(self, "edges", tuple(self.edges))
        for edge in self.edges:
            _check_edge(edge)
        pairs = [(edge.source, edge.target) for edge in self.edges]
        if len(set(pairs)) < len(pairs):
            raise ValueError("an edge is there twice: give each pair of nodes one weight.")

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
        """Writes the circuit as JSON, makes the folder if there is none, and returns the path."""
        edges = [[edge.source, edge.target, float(edge.weight)] for edge in self.edges]
        content = {"format": _FORMAT, "note": self.note, "edges": edges, "meta": self.meta}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """Returns the circuit that `save` wrote. Raises ValueError for any other file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content["format"] != _FORMAT:
                raise ValueError("Circuit.save did not write it")
            edges = tuple(Edge(str(a), str(b), weight) for a, b, weight in content["edges"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no circuit: {error}.") from None
        meta = content.get("meta")
        return cls(edges, str(content.get("note", "")), meta if isinstance(meta, dict) else {})

    def svg(self) -> str:
        """Returns a drawing, layers from left to right.

        The wider an edge the larger its weight; blue edges have a weight of at least 0, red ones
        one below.
        """
        places = {name: place_of(name) for name in self.nodes()}
        edges = [(edge.source, edge.target, float(edge.weight)) for edge in self.edges]
        return drawn(places, edges, self.note)

    def _repr_html_(self) -> str:
        return self.svg()


def head_name(layer: int, head: int) -> str:
    """Returns the name of a head, such as "L3H1", as `model.all_head_labels()` has it."""
    return f"L{int(layer)}H{int(head)}"


def place_of(name: str) -> tuple[int, int]:
    """Returns (layer, 0 for heads and 1 for atoms); the layer is -1 for "embed", LAST for "logits".

    Raises ValueError if the name is no node.
    """
    match = _NODE.fullmatch(name) if isinstance(name, str) else None
    if not match:
        raise ValueError(
            f"{name!r} is no node: give 'embed', 'logits', a head such as 'L3H1' or an atom such "
            "as 'L3A17'."
        )
    if name in ("embed", "logits"):
        return (-1, 0) if name == "embed" else (LAST, 0)
    return int(match[1]), int("A" in name)


def number_of(name: str) -> int:
    """Returns the number of a head or atom in its layer; 0 for other nodes."""
    return int(re.findall(r"\d+", name)[-1]) if name.startswith("L") else 0


def _check_edge(edge: Any) -> None:
    if not isinstance(edge, Edge):
        raise ValueError(f"a circuit is made of Edge(source, target, weight), got {edge!r}.")
    words = f"the edge {edge.source} -> {edge.target}"
    if not isinstance(edge.weight, Real) or not math.isfinite(edge.weight):
        raise ValueError(f"{words} has the weight {edge.weight!r}: give a finite number.")
    if place_of(edge.source) >= place_of(edge.target):
        raise ValueError(f"{words} does not go to a later place: give edges that go forward.")
