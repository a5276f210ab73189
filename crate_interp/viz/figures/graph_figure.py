"""An attribution graph as a figure for papers: layers upwards, tokens across."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from crate_interp.circuits.graphs.result import BIAS, EMBEDDING, TARGET, AttributionGraph
from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.viz.figures.canvas import PAGE, SMALL, canvas, finished, label
from crate_interp.viz.figures.colours import CHANCE, INK, TRAINED, UNTRAINED

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_EDGES = 4  # edges for each node, the largest
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

    Layers go upwards from the embeddings to the answer. Tokens, or the patches of an image, stand
    in columns, in their order. A node is as large as its attribution, blue if it raises the answer
    and orange if it lowers it. An edge is as wide as its weight, dashed below 0; edges that one
    head carries more than the skip connection does are black.

    most: how many codes to draw. ax, title, dpi: as in `ci.viz.layers`. Raises ValueError for
    anything but a graph.
    """
    if not isinstance(graph, AttributionGraph):
        raise ValueError(f"got {type(graph).__name__}: give the graph that ci.graph returns.")
    most = checks.count("most", most)
    nodes, edges = _shown(graph, most)
    spots, columns = _spots(nodes)
    figure, axes = canvas(ax, 1.0, dpi)
    if ax is None:
        figure.set_size_inches(PAGE, 3.6)
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
    size = codes["attribution"].abs() / max(codes["attribution"].abs().max(), 1e-30)
    for row, share in zip(codes.itertuples(), size, strict=True):
        colour = TRAINED if row.attribution > 0 else UNTRAINED
        marker = "s" if row.atom == EMBEDDING else "o"
        axes.scatter(*spots[row.node], s=6 + 60 * share, color=colour, marker=marker, zorder=2)
    axes.scatter(*spots["logit"], s=70, color=INK, zorder=2)
    axes.text(*spots["logit"], f"   {label(graph.answer)}", va="center", fontsize=SMALL, color=INK)
    _set_axes(axes, graph, columns)
    return finished(figure, [axes], ax, title, f"Why {plain(graph.answer)}")


def _shown(graph: AttributionGraph, most: int) -> tuple[Any, Any]:
    """Returns the largest nodes, with the embeddings that feed them, and the edges between them."""
    table: Any = graph.table("nodes")
    table = table[table["atom"] != BIAS]
    codes = table[table["atom"] >= 0].nlargest(most, "influence")
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


def _spots(nodes: pd.DataFrame) -> tuple[dict[str, tuple[float, float]], dict[int, float]]:
    """Returns where each node stands, and where each token does."""
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
    return spots, columns


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
