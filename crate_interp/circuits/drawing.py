"""A drawing of layers of nodes and weighted edges, as SVG without a script."""

import html
import math
from collections.abc import Sequence

_WIDE, _TALL, _BOX = 120, 40, (72, 24)  # between columns, between rows, of a node
_ABOVE, _BELOW = "#2a6fb5", "#c0432b"  # colours of edges by the sign of their weight

Point = tuple[float, float]


def drawn(
    places: dict[str, tuple[int, int]], edges: Sequence[tuple[str, str, float]], title: str
) -> str:
    """Returns the SVG of nodes and edges.

    places: the place of each node, by its name; nodes of one place share a column, and columns are
    in the order of places. edges: (from, to, weight).
    """
    spots, width, height = _layout(places)
    largest = max((abs(weight) for *_, weight in edges), default=0.0) or 1.0
    parts = [_edge(spots, edge, largest) for edge in edges]
    parts += [_node(name, spot) for name, spot in spots.items()]
    words = html.escape(title or "circuit", quote=True)
    style = f"max-width: 100%; width: {width}px; font: 12px system-ui, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{words}" '
        f'viewBox="0 0 {width} {height}" style="{style}">'
        f"<title>{words}</title>{''.join(parts)}</svg>"
    )


def _layout(places: dict[str, tuple[int, int]]) -> tuple[dict[str, Point], int, int]:
    """Returns the upper left corner of each node, and the width and height of the drawing."""
    columns = sorted(set(places.values()))
    rows: dict[tuple[int, int], list[str]] = {place: [] for place in columns}
    for name, place in places.items():
        rows[place].append(name)
    most = max((len(names) for names in rows.values()), default=1)
    spots: dict[str, Point] = {}
    for column, place in enumerate(columns):
        names = rows[place]
        for row, name in enumerate(names):
            y = 30 + (row + (most - len(names)) / 2) * _TALL
            spots[name] = (20.0 + column * _WIDE, y)
    width = 40 + max(len(columns) - 1, 0) * _WIDE + _BOX[0]
    return spots, width, 60 + (most - 1) * _TALL + _BOX[1]


def _edge(spots: dict[str, Point], edge: tuple[str, str, float], largest: float) -> str:
    a, b, weight = edge
    share = abs(weight) / largest
    path = _path(spots[a], spots[b])
    colour = _ABOVE if weight >= 0 else _BELOW
    words = html.escape(f"{a} to {b}: {weight:.3g}")
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" '
        f'stroke-width="{0.8 + 4 * share:.2f}" stroke-opacity="{0.35 + 0.5 * share:.2f}">'
        f"<title>{words}</title></path>"
    )


def _path(start: Point, end: Point) -> str:
    x0, y0 = start[0] + _BOX[0], start[1] + _BOX[1] / 2
    x1, y1 = end[0], end[1] + _BOX[1] / 2
    if start[1] == end[1] and x1 - x0 > _WIDE:  # around the nodes between
        y = y0 - _BOX[1] * (1 + 0.15 * math.sqrt(x1 - x0))
        return f"M{x0:.1f} {y0:.1f} C{x0 + 40:.1f} {y:.1f} {x1 - 40:.1f} {y:.1f} {x1:.1f} {y1:.1f}"
    x = (x0 + x1) / 2
    return f"M{x0:.1f} {y0:.1f} C{x:.1f} {y0:.1f} {x:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"


def _node(name: str, spot: Point) -> str:
    x, y = spot
    width, height = _BOX
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height}" rx="5" '
        'fill="#f4f4f4" stroke="#777"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 16:.1f}" text-anchor="middle" '
        f'fill="#111">{html.escape(name)}</text>'
    )
