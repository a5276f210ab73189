"""A layered drawing of nodes and weighted edges as SVG, without any library and without a script."""

import html
import math

_WIDE, _TALL, _BOX = 120, 40, (72, 24)  # between columns, between rows, of a node


def drawn(
    places: dict[str, tuple[int, int]], edges: list[tuple[str, str, float]], title: str
) -> str:
    """nodes: name -> (layer, order in it); a column for each place that has a node."""
    columns = sorted(set(places.values()))
    rows = {place: [name for name in places if places[name] == place] for place in columns}
    most = max((len(names) for names in rows.values()), default=1)
    spots: dict[str, tuple[float, float]] = {}
    for column, place in enumerate(columns):
        names = rows[place]
        for row, name in enumerate(names):
            spots[name] = (20.0 + column * _WIDE, 30 + (row + (most - len(names)) / 2) * _TALL)
    width, height = (
        40 + max(len(columns) - 1, 0) * _WIDE + _BOX[0],
        60 + (most - 1) * _TALL + _BOX[1],
    )
    largest = max((abs(weight) for *_, weight in edges), default=0) or 1
    parts = [
        _edge(spots[a], spots[b], a, b, weight, abs(weight) / largest) for a, b, weight in edges
    ]
    parts += [_node(name, spot) for name, spot in spots.items()]
    words = html.escape(title or "circuit", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{words}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width: 100%; width: {width:.0f}px; font: 12px system-ui, sans-serif"><title>{words}</title>{"".join(parts)}</svg>'
    )


def _edge(
    start: tuple[float, float],
    end: tuple[float, float],
    a: str,
    b: str,
    weight: float,
    share: float,
) -> str:
    x0, y0 = start[0] + _BOX[0], start[1] + _BOX[1] / 2
    x1, y1 = end[0], end[1] + _BOX[1] / 2
    if start[1] == end[1] and x1 - x0 > _WIDE:  # around the nodes between
        y = y0 - _BOX[1] * (1 + 0.15 * math.sqrt(x1 - x0))
        path = f"M{x0:.1f} {y0:.1f} C{x0 + 40:.1f} {y:.1f} {x1 - 40:.1f} {y:.1f} {x1:.1f} {y1:.1f}"
    else:
        middle = (x0 + x1) / 2
        path = f"M{x0:.1f} {y0:.1f} C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    colour = "#2a6fb5" if weight >= 0 else "#c0432b"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{0.8 + 4 * share:.2f}" stroke-opacity="{0.35 + 0.5 * share:.2f}">'
        f"<title>{html.escape(f'{a} to {b}: {weight:.3g}')}</title></path>"
    )


def _node(name: str, spot: tuple[float, float]) -> str:
    x, y = spot
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{_BOX[0]}" height="{_BOX[1]}" rx="5" fill="#f4f4f4" stroke="#777"/>'
        f'<text x="{x + _BOX[0] / 2:.1f}" y="{y + 16:.1f}" text-anchor="middle" fill="#111">{html.escape(name)}</text>'
    )
