"""Path patching: the effect that one head has through others, with everything else held fixed."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import edit, full_name
from crate_interp.circuits.patching_arguments import Head, Metric, as_number, check_runs, heads_of
from crate_interp.core.progress import tqdm
from crate_interp.models.hooked import HookedModel

_ROLES = ("q", "k", "v")
_Hooks = list[tuple[str | Callable, Callable]]


def path_patch(
    model: HookedModel,
    source: Tensor,
    base: Tensor,
    metric: Metric,
    *,
    receivers: Sequence[Head] | str = "logits",
    senders: Sequence[Head] | None = None,
    roles: Sequence[str] = _ROLES,
    positions: int | Collection[int] | Tensor | None = None,
    progress: bool = True,
) -> Float[Tensor, "layer head"]:
    """Returns the metric if the receivers read what one head wrote in another run.

    NaN for heads that are not senders. For each sender, as in arXiv 2211.00593 (IOI), the base run
    gets the sender's output from `source`, while every other head keeps its output of the base run,
    so that only the path through norms and sparse steps is left. Then the base run gets what the
    receivers read on that path. Sparse steps are computed again: in CRATE they rewrite the stream,
    and no path goes around them. If nothing reaches the receivers, the value is
    metric(model(base)).

    source, base: two inputs of one shape. metric(logits) -> a number. receivers: (layer, head)
    pairs, or "logits". senders: None for every head before the last receiver. roles: the maps in
    which the receivers read the change, some of "q", "k", "v". positions: those of the sender's
    output that are patched, such as `hooks.edit.patch_positions([(2, 3)], model.cfg.grid)`; None
    for all. It takes two forwards for each sender.

    Raises ValueError for heads that the model does not have, inputs that differ in shape, and a
    metric that does not return one finite number.
    """
    check_runs(model, source, base)
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    if isinstance(receivers, str) and receivers != "logits":
        raise ValueError(f"receivers={receivers!r}: give 'logits' or (layer, head) pairs.")
    to = [] if isinstance(receivers, str) else heads_of("receivers", receivers, layers, heads)
    if not isinstance(roles, (list, tuple)) or not roles or set(roles) - set(_ROLES):
        raise ValueError(f"roles={roles!r}: give some of 'q', 'k', 'v', such as ('q',).")
    last = max((layer for layer, _ in to), default=layers)
    before = [(layer, head) for layer in range(last) for head in range(heads)]
    chosen = before if senders is None else heads_of("senders", senders, layers, heads)
    _check_senders(chosen, last)
    names = [full_name("attn.hook_z", layer) for layer in range(layers)]
    values = torch.full((layers, heads), torch.nan)
    with torch.no_grad():
        _, there = model.run_with_cache(source, names_filter=names)
        _, here = model.run_with_cache(base, names_filter=names)
        for layer, head in tqdm(chosen, desc="path patching", disable=not progress):
            hooks: _Hooks = [(name, edit.patch(here[name])) for name in names]
            sent = edit.patch(there[names[layer]], heads=head, positions=positions)
            hooks[layer] = (names[layer], edit.compose(hooks[layer][1], sent))
            arrived: dict[str, Tensor] = {}
            out = model.run_with_hooks(base, fwd_hooks=[*_reading(to, roles, arrived), *hooks])
            if to:
                out = model.run_with_hooks(base, fwd_hooks=_patching(to, roles, arrived))
            values[layer, head] = as_number(metric(out))
    return values


def _reading(to: list[Head], roles: Sequence[str], arrived: dict[str, Tensor]) -> _Hooks:
    """Returns hooks that record what the receivers' layers read."""

    def keep(tensor: Tensor, hook: Any) -> None:
        arrived[hook.name] = tensor.clone()

    layers = sorted({layer for layer, _ in to})
    return [(full_name(f"attn.hook_{role}", layer), keep) for layer in layers for role in roles]


def _patching(to: list[Head], roles: Sequence[str], arrived: dict[str, Tensor]) -> _Hooks:
    """Returns hooks that make the receivers read what was recorded."""
    hooks: _Hooks = []
    for layer in sorted({layer for layer, _ in to}):
        heads = [head for own, head in to if own == layer]
        for role in roles:
            name = full_name(f"attn.hook_{role}", layer)
            hooks.append((name, edit.patch(arrived[name], heads=heads)))
    return hooks


def _check_senders(senders: list[Head], last: int) -> None:
    late = [sender for sender in senders if sender[0] >= last]
    if late:
        raise ValueError(
            f"senders: the receivers read no head of layer {last} or later, such as {late[0]}: "
            "give earlier heads."
        )
    if not senders:
        raise ValueError(
            "senders: the receivers are in the first layer, where they read no head: "
            "give receivers of a later layer."
        )
