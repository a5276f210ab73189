"""How far a graph may be trusted: real ablations, and what is left of the answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.circuits.code_swaps import rotation
from crate_interp.circuits.graphs.derivatives import Explained
from crate_interp.circuits.graphs.edited_runs import keeping, without

KEPT = (1, 3, 10, 30, 100, 300, 1000)  # nodes of each layer that are kept alone
DRAWS, DRAWS_UNTRAINED = 100, 10  # of random nodes at each token, beside those of a graph
DRAWS_OF_K = 3  # of k random nodes of a layer
_TESTED = 96  # nodes that are ablated, of all layers together, but at least 8 of each


def ablations(
    case: Explained, inside: Sequence[Bool[Tensor, "pos atom"]], seed: int
) -> pd.DataFrame:
    """Returns real effects of nodes outside a graph: layer, pos, atom, attribution, effect.

    Half of the nodes of a layer are those with the largest attribution, half are random. inside:
    for each layer, which nodes `[pos, atom]` are in the graph; these are left out. effect: the
    target with the node less the target without it, which the attribution predicts.
    """
    rows = []
    generator = torch.Generator().manual_seed(seed)
    count = len(case.values.codes)
    each = max(8, _TESTED // count) // 2
    for layer in range(count):
        attribution = case.values.attribution(layer).cpu()
        free = (case.values.codes[layer].cpu() != 0) & ~inside[layer]
        places = free.flatten().nonzero()[:, 0]
        order = places[attribution.flatten()[places].abs().argsort(descending=True)]
        rest = order[each:][torch.randperm(max(0, len(order) - each), generator=generator)]
        chosen = torch.cat([order[:each], rest[:each]])
        nodes = torch.stack([chosen // free.shape[1], chosen % free.shape[1]], dim=1)
        after = without(case, layer, nodes)
        rows.append(
            pd.DataFrame(
                {
                    "layer": layer, "pos": nodes[:, 0].numpy(), "atom": nodes[:, 1].numpy(),
                    "attribution": attribution.flatten()[chosen].numpy(),
                    "effect": case.values.target - after.numpy(),
                }
            )
        )  # fmt: skip
    return pd.concat(rows, ignore_index=True)


def agreement(tests: pd.DataFrame) -> pd.DataFrame:
    """Returns layer, pearson, low, high, spearman, n: attributions against real ablations.

    low, high: the 95 % interval of Pearson's correlation over the ablated nodes, by Fisher's z.
    """
    rows = []
    groups: Any = tests.groupby("layer")
    for layer, own in groups:
        pair: Any = own[["attribution", "effect"]]
        known = len(pair) > 3 and bool((pair.nunique() > 1).all())
        pearson = float(pair.corr().iloc[0, 1]) if known else np.nan
        spearman = float(pair.corr("spearman").iloc[0, 1]) if known else np.nan
        z = np.arctanh(np.clip(pearson, -1 + 1e-12, 1 - 1e-12))
        half = 1.96 / np.sqrt(max(len(own) - 3, 1))
        ends = np.tanh([z - half, z + half]) if known else (np.nan, np.nan)
        rows.append((layer, pearson, *map(float, ends), spearman, len(own)))
    columns = ["layer", "pearson", "low", "high", "spearman", "n"]
    return pd.DataFrame(rows, columns=columns)


def sufficiency(case: Explained, seed: int) -> pd.DataFrame:
    """Returns the target if only k nodes of each layer stay: k, logit, largest, random, rotated.

    logit: with the k nodes of each layer whose attribution is largest in size. largest: with the k
    largest codes. random_mean: with k random nodes that are not 0, the mean of three draws.
    rotated: with the k largest coordinates of the codes in random orthonormal axes, by attribution
    in these axes.
    """
    codes, own = [code.cpu() for code in case.values.codes], case.values
    active = [int((code != 0).sum()) for code in codes]
    axes = [rotation(code.shape[1], seed).to(code) for code in own.codes]
    turned = [
        (code @ axis) * (slope @ axis)
        for code, slope, axis in zip(own.codes, own.slopes, axes, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for k in [k for k in KEPT if k < max(active)]:
        count = torch.tensor([k])
        nodes, coordinates = [], []
        for layer, code in enumerate(codes):
            sizes = torch.stack([own.attribution(layer).cpu(), code.double()]).abs()
            best = largest(sizes.view(2, 1, -1), count)
            draws = random_nodes(code.view(1, -1), count, DRAWS_OF_K, generator)
            nodes.append(torch.cat([best, draws]))
            coordinates.append(largest(turned[layer].abs().cpu().view(1, 1, -1), count))
        found = keeping(case, nodes)
        rotated = keeping(case, coordinates, axes=axes)
        rows.append((k, *found[:2].tolist(), float(found[2:].mean()), float(rotated)))
    return pd.DataFrame(rows, columns=["k", "logit", "largest", "random_mean", "rotated"])


def alone_and_gone(
    case: Explained, inside: Sequence[Bool[Tensor, "pos atom"]], draws: int, seed: int
) -> pd.DataFrame:
    """Returns the target with the graph's nodes alone, and without them: rows "keep", "remove".

    Columns: edit, logit, largest, random_mean, random_q025, random_q975, draws, nodes. largest:
    with the largest codes in place of the graph's nodes, as many at each token of each layer.
    random: with as many random codes that are not 0, the mean and the middle 95 % of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    nodes = []
    for code, mask in zip(case.values.codes, inside, strict=True):
        size, counts = code.cpu().abs(), mask.sum(dim=-1)
        beside = random_nodes(size, counts, draws, generator)
        nodes.append(torch.cat([largest(torch.stack([mask.to(size), size]), counts), beside]))
    rows, count = [], sum(one.shape[1] for one in nodes)
    for edit in ("keep", "remove"):
        found = keeping(case, nodes, others=edit == "remove")
        random = pd.Series(found[2:].numpy())
        middle = (random.mean(), random.quantile(0.025), random.quantile(0.975))
        rows.append((edit, *found[:2].tolist(), *middle, draws, count))
    columns = ["edit", "logit", "largest", "random_mean", "random_q025", "random_q975"]
    return pd.DataFrame(rows, columns=[*columns, "draws", "nodes"])


def largest(
    size: Float[Tensor, "*draw pos atom"], counts: Int[Tensor, "pos"]
) -> Int[Tensor, "*draw node"]:
    """Returns the numbers of the largest entries of a flat code, `counts` of them at each token."""
    pos, atoms = size.shape[-2:]
    order = size.topk(min(int(counts.max()), atoms), dim=-1).indices
    there = torch.arange(order.shape[-1]) < counts[:, None]
    return (order + atoms * torch.arange(pos)[:, None])[..., there]


def random_nodes(
    code: Float[Tensor, "pos atom"],
    counts: Int[Tensor, "pos"],
    draws: int,
    generator: torch.Generator,
) -> Int[Tensor, "draw node"]:
    """Returns the numbers of random entries that are not 0, `counts` at each token, by draw."""
    nodes = largest(code, counts).repeat(draws, 1)
    for draw in nodes:
        size = torch.rand(code.shape, generator=generator, dtype=torch.float32)
        draw[:] = largest(size.masked_fill(code == 0, -1.0), counts)
    return nodes
