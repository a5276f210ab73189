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
from crate_interp.models.hooked import HookedModel
from crate_interp.sweeps.atom_statistics import CODE

_TOKENS = 2**15  # of the copies of one forward, each of which lacks another atom


def ablations(model: HookedModel, inputs: Tensor | None, progress: bool) -> pd.DataFrame:
    """Returns a row per layer and atom: layer, atom, ablation, samples.

    ablation: the mean over the inputs of the Kullback-Leibler divergence, in nats, of the model's
    answers with the atom set to 0 from its own answers; NaN if there are no inputs. An atom that
    never fires on them changes nothing.
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
    if not theirs["samples"].to_numpy().any():
        return mine
    if not mine["samples"].to_numpy().any():
        return theirs
    n = mine["samples"] + theirs["samples"]
    total = mine["ablation"] * mine["samples"] + theirs["ablation"] * theirs["samples"]
    return mine.assign(ablation=total / n, samples=n)


def _divergences(model: Any, inputs: Tensor, progress: bool) -> list[float]:
    """Returns the divergence of each atom, by layer and atom."""
    layers, width = range(len(model.blocks)), model.cfg.d_mlp
    names = [full_name(point, layer) for point in (CODE, "hook_resid_post") for layer in layers]
    logits, cache = model.run_with_cache(inputs, names_filter=names)
    before = logits.float().log_softmax(dim=-1)
    changes: list[float] = []
    with tqdm(
        total=width * len(layers), desc="ablations", unit="atom", disable=not progress
    ) as bar:
        for layer in layers:
            code, post = cache.at(CODE, layer), cache.at("hook_resid_post", layer)
            on = (code != 0).flatten(0, 1).any(dim=0)
            moved = torch.zeros(width, dtype=torch.float64)
            directions = model.blocks[layer].mlp.written()
            at_once = max(1, _TOKENS // (len(inputs) * code.shape[1]))
            for group in on.nonzero().flatten().split(at_once):
                pattern = "b n atom, atom d -> atom b n d"
                gone = einsum(code[..., group], directions[group], pattern)
                stream = (post - gone).flatten(0, 1)  # [atom * batch, pos, d_model]
                after = _rest(model, inputs, layer, stream).float().log_softmax(dim=-1)
                moved[group.cpu()] = _means(before, after, len(group)).double().cpu()
                bar.update(len(group))
            bar.update(width - int(on.sum()))
            changes += moved.tolist()
    return changes


def _means(before: Tensor, after: Tensor, atoms: int) -> Tensor:
    """Returns the mean divergence of each atom from the log probabilities of all copies."""
    after = after.unflatten(0, (atoms, len(before)))
    divergence = (before.exp() * (before - after)).sum(dim=-1)  # [atom, batch, ...]
    return divergence.flatten(1).mean(dim=1).clamp(min=0)


def _rest(model: Any, inputs: Tensor, layer: int, stream: Tensor) -> Tensor:
    """Returns the logits of copies of the inputs whose stream after a layer is replaced."""
    if not hasattr(model, "x0_lambdas") or not bool(model.x0_lambdas[layer + 1 :].any()):
        return model(stream, start_at_layer=layer + 1)
    many = inputs.repeat(len(stream) // len(inputs), 1)  # later layers add the embedding again
    name = full_name("hook_resid_post", layer)
    return model.run_with_hooks(many, fwd_hooks=[(name, lambda post, hook: stream)])
