"""The tables of a graph: its nodes, edges, layers and answers."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.circuits.atlases.atom_directions import answer_names
from crate_interp.circuits.atlases.excerpts import as_webp, rgb
from crate_interp.circuits.graphs.atom_names import AtomNames
from crate_interp.circuits.graphs.derivatives import CutPass, Explained, Values
from crate_interp.circuits.graphs.edited_runs import baselines, without
from crate_interp.circuits.graphs.result import BIAS, EMBEDDING, TARGET, node_name
from crate_interp.circuits.graphs.selection import SKIP, Graph
from crate_interp.core.safe_text import visible
from crate_interp.models.hooked import HookedModel

# of so many nodes the effect is measured at least; of as many more as forwards of a tiny network,
# in tokens times parameters, make half a minute
_EFFECTS, _WORK = 24, 2**34


def _kept(chosen: Graph) -> list[int]:
    """Returns the nodes of the graph: kept codes, embeddings with an edge, and the target."""
    linked = chosen.kept.edges.any(dim=0) | (chosen.nodes[:, 0] >= 0)
    return (chosen.kept.nodes & linked).nonzero()[:, 0].tolist()


def _names(chosen: Graph) -> list[str]:
    top = int(chosen.nodes[-1, 0])
    return [
        node_name(layer, pos, TARGET if layer == top else atom)
        for layer, pos, atom in chosen.nodes.tolist()
    ]


def inside(case: Explained, chosen: Graph) -> list[Tensor]:
    """Returns for each layer which codes `[pos, atom]` are nodes of the graph."""
    masks = [torch.zeros(code.shape, dtype=torch.bool) for code in case.values.codes]
    for layer, pos, atom in chosen.nodes[chosen.kept.nodes].tolist():
        if 0 <= layer < len(masks):
            masks[layer][pos, atom] = True
    return masks


def node_table(case: Explained, chosen: Graph, cut: CutPass) -> pd.DataFrame:
    """Returns the table "nodes": embeddings, codes, biases of each layer, and the target."""
    own, names, count = case.values, _names(chosen), len(case.values.codes)
    rows = []
    for number in _kept(chosen):
        layer, pos, atom = chosen.nodes[number].tolist()
        if layer == count:
            value, attribution, atom = own.target, own.target, TARGET
        else:
            place = atom if layer >= 0 else 0
            attribution = float(own.attribution(layer)[pos, place])
            value = float(own.codes[layer][pos, atom]) if layer >= 0 else np.nan
        influence = float(chosen.influence[number]) if layer < count else 1.0
        rows.append((names[number], layer, pos, atom, value, attribution, influence, np.nan))
    for layer in range(count):
        slope = own.slopes_before[layer]
        whole = float((own.before[layer].double() * slope.double()).sum())
        added = whole - cut.carried(layer, slope)
        rows.append((node_name(layer, -1, BIAS), layer, -1, BIAS, np.nan, added, 0.0, np.nan))
    name = node_name(count, -1, BIAS)
    rows.append((name, count, -1, BIAS, np.nan, float(chosen.rest[-1]), 0.0, np.nan))
    columns = ["node", "layer", "pos", "atom", "value", "attribution", "influence", "effect"]
    table = pd.DataFrame(rows, columns=columns).assign(label="")
    return _with_effects(case, table).sort_values(["layer", "pos", "atom"], ignore_index=True)


def _with_effects(case: Explained, table: pd.DataFrame) -> pd.DataFrame:
    """Adds what real forwards without each node say; biases and the target have no effect.

    In a large network only the nodes with the largest influence have one.
    """
    count = len(case.values.codes)
    nodes: Any = table[(table["atom"] >= EMBEDDING) & (table["layer"] < count)]
    work = len(case.values.embedded) * case.model.n_params_total
    nodes = nodes.nlargest(max(_EFFECTS, _WORK // work), "influence")
    for layer, own in nodes.groupby("layer"):
        places = torch.tensor(own[["pos", "atom"]].to_numpy())
        after = without(case, int(layer), places)
        table.loc[own.index, "effect"] = case.values.target - after.numpy()
    return table


def edge_rows(chosen: Graph, links: list[tuple[int, int, float, int]]) -> pd.DataFrame:
    """Returns the table "edges": source, target, weight, head; those of biases last."""
    names = _names(chosen)
    rows = [(names[source], names[target], weight, head) for source, target, weight, head in links]
    for number in _kept(chosen):
        layer, rest = int(chosen.nodes[number, 0]), float(chosen.rest[number])
        if 0 <= layer and rest:
            rows.append((node_name(layer, -1, BIAS), names[number], rest, SKIP))
    return pd.DataFrame(rows, columns=["source", "target", "weight", "head"])


def layer_table(case: Explained, freeze: tuple[str, ...]) -> pd.DataFrame:
    """Returns the table "layers": what all nodes of a layer add, and what is left."""
    own, found = case.values, baselines(case, freeze)
    rows = []
    for layer, bias in enumerate(found):
        total = float(own.attribution(layer).sum())
        active = int((own.codes[layer] != 0).sum())
        rows.append((layer, active, total, bias, own.target - total - bias))
    return pd.DataFrame(rows, columns=["layer", "active", "attribution", "bias", "error"])


def place_table(own: Values) -> pd.DataFrame:
    """Returns the table "places": layer, pos, attribution, summed over all nodes of a token."""
    parts = []
    for layer in range(-1, len(own.codes)):
        sums = own.attribution(layer).sum(dim=1).cpu().numpy()
        parts.append(pd.DataFrame({"layer": layer, "pos": range(len(sums)), "attribution": sums}))
    return pd.concat(parts, ignore_index=True)


def answer_table(model: HookedModel, own: Values) -> pd.DataFrame:
    """Returns the table "answers": the logits of all answers, less their mean."""
    logits = own.logits.double().cpu()
    table = {"name": names_of(model), "logit": logits - logits.mean()}
    found = pd.DataFrame(table | {"probability": logits.softmax(dim=0)})
    return found.rename_axis("answer").reset_index().astype({"logit": float})


def names_of(model: HookedModel) -> list[str]:
    """Returns the names of the answers; characters that could harm a page are escaped."""
    return [visible(name) for name in answer_names(model)]


def picture_table(model: HookedModel, sample: Tensor) -> pd.DataFrame:
    """Returns the table "picture": the file of the picture, rows and columns of its patches.

    It is empty for a text.
    """
    if model.cfg.kind == "text":
        return pd.DataFrame({"webp": [], "rows": [], "columns": []}).astype({"webp": object})
    net: Any = model
    height, width = (
        size // patch for size, patch in zip(sample.shape[2:], net.cfg.patch_size, strict=True)
    )
    file = as_webp(rgb(sample[0], model.cfg))
    return pd.DataFrame({"webp": [file], "rows": [height], "columns": [width]})


def labelled(nodes: pd.DataFrame, names: AtomNames | None) -> pd.DataFrame:
    """Returns the table of nodes with the name of each code's atom, or "no name"."""
    if names is None:
        return nodes
    words = [
        (names.name_of(row.layer, row.atom) or "no name") if row.atom >= 0 else ""  # pyright: ignore
        for row in nodes.itertuples()
    ]
    return nodes.assign(label=words)


def example_table(chosen: Graph, names: AtomNames | None) -> pd.DataFrame:
    """Returns the table "examples": layer, atom, value, words, webp, of the graph's atoms."""
    columns = ["layer", "atom", "value", "words", "webp"]
    rows = []
    if names is not None:
        kept = chosen.nodes[chosen.kept.nodes].tolist()
        for layer, atom in sorted({(layer, atom) for layer, _, atom in kept if atom >= 0}):
            found = names.examples(layer, atom)
            rows += [(layer, atom, one["value"], one["words"], one["webp"]) for one in found]
    return pd.DataFrame(rows, columns=columns)
