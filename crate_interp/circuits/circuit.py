"""A circuit: a frozen list of weighted edges between heads, atoms, embedding and logits."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crate_interp.circuits.patching import Head
from crate_interp.core import checks
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import plain

_NODE = re.compile(r"L(0|[1-9][0-9]{0,8})[HA](0|[1-9][0-9]{0,8})|embed|logits")
LAST = 2**31 - 1  # the layer number of the logits, above that of any layer
_FORMAT = "crate_interp circuit 1"


@dataclass(frozen=True)
class Edge:
    """An edge from one node to a later one, with a weight.

    Nodes are "embed", "L3H1" (head 1 of layer 3), "L3A17" (atom 17 of layer 3) and "logits".

    Args:
        source: A node: "embed", "L3H1" (head 1 of layer 3), "L3A17" (atom 17 of layer 3).
        target: A later node, or "logits".
        weight: How much goes along the edge.
    """

    source: str
    target: str
    weight: float


@dataclass(frozen=True)
class Circuit:
    """Weighted edges, with a note and meta on their origin; the edges are stored as a tuple.

    Args:
        edges: The edges; they are stored as a tuple.
        note: What the circuit is, in words.
        meta: Where it comes from.

    Raises:
        ValueError: If a name is not that of a node, an edge does not go to a later node, a weight
            is not a finite number, or two edges connect the same nodes.
    """

    edges: Sequence[Edge]
    note: str = ""
    meta: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple(self.edges))
        for edge in self.edges:
            if not isinstance(edge, Edge) or not checks.is_number(edge.weight):
                words = "is not an edge: give Edge(source, target, weight) with a finite weight."
                raise ValueError(f"{checks.quote(edge)} {words}")
            if not place_of(edge.source) < place_of(edge.target):
                raise ValueError(f"{edge.source} -> {edge.target} does not go to a later node.")
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
        graph.add_weighted_edges_from((one.source, one.target, one.weight) for one in self.edges)
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
        """Returns the circuit that `save` wrote; raises ValueError for any other file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            note, meta = content["note"], content["meta"]
            if content["format"] != _FORMAT or not isinstance(note, str) or type(meta) is not dict:
                raise ValueError("Circuit.save did not write this file.")
            return cls([Edge(*edge) for edge in content["edges"]], note, meta)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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
        """Returns `ci.viz.circuit` as SVG, in the colours of the page around it.

        Raises ValueError if there are no edges.
        """
        from crate_interp.viz.circuit_figures import circuit
        from crate_interp.viz.page import inline_svg

        return inline_svg(circuit(self), self.note or "circuit", salt="circuit")

    def _repr_html_(self) -> str | None:
        return self.svg() if self.edges else None


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
            f"{checks.quote(name)} is not a node: give 'embed', 'logits', a head such as 'L3H1' or "
            "an atom such as 'L3A17'."
        )
    if name in ("embed", "logits"):
        return (-1, 0) if name == "embed" else (LAST, 0)
    return int(match[1]), int("A" in name)


def number_of(name: str) -> int:
    """Returns the number of a head or atom in its layer; 0 for other nodes."""
    return int(re.findall(r"\d+", name)[-1]) if name.startswith("L") else 0
