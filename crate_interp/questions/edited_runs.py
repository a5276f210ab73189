"""Runs of a model in which something is edited or differentiated: pieces that fit, and starts."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import full_name
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.attention import PatternAttention

_LOGITS = 2**25  # the most logits in one forward of a piece of a batch: 128 MB
_STREAM = 2**20  # the most numbers in the stream of images whose graph is kept: 1 GB in 12 layers
Hook = tuple[str, Callable[..., Any]]


def at_once(model: HookedModel, inputs: Tensor) -> int:
    """Returns how many of the inputs one forward may take, so that its gradients fit in memory."""
    if model.cfg.kind != "text":
        patches = inputs[0, 0].numel() // math.prod(model.cfg.patch_size)
        return max(1, _STREAM // (patches * model.cfg.d_model))
    return max(1, _LOGITS // (inputs.shape[1] * model.W_U.shape[1]))


def pieces(
    model: HookedModel, inputs: Tensor, numbers: Sequence[int]
) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yields the inputs in pieces that fit in one forward, with their numbers."""
    size = at_once(model, inputs)
    for start in range(0, len(inputs), size):
        yield inputs[start : start + size], numbers[start : start + size]


def may_share(model: HookedModel) -> bool:
    """Tells whether a forward from a layer's stream gives the logits of a full forward."""
    takes = "start_at_layer" in inspect.signature(model.forward).parameters
    # with x0_lambdas, later layers add the embedding again, which the stream does not hold
    return takes and not hasattr(model, "x0_lambdas")


def from_layer(
    model: HookedModel, layer: int, stream: Tensor, inputs: Tensor, hooks: Sequence[Hook]
) -> Any:
    """Returns the logits of a run with hooks in a layer, from the stream that the layer reads on.

    Where later layers read more than the stream, the whole model runs on the inputs.
    """
    if may_share(model):
        return model.run_with_hooks(stream, fwd_hooks=[*hooks], start_at_layer=layer)
    return model.run_with_hooks(inputs, fwd_hooks=[*hooks])


def after_layer(model: HookedModel, layer: int, stream: Tensor, inputs: Tensor) -> Any:
    """Returns the logits if this is the stream after a layer.

    Where the classes are read from CLS alone, the last layer runs for CLS alone.
    """
    if may_share(model):
        last = len(model.blocks) - 1
        if layer < last and _reads_cls(model):
            stream = model(stream, start_at_layer=layer + 1, stop_at_layer=last)
            block: Any = model.blocks[last]
            moved = block.attn(block.ln1(stream), queries=1)
            stream, layer = block.after_attention(stream[:, :1] + moved), last
        return model(stream, start_at_layer=layer + 1)
    put = (full_name("hook_resid_post", layer), lambda value, hook: stream)
    return model.run_with_hooks(inputs, fwd_hooks=[put])


def with_head(
    model: HookedModel,
    layer: int,
    head: int,
    output: Float[Tensor, "pos d_head"] | float,
    z: Float[Tensor, "sample pos head d_head"],
    stream: Float[Tensor, "sample pos d_model"],
    inputs: Tensor,
) -> Any:
    """Returns the logits if a head gives this output, from the layer's z and stream after it.

    A black box keeps its stream where our layers read it, so that its whole forward runs.
    """
    block: Any = model.blocks[layer]
    if not may_share(model) or not hasattr(block, "after_attention"):

        def put(value: Tensor, hook: object) -> Tensor:
            value = value.clone()
            value[:, :, head] = output
            return value

        return model.run_with_hooks(inputs, fwd_hooks=[(full_name("attn.hook_z", layer), put)])
    change = output - z[:, :, head]
    if layer == len(model.blocks) - 1 and _reads_cls(model):
        stream, change = stream[:, :1], change[:, :1]
    stream = stream + change @ block.attn.W_O[head]
    return after_layer(model, layer, block.after_attention(stream), inputs)


def _reads_cls(model: HookedModel) -> bool:
    """Tells whether the answer is read from the first token of the last layer, and no other."""
    cfg, block = model.cfg, model.blocks[-1]
    of_cls = cfg.kind == "vision" and cfg.pool == "cls" and not cfg.class_layers
    return of_cls and isinstance(block.attn, PatternAttention)


def with_gradients(
    model: HookedModel, inputs: Tensor, points: Sequence[str], hooks: Sequence[Hook] = ()
) -> tuple[Any, dict[str, Tensor]]:
    """Returns the logits of a run, and its activations at points, each with a gradient."""
    held: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> Tensor:
        # a leaf in the graph, so that it has a gradient even if the weights need none
        held[hook.name] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return held[hook.name]

    with torch.enable_grad():
        every = [*hooks, *((name, keep) for name in points)]
        return model.run_with_hooks(inputs, fwd_hooks=every), held


def pushed(
    output: Tensor, inputs: Sequence[Tensor], *changes: Sequence[Tensor]
) -> Float[Tensor, "change ..."]:
    """Returns how an output changes with its inputs, to first order: the derivative times changes.

    This is the derivative of a backward pass with respect to its seed. torch's forward mode needs
    one pass, but first compiles decompositions with torch.jit, which takes seconds and is
    deprecated.
    """
    seed = torch.zeros_like(output, requires_grad=True)
    slopes = torch.autograd.grad(output, inputs, seed, create_graph=True)
    found = [torch.autograd.grad(slopes, seed, one, retain_graph=True)[0] for one in changes]
    return torch.stack(found)


def every_entry(
    name: str, values: Tensor | np.ndarray | Sequence[Any], **axes: Iterable[Any]
) -> pd.DataFrame:
    """Returns a row per entry of an array: its place along each axis, and its value as `name`."""
    places = pd.MultiIndex.from_product([*axes.values()], names=[*axes])
    table: Any = places.to_frame(index=False)
    return table.assign(**{name: np.asarray(values).reshape(-1)})


def joined(parts: Mapping[str, Sequence[pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Returns tables whose rows came in parts; none of a chunk without decodable samples."""
    return {name: pd.concat(rows, ignore_index=True) for name, rows in parts.items() if rows}
