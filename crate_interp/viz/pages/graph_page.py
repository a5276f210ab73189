"""The page of an attribution graph: which codes made one answer, and how far to trust it."""

import base64
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.circuits.graphs.result import (
    BIAS,
    EMBEDDING,
    MODEL,
    RIVAL,
    RIVAL_NODES,
    TARGET,
    UNTRAINED,
    AttributionGraph,
)
from crate_interp.core.safe_text import plain
from crate_interp.results.result import model_name
from crate_interp.viz.pages.page import Html, render, sources

_HEADS = 3  # of an edge, those with the largest parts, are named on the page
_ANSWERS = 5


def graph(graph: AttributionGraph) -> Html:
    """Returns a page of an attribution graph on which nodes and edges are pointed at and pinned.

    Layers go upwards, tokens across; nodes of an image stand on their patches, one picture for each
    layer. A node is as large as what the answer loses without it, a hollow one as its slope. An
    edge is as wide as its weight; its colour is that of the head that carries most of it. Two
    sliders hide what holds least of the influence. Pinned nodes may be named as a group. The
    address keeps the state. The page is one file that needs no internet and runs no model.

    Raises ValueError for anything but a graph.
    """
    if not isinstance(graph, AttributionGraph):
        raise ValueError(f"got {type(graph).__name__}: give the graph that ci.graph returns.")
    name, picture = model_name(graph.meta), graph.table("picture")
    title = plain(f"{name}: {graph.question}")
    file = None if picture.empty else base64.b64encode(picture["webp"].iloc[0]).decode()
    page = render(
        "graph.html",
        title=title,
        name=name,
        meta=graph.meta,
        finding=graph.finding(),
        warning=graph.warning(),
        picture=file,
        data=_data(graph, picture),
        answers=graph.table("answers").nlargest(_ANSWERS, "logit").to_dict("records"),
        agreement=_agreement(graph),
        sufficiency=_sufficiency(graph),
        layers=graph.table("layers").to_dict("records"),
        whole=_whole(graph),
        rival=graph.meta.get("rival"),
        rival_rank=graph.rival_rank if "rival" in graph.meta else "",
        scores=graph.meta["scores"],
        target=graph.meta["target"],
        frozen=graph.meta["settings"]["freeze"],
        settings=graph.meta["settings"],
        sources=sources(graph.meta),
    )
    return Html(title, page)


def _data(graph: AttributionGraph, picture: pd.DataFrame) -> dict[str, Any]:
    """Returns what the page's script reads: nodes and edges by number, words and sizes."""
    table: Any = graph.table("nodes")
    places = {node: number for number, node in enumerate(table["node"])}
    kinds = {EMBEDDING: "embedding", BIAS: "bias", TARGET: "target"}
    nodes = [
        {
            "id": row.node, "layer": int(row.layer), "pos": int(row.pos), "atom": int(row.atom),
            "kind": kinds.get(row.atom, "code"), "value": _number(row.value),
            "attribution": _number(row.attribution), "influence": _number(row.influence),
            "effect": _number(row.effect), "label": str(row.label),
        }
        for row in table.itertuples()
    ]  # fmt: skip
    layers, tokens, _ = graph.meta["settings"]["shape"]
    grid = None if picture.empty else [int(picture[one].iloc[0]) for one in ("rows", "columns")]
    return {
        "nodes": nodes,
        "edges": _edges(graph, places),
        "layers": layers,
        "count": tokens,
        "tokens": graph.meta["tokens"],
        "grid": grid,
        "special": graph.meta["special"],
        "places": _places(graph),
        "examples": _examples(graph),
        "answer": graph.answer,
        "versus": _versus(graph),
        "exact": len(graph.meta["settings"]["freeze"]) == 2,
        "heads": bool((graph.table("edges")["head"] >= 0).any()),
        "target": graph.meta["target"]["logit"],
    }


def _edges(graph: AttributionGraph, places: dict[str, int]) -> list[list[Any]]:
    """Returns [source, target, weight, [[head, part], ...]] of each edge, largest parts first."""
    table: Any = graph.table("edges")
    sums = table.groupby(["source", "target"], sort=False)["weight"].sum()
    order = table["weight"].abs().sort_values(ascending=False).index
    parts = table.loc[order].groupby(["source", "target"], sort=False).head(_HEADS)
    by_edge: dict[tuple[str, str], list[Any]] = {}
    for row in parts.itertuples():
        by_edge.setdefault((row.source, row.target), []).append([row.head, _number(row.weight)])
    return [
        [places[source], places[target], _number(weight), by_edge[source, target]]
        for (source, target), weight in sums.items()
    ]


def _examples(graph: AttributionGraph) -> dict[str, list[list[Any]]]:
    """Returns [value, words, data URI or None] of the examples of each atom, by its name."""
    found: dict[str, list[list[Any]]] = {}
    for row in graph.table("examples").itertuples():
        shown: Any = row
        packed = shown.webp if isinstance(shown.webp, bytes) else None
        uri = packed and f"data:image/webp;base64,{base64.b64encode(packed).decode()}"
        entry = [_number(shown.value), str(shown.words), uri]
        found.setdefault(f"L{shown.layer}A{shown.atom}", []).append(entry)
    return found


def _places(graph: AttributionGraph) -> list[list[float]]:
    """Returns the attribution of each token in each layer, over the layer's largest."""
    table: Any = graph.table("places").pivot(index="layer", columns="pos", values="attribution")
    scaled = table.div(table.abs().max(axis=1).clip(lower=1e-30), axis=0)
    return [[float(f"{value:.2f}") for value in row] for row in scaled.to_numpy()]


def _versus(graph: AttributionGraph) -> str:
    """Returns what the target is measured from."""
    target = graph.meta["target"]
    return "the mean of all logits" if target["versus"] is None else repr(target["versus_name"])


def _number(value: float) -> float | None:
    """Returns a number with four digits, which keeps a page small; None for one that is missing."""
    return None if np.isnan(value) else float(f"{value:.4g}")


def _agreement(graph: AttributionGraph) -> list[dict[str, Any]]:
    """Returns a row per layer, with the correlation of the untrained network beside."""
    own, twin = (graph.of("agreement", network) for network in (MODEL, UNTRAINED))
    return own.assign(untrained=twin["pearson"]).to_dict("records")


def _whole(graph: AttributionGraph) -> list[dict[str, Any]]:
    """Returns the rows of the table "whole", with words for whose codes they are."""
    other = f"for {graph.meta['rival']['name']}" if "rival" in graph.meta else ""
    words = {RIVAL: other, RIVAL_NODES: f"{other}, on this answer"}
    rows = graph.table("whole").to_dict("records")
    return [row | {"codes": words.get(row["network"], row["network"])} for row in rows]


def _sufficiency(graph: AttributionGraph) -> list[dict[str, Any]]:
    own = graph.of("sufficiency").to_dict("records")
    twin: Any = graph.of("sufficiency", UNTRAINED).set_index("k")["logit"]
    return [row | {"untrained": float(twin.get(row["k"], np.nan))} for row in own]
