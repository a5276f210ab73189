"""A circuit: a frozen list of weighted edges between heads, atoms, embedding and logits."""

import json
import math
import re
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from crate_interp.circuits.drawing import drawn
from crate_interp.files import write_text

_NODE = re.compile(r"L(0|[1-9]\d*)[HA](0|[1-9]\d*)|embed|logits")
LAST = 2**31 - 1  # the layer of the logits, after any other
_FORMAT = "crate_interp circuit 1"


@dataclass(frozen=True)
class Edge:
    """From one node to a later one. Nodes are "embed", "L3H1" (head 1 of layer 3), "L3A17" (atom 17 of layer 3) and "logits"."""

    source: str
    target: str
    weight: float


@dataclass(frozen=True)
class Circuit:
    """Edges and what they are. Raises ValueError for names that are no nodes, edges that go back, weights that are no numbers,
    and an edge that is there twice."""

    edges: Any  # of Edge, kept as a tuple
    note: str = ""
    meta: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.edges, (list, tuple)):
            raise ValueError(f"edges={self.edges!r}: give a list of Edge(source, target, weight).")
        object.__setattr__(self, "edges", tuple(self.edges))
        for edge in self.edges:
            if not isinstance(edge, Edge):
                raise ValueError(
                    f"a circuit is made of Edge(source, target, weight), got {edge!r}."
                )
            if not isinstance(edge.weight, Real) or not math.isfinite(edge.weight):
                raise ValueError(
                    f"the edge {edge.source} -> {edge.target} has the weight {edge.weight!r}: give a finite number."
                )
            if place_of(edge.source) >= place_of(edge.target):
                raise ValueError(
                    f"the edge {edge.source} -> {edge.target} does not go to a later place."
                )
        pairs = [(edge.source, edge.target) for edge in self.edges]
        if len(set(pairs)) < len(pairs):
            raise ValueError("an edge is there twice: give each pair one weight.")

    def nodes(self) -> list[str]:
        """Every node once, from the embedding to the logits."""
        names = {name for edge in self.edges for name in (edge.source, edge.target)}
        return sorted(names, key=lambda name: (*place_of(name), number_of(name)))

    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of the nodes that are heads."""
        return [
            (place_of(name)[0], number_of(name))
            for name in self.nodes()
            if name.startswith("L") and "H" in name
        ]

    def to_networkx(self) -> Any:
        """A networkx.DiGraph with `weight` on edges and `layer` on nodes (-1 for the embedding, LAST for the logits)."""
        import networkx

        graph = networkx.DiGraph(note=self.note)
        graph.add_nodes_from((name, {"layer": place_of(name)[0]}) for name in self.nodes())
        graph.add_weighted_edges_from(
            (edge.source, edge.target, edge.weight) for edge in self.edges
        )
        return graph

    def save(self, path: str | Path) -> Path:
        """Writes JSON."""
        edges = [[edge.source, edge.target, float(edge.weight)] for edge in self.edges]
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            path,
            json.dumps(
                {"format": _FORMAT, "note": self.note, "edges": edges, "meta": self.meta}, indent=1
            )
            + "\n",
        )
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """What `save` wrote; ValueError for another file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            right = isinstance(content, dict) and content["format"] == _FORMAT
            edges = (
                tuple(Edge(str(a), str(b), weight) for a, b, weight in content["edges"])
                if right
                else ()
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r} holds no circuit: {error}") from None
        if not right:
            raise ValueError(f"{str(path)!r} holds no circuit that Circuit.save wrote.")
        meta = content.get("meta")
        return cls(edges, str(content.get("note", "")), meta if isinstance(meta, dict) else {})

    def svg(self) -> str:
        """A drawing, layers from left to right; the wider an edge the larger its weight, blue where it is above 0, red below."""
        places = {name: place_of(name) for name in self.nodes()}
        return drawn(
            places,
            [(edge.source, edge.target, float(edge.weight)) for edge in self.edges],
            self.note,
        )

    def _repr_html_(self) -> str:
        return self.svg()


def head_name(layer: int, head: int) -> str:
    """ "L3H1", as `model.all_head_labels()` calls it."""
    return f"L{int(layer)}H{int(head)}"


def place_of(name: Any) -> tuple[int, int]:
    """(layer, 0 for heads and 1 for atoms), -1 for the embedding and LAST for the logits; ValueError for no node."""
    match = _NODE.fullmatch(name) if isinstance(name, str) else None
    if not match:
        raise ValueError(
            f"{name!r} is no node: give 'embed', 'logits', a head such as 'L3H1' or an atom such as 'L3A17'."
        )
    if name in ("embed", "logits"):
        return (-1, 0) if name == "embed" else (LAST, 0)
    return int(match[1]), int("A" in name)


def number_of(name: str) -> int:
    """The number of a head or atom in its layer."""
    return int(re.findall(r"\d+", name)[-1]) if name.startswith("L") else 0
