"""How far a model's answers move when an atom is set to 0 everywhere."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import full_name
from crate_interp.sweeps.atom_statistics import CODE

_TOKENS = 2**15  # of the copies of one forward, each of which lacks another atom


def ablations(model: Any, inputs: Tensor | None, progress: bool) -> pd.DataFrame:
    """Returns a row per layer and atom: layer, atom, ablation, samples.

    ablation: the mean Kullback-Leibler divergence, in nats, of the model's answers without the atom
    from its answers as it is, over these inputs; NaN if there are none. An atom that never fires on
    them changes nothing.
    """
    layers, width = len(model.blocks), model.cfg.d_mlp
    count = 0 if inputs is None else len(inputs)
    columns: dict[str, Any] = {
        "layer": np.repeat(np.arange(layers), width),
        "atom": np.tile(np.arange(width), layers),
        "ablation": np.nan if inputs is None else _divergences(model, inputs, progress),
        "samples": count,
    }
    return pd.DataFrame(columns)


def merged_ablations(
    mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]
) -> pd.DataFrame:
    """Returns the means over the samples of both."""
    if not theirs["samples"].any() or not mine["samples"].any():
        return mine if mine["samples"].any() else theirs
    n = mine["samples"] + theirs["samples"]
    total = mine["ablation"] * mine["samples"] + theirs["ablation"] * theirs["samples"]
    return mine.assign(ablation=total / n, samples=n)


def _divergences(model: Any, inputs: Tensor, progress: bool) -> list[float]:
    width, layers, count = model.cfg.d_mlp, range(len(model.blocks)), len(inputs)
    names = [full_name(point, layer) for point in (CODE, "hook_resid_post") for layer in layers]
    logits, cache = model.run_with_cache(inputs, names_filter=names)
    before = logits.float().log_softmax(dim=-1)
    changes: list[float] = []
    bar = tqdm(total=width * len(layers), desc="ablations", unit="atom", disable=not progress)
    with bar:
        for layer in layers:
            code, post = cache.at(CODE, layer), cache.at("hook_resid_post", layer)
            on = (code != 0).flatten(0, 1).any(dim=0)
            lost = torch.zeros(width, dtype=torch.float64)
            directions = model.blocks[layer].mlp.written()
            at_once = max(1, _TOKENS // (count * code.shape[1]))
            for group in on.nonzero().flatten().split(at_once):
                pattern = "b n atom, atom d -> atom b n d"
                gone = einsum(code[..., group], directions[group], pattern)
                stream = (post - gone).flatten(0, 1)  # [atom * batch, pos, d_model]
                after = _rest(model, inputs, layer, stream).float().log_softmax(dim=-1)
                after = after.unflatten(0, (len(group), count))
                divergence = (before.exp() * (before - after)).sum(dim=-1)  # [atom, batch, ...]
                mean = divergence.flatten(1).mean(dim=1).clamp(min=0)
                lost[group.cpu()] = mean.double().cpu()
                bar.update(len(group))
            bar.update(width - int(on.sum()))
            changes += lost.tolist()
    return changes


def _rest(model: Any, inputs: Tensor, layer: int, stream: Tensor) -> Tensor:
    """Returns the logits of copies of the inputs whose stream after a layer is replaced."""
    if not hasattr(model, "x0_lambdas") or not bool(model.x0_lambdas[layer + 1 :].any()):
        return model(stream, start_at_layer=layer + 1)
    many = inputs.repeat(len(stream) // len(inputs), 1)  # later layers add the embedding again
    name = full_name("hook_resid_post", layer)
    return model.run_with_hooks(many, fwd_hooks=[(name, lambda post, hook: stream)])
