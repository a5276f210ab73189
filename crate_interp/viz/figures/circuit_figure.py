"""A circuit as a figure for papers: heads in columns by layer, edges as wide as their weights."""

from textwrap import fill
from typing import TYPE_CHECKING, Any

from crate_interp.circuits.circuit import BOX, LAST, Circuit, Point, bend, layout, place_of
from crate_interp.core.safe_text import plain
from crate_interp.viz.figures.canvas import as_written, canvas

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_ABOVE, _BELOW, _INK, _CARD = "#1f66a3", "#b8601f", "#1a1d20", "#f4f6f8"
_INCHES = 1 / 108  # inches per unit of the layout, which makes six columns 6.2 inches wide
_THIN, _THICK = 0.6, 3.5  # points
_SIGNS = 38  # characters that fit on a title line of the narrowest figure
_BELOW_NODES = 10  # room for two lines of words below the nodes


def circuit(
    circuit: Circuit,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of a circuit, layers from left to right.

    A wider edge has a larger weight. Edges with a weight below 0 are orange and dashed. A line of
    text below the drawing gives the weight of the widest edge. If there are more than 1,000 edges,
    the largest are drawn. ax: the Axes to draw into, instead of a new figure. title: None means the
    circuit's note, "" means no title. dpi: the resolution of the figure.

    Raises ValueError if `circuit` is not a Circuit or has no edges, if ax is no matplotlib Axes, or
    if dpi is not above 0.
    """
    if not isinstance(circuit, Circuit) or not circuit.edges:
        got = "a circuit without edges" if isinstance(circuit, Circuit) else type(circuit).__name__
        raise ValueError(f"got {got} to draw. Give a ci.circuits.Circuit with edges.")
    shown = circuit.largest()
    pairs = [(edge.source, edge.target) for edge in shown.edges]
    spots, width, height = layout({name: place_of(name) for name in shown.nodes()}, pairs)
    height += _BELOW_NODES
    figure, axes = canvas(ax, 1.0, dpi)
    if ax is None:
        figure.set_size_inches(max(3.2, width * _INCHES), max(1.5, height * _INCHES + 0.3))
    size = 8.0 if ax is None else _font_size(ax, width)
    largest = max(abs(edge.weight) for edge in shown.edges)
    for edge in sorted(shown.edges, key=lambda edge: abs(edge.weight)):
        share = abs(edge.weight) / (largest or 1.0)
        _draw_edge(axes, spots[edge.source], spots[edge.target], edge.weight < 0, share)
    for name, spot in spots.items():
        _draw_node(axes, name, spot, size)
    _draw_columns(axes, spots, height, size)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.set_axis_off()
    note = shown.note or f"Circuit of {len(shown.nodes())} nodes"
    words = fill(plain(note if title is None else title, 120), max(_SIGNS, width // 8))
    if words:
        axes.set_title(words, fontsize=9, color=_INK)
    below = any(edge.weight < 0 for edge in shown.edges)
    scale = f"widest edge: {largest:.2g}" + "; dashed: below 0" * below
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": size - 1, "color": _INK}
    axes.text(width / 2, height - 2, scale, **look)
    return as_written(figure, *([] if ax is None else [axes]))


def _font_size(axes: Any, width: int) -> float:
    """Returns the font size, 4 to 8 points, at which the words fit into the boxes."""
    inches = axes.get_window_extent().width / axes.figure.dpi
    return min(8.0, max(4.0, 8.0 * inches / (width * _INCHES)))


def _draw_edge(axes: Any, start: Point, end: Point, below: bool, share: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    curve = Path(bend(start, end), [Path.MOVETO, *[Path.CURVE4] * 3])
    look: dict[str, Any] = {"lw": _THIN + (_THICK - _THIN) * share, "alpha": 0.5 + 0.5 * share}
    look |= {"ec": _BELOW, "ls": "--"} if below else {"ec": _ABOVE}
    axes.add_patch(PathPatch(curve, fc="none", zorder=1, **look))


def _draw_node(axes: Any, name: str, spot: Point, size: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = spot
    look: dict[str, Any] = {"boxstyle": "round,pad=4,rounding_size=6", "fc": _CARD, "ec": _INK}
    axes.add_patch(FancyBboxPatch((x + 4, y + 4), BOX[0] - 8, BOX[1] - 8, lw=0.8, zorder=2, **look))
    words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size, "color": _INK}
    axes.text(x + BOX[0] / 2, y + BOX[1] / 2, name, zorder=3, **words)


def _draw_columns(axes: Any, spots: dict[str, Point], height: int, size: float) -> None:
    """Writes the number of the layer below each column of heads or atoms."""
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": size - 1, "color": _INK}
    for (layer, atoms), x in {place_of(name): spot[0] for name, spot in spots.items()}.items():
        if -1 < layer < LAST:
            words = "atoms of " * atoms + f"layer {layer}"
            axes.text(x + BOX[0] / 2, height - 22, words, **look)
