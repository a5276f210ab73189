"""A drawing of layers of nodes and weighted edges, as SVG without a script."""

import math
from collections.abc import Sequence

from crate_interp.core.safe_text import in_html

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


def drawn(places: dict[str, Place], edges: Sequence[tuple[str, str, float]], title: str) -> str:
    """Returns the SVG of nodes and edges.

    places: the place of each node, by the node's name. Nodes with equal places share a column, and
    columns are sorted by place. edges: (from, to, weight). Edges with a weight below 0 are dashed.
    """
    spots, width, height = layout(places, [(a, b) for a, b, _ in edges])
    largest = max((abs(weight) for *_, weight in edges), default=0.0) or 1.0
    parts = [_edge(spots, edge, largest) for edge in edges]
    parts += [_node(name, spot) for name, spot in spots.items()]
    words = in_html(title or "circuit")
    style = f"max-width: 100%; width: {width}px; font: 12px system-ui, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{words}" '
        f'viewBox="0 0 {width} {height}" style="{style}">'
        f"<title>{words}</title>{''.join(parts)}</svg>"
    )


def layout(
    places: dict[str, Place], edges: Sequence[tuple[str, str]]
) -> tuple[dict[str, Point], int, int]:
    """Returns the upper left corner of each node, and the width and height of the drawing."""
    columns = sorted(set(places.values()))
    rows: dict[Place, list[str]] = {place: [] for place in columns}
    for name, place in places.items():
        rows[place].append(name)
    most = max((len(names) for names in rows.values()), default=1)
    spots: dict[str, Point] = {}
    for column, place in enumerate(columns):
        names = rows[place]
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


def _edge(spots: dict[str, Point], edge: tuple[str, str, float], largest: float) -> str:
    a, b, weight = edge
    share = abs(weight) / largest
    (x0, y0), *rest = bend(spots[a], spots[b])
    path = f"M{x0:.1f} {y0:.1f} C" + " ".join(f"{x:.1f} {y:.1f}" for x, y in rest)
    colour, dashes = (_ABOVE, "") if weight >= 0 else (_BELOW, ' stroke-dasharray="6 3"')
    words = in_html(f"{a} to {b}: {weight:.3g}")
    return (
        f'<path d="{path}" fill="none" style="stroke: {colour}"{dashes} '
        f'stroke-width="{1 + 4 * share:.2f}" stroke-opacity="{0.6 + 0.4 * share:.2f}">'
        f"<title>{words}</title></path>"
    )


def _node(name: str, spot: Point) -> str:
    x, y = spot
    width, height = BOX
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height}" rx="5" '
        f'style="fill: {_CARD}; stroke: {_LINE}"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 16:.1f}" text-anchor="middle" '
        f'style="fill: {_INK}">{in_html(name)}</text>'
    )
