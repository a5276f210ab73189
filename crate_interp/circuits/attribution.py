"""Direct logit attribution: what each head and each atom adds to a logit, where the stream is a sum of what they add."""

from dataclasses import dataclass, fields
from typing import Any

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from crate_interp import checks
from crate_interp.models.cache import CrateCache
from crate_interp.models.norm import HookedLayerNorm


@dataclass(frozen=True)
class LogitAttribution:
    """What every part of a model adds to a logit of each sample; all parts together are the logit.

    embed and positions `[batch]`, heads `[batch, layer, head]`, atoms `[batch, layer, atom]`, biases `[batch, layer]` of the
    output maps, constant `[batch]` from the last norm and the unembedding. In the unit of the logit (nats), either sign.
    """

    embed: Float[Tensor, "batch"]
    positions: Float[Tensor, "batch"]
    heads: Float[Tensor, "batch layer head"]
    atoms: Float[Tensor, "batch layer atom"]
    biases: Float[Tensor, "batch layer"]
    constant: Float[Tensor, "batch"]

    def total(self) -> Float[Tensor, "batch"]:
        """The sum of all parts: the logit, before a softcap."""
        parts: list[Tensor] = [getattr(self, field.name) for field in fields(self)]
        return torch.stack(
            [part.flatten(1).sum(dim=1) if part.ndim > 1 else part for part in parts]
        ).sum(dim=0)

    def table(self) -> pd.DataFrame:
        """A row per part, largest mean first in absolute value: part, layer, number, mean and std over samples."""
        rows: list[tuple] = []
        for field in fields(self):
            values = getattr(self, field.name).detach().double()
            name = field.name.removesuffix("s") if values.ndim > 1 else field.name
            for place in (
                torch.cartesian_prod(*(torch.arange(side) for side in values.shape[1:]))
                if values.ndim > 1
                else [()]
            ):
                index = (
                    tuple(int(number) for number in torch.atleast_1d(place))
                    if values.ndim > 1
                    else ()
                )
                own = values[(slice(None), *index)]
                std = own.std().item() if len(own) > 1 else float("nan")
                rows.append((name, *(*index, None, None)[:2], own.mean().item(), std))
        table = pd.DataFrame(rows, columns=["part", "layer", "number", "mean", "std"])
        table = table.astype({"layer": "Int64", "number": "Int64"})
        return table.sort_values("mean", key=abs, ascending=False, kind="stable").reset_index(
            drop=True
        )

    def _repr_html_(self) -> str:
        return self.table().head(20).to_html(index=False, float_format=lambda value: f"{value:.3f}")


def logit_attribution(
    cache: Any, target: Any, *, minus: Any = None, position: Any = -1
) -> LogitAttribution:
    """The logit of `target` as a sum over embedding, heads, atoms and biases: `sum_c <c, g * w_t - mean> / scale + constant`.

    c: what a part writes into the stream at the token that is read; w_t: the target's column of W_U; g and scale: of the last
    norm, the scale as it was in this run (its own change is not shared out). nanochat-crate: a part of layer l has passed the
    residual lambdas of the layers after it, and the embedding enters again in every one; the logit is that before the softcap.

    cache: of `model.run_with_cache(x)`, with hook_embed, hook_pos_embed, attn.hook_z, mlp.hook_post and ln_final.hook_scale.
    target: a class or token, its name, or one for each sample `[batch]`. minus: another one, to attribute the difference.
    position: the token whose prediction it is, in language models; images are read at CLS, or at the mean of all tokens. Atoms of
    gpt-baseline are its neurons. TransformerLens `cache.logit_attrs` has the heads alone, and no lambdas.

    Raises ValueError in families where the sparse step replaces the stream (crate, crate-mae, crate-lm): nothing adds up
    there, and a path is patched instead (`ci.circuits.path_patch`); KeyError for points that were not cached.
    """
    model = _checked(cache)
    vision = model.cfg.kind == "vision"
    mean = vision and model.cfg.pool == "mean"
    direction = _direction(model, target)
    constant = _constant(model, target)
    if minus is not None:
        direction, constant = (
            direction - _direction(model, minus),
            constant - _constant(model, minus),
        )

    def at(name: str) -> Tensor:
        """What a point held at the token that is read."""
        if name not in cache.cache_dict:
            raise KeyError(
                f"the cache lacks {name!r}: run_with_cache(x) with all points, or name it in names_filter."
            )
        held = cache[name]
        if mean:
            return held.mean(dim=1)
        place = 0 if vision else position
        if not checks.is_int(place) or not -held.shape[1] <= place < held.shape[1]:
            raise ValueError(f"position={position!r}: there are {held.shape[1]} tokens.")
        return held[:, place]

    scale = at("ln_final.hook_scale")  # [batch, 1]
    if len(direction) not in (1, len(scale)):
        raise ValueError(
            f"there are {len(direction)} targets for {len(scale)} samples: give one, or one per sample."
        )
    direction = direction.expand(len(scale), -1) / scale
    gains, entry = _gains(model)
    heads, atoms, biases = [], [], []
    for layer, block in enumerate(model.blocks):
        written = einsum(block.attn.W_O, direction, "head d_head d, batch d -> batch head d_head")
        heads.append(gains[layer] * (at(f"blocks.{layer}.attn.hook_z") * written).sum(dim=-1))
        atoms.append(
            gains[layer] * at(f"blocks.{layer}.mlp.hook_post") * (direction @ block.mlp.W_out.T)
        )
        biases.append(gains[layer] * (direction @ (block.attn.b_O + block.mlp.b_out)))
    embed = entry * (at("hook_embed") * direction).sum(dim=-1)
    placed = "hook_pos_embed" in model.hook_dict
    positions = (
        (at("hook_pos_embed") * direction).sum(dim=-1) if placed else torch.zeros_like(embed)
    )
    by_layer = {
        name: torch.stack(parts, dim=1)
        for name, parts in (("heads", heads), ("atoms", atoms), ("biases", biases))
    }
    return LogitAttribution(
        embed=embed, positions=positions, constant=constant.expand(len(embed)), **by_layer
    )


def _checked(cache: Any) -> Any:
    if not isinstance(cache, CrateCache):
        raise ValueError(
            f"logits are attributed from the cache of model.run_with_cache(x), got {type(cache).__name__}."
        )
    model = cache.model
    if model.cfg.kind not in ("vision", "text"):
        raise ValueError(
            "logits are attributed in a classifier of images or a language model; of a CLIP there are none."
        )
    if not model.cfg.residual:
        raise ValueError(
            f"in family {model.cfg.family!r} the sparse step replaces the stream, so parts of different layers do not add up to "
            "a logit: use ci.circuits.path_patch or ci.circuits.attribution_patch."
        )
    if not cache.has_batch_dim:
        raise ValueError(
            "the cache has no batch axis: run_with_cache without remove_batch_dim=True."
        )
    return model


def _indices(model: Any, target: Any) -> Tensor:
    """A class or token, or one per sample, as indices `[1]` or `[batch]`; ValueError for one there is not."""
    index = model.to_single_token(target) if isinstance(target, str) else target
    if not isinstance(index, (Tensor, int, list, tuple)) and not checks.is_int(index):
        raise ValueError(f"target={target!r}: give a number, a name, or one per sample.")
    found = torch.atleast_1d(torch.as_tensor(index, device=model.W_U.device))
    count = model.W_U.shape[1]
    if (
        found.is_floating_point()
        or found.dtype == torch.bool
        or found.ndim != 1
        or not len(found)
        or bool(((found < 0) | (found >= count)).any())
    ):
        raise ValueError(
            f"target={target!r}: give a number from 0 to {count - 1}, its name, or one per sample."
        )
    return found


def _direction(model: Any, target: Any) -> Float[Tensor, "target d_model"]:
    """What a unit of the stream along each axis adds to the logit, but for the scale of the last norm."""
    columns = model.W_U.T[_indices(model, target)]
    if not isinstance(model.ln_final, HookedLayerNorm):
        return columns
    columns = columns * model.ln_final.weight
    return columns - columns.mean(dim=-1, keepdim=True)


def _constant(model: Any, target: Any) -> Float[Tensor, "target"]:
    """The logit of a stream of zeros."""
    index = _indices(model, target)
    constant = model.b_U[index]
    bias = getattr(model.ln_final, "bias", None)
    return constant if bias is None else constant + model.W_U.T[index] @ bias


def _gains(model: Any) -> tuple[list[Any], Any]:
    """By how much what each layer adds has grown at the end, and by how much the embedding has."""
    count = len(model.blocks)
    if not hasattr(model, "resid_lambdas"):
        return [1.0] * count, 1.0
    gains, entry = (
        [torch.ones(()).to(model.resid_lambdas)] * count,
        torch.ones(()).to(model.resid_lambdas),
    )
    for layer in range(count):
        entry = model.resid_lambdas[layer] * entry + model.x0_lambdas[layer]
        gains[layer] = model.resid_lambdas[layer + 1 :].prod()
    return gains, entry
