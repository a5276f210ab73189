"""The tables of a graph: its nodes, edges, layers and answers."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.circuits.atlases.atom_logits import answer_names
from crate_interp.circuits.atlases.excerpts import as_webp, rgb
from crate_interp.circuits.graphs.atom_names import AtomNames
from crate_interp.circuits.graphs.derivatives import CutPass, Explained
from crate_interp.circuits.graphs.result import BIAS, EMBEDDING, TARGET, node_name
from crate_interp.circuits.graphs.selection import SKIP, Graph, edge_table
from crate_interp.circuits.graphs.trust import baselines, without
from crate_interp.core.safe_text import visible
from crate_interp.models.hooked import HookedModel

# of so many nodes the effect is measured at least; of as many more as forwards of a tiny network,
# in tokens times parameters, make half a minute
_EFFECTS, _WORK = 24, 2**34


def graph_tables(
    case: Explained,
    cut: CutPass,
    chosen: Graph,
    freeze: tuple[str, ...],
    names: AtomNames | None,
) -> dict[str, pd.DataFrame]:
    """Returns the tables of the graph itself; "picture" is empty for a text."""
    own, model = case.values, case.model
    nodes, edges = _nodes_and_edges(case, chosen, cut, freeze)
    places = []
    for layer in range(-1, len(own.codes)):
        sums = own.attribution(layer).sum(dim=1).cpu().numpy()
        places.append(pd.DataFrame({"layer": layer, "pos": range(len(sums)), "attribution": sums}))
    logits = own.logits.double().cpu()
    answers = pd.DataFrame({"name": names_of(model), "logit": logits - logits.mean()})
    answers = answers.assign(probability=logits.softmax(dim=0).numpy()).rename_axis("answer")
    rows = []
    for layer, bias in enumerate(baselines(case, freeze)):
        total = float(own.attribution(layer).sum())
        active = int((own.codes[layer] != 0).sum())
        rows.append((layer, active, total, bias, own.target - total - bias))
    layers = pd.DataFrame(rows, columns=["layer", "active", "attribution", "bias", "error"])
    picture = pd.DataFrame({"webp": [], "rows": [], "columns": []}).astype({"webp": object})
    if model.cfg.kind != "text":
        net: Any = model
        height, width = net.cfg.patch_size
        grid = case.sample.shape[2] // height, case.sample.shape[3] // width
        file = as_webp(rgb(case.sample[0], model.cfg))
        picture = pd.DataFrame({"webp": [file], "rows": grid[:1], "columns": grid[1:]})
    examples = []
    if names is not None:
        labels = [
            (names.name_of(layer, atom) or "no name") if atom >= 0 else ""
            for layer, atom in nodes[["layer", "atom"]].itertuples(index=False)
        ]
        nodes = nodes.assign(label=labels)
        kept = chosen.nodes[chosen.kept.nodes].tolist()
        for layer, atom in sorted({(layer, atom) for layer, _, atom in kept if atom >= 0}):
            for one in names.examples(layer, atom):
                examples.append((layer, atom, one["value"], one["words"], one["webp"]))
    return {
        "nodes": nodes,
        "edges": edges,
        "layers": layers,
        "answers": answers.reset_index().astype({"logit": float}),
        "places": pd.concat(places, ignore_index=True),
        "picture": picture,
        "examples": pd.DataFrame(examples, columns=["layer", "atom", "value", "words", "webp"]),
    }


def _nodes_and_edges(
    case: Explained, chosen: Graph, cut: CutPass, freeze: tuple[str, ...]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the tables "nodes" and "edges".

    Nodes are kept codes, embeddings with an edge, the target, and biases of each layer; edges of
    biases come last.
    """
    own, count = case.values, len(case.values.codes)
    linked = chosen.kept.edges.any(dim=0) | (chosen.nodes[:, 0] >= 0)
    kept = (chosen.kept.nodes & linked).nonzero()[:, 0].tolist()
    names = [
        node_name(layer, pos, TARGET if layer == count else atom)
        for layer, pos, atom in chosen.nodes.tolist()
    ]
    nodes: list[tuple] = []
    edges = [(names[s], names[t], *more) for s, t, *more in edge_table(cut, own, chosen, freeze)]
    for number in kept:
        layer, pos, atom = chosen.nodes[number].tolist()
        value, rest = np.nan, float(chosen.rest[number])
        influence = float(chosen.influence[number]) if layer < count else 1.0
        if layer == count:
            value, attribution, atom = own.target, own.target, TARGET
        else:
            attribution = float(own.attribution(layer)[pos, max(atom, 0)])
            value = float(own.codes[layer][pos, atom]) if layer >= 0 else np.nan
        nodes.append((names[number], layer, pos, atom, value, attribution, influence))
        if layer >= 0 and rest:
            edges.append((node_name(layer, -1, BIAS), names[number], rest, SKIP))
    for layer in range(count + 1):
        added = float(chosen.rest[-1])
        if layer < count:
            slope = own.slopes_before[layer]
            whole = float((own.before[layer].double() * slope.double()).sum())
            added = whole - cut.carried(layer, slope)
        nodes.append((node_name(layer, -1, BIAS), layer, -1, BIAS, np.nan, added, 0.0))
    columns = ["node", "layer", "pos", "atom", "value", "attribution", "influence"]
    table: Any = pd.DataFrame(nodes, columns=columns).assign(effect=np.nan, label="")
    # real forwards without each node; in a large network without those of the largest influence
    real = table[(table["atom"] >= EMBEDDING) & (table["layer"] < count)]
    work = len(own.embedded) * case.model.n_params_total
    for layer, rows in real.nlargest(max(_EFFECTS, _WORK // work), "influence").groupby("layer"):
        after = without(case, int(layer), torch.tensor(rows[["pos", "atom"]].to_numpy()))
        table.loc[rows.index, "effect"] = own.target - after.numpy()
    table = table.sort_values(["layer", "pos", "atom"], ignore_index=True)
    return table, pd.DataFrame(edges, columns=["source", "target", "weight", "head"])


def inside(case: Explained, chosen: Graph) -> list[Tensor]:
    """Returns for each layer which codes `[pos, atom]` are nodes of the graph."""
    masks = [torch.zeros(code.shape, dtype=torch.bool) for code in case.values.codes]
    for layer, pos, atom in chosen.nodes[chosen.kept.nodes].tolist():
        if 0 <= layer < len(masks):
            masks[layer][pos, atom] = True
    return masks


def names_of(model: HookedModel) -> list[str]:
    """Returns the names of the answers; characters that could harm a page are escaped."""
    return [visible(name) for name in answer_names(model)]
