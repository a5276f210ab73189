"""The page of an attribution graph: which codes made one answer, and how far to trust it."""

import base64
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.circuits.graphs import result
from crate_interp.circuits.graphs.result import UNTRAINED, AttributionGraph
from crate_interp.core.safe_text import plain
from crate_interp.results.result import model_name
from crate_interp.viz.circuit_figures import graph_figure
from crate_interp.viz.page import Html, data_uri, sources

_LOOK = ["layer", "head", "query", "key"]  # what tells one look from another
_HEADS = 3  # of an edge, those with the largest parts, are named on the page
_STILL = 30  # codes in the figure that stands for the page where no JavaScript runs


def graph(graph: AttributionGraph) -> Html:
    """Returns a page that shows which codes made one answer, to point at and to share.

    Layers go upwards, tokens across; nodes of an image stand on their patches, on a leaning picture
    for each layer. A filled node is as large as its effect, which is how far the logit falls
    without it; a hollow node is as large as its slope. The width of an edge is its weight; the
    colour is that of the head that carries most of it. Two sliders hide the nodes and edges with
    the least influence; inputs and the largest code of a layer keep an edge. Codes with
    similar inputs and outputs are grouped, and you can name pinned nodes as a group. The address
    keeps the state. The page is one file that needs no internet and runs no model.

    Args:
        graph: An attribution graph from `ci.graph`. With `names=` the page shows where each code
            is largest in the data.

    Returns:
        The page; `.save(path)` writes it.
    """
    meta, name, picture = graph.meta, model_name(graph.meta), graph.table("picture")
    agreement, twins = (graph.of("agreement", network) for network in (result.MODEL, UNTRAINED))
    sufficiency: Any = graph.of("sufficiency")
    random: Any = graph.of("sufficiency", UNTRAINED).set_index("k")["logit"]
    return Html.of(
        "graph.html",
        plain(f"{name}: {graph.question}"),
        name=name,
        meta=meta,
        graph=graph,
        said=graph.sentences(),
        still=graph_figure(graph, most=_STILL),
        picture=None if picture.empty else base64.b64encode(picture["webp"].iloc[0]).decode(),
        data=_data(graph, picture),
        agreement=agreement.assign(untrained=twins["pearson"]).to_dict("records"),
        sufficiency=sufficiency.assign(untrained=sufficiency["k"].map(random)).to_dict("records"),
        sources=sources(meta),
    )


def _data(graph: AttributionGraph, picture: pd.DataFrame) -> dict[str, Any]:
    """Returns what the page's script reads: nodes and edges by number, words and sizes."""
    meta = graph.meta
    table: Any = graph.table("nodes")
    kinds = {result.EMBEDDING: "embedding", result.BIAS: "bias", result.TARGET: "target"}
    nodes = [
        {
            "id": row.node, "layer": int(row.layer), "pos": int(row.pos), "atom": int(row.atom),
            "kind": kinds.get(row.atom, "code"), "value": _number(row.value),
            "attribution": _number(row.attribution), "influence": _number(row.influence),
            "effect": _number(row.effect), "label": str(row.label),
        }
        for row in table.itertuples()
    ]  # fmt: skip
    layers, tokens, _ = meta["settings"]["shape"]
    places: Any = graph.table("places").pivot(index="layer", columns="pos", values="attribution")
    scaled = places.div(places.abs().max(axis=1).clip(lower=1e-30), axis=0)
    target, looks = meta["target"], graph.table("looks")
    scores: Any = {} if looks.empty else looks.groupby(_LOOK)["score"].first()
    return {
        "nodes": nodes,
        "edges": _edges(graph, {node: number for number, node in enumerate(table["node"])}),
        "layers": layers,
        "count": tokens,
        "tokens": meta["tokens"],
        "grid": None if picture.empty else picture[["rows", "columns"]].iloc[0].tolist(),
        "special": meta["special"],
        "places": [[float(f"{value:.2f}") for value in row] for row in scaled.to_numpy()],
        "examples": _examples(graph),
        "looks": [
            [*place, [[*names, _number(part)] for *names, part in pairs], _number(scores[place])]
            for place, pairs in graph.looks().items()
        ],
        "answer": graph.answer,
        "versus": None if target["versus"] is None else target["versus_name"],
        "exact": len(meta["settings"]["freeze"]) == 2,
        "trusted": "signs" not in graph.warnings(),
        "heads": bool((graph.table("edges")["head"] >= 0).any()),
        "target": target["logit"],
        "position": target["position"],
    }


def _edges(graph: AttributionGraph, places: dict[str, int]) -> list[list[Any]]:
    """Returns [source, target, weight, [[head, part], ...]] of each edge, largest parts first."""
    table: Any = graph.table("edges")
    sums = table.groupby(["source", "target"], sort=False)["weight"].sum()
    table = table.sort_values("weight", key=abs, ascending=False, kind="stable")
    parts = table.groupby(["source", "target"], sort=False).head(_HEADS)
    by_edge: dict[tuple[str, str], list[Any]] = {}
    for row in parts.itertuples():
        by_edge.setdefault((row.source, row.target), []).append([row.head, _number(row.weight)])
    return [
        [places[source], places[target], _number(weight), by_edge[source, target]]
        for (source, target), weight in sums.items()
    ]


def _examples(graph: AttributionGraph) -> dict[str, list[list[Any]]]:
    """Returns [value, words, data URI or None] of the examples of each atom, by its name."""
    examples: dict[str, list[list[Any]]] = {}
    for row in graph.table("examples").to_dict("records"):
        uri = data_uri(row["webp"], "webp") if isinstance(row["webp"], bytes) else None
        entry = [_number(row["value"]), str(row["words"]), uri]
        examples.setdefault(f"L{row['layer']}A{row['atom']}", []).append(entry)
    return examples


def _number(value: float) -> float | None:
    """Returns a number with four digits, which keeps a page small; None for one that is missing."""
    return None if np.isnan(value) else float(f"{value:.4g}")
