"""A graph as the JSON of circuit-tracer's page (its frontend/graph_models.py)."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from crate_interp.core.safe_text import plain

if TYPE_CHECKING:
    from crate_interp.circuits.graphs.result import AttributionGraph


def circuit_tracer_json(graph: "AttributionGraph") -> dict[str, Any]:
    """Returns the graph in circuit-tracer's words: metadata, qParams, nodes and links.

    A code is a "cross layer transcoder" feature. Their influence is cumulative: the share of the
    influence that nodes down to this one hold together. Embeddings and the target are nodes of
    their own types. Biases are left out: their page has no such type.
    """
    table: Any = graph.table("nodes")
    table = table[table["atom"] != -2]
    meta = graph.meta
    count, tokens, _ = meta["settings"]["shape"]
    words = meta["tokens"] or [str(n) for n in range(tokens)]
    place = meta["target"]["position"]
    place = tokens - 1 if place is None else place
    order = table["influence"].to_numpy().argsort()[::-1]
    sums = np.cumsum(table["influence"].to_numpy()[order])
    share = np.empty(len(table))
    share[order] = sums / sums[-1]
    chances: Any = graph.table("answers").set_index("answer")["probability"]
    ids, nodes = {}, []
    for row, influence in zip(table.itertuples(), share.tolist(), strict=True):
        node = _node(row, count, place, meta["target"], words)
        ids[row.node] = node["node_id"]
        if row.atom == -3:
            node["token_prob"] = float(chances.get(meta["target"]["answer"], 0.0))
        value = None if np.isnan(row.value) else float(row.value)
        nodes.append(node | {"influence": influence, "activation": value})
    links: Any = graph.table("edges").groupby(["source", "target"], as_index=False)["weight"].sum()
    known = links[links["source"].isin(ids) & links["target"].isin(ids)]
    name = plain(meta["model"] or meta["config"]["family"])
    # their page puts it into the name of a file
    slug = re.sub("[^a-z0-9]+", "-", f"{name}-{meta['target']['name']}".lower()).strip("-")
    return {
        "metadata": {
            "slug": slug[:60] or "graph", "scan": name,
            "transcoder_list": [], "prompt_tokens": [str(word) for word in words],
            "prompt": "".join(str(word) for word in words),
            "node_threshold": meta["settings"]["nodes"], "schema_version": 1,
        },
        "qParams": {
            "pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": "",
        },
        "nodes": nodes,
        "links": [
            {"source": ids[row.source], "target": ids[row.target], "weight": float(row.weight)}
            for row in known.itertuples()
        ],
    }  # fmt: skip


def _node(row: Any, count: int, place: int, target: Any, words: list[str]) -> dict[str, Any]:
    """Returns a node without its numbers. Their ids are LAYER_FEATURE_POSITION, "E" for layer."""
    if row.atom == -3:
        layer, feature, pos, kind = str(count + 1), int(target["answer"]), place, "logit"
        words_of = f"Output {target['name']}"
    elif row.atom == -1:
        layer, feature, pos, kind = "E", int(row.pos), int(row.pos), "embedding"
        words_of = f"Emb: {words[row.pos]}"
    else:
        layer, feature, pos = str(row.layer), int(row.atom), int(row.pos)
        kind, words_of = "cross layer transcoder", str(row.label)
    name, paired = f"{layer}_{feature}_{pos}", feature
    if row.atom >= 0:  # their page knows an atom by one number for layer and atom
        paired = (row.layer + feature) * (row.layer + feature + 1) // 2 + feature
    return {
        "node_id": name, "feature": paired, "layer": layer, "ctx_idx": pos,
        "feature_type": kind, "token_prob": 0.0, "is_target_logit": kind == "logit",
        "run_idx": 0, "reverse_ctx_idx": 0, "jsNodeId": f"{layer}_{feature}-0",
        "clerp": plain(words_of),
    }  # fmt: skip
