"""A circuit: a frozen list of weighted edges between heads, atoms, embedding and logits."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crate_interp.circuits.patching import Head
from crate_interp.core import checks
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import in_html, plain

_NODE = re.compile(r"L(0|[1-9][0-9]{0,8})[HA](0|[1-9][0-9]{0,8})|embed|logits")
LAST = 2**31 - 1  # the layer number of the logits, above that of any layer
_FORMAT = "crate_interp circuit 1"
WIDE, TALL, BOX = 120, 40, (72, 24)  # distance of columns, distance of rows, size of a node
# Pages of this library define these colours for a light and a dark scheme. Elsewhere, as in a
# notebook, the fallbacks apply: the page's own text colour, and colours that are legible on light
# and on dark.
_INK = "var(--ink, currentColor)"
_CARD = "var(--card, rgba(127, 127, 127, 0.12))"
_LINE = "var(--muted, currentColor)"
_ABOVE, _BELOW = "var(--accent, #3a86c8)", "var(--other, #c8702c)"  # edges of weight >= 0 and < 0

Point = tuple[float, float]
Place = tuple[int, int]


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
        object.__setattr__(self, "edges", tuple(self.edges))
        for edge in self.edges:
            if not isinstance(edge, Edge) or not checks.is_number(edge.weight):
                words = "is not an edge: give Edge(source, target, weight) with a finite weight."
                raise ValueError(f"{checks.shown(edge)} {words}")
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
        """Returns a drawing, layers from left to right.

        A wider edge has a larger absolute weight. Blue edges have a weight of at least 0,
        orange dashed edges a weight below 0. If there are more than 1,000 edges, only the 1,000
        largest are drawn, and the title says so. `ci.viz.circuit` draws a circuit for a paper.
        """
        circuit = self.largest()
        title = plain(circuit.note or "circuit")
        places = {name: place_of(name) for name in circuit.nodes()}
        spots, width, height = layout(
            places, [(edge.source, edge.target) for edge in circuit.edges]
        )
        largest = max((abs(edge.weight) for edge in circuit.edges), default=0.0) or 1.0
        parts, looks = [], ((_ABOVE, ""), (_BELOW, ' stroke-dasharray="6 3"'))
        for edge in circuit.edges:
            share = abs(edge.weight) / largest
            (x0, y0), *rest = bend(spots[edge.source], spots[edge.target])
            path = f"M{x0:.1f} {y0:.1f} C" + " ".join(f"{x:.1f} {y:.1f}" for x, y in rest)
            colour, dashes = looks[edge.weight < 0]
            words = in_html(f"{edge.source} to {edge.target}: {edge.weight:.3g}")
            parts.append(
                f'<path d="{path}" fill="none" style="stroke: {colour}"{dashes} '
                f'stroke-width="{1 + 4 * share:.2f}" stroke-opacity="{0.6 + 0.4 * share:.2f}">'
                f"<title>{words}</title></path>"
            )
        for name, (x, y) in spots.items():
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{BOX[0]}" height="{BOX[1]}" rx="5" '
                f'style="fill: {_CARD}; stroke: {_LINE}"/>'
                f'<text x="{x + BOX[0] / 2:.1f}" y="{y + 16:.1f}" text-anchor="middle" '
                f'style="fill: {_INK}">{in_html(name)}</text>'
            )
        style = f"max-width: 100%; width: {width}px; font: 12px system-ui, sans-serif"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{in_html(title)}" '
            f'viewBox="0 0 {width} {height}" style="{style}">'
            f"<title>{in_html(title)}</title>{''.join(parts)}</svg>"
        )

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


def layout(
    places: dict[str, Place], edges: Sequence[tuple[str, str]]
) -> tuple[dict[str, Point], int, int]:
    """Returns the upper left corner of each node, and the width and height of the drawing."""
    every = sorted(set(places.values()))
    columns = [[name for name in places if places[name] == place] for place in every]
    most = max(map(len, columns), default=1)
    spots: dict[str, Point] = {}
    for column, names in enumerate(columns):
        for row, name in enumerate(names):
            y = 30 + (row + (most - len(names)) / 2) * TALL
            spots[name] = (20.0 + column * WIDE, y)
    width = 40 + max(len(columns) - 1, 0) * WIDE + BOX[0]
    # an arc rises three quarters of the way to the inner control points of its curve
    bends = [bend(spots[a], spots[b]) for a, b in edges]
    tops = [0.25 * start[1] + 0.75 * inner[1] for start, inner, _, _ in bends]
    lower = max(0, math.ceil(20 - min(tops, default=20)))
    spots = {name: (x, y + lower) for name, (x, y) in spots.items()}
    return spots, width, 60 + lower + (most - 1) * TALL + BOX[1]


def bend(start: Point, end: Point) -> tuple[Point, Point, Point, Point]:
    """Returns the four points of the cubic curve from one node's right side to another's left."""
    x0, y0 = start[0] + BOX[0], start[1] + BOX[1] / 2
    x1, y1 = end[0], end[1] + BOX[1] / 2
    if start[1] == end[1] and x1 - x0 > WIDE:  # an arc around the nodes in between
        y = y0 - BOX[1] * (1 + 0.15 * math.sqrt(x1 - x0))
        return (x0, y0), (x0 + 40, y), (x1 - 40, y), (x1, y1)
    x = (x0 + x1) / 2
    return (x0, y0), (x, y0), (x, y1), (x1, y1)
