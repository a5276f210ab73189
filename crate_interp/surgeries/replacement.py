"""replaced: a context in which some layers take a different step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core import checks
from crate_interp.models.hooked import HookedModel
from crate_interp.surgeries.steps import Step, attention_step, sparse_step, visible_tokens
from crate_interp.sweeps.runs.batches import check_model

Hook = tuple[str, Callable[..., Any]]


@contextmanager
def replaced(
    model: HookedModel,
    *,
    attention: str | None = None,
    sparse: str | int | None = None,
    layers: Sequence[int] | None = None,
    mix: float = 1.0,
    eps: float = 0.1,
) -> Iterator[HookedModel]:
    """Puts another step in place of attention, of the sparse step, or of both, in some layers.

        with ci.surgeries.replaced(model, attention="gradient", layers=[3], mix=0.1):
            logits = model(images)

    While the context is open, the output of attention (hook_attn_out) becomes `(1 - mix) own + mix
    step`, and so does the code of the sparse step (mlp.hook_post).

    attention: a step computed from the stored U and the layer's input Z^l. "gradient" is `-grad
    R^c(Z^l)`, the step from which arXiv 2306.01129 derives attention; "neumann" is the first two
    terms of its Neumann series (eq. 9). "plus" and "minus" are MSSA with the output map U_k^T
    (CRATE-C) or -U_k^T (CRATE-N, arXiv 2411.17182) on the layer's own attn.hook_z. Each step is
    scaled, sample by sample, to the Frobenius length of the layer's own update. In a language model
    each token takes the gradient of the rate of the tokens that it sees, since the gradient over
    all tokens would reveal later tokens; tokens in a `past` are not counted.

    sparse: a number n takes n proximal steps on the layer's own lasso, with the layer's eta, lambd
    and start; "solution" takes a solution of this lasso (`measures.lasso_solution` to a tolerance
    of 3e-4).

    layers: None means all. The steps are constants: gradients flow only through `(1 - mix) own`.
    The hooks are gone when the context closes, also after an exception.

    Raises ValueError if no step is given, for an unknown step, for layers that the model does not
    have, for a mix outside [0, 1], and if a layer has no U or no lasso; the error says why.
    """
    check_model(model)
    steps = [attention_step(attention)] if attention is not None else []
    steps += [sparse_step(sparse)] if sparse is not None else []
    if not steps:
        raise ValueError(
            "there is nothing to replace: give attention= or sparse=, such as attention='gradient'."
        )
    wanted = check_layers(model, layers)
    for step in steps:
        check_step(model, step, wanted)
    share, eps = check_mix(mix), checks.positive("eps", eps)
    hooks: Any = replacement_hooks(model, steps, wanted, share, eps)
    with model.hooks(hooks):
        yield model


def replacement_hooks(
    model: HookedModel, steps: Sequence[Step], layers: Sequence[int], mix: float, eps: float
) -> list[Hook]:
    """Returns the hooks that compute steps in layers and mix them with the layers' own steps."""
    return [
        hook
        for layer in layers
        for step in steps
        for hook in _hooks_in_layer(model, step, layer, mix, eps)
    ]


def _hooks_in_layer(
    model: HookedModel, step: Step, layer: int, mix: float, eps: float
) -> list[Hook]:
    block: Any = model.blocks[layer]
    acts: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any, point: str) -> None:
        acts[point] = tensor.detach()

    def put(tensor: Tensor, hook: Any) -> Tensor:
        with torch.no_grad():
            keep(tensor, hook, step.point)
            new = step.make(block, acts, visible_tokens(model, layer, tensor.shape[1]), eps)
        acts.clear()
        return mixed(tensor, new.to(tensor), mix)

    kept = [(full_name(point, layer), partial(keep, point=point)) for point in step.reads]
    return [*kept, (full_name(step.point, layer), put)]


def mixed(own: Tensor, step: Tensor, mix: float) -> Tensor:
    """Returns `(1 - mix) own + mix step`; for mix 0 exactly own, for mix 1 exactly step."""
    return torch.lerp(own, step, mix)


def check_layers(model: HookedModel, layers: Sequence[int] | None) -> list[int]:
    """Returns the numbers of layers; None means all.

    Raises ValueError for an empty list, or if the model lacks a layer.
    """
    count = len(model.blocks)
    if layers is None:
        return list(range(count))
    listed = isinstance(layers, (list, tuple, range, set)) and len(layers) > 0
    if not listed or not all(checks.is_int(layer) and 0 <= layer < count for layer in layers):
        raise ValueError(f"layers={layers!r}: give layers from 0 to {count - 1}, or None for all.")
    return sorted({int(layer) for layer in layers})


def check_mix(mix: float) -> float:
    """Returns a mix as a float; raises ValueError unless it lies in [0, 1]."""
    if not checks.is_number(mix) or not 0 <= mix <= 1:
        raise ValueError(f"mix={mix!r}: give a number from 0 (own step) to 1 (the other step).")
    return float(mix)


def check_step(model: HookedModel, step: Step, layers: Sequence[int]) -> None:
    """Raises ValueError, with the reason, if a layer cannot take the step."""
    blocks: list[Any] = list(model.blocks)
    for layer in layers:
        reason = step.lacking(blocks[layer])
        if reason:
            raise ValueError(
                f"layer {layer} cannot take {step.name!r}: {reason}. Give other layers or steps."
            )
