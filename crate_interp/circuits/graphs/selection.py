"""Which nodes of an answer are looked at, and which nodes and edges a graph keeps.

From the target down to the embeddings, by influence as circuit-tracer defines it: the effects on a
node, divided by the sum of their absolute values, are its shares; the influence of a node is the
sum over all paths to the target of the product of the shares along the path.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.circuits.graphs.derivatives import CutPass, Explained, through_heads
from crate_interp.questions.edited_runs import may_share

# The effects of a node are kept for so many sources of each layer, those with the largest
# attribution; the others count in its total. All nodes of a small network are fewer.
_SOURCES = 2**14
SKIP = -1  # the head that stands for the skip connection, and for layers that lie between


@dataclass(frozen=True)
class Kept:
    """Which nodes and edges a graph keeps, and how much of the influence they hold.

    completeness: the share of the effects on the graph's nodes, weighted by their influence, that
    come from nodes of the graph. replacement: the share of the influence of all that has no
    further source in the graph, which embeddings hold; the rest enters from nodes outside.
    influence: of each node, kept or not.
    """

    nodes: Bool[Tensor, "node"]
    edges: Bool[Tensor, "node node"]
    completeness: float
    replacement: float
    influence: Float[Tensor, "node"]


@dataclass(frozen=True)
class Graph:
    """The nodes that were looked at, the effects between them, and what is kept.

    nodes: (layer, token, atom) of each node, embeddings (-1, token, -1) first, from the lowest
    layer up; the target (n_layers, -1, -1) is the last. effects: `[target, source]`. rest: what no
    effect carries of each node's pre-threshold value: biases, and with a curved step its remainder.
    slopes: the derivative with respect to the heads of a node's own layer
    at its own token, by the node's number.
    """

    nodes: Int[Tensor, "node 3"]
    effects: Float[Tensor, "node node"]
    rest: Float[Tensor, "node"]
    slopes: dict[int, Float[Tensor, "head d_head"]]
    kept: Kept


@dataclass
class _Rows:
    """The effects on the nodes of one layer that were looked at, by the layer of the source."""

    effects: dict[int, Float[Tensor, "node source"]]
    totals: Float[Tensor, "node"]
    rest: Float[Tensor, "node"]
    slopes: Float[Tensor, "node head d_head"] | None


def select(cut: CutPass, nodes: float, edges: float, most: int) -> Graph:
    """Returns the graph of one answer.

    From the target down, in each layer the `most / n_layers` nodes with the largest influence are
    looked at: the effects on them are computed, which gives the influence of nodes below. Then
    `prune` keeps what holds the given shares of the influence. A node that was not looked at is not
    in the graph, but it counts in the shares of the nodes that it feeds.
    """
    case, count = cut.case, len(cut.case.codes)
    width = {layer: case.attribution(layer).shape[1] for layer in range(-1, count)}
    sources = {layer: _largest(case, layer) for layer in range(-1, count)}
    shares = {layer: torch.zeros(len(own), dtype=torch.float64) for layer, own in sources.items()}
    chosen: dict[int, Tensor] = {}
    rows: dict[int, _Rows] = {}

    def look_at(layer: int, nodes: Tensor, influence: Tensor) -> None:
        rows[layer] = _rows(cut, layer, nodes, sources)
        weight = influence / rows[layer].totals.clamp_min(1e-300)
        for source, effects in rows[layer].effects.items():
            shares[source] += weight @ effects.abs()

    look_at(count, torch.zeros(1).long(), torch.ones(1, dtype=torch.float64))
    for layer in reversed(range(count)):
        own = shares[layer]
        best = own.topk(min(max(1, most // count), len(own)))
        chosen[layer] = best.indices[best.values > 0].sort().values
        if len(chosen[layer]):
            look_at(layer, sources[layer][chosen[layer]], own[chosen[layer]])
    chosen[-1] = torch.arange(len(sources[-1]))
    return _joined(chosen, rows, sources, width, nodes, edges)


def _largest(case: Explained, layer: int) -> Int[Tensor, "source"]:
    """Returns the nodes of a layer whose effects are kept, by their numbers in the flat code."""
    size = case.attribution(layer).abs().flatten().cpu()
    if layer < 0:
        return torch.arange(len(size))
    active = case.codes[layer].flatten().cpu().nonzero()[:, 0]
    if len(active) <= _SOURCES:
        return active
    return active[size[active].topk(_SOURCES).indices].sort().values


def _rows(cut: CutPass, layer: int, nodes: Tensor, sources: dict[int, Tensor]) -> _Rows:
    """Returns the effects on nodes of a layer, which are given by their numbers in its code."""
    case, effects = cut.case, {}
    totals, sums, slopes = [], [], []
    for group in nodes.split(cut.at_once(layer)):
        found, heads = cut.effects(layer, group.to(case.embedded.device))
        for source, own in found.items():
            kept = own.flatten(1)[:, sources[source].to(own.device)]
            effects.setdefault(source, []).append(kept.double().cpu())
        totals.append(sum(own.double().abs().sum(dim=(1, 2)) for own in found.values()).cpu())  # pyright: ignore
        sums.append(sum(own.double().sum(dim=(1, 2)) for own in found.values()).cpu())  # pyright: ignore
        slopes += [] if heads is None else [heads]
    if layer == len(case.codes):
        whole = torch.tensor([case.target], dtype=torch.float64)
    else:
        whole = case.before[layer].flatten().double().cpu()[nodes]
    joined = {source: torch.cat(parts) for source, parts in effects.items()}
    all_slopes = torch.cat(slopes) if slopes else None
    return _Rows(joined, torch.cat(totals), whole - torch.cat(sums), all_slopes)


def _joined(
    chosen: dict[int, Tensor],
    rows: dict[int, _Rows],
    sources: dict[int, Tensor],
    width: dict[int, int],
    nodes: float,
    edges: float,
) -> Graph:
    """Returns the graph of the chosen nodes, embeddings first and the target last."""
    layers = sorted(chosen)
    table, starts, size = [], {}, 0
    for layer in layers:
        flat = sources[layer][chosen[layer]]
        starts[layer] = size
        size += len(flat)
        atoms = torch.full_like(flat, -1) if layer < 0 else flat % width[layer]
        table.append(torch.stack([torch.full_like(flat, layer), flat // width[layer], atoms], 1))
    top = max(rows)
    table.append(torch.tensor([[top, -1, -1]]))
    starts[top], size = size, size + 1
    effects = torch.zeros(size, size, dtype=torch.float64)
    totals, rest = torch.ones(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    slopes = {}
    for layer, own in rows.items():
        here = slice(starts[layer], starts[layer] + len(own.totals))
        totals[here], rest[here] = own.totals, own.rest
        for source, found in own.effects.items():
            there = slice(starts[source], starts[source] + len(chosen[source]))
            effects[here, there] = found[:, chosen[source]]
        if own.slopes is not None:
            slopes |= dict(enumerate(own.slopes, starts[layer]))
    joined = torch.cat(table)
    kept = prune(effects, totals, joined[:, 0] < 0, nodes, edges)
    return Graph(joined, effects, rest, slopes, kept)


def edge_table(case: Explained, graph: Graph) -> list[tuple[int, int, float, int]]:
    """Returns (source, target, weight, head) of every kept edge, split over heads.

    The part of each head is what its output carries; the remainder is the skip connection, head -1.
    An edge over more than one layer, or to the target, is not split.
    """
    found: list[tuple[int, int, float, int]] = []
    targets, sources = (place.tolist() for place in graph.kept.edges.nonzero(as_tuple=True))
    pairs = list(zip(sources, targets, strict=True))
    table = graph.nodes.tolist()
    parts: dict[tuple[int, int], list[float]] = {}
    for layer in range(len(case.codes)) if may_share(case.model) else ():
        here = [(s, t) for s, t in pairs if table[t][0] == layer and table[s][0] == layer - 1]
        read = sorted({s for s, _ in here})
        changes = through_heads(case, layer, graph.nodes[read][:, 1:]) if read else ()
        change = dict(zip(read, changes, strict=True))
        for s, t in here:
            own = graph.slopes[t].double() * change[s][table[t][1]].double()
            parts[s, t] = own.sum(dim=-1).tolist()
    for s, t in pairs:
        split = parts.get((s, t), [])
        found += [(s, t, part, head) for head, part in enumerate(split) if part]
        found.append((s, t, float(graph.effects[t, s]) - sum(split), SKIP))
    return found


def influences(
    shares: Float[Tensor, "node node"], start: Float[Tensor, "node"]
) -> Float[Tensor, "node"]:
    """Returns `start (A + A^2 + ...)` for the shares A `[target, source]` of a graph without loops.

    start: the weight of each node as a target. circuit-tracer `graph.py` `compute_influence`.
    """
    here, total = start @ shares, torch.zeros_like(start)
    while bool(here.any()):
        total += here
        here = here @ shares
    return total


def among(effects: Float[Tensor, "node node"]) -> Float[Tensor, "node node"]:
    """Returns the shares of effects `[target, source]` among the nodes of a graph."""
    size = effects.abs().double()
    return size / size.sum(dim=1, keepdim=True).clamp_min(1e-300)


def enough(scores: Float[Tensor, "any"], share: float) -> float:
    """Returns the smallest of the largest scores that together hold this share of their sum."""
    if not float(scores.sum()):
        return 0.0
    ordered = scores.sort(descending=True).values
    sums = ordered.cumsum(0)
    place = int(torch.searchsorted(sums / sums[-1], share))
    return float(ordered[min(place, len(ordered) - 1)])


def prune(
    effects: Float[Tensor, "node node"],
    totals: Float[Tensor, "node"],
    inputs: Bool[Tensor, "node"],
    nodes: float,
    edges: float,
) -> Kept:
    """Returns what a graph keeps. The last node is the target; targets are rows.

    effects: `[target, source]`, of the nodes that were looked at. totals: the sum of the absolute
    effects on each node, of all nodes, looked at or not. inputs: which nodes are embeddings, which
    are kept. First prune keeps the nodes that hold the share `nodes` of the influence, then the
    edges that hold the share `edges` of the influence through edges. Then it removes nodes without
    an edge in or an edge out until none is left. circuit-tracer `graph.py` `prune_graph`. As there,
    these shares are among the nodes that were looked at; the scores count all nodes.
    """
    shares = effects.abs().double() / totals.double().clamp_min(1e-300)[:, None]
    start = torch.zeros(len(shares), dtype=torch.float64)
    start[-1] = 1.0
    found = influences(among(effects), start)
    always = inputs.clone()
    always[-1] = True
    kept = ((found >= enough(found[:-1], nodes)) & (found > 0)) | always
    scaled = among(effects * kept[:, None] * kept[None])
    through = scaled * (influences(scaled, start) + start)[:, None]
    # two products that are equal by symmetry may differ in their last bit
    links = (through >= enough(through.flatten(), edges) * (1 - 1e-9)) & (through > 0)
    while True:
        fed = links.any(dim=1) | always
        read = links.any(dim=0) | always
        gone = kept & ~(fed & read)
        if not bool(gone.any()):
            break
        kept = kept & ~gone
        links = links & kept[:, None] & kept[None]
    # circuit-tracer `graph.py`
    own = shares * kept[:, None] * kept[None]
    weights, within = influences(own, start) + start, own.sum(dim=1)
    read = kept & ~inputs
    completeness = float((within * weights)[read].sum() / weights[read].sum())
    outside = float(((1 - within) * weights)[read].sum())
    ends = float(weights[inputs & kept].sum())
    return Kept(kept, links, completeness, ends / max(ends + outside, 1e-300), found)
