"""What the weights say about an atom: its logits on the direct path, and its nearest atoms."""

from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from crate_interp.circuits.attribution import residual_gains
from crate_interp.core.safe_text import LONGEST
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.norm import HookedLayerNorm
from crate_interp.probes.layer_reading import dictionary

NAMED = 3  # how many classes or tokens, and how many near atoms, are listed for each atom


def answer_names(model: HookedModel) -> list[str]:
    """Returns the names of a model's classes, or the strings of its tokens; long ones are cut."""
    net: Any = model
    numbers = range(net.W_U.shape[1])
    if model.cfg.kind == "text":
        try:
            names = [net.to_single_str_token(token) for token in numbers]
        except ValueError:  # there is no tokenizer
            names = [str(token) for token in numbers]
    else:
        names = model.cfg.labels or [f"class {number}" for number in numbers]
    return [name[:LONGEST] for name in names]


def directions(model: HookedModel) -> pd.DataFrame:
    """Returns a row per layer and atom: layer, atom, raises, lowers, nearest, nearest_cosine.

    raises, lowers: the classes or tokens whose logit the atom's direction moves most on the direct
    path. Logit t moves by `gain <row of W_out, g * w_t>` less the mean over t, for a code of 1 and
    a final norm of scale 1. gain: the factor of nanochat's residual lambdas. g: the final norm's
    weight. w_t: the column of W_U. raises and lowers are "" if sparse steps replace the stream
    (`cfg.residual` is False), because then no direct path leads from a layer to the logits.
    nearest: the atoms of other layers whose columns of D have the largest cosine with the atom's.
    """
    layers, width = len(model.blocks), model.cfg.d_mlp
    raises, lowers = _logits(model) if model.cfg.residual else ([""] * layers * width,) * 2
    nearest, cosines = _nearest(model)
    columns: dict[str, Any] = {
        "layer": np.repeat(np.arange(layers), width),
        "atom": np.tile(np.arange(width), layers),
        "raises": raises,
        "lowers": lowers,
        "nearest": nearest,
        "nearest_cosine": cosines,
    }
    return pd.DataFrame(columns)


def _logits(model: Any) -> tuple[list[str], list[str]]:
    """Returns the names of the logits that each atom raises most and lowers most."""
    names, read = answer_names(model), model.W_U
    if isinstance(model.ln_final, HookedLayerNorm):
        read = model.ln_final.weight[:, None] * read
        read = read - read.mean(dim=0, keepdim=True)
    raises, lowers = [], []
    for block, gain in zip(model.blocks, residual_gains(model)[0], strict=True):
        moved = gain * block.mlp.written() @ read  # [atom, logit]
        moved = moved - moved.mean(dim=1, keepdim=True)
        count = min(NAMED, moved.shape[1])
        for sign, texts in ((1, raises), (-1, lowers)):
            best = (sign * moved).topk(count, dim=1)
            rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            for values, places in rows:
                pairs = zip(values, places, strict=True)
                words = [f"{names[place]!r} {sign * value:+.2g}" for value, place in pairs]
                texts.append(", ".join(words))
    return raises, lowers


def _nearest(model: Any) -> tuple[list[str], list[float]]:
    """Returns, for each atom, the nearest atoms of other layers as text, and the largest cosine."""
    bases = [dictionary(block) for block in model.blocks]
    unit = [None if d is None else F.normalize(d.detach().float(), dim=0) for d in bases]
    names: list[str] = []
    cosines: list[float] = []
    for layer, mine in enumerate(unit):
        others = [(other, d) for other, d in enumerate(unit) if other != layer and d is not None]
        if mine is None or not others:
            names += [""] * model.cfg.d_mlp
            cosines += [np.nan] * model.cfg.d_mlp
            continue
        # the nearest of each layer are found first, so that memory never holds all pairs of atoms
        best = [(mine.T @ d).topk(min(NAMED, d.shape[1]), dim=1) for _, d in others]
        values = torch.cat([top.values for top in best], dim=1)
        numbers = zip(others, best, strict=True)
        layers = [torch.full_like(top.indices, other) for (other, _), top in numbers]
        layers = torch.cat(layers, dim=1)
        places = torch.cat([top.indices for top in best], dim=1)
        top = values.topk(min(NAMED, values.shape[1]), dim=1)
        for row, order in enumerate(top.indices.tolist()):
            texts = [
                f"L{int(layers[row, at])}A{int(places[row, at])} {values[row, at]:.2f}"
                for at in order
            ]
            names.append(", ".join(texts))
        cosines += top.values[:, 0].tolist()
    return names, cosines
