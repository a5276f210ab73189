"""Which nodes and edges a graph keeps: influence, as circuit-tracer defines it.

The effects on a node, divided by the sum of their absolute values, are its shares. The influence of
a node is the sum over all paths to the target of the product of the shares along the path.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Which nodes and edges a graph keeps, and how much of the influence they hold.

    completeness: the share of the effects on the graph's nodes, weighted by their influence, that
    come from nodes of the graph. replacement: the share of the influence of all that has no
    further source in the graph, which embeddings hold; the rest enters from nodes outside.
    """

    nodes: Bool[Tensor, "node"]
    edges: Bool[Tensor, "node node"]
    completeness: float
    replacement: float


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
    if not scores.numel():
        return 0.0
    ordered = scores.sort(descending=True).values
    sums = ordered.cumsum(0)
    if not float(sums[-1]):
        return 0.0
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
    are kept. First the nodes stay that hold `nodes` of the influence, then the edges that hold
    `edges` of the influence that passes through them; then nodes without an edge in or an edge out
    go until there is none. circuit-tracer `graph.py` `prune_graph`. As there, these shares are
    those among the nodes that were looked at; the scores count all nodes.
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
    return Kept(kept, links, *_scores(shares, kept, inputs, start))


def _scores(shares: Tensor, kept: Tensor, inputs: Tensor, start: Tensor) -> tuple[float, float]:
    """Returns completeness and replacement of the kept nodes. circuit-tracer `graph.py`."""
    own = shares * kept[:, None] * kept[None]
    weights = influences(own, start) + start
    read = kept & ~inputs
    within = own.sum(dim=1)
    completeness = float((within * weights)[read].sum() / weights[read].sum())
    outside = float(((1 - within) * weights)[read].sum())
    ends = float(weights[inputs & kept].sum())
    return completeness, ends / max(ends + outside, 1e-300)
