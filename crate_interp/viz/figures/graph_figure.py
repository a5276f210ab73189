"""An attribution graph as a figure for papers: layers upwards, tokens across."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from crate_interp.circuits.graphs.result import BIAS, EMBEDDING, TARGET, AttributionGraph
from crate_interp.core import checks
from crate_interp.core.pictures import decoded
from crate_interp.viz.figures.canvas import PAGE, SMALL, canvas, finished, label
from crate_interp.viz.figures.colours import CHANCE, INK, TRAINED, UNTRAINED

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_EDGES = 4  # edges for each node, the largest
_LEAN, _DEPTH = 0.4, 0.66  # of a sheet: to the right, and upwards
_STEP = 0.8  # between nodes of one token and layer, of the width of a token


def graph_figure(
    graph: AttributionGraph,
    *,
    most: int = 40,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of the nodes of a graph with the largest influence.

    Layers go upwards from the embeddings to the answer. Tokens stand in columns, in their order;
    patches on a sheet for each layer with the picture on it, CLS to the left of it. A node is as
    large as what the answer loses without it, a hollow one as its attribution, where no forward
    without it was run; blue raises the answer, orange lowers it. An edge is as wide as its weight,
    dashed below 0; edges that one head carries more than the skip connection does are black.

    most: how many codes to draw; of an image, as many of each layer. ax, title, dpi: as
    in `ci.viz.layers`. Raises ValueError for anything but a graph.
    """
    if not isinstance(graph, AttributionGraph):
        raise ValueError(f"got {type(graph).__name__}: give the graph that ci.graph returns.")
    most = checks.count("most", most)
    nodes, edges = _shown(graph, most)
    figure, axes = canvas(ax, 1.0, dpi)
    on_sheets = not graph.table("picture").empty
    if ax is None:
        figure.set_size_inches(*((4.4, 5.6) if on_sheets else (PAGE, 3.6)))
    spots = _on_sheets(axes, graph, nodes) if on_sheets else _in_columns(axes, graph, nodes)
    largest = max(edges["weight"].abs().max(), 1e-30) if len(edges) else 1.0
    for row in edges.itertuples():
        (x, y), (to_x, to_y) = spots[row.source], spots[row.target]
        look: Any = {
            "lw": 0.3 + 2.2 * (abs(row.weight) / largest) ** 0.5,
            "alpha": 0.6,
            "zorder": 1,
        }
        colour, style = (INK if row.head >= 0 else CHANCE), ("--" if row.weight < 0 else "-")
        axes.plot([x, to_x], [y, to_y], color=colour, ls=style, **look)
    codes = nodes[nodes["atom"] != TARGET]
    amounts = codes["node"].map(graph.amounts.set_axis(graph.table("nodes")["node"]))
    size = (amounts.abs() / max(amounts[codes["atom"] >= 0].abs().max(), 1e-30)).clip(upper=1.0)
    for row, amount, share in zip(codes.itertuples(), amounts, size, strict=True):
        colour = TRAINED if amount > 0 else UNTRAINED
        look = {"color": colour, "marker": "s" if row.atom == EMBEDDING else "o", "zorder": 2}
        if np.isnan(row.effect):
            look["facecolor"] = "none"
        axes.scatter(*spots[row.node], s=6 + 60 * share, **look)
    axes.scatter(*spots["logit"], s=70, color=INK, zorder=2)
    axes.text(*spots["logit"], f"   {label(graph.answer)}", va="center", fontsize=SMALL, color=INK)
    return finished(figure, [axes], ax, title, f"{graph.question[0].upper()}{graph.question[1:]}")


def _shown(graph: AttributionGraph, most: int) -> tuple[Any, Any]:
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
    order = edges["weight"].abs().sort_values(ascending=False).index
    largest = edges.loc[order].groupby(["source", "target"], sort=False)["head"].first()
    sums = edges.groupby(["source", "target"], sort=False)["weight"].sum()
    joined: Any = pd.concat([sums, largest], axis=1).reset_index()
    order = joined["weight"].abs().sort_values(ascending=False).index
    joined = joined.loc[order].head(_EDGES * most)
    fed = ends[ends["node"].isin(joined["source"]) | (ends["atom"] == TARGET)]
    return pd.concat([fed, codes], ignore_index=True), joined


def _on_sheets(
    axes: Any, graph: AttributionGraph, nodes: pd.DataFrame
) -> dict[str, tuple[float, float]]:
    """Draws the picture on a sheet for each layer; returns where each node stands."""
    from matplotlib.transforms import Affine2D

    layers, _, _ = graph.meta["settings"]["shape"]
    sheet_of: Any = graph.table("picture").iloc[0]
    picture = decoded(sheet_of["webp"], "the picture")
    rows, columns = int(sheet_of["rows"]), int(sheet_of["columns"])
    for layer in range(-1, layers):
        lying = Affine2D(np.array([[1, _LEAN, 0], [0, _DEPTH, layer], [0, 0, 1]]))
        sheet = axes.imshow(
            picture, extent=(0, 1, 0, 1), alpha=0.45 if layer >= 0 else 0.9, aspect="auto", zorder=0
        )
        sheet.set_transform(lying + axes.transData)
        name = "input" if layer < 0 else f"layer {layer}"
        axes.text(1.03 + _LEAN, layer + _DEPTH, name, fontsize=SMALL, color=INK, va="top")
    spots, taken = {}, dict[tuple[int, int], int]()
    for row in nodes.itertuples():
        node: Any = row
        layer, patch = int(node.layer), int(node.pos) - graph.meta["special"]
        place = taken[layer, patch] = taken.get((layer, patch), -1) + 1
        if node.atom == TARGET:
            spots[str(node.node)] = (-0.12, layers + 0.2)
        elif patch < 0:  # CLS
            spots[str(node.node)] = (-0.14 - 0.06 * place, layer + 0.5 * _DEPTH)
        else:
            u, v = (patch % columns + 0.5) / columns, 1 - (patch // columns + 0.5) / rows
            spots[str(node.node)] = (u + _LEAN * v + 0.02 * place, layer + _DEPTH * v)
    axes.text(-0.16, -1 + 0.5 * _DEPTH, "CLS ", ha="right", va="center", fontsize=SMALL, color=INK)
    axes.set(xlim=(-0.62, 1.36 + _LEAN), ylim=(-1.05, layers + 0.5))
    axes.set_axis_off()
    return spots


def _in_columns(
    axes: Any, graph: AttributionGraph, nodes: pd.DataFrame
) -> dict[str, tuple[float, float]]:
    """Returns where each node stands if every token has a column, and names the columns."""
    counts: Any = nodes[nodes["atom"] != TARGET].groupby(["pos", "layer"]).size()
    columns, x = {}, 0.0
    for pos, own in counts.groupby(level="pos"):
        width = max(1.0, _STEP * (own.max() - 1) / 4 + 1)
        columns[int(pos)] = x + width / 2
        x += width + 0.4
    spots: dict[str, tuple[float, float]] = {}
    groups: Any = nodes.groupby(["layer", "pos"])
    for (layer, pos), own in groups:
        middle = columns.get(int(pos), max(columns.values(), default=0.0))
        for place, name in enumerate(own["node"]):
            shift = (place - (len(own) - 1) / 2) * _STEP / 4
            spots[str(name)] = (middle + shift, float(layer) + 0.12 * (place % 2))
    _set_axes(axes, graph, columns)
    return spots


def _set_axes(axes: Any, graph: AttributionGraph, columns: dict[int, float]) -> None:
    layers, _, _ = graph.meta["settings"]["shape"]
    tokens, special = graph.meta["tokens"], graph.meta["special"]
    words = []
    for pos in columns:
        if tokens:
            words.append(label(tokens[pos])[:10])
        else:
            words.append("CLS" if pos < special else str(pos - special))
    axes.set_yticks(range(-1, layers + 1), ["input", *map(str, range(layers)), "answer"])
    axes.set_xticks(list(columns.values()), words, rotation=60, ha="right")
    axes.tick_params(labelsize=SMALL, length=0)
    axes.set_ylabel("layer", fontsize=SMALL)
    axes.set_xlabel("token" if tokens else "patch", fontsize=SMALL)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
