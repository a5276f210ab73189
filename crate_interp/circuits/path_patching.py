"""Path patching: the effect of one head through chosen receivers, with all else held fixed."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import edit, full_name
from crate_interp.circuits.patching_arguments import Head, Metric, as_number, check_runs, heads_of
from crate_interp.core.progress import tqdm
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hook_points import check_pattern
from crate_interp.models.hooked import HookedModel

_ROLES = ("q", "k", "v")
_Hooks = list[tuple[str | Callable, Callable]]


@in_full_precision
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
    """Returns, for each sender, the metric if the receivers read the sender's output on `source`.

    Heads that are not senders get NaN. For each sender there are two forwards on `base`, as in
    arXiv 2211.00593 (IOI). In the first, the sender's output comes from the run on `source`, and
    every other head keeps its output on `base`, so the change travels only through norms and sparse
    steps. In the second, the receivers take the queries, keys or values that they had in the
    first. Sparse steps are computed again, because in CRATE they rewrite the stream and no path
    goes around them. If nothing reaches the receivers, the value is metric(model(base)).

    source, base: two inputs of one shape. metric(logits) returns one number. receivers: (layer,
    head) pairs, or "logits", which needs only the first forward. senders: (layer, head) pairs; None
    means every head before the last receiver. roles: the maps by which the receivers read the
    change, some of "q", "k", "v". positions: the positions at which the sender's output is patched,
    such as `hooks.edit.patch_positions([(2, 3)], model.cfg.grid)`; None means all.

    Raises ValueError for heads that the model does not have, for heads as receivers in ToST and
    CBT, which have no queries, keys and values, for inputs that differ in shape, and for a metric
    that does not return one finite number.
    """
    check_runs(model, source, base)
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    if isinstance(receivers, str) and receivers != "logits":
        raise ValueError(f"receivers={receivers!r}: give 'logits' or (layer, head) pairs.")
    to = [] if isinstance(receivers, str) else heads_of("receivers", receivers, layers, heads)
    if not isinstance(roles, (list, tuple)) or not roles or set(roles) - set(_ROLES):
        raise ValueError(f"roles={roles!r}: give some of 'q', 'k', 'v', such as ('q',).")
    if to:
        check_pattern(model.cfg, "a head as receiver")
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
    """Returns hooks that record the queries, keys or values of the receivers' layers."""

    def keep(tensor: Tensor, hook: Any) -> None:
        arrived[hook.name] = tensor.clone()

    layers = sorted({layer for layer, _ in to})
    return [(full_name(f"attn.hook_{role}", layer), keep) for layer in layers for role in roles]


def _patching(to: list[Head], roles: Sequence[str], arrived: dict[str, Tensor]) -> _Hooks:
    """Returns hooks that give the receivers the recorded queries, keys or values."""
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
            f"senders: the receivers read no head of layer {last} or later, such as {late[0]}. "
            "Give earlier heads."
        )
    if not senders:
        raise ValueError(
            "senders: the receivers are in the first layer, where no head comes before them. "
            "Give receivers of a later layer."
        )
