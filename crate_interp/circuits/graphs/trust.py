"""How far a graph may be trusted: real ablations, and what is left of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from crate_interp.circuits.code_swaps import rotation
from crate_interp.circuits.graphs.derivatives import Values
from crate_interp.circuits.graphs.edited_runs import copies_at_once, keeping, without
from crate_interp.circuits.graphs.question import Question
from crate_interp.models.hooked import HookedModel

KEPT = (1, 3, 10, 30, 100, 300, 1000)  # nodes of each layer that are kept alone
_BESIDE = ("logit", "random_low", "random_mean", "random_high")
DRAWS, DRAWS_ALIKE = 3, 10  # of as many random nodes of a layer, and of each token of a layer
_TESTED = 96  # nodes that are ablated, of all layers together, but at least 8 of each


@dataclass(frozen=True)
class Explained:
    """A sample, an answer, and the values of a network for it."""

    model: HookedModel
    sample: Tensor
    question: Question
    values: Values


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
        after = without(case.model, case.sample, case.question, case.values, layer, nodes)
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
    """Returns the target if only k nodes of each layer stay: k, logit, random and rotated ones.

    logit: with the k nodes of each layer whose attribution is largest in size. random_low,
    random_mean, random_high: with as many random nodes that are not 0, the least, mean and most of
    the draws. rotated: with the k largest coordinates of the codes in random orthonormal axes, by
    attribution in these axes.
    """
    codes = case.values.codes
    active = [int((code != 0).sum()) for code in codes]
    axes = [rotation(code.shape[1], seed).to(code) for code in codes]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for k in [k for k in KEPT if k < max(active)]:
        best = [_top(case.values.attribution(n).abs(), k)[None] for n in range(len(codes))]
        random = [_random(code, k, generator) for code in codes]
        masks = [torch.cat(both) for both in zip(best, random, strict=True)]
        found = _in_parts(case, masks)
        turned = []
        for layer, axis in enumerate(axes):
            coordinates = codes[layer] @ axis
            slopes = case.values.slopes[layer] @ axis
            turned.append(_top((coordinates * slopes).abs(), k)[None])
        rotated = float(_in_parts(case, turned, axes)[0])
        rows.append((k, *_beside_random(found), rotated))
    return pd.DataFrame(rows, columns=["k", *_BESIDE, "rotated"])


def alone_and_gone(
    case: Explained, inside: Sequence[Bool[Tensor, "pos atom"]], seed: int
) -> pd.DataFrame:
    """Returns the target with the graph's nodes alone, and without them: rows "keep", "remove".

    Columns: edit, logit, random_low, random_mean, random_high, nodes. Random nodes are as many at
    each token of each layer, and not 0.
    """
    generator = torch.Generator().manual_seed(seed)
    keep = []
    for code, own in zip(case.values.codes, inside, strict=True):
        drawn = _random_alike(code, own.sum(dim=-1), generator)
        keep.append(torch.cat([own[None], drawn]).to(code.device))
    count = sum(int(own.sum()) for own in inside)
    rows = []
    for edit, masks in (("keep", keep), ("remove", [~mask for mask in keep])):
        rows.append((edit, *_beside_random(_in_parts(case, masks)), count))
    return pd.DataFrame(rows, columns=["edit", *_BESIDE, "nodes"])


def _beside_random(found: Float[Tensor, "copy"]) -> tuple[float, float, float, float]:
    """Returns the first target, and the least, mean and largest of the others, the random ones."""
    draws = found[1:]
    return float(found[0]), float(draws.min()), float(draws.mean()), float(draws.max())


def _in_parts(
    case: Explained, masks: list[Tensor], axes: list[Tensor] | None = None
) -> Float[Tensor, "copy"]:
    size = copies_at_once(case.model, case.values)
    parts = [
        keeping(case.model, case.sample, case.question, [m[i : i + size] for m in masks], axes)
        for i in range(0, len(masks[0]), size)
    ]
    return torch.cat(parts)


def _top(size: Float[Tensor, "pos atom"], k: int) -> Bool[Tensor, "pos atom"]:
    """Returns the mask of the k largest entries."""
    mask = torch.zeros(size.numel(), dtype=torch.bool, device=size.device)
    mask[size.flatten().topk(min(k, size.numel())).indices] = True
    return mask.view_as(size)


def _random(
    code: Float[Tensor, "pos atom"], k: int, generator: torch.Generator
) -> Bool[Tensor, "draw pos atom"]:
    """Returns masks of k random entries that are not 0, one for each draw."""
    places = (code != 0).flatten().nonzero()[:, 0]
    masks = torch.zeros(DRAWS, code.numel(), dtype=torch.bool, device=code.device)
    for mask in masks:
        mask[places[torch.randperm(len(places), generator=generator)[:k].to(places.device)]] = True
    return masks.view(DRAWS, *code.shape)


def _random_alike(
    code: Float[Tensor, "pos atom"], counts: Int[Tensor, "pos"], generator: torch.Generator
) -> Bool[Tensor, "draw pos atom"]:
    """Returns masks of random entries that are not 0, `counts` at each token, for each draw."""
    active, masks = (code != 0).cpu(), []
    for _ in range(DRAWS_ALIKE):
        scores = torch.rand(code.shape, generator=generator, dtype=torch.float32).masked_fill(
            ~active, -1.0
        )
        places = scores.argsort(dim=-1, descending=True).argsort(dim=-1)
        masks.append((places < counts[:, None]) & active)
    return torch.stack(masks)
