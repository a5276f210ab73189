"""How far to trust a graph: real forwards in which nodes are removed, or in which only they are
kept."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.code_swaps import rotation
from crate_interp.circuits.graphs.derivatives import CODE, Explained, directions, frozen_points
from crate_interp.questions.edited_runs import may_share

KEPT = (1, 3, 10, 30, 100, 300, 1000)  # nodes of each layer that are kept alone
DRAWS, DRAWS_UNTRAINED = 40, 10  # of random nodes at each token, beside those of a graph
ABLATED = 96  # nodes that are ablated, of all layers together, but at least 8 of each
DRAWS_OF_K = 3  # of k random nodes of a layer
_THRESHOLDS = (("mlp.hook_pre", "mlp.hook_post"), ("mlp.hook_pre_init", "mlp.hook_post_init"))
# of the largest activation of a batch of edited copies: larger batches are slower on a processor
_NUMBERS = 2**23


def copies_at_once(case: Explained) -> int:
    """Returns how many copies of the sample one forward may take."""
    pos, cfg = len(case.embedded), case.model.cfg
    answers = len(case.logits) * (pos if cfg.kind == "text" else 1)
    return max(1, _NUMBERS // max(pos * max(pos * cfg.n_heads, cfg.d_mlp * 2), answers))


@torch.no_grad()
def without(case: Explained, layer: int, nodes: Int[Tensor, "node 2"]) -> Float[Tensor, "node"]:
    """Returns the target after removing each node (token, atom) of a layer alone.

    A code of 0 takes its place; layer -1 stands for embeddings, which become 0. The layers below
    do not run again, except in nanochat-crate.
    """
    found, model = [], case.model
    stream = case.embedded if layer < 0 else case.streams[layer]
    for group in nodes.to(stream.device).split(copies_at_once(case)) if len(nodes) else ():
        copy, (pos, atom) = torch.arange(len(group), device=group.device), group.T
        gone = (copy, pos) if layer < 0 else (copy, pos, atom)

        def zeroed(value: Tensor, hook: Any, gone: tuple[Tensor, ...] = gone) -> Tensor:
            value = value.clone()
            value[gone] = 0
            return value

        if not may_share(model):  # later layers read the embedding again
            point = "hook_embed" if layer < 0 else full_name(CODE, layer)
            copies = case.sample.expand(len(group), *case.sample.shape[1:])
            logits = model.run_with_hooks(copies, fwd_hooks=[(point, zeroed)])
        else:
            copies = stream.repeat(len(group), 1, 1)
            if layer < 0:
                copies[gone] = 0
            else:
                lost = case.codes[layer][pos, atom, None]
                copies[copy, pos] -= lost * directions(model, layer)[atom]
            logits = model(copies, start_at_layer=layer + 1)
        found.append(case.question.of(logits).double().cpu())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


@torch.no_grad()
def keeping(
    case: Explained,
    nodes: list[Int[Tensor, "copy node"]],
    *,
    others: bool = False,
    axes: list[Float[Tensor, "atom axis"]] | None = None,
) -> Float[Tensor, "copy"]:
    """Returns the target if only some nodes of each layer stay and the others are 0.

    nodes: their numbers in the flat code of each layer, for each copy of the sample. others: these
    nodes are 0, and all other nodes stay. axes: an orthonormal basis of the codes of each layer,
    one axis a column, in which the nodes are coordinates.
    """

    def edit(code: Tensor, hook: Any, chosen: Tensor, axis: Tensor | None) -> Tensor:
        mask = torch.zeros_like(code).flatten(1).scatter_(1, chosen.to(code.device), 1.0)
        mask = (1 - mask if others else mask).view_as(code)
        return code * mask if axis is None else ((code @ axis) * mask) @ axis.T

    found = []
    names = [full_name(CODE, layer) for layer in range(len(nodes))]
    turned = axes or [None] * len(nodes)
    for group in zip(*(one.split(copies_at_once(case)) for one in nodes), strict=True):
        edits = [partial(edit, chosen=c, axis=a) for c, a in zip(group, turned, strict=True)]
        copies = case.sample.expand(len(group[0]), *case.sample.shape[1:])
        logits = case.model.run_with_hooks(copies, fwd_hooks=[*zip(names, edits, strict=True)])
        found.append(case.question.of(logits).double().cpu())
    return torch.cat(found)


@torch.no_grad()
def baselines(case: Explained) -> list[float]:
    """Returns the target without all nodes of a layer, for each layer, with what is frozen held.

    Which codes are on in the layers above stays as it is, as do patterns and norms that are
    frozen. If both are frozen, the network is affine in the codes, and the target is the sum of the
    layer's attributions and of this baseline.
    """
    model, sample = case.model, case.sample
    layers = range(model.cfg.n_layers)
    points = frozen_points(model, case.freeze)
    # where a node's value is its pre-threshold value or 0: a ReLU, not a GELU
    pre_of = {
        full_name(post, layer): full_name(pre, layer)
        for pre, post in _THRESHOLDS
        for layer in layers
        if full_name(pre, 0) in model.hook_dict.keys() and "gelu" not in model.cfg.sparse_step
    }
    names, before = [*points, *pre_of.values()], {}
    cache = model.run_with_cache(sample, names_filter=names)[1] if names else {}

    def hold_code(current: Tensor, hook: Any) -> Tensor:
        return cache[hook.name].expand_as(current)

    def note(value: Tensor, hook: Any) -> None:
        before[hook.name] = value

    def masked(value: Tensor, hook: Any) -> Tensor:
        pre = pre_of[hook.name]
        return before[pre] * (cache[pre] > 0)

    hooks: list[Any] = [(name, hold_code) for name in points]
    hooks += [both for post, pre in pre_of.items() for both in ((pre, note), (post, masked))]
    found = []
    for layer in layers:
        if not may_share(model):
            gone = (full_name(CODE, layer), lambda code, hook: torch.zeros_like(code))
            logits = model.run_with_hooks(sample, fwd_hooks=[*hooks, gone])
        else:
            stream = case.streams[layer] - case.codes[layer] @ directions(model, layer)
            above = [
                (name, hook) for name, hook in hooks
                if not name.startswith("blocks.") or int(name.split(".")[1]) > layer
            ]  # fmt: skip
            start: Any = {"start_at_layer": layer + 1}
            logits = model.run_with_hooks(stream[None], fwd_hooks=above, **start)
        found.append(float(case.question.of(logits)[0]))
    return found


def ablations(
    case: Explained, inside: Sequence[Bool[Tensor, "pos atom"]], seed: int, most: int
) -> pd.DataFrame:
    """Returns real effects of nodes outside a graph: layer, pos, atom, attribution, effect.

    Half of the nodes of a layer are those with the largest attribution, half are random. inside:
    for each layer, which nodes `[pos, atom]` are in the graph; these are left out. most: how many
    of all layers. effect: the target with the node less the target without it, which the
    attribution predicts.
    """
    rows = []
    generator = torch.Generator().manual_seed(seed)
    count = len(case.codes)
    each = max(8, most // count) // 2 if most else 0
    for layer in range(count):
        attribution = case.attribution(layer).cpu()
        free = (case.codes[layer].cpu() != 0) & ~inside[layer]
        places = free.flatten().nonzero()[:, 0]
        order = places[attribution.flatten()[places].abs().argsort(descending=True)]
        rest = order[each:][torch.randperm(max(0, len(order) - each), generator=generator)]
        chosen = torch.cat([order[:each], rest[:each]])
        nodes = torch.stack([chosen // free.shape[1], chosen % free.shape[1]], dim=1)
        after = without(case, layer, nodes)
        effect = case.target - after.numpy()
        numbers = {"attribution": attribution.flatten()[chosen].numpy(), "effect": effect}
        table = pd.DataFrame(nodes.numpy(), columns=["pos", "atom"]).assign(**numbers)
        table.insert(0, "layer", layer)
        rows.append(table)
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


def sufficiency(case: Explained, seed: int, counts: Sequence[int] = KEPT) -> pd.DataFrame:
    """Returns the target if only k nodes of each layer stay: k, logit, largest, random, rotated.

    logit: with the k nodes of each layer whose attribution is largest in size. largest: with the k
    largest codes. random_mean: with k random nodes that are not 0, the mean of three draws.
    rotated: with the k largest coordinates of the codes in random orthonormal axes, by attribution
    in these axes.
    """
    codes = [code.cpu() for code in case.codes]
    axes = [rotation(code.shape[1], seed).to(code) for code in case.codes if counts]
    both = zip(case.codes, case.slopes, axes, strict=bool(counts))
    turned = [(code @ axis) * (slope @ axis) for code, slope, axis in both]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for k in [k for k in counts if k < max(int((code != 0).sum()) for code in codes)]:
        count = torch.tensor([k])
        nodes, coordinates = [], []
        for layer, code in enumerate(codes):
            sizes = torch.stack([case.attribution(layer).cpu(), code.double()]).abs()
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
    with the largest codes in place of the graph's nodes, the same number at each token of each
    layer. random: with the same number of random codes that are not 0, the mean and the middle 95 %
    of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    nodes = []
    for code, mask in zip(case.codes, inside, strict=True):
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
