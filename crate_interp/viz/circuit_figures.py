"""Figures for papers: a circuit with heads in columns, and an attribution graph, layers upwards."""

from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from crate_interp.circuits.attention_reasons_result import AttentionReason
from crate_interp.circuits.circuit import LAST, Circuit, place_of
from crate_interp.circuits.graphs.result import BIAS, EMBEDDING, TARGET, AttributionGraph
from crate_interp.core import checks
from crate_interp.core.pictures import decoded
from crate_interp.core.safe_text import plain
from crate_interp.viz import canvas
from crate_interp.viz.canvas import CARD, CHANCE, INK, SMALL, TRAINED, UNTRAINED

WIDE, TALL, BOX = 120, 40, (72, 24)  # distance of columns, distance of rows, size of a node
_INCHES = 1 / 108  # inches per unit of the layout, which makes six columns 6.2 inches wide
_SIGNS = 38  # characters that fit on a title line of the narrowest figure

_EDGES = 4  # of a graph: edges for each node, the largest
_LEAN, _DEPTH = 0.4, 0.66  # of a sheet: to the right, and upwards
_STEP = 0.8  # between nodes of one token and layer, of the width of a token
Spots = dict[str, tuple[float, float]]


def circuit(
    circuit: Circuit, *, ax: Axes | None = None, title: str | None = None, dpi: float | None = None
) -> Figure:
    """Returns a matplotlib Figure of a circuit, layers from left to right.

    A wider edge has a larger weight. Edges with a weight below 0 are orange and dashed. A line of
    text below the drawing gives the weight of the widest edge. If there are more than 1,000 edges,
    the largest are drawn.

    Args:
        circuit: A `ci.circuits.Circuit`.
        ax: The Axes to draw into, instead of a new figure.
        title: None means the circuit's note, "" means no title.
        dpi: The resolution of the figure.

    Raises:
        ValueError: If the circuit has no edges.
    """
    if not circuit.edges:
        raise ValueError(
            "got a circuit without edges to draw. Give a ci.circuits.Circuit with edges."
        )
    shown = circuit.largest()
    places = {name: place_of(name) for name in shown.nodes()}
    spots, width, height = layout(places)
    bends = {edge: bend(spots[edge.source], spots[edge.target]) for edge in shown.edges}
    # an arc rises three quarters of the way to the inner control points of its curve
    top = min(0.25 * start[1] + 0.75 * inner[1] for start, inner, _, _ in bends.values())
    top = min(0.0, top - 20)
    figure, axes = canvas.canvas(ax, 1.0, dpi)
    size = 8.0  # points; in the caller's Axes 4 to 8, at which the words fit into the boxes
    if ax is None:
        figure.set_size_inches(max(3.2, width * _INCHES), max(1.5, (height - top) * _INCHES + 0.3))
    else:
        inches = ax.get_window_extent().width / figure.dpi
        size = min(8.0, max(4.0, 8.0 * inches / (width * _INCHES)))
    largest = max(abs(edge.weight) for edge in shown.edges)
    for edge in sorted(shown.edges, key=lambda edge: abs(edge.weight)):
        share = abs(edge.weight) / (largest or 1.0)
        look: Any = {"lw": 0.6 + 2.9 * share, "alpha": 0.5 + 0.5 * share, "fc": "none", "zorder": 1}
        look |= {"ec": UNTRAINED, "ls": "--"} if edge.weight < 0 else {"ec": TRAINED}
        axes.add_patch(PathPatch(Path(bends[edge], [Path.MOVETO, *[Path.CURVE4] * 3]), **look))
    below: Any = {"ha": "center", "va": "bottom", "fontsize": size - 1, "color": INK}
    box: Any = {"boxstyle": "round,pad=4,rounding_size=6", "fc": CARD, "ec": INK, "lw": 0.8}
    for name, (x, y) in spots.items():
        corner = (x + 4, y + 4)
        axes.add_patch(FancyBboxPatch(corner, BOX[0] - 8, BOX[1] - 8, zorder=2, **box))
        middle = (x + BOX[0] / 2, y + BOX[1] / 2)
        axes.text(*middle, name, ha="center", va="center", fontsize=size, color=INK, zorder=3)
    for (layer, atoms), x in {places[name]: spot[0] for name, spot in spots.items()}.items():
        if -1 < layer < LAST:
            words = "atoms of " * atoms + f"layer {layer}"
            axes.text(x + BOX[0] / 2, height - 22, words, **below)
    axes.set(xlim=(0, width), ylim=(height, top), aspect="equal")
    axes.set_axis_off()
    note = shown.note or f"Circuit of {len(places)} nodes"
    words = fill(plain(note if title is None else title, 120), max(_SIGNS, width // 8))
    if words:
        axes.set_title(words, fontsize=9, color=INK)
    dashed = any(edge.weight < 0 for edge in shown.edges)
    scale = f"widest edge: {largest:.2g}" + "; dashed: below 0" * dashed
    axes.text(width / 2, height - 2, scale, **below)
    return canvas.as_written(figure, *([] if ax is None else [axes]))


def layout(places: dict[str, tuple[int, int]]) -> tuple[Spots, int, int]:
    """Returns the upper left corner of each node, and the width and height of the drawing."""
    every = sorted(set(places.values()))
    columns = [[name for name in places if places[name] == place] for place in every]
    most = max(map(len, columns))
    spots = {
        name: (20.0 + column * WIDE, 30 + (row + (most - len(names)) / 2) * TALL)
        for column, names in enumerate(columns)
        for row, name in enumerate(names)
    }
    return spots, 40 + (len(columns) - 1) * WIDE + BOX[0], 70 + (most - 1) * TALL + BOX[1]


def bend(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """Returns the four points of the cubic curve from one node's right side to another's left."""
    x0, y0 = start[0] + BOX[0], start[1] + BOX[1] / 2
    x1, y1 = end[0], end[1] + BOX[1] / 2
    if start[1] == end[1] and x1 - x0 > WIDE:  # an arc around the nodes in between
        y = y0 - BOX[1] * (1 + 0.15 * (x1 - x0) ** 0.5)
        return [(x0, y0), (x0 + 40, y), (x1 - 40, y), (x1, y1)]
    x = (x0 + x1) / 2
    return [(x0, y0), (x, y0), (x, y1), (x1, y1)]


def graph_figure(
    graph: AttributionGraph,
    *,
    most: int = 40,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of the nodes of a graph with the largest influence.

    Layers go upwards from the embeddings to the answer. Tokens stand in columns, in their order.
    Patches stand on the picture, a copy of it for each layer with codes of patches; CLS stands to
    the left. A filled node is as large as its effect, which is how far the logit falls without it;
    a hollow node, which was not removed, is as large as its attribution. Blue raises the answer,
    orange lowers it. The width of an edge is its weight; a weight below 0 is dashed. An edge is
    black if one head carries more of it than goes directly, through no head.

    Args:
        graph: What `ci.graph` returns.
        most: How many codes to draw; for an image, this many per layer.
        ax: As in `ci.viz.layers`.
        title: As in `ci.viz.layers`.
        dpi: As in `ci.viz.layers`.
    """
    nodes, edges = _largest(graph, checks.count("most", most))
    figure, axes = canvas.canvas(ax, 1.0, dpi)
    on_sheets = not graph.table("picture").empty
    if ax is None:
        figure.set_size_inches(*((4.4, 5.6) if on_sheets else (canvas.PAGE, 3.6)))
    spots = _on_sheets(axes, graph, nodes) if on_sheets else _in_columns(axes, graph, nodes)
    largest = max(edges["weight"].abs().max(), 1e-30) if len(edges) else 1.0
    for row in edges.itertuples():
        (x, y), (to_x, to_y) = spots[row.source], spots[row.target]
        look: Any = {"lw": 0.3 + 2.2 * (abs(row.weight) / largest) ** 0.5, "alpha": 0.6}
        colour, style = (INK if row.head >= 0 else CHANCE), ("--" if row.weight < 0 else "-")
        axes.plot([x, to_x], [y, to_y], color=colour, ls=style, zorder=1, **look)
    codes = nodes[nodes["atom"] != TARGET]
    amounts = codes["effect"].fillna(codes["attribution"])
    size = (amounts.abs() / max(amounts[codes["atom"] >= 0].abs().max(), 1e-30)).clip(upper=1.0)
    for row, amount, share in zip(codes.itertuples(), amounts, size, strict=True):
        colour = TRAINED if amount > 0 else UNTRAINED
        look = {"color": colour, "marker": "s" if row.atom == EMBEDDING else "o", "zorder": 2}
        if np.isnan(row.effect):
            look["facecolor"] = "none"
        axes.scatter(*spots[row.node], s=6 + 60 * share, **look)
    axes.scatter(*spots["logit"], s=70, color=INK, zorder=2)
    words = f"   {canvas.label(graph.answer)}"
    axes.text(*spots["logit"], words, va="center", fontsize=SMALL, color=INK)
    question = graph.question[0].upper() + graph.question[1:]
    return canvas.finished(figure, [axes], ax, title, question)


def _largest(graph: AttributionGraph, most: int) -> tuple[Any, Any]:
    """Returns the largest nodes, with the embeddings that feed them, and the edges between them."""
    table: Any = graph.table("nodes")
    table = table[table["atom"] != BIAS]
    codes = table[table["atom"] >= 0].sort_values("influence", ascending=False)
    if not graph.table("picture").empty:
        each = max(1, most // graph.meta["settings"]["shape"][0])
        codes = codes.groupby("layer", sort=False).head(each)
    codes = codes.head(most)
    ends = table[table["atom"] < 0]
    known = {*codes["node"], *ends["node"]}
    edges: Any = graph.table("edges")
    edges = edges[edges["source"].isin(known) & edges["target"].isin(known)]
    largest: Any = {"key": abs, "ascending": False, "kind": "stable"}
    pairs = edges.sort_values("weight", **largest).groupby(["source", "target"], sort=False)
    joined: Any = pairs.agg({"weight": "sum", "head": "first"}).reset_index()
    joined = joined.sort_values("weight", **largest).head(_EDGES * most)
    fed = ends[ends["node"].isin(joined["source"]) | (ends["atom"] == TARGET)]
    return pd.concat([fed, codes], ignore_index=True), joined


def _on_sheets(axes: Any, graph: AttributionGraph, nodes: Any) -> Spots:
    """Draws the picture where a layer has codes of patches; returns where each node stands."""
    layers, codes = graph.meta["settings"]["shape"][0], nodes[nodes["atom"] >= 0]
    sheet_of: Any = graph.table("picture").iloc[0]
    picture = decoded(sheet_of["webp"], "the picture")
    rows, columns = int(sheet_of["rows"]), int(sheet_of["columns"])
    for layer in range(-1, layers):
        lying = Affine2D(np.array([[1, _LEAN, 0], [0, _DEPTH, layer], [0, 0, 1]]))
        look: Any = {"alpha": 0.45 if layer >= 0 else 0.9, "aspect": "auto", "zorder": 0}
        lies = layer < 0 or (codes["pos"][codes["layer"] == layer] >= graph.meta["special"]).any()
        if lies:
            sheet = axes.imshow(picture, extent=(0, 1, 0, 1), **look)
            sheet.set_transform(lying + axes.transData)
        name, x = "input" if layer < 0 else f"layer {layer}", 1.03 + _LEAN if lies else -0.06
        axes.text(x, layer + _DEPTH / 2, name, fontsize=SMALL, color=INK, va="center")
    spots: Spots = {}
    places = nodes.groupby(["layer", "pos"]).cumcount()
    for node, place in zip(nodes.itertuples(), places, strict=True):
        layer, patch = int(node.layer), int(node.pos) - graph.meta["special"]
        if node.atom == TARGET:
            spots[node.node] = (-0.12, layers + 0.2)
        elif patch < 0:  # CLS
            spots[node.node] = (-0.14 - 0.06 * place, layer + 0.5 * _DEPTH)
        else:
            u, v = (patch % columns + 0.5) / columns, 1 - (patch // columns + 0.5) / rows
            spots[node.node] = (u + _LEAN * v + 0.02 * place, layer + _DEPTH * v)
    axes.text(-0.16, -1 + 0.5 * _DEPTH, "CLS ", ha="right", va="center", fontsize=SMALL, color=INK)
    axes.set(xlim=(-0.62, 1.36 + _LEAN), ylim=(-1.05, layers + 0.5))
    axes.set_axis_off()
    return spots


def _in_columns(axes: Any, graph: AttributionGraph, nodes: Any) -> Spots:
    """Returns where each node stands if every token has a column, and names the columns."""
    counts = nodes[nodes["atom"] != TARGET].groupby(["pos", "layer"]).size()
    columns, x = {}, 0.0
    for pos, own in counts.groupby(level="pos"):
        width = max(1.0, _STEP * (own.max() - 1) / 4 + 1)
        columns[int(pos)] = x + width / 2
        x += width + 0.4
    spots: Spots = {}
    layers, _, _ = graph.meta["settings"]["shape"]
    for (layer, pos), own in nodes.groupby(["layer", "pos"]):
        here = graph.meta["target"]["position"] if layer == layers else pos
        middle = columns.get(here, max(columns.values(), default=0.0))
        for place, name in enumerate(own["node"]):
            shift = (place - (len(own) - 1) / 2) * _STEP / 4
            spots[name] = (middle + shift, float(layer) + 0.12 * (place % 2))
    tokens, special = graph.meta["tokens"], graph.meta["special"]
    if tokens:
        words = [canvas.label(tokens[pos])[:10] for pos in columns]
    else:
        words = ["CLS" if pos < special else str(pos - special) for pos in columns]
    axes.set_yticks(range(-1, layers + 1), ["input", *map(str, range(layers)), "answer"])
    axes.set_xticks(list(columns.values()), words, rotation=60, ha="right", parse_math=False)
    axes.tick_params(labelsize=SMALL, length=0)
    axes.set_ylabel("layer", fontsize=SMALL)
    axes.set_xlabel("token" if tokens else "patch", fontsize=SMALL)
    axes.spines[:].set_visible(False)
    return spots


_KINDS = {"strongest": (TRAINED, "-"), "largest": (UNTRAINED, "--"), "rotated": (CHANCE, ":")}


def why_figure(
    reason: AttentionReason,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of the attention that is left without atoms of the key.

    A line for the strongest and for the largest atoms, for random axes and, with a band from the
    lowest to the highest draw, for random atoms.

    Args:
        reason: What `ci.circuits.why_attends` returns.
        ax: The Axes to draw into, instead of a new figure.
        title: None means the head and its two tokens, "" means no title.
        dpi: The resolution of the figure.
    """
    table: Any = reason.table("effects")
    table = table[(table["network"] == "model") & table["side"].isin(["key", "both"])]
    start = table[table["k"] == 0]
    figure, axes = canvas.canvas(ax, 2.2, dpi)
    names = {"strongest": "strongest atoms", "largest": "largest codes", "rotated": "random axes"}
    for kind, name in (names | {"random": "random atoms"}).items():
        rows = pd.concat([start, table[(table["kind"] == kind) & (table["side"] == "key")]])
        colour, style = _KINDS.get(kind, (INK, "-."))
        band = (rows["low"], rows["high"]) if kind == "random" else None
        look: Any = {"color": colour, "ls": style, "label": name, "marker": "o"}
        canvas.line(axes, rows["k"], rows["attention"], band, **look)
    canvas.set_layers(axes, "attention that is left", "atoms taken out of the key")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({*table["k"]}))
    axes.yaxis.set_major_formatter(canvas.percent)
    head = f"L{reason.meta['layer']}H{reason.meta['head']}"
    words = f"{head} from {reason.meta['query']} to {reason.meta['key']}"
    return canvas.finished(figure, [axes], ax, title, words)
