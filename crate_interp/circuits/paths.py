"""Path patching: what one head tells others, with everything else held as it was, sparse steps computed anew."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import edit, full_name
from crate_interp import checks

Head = tuple[int, int]
_ROLES = ("q", "k", "v")


def path_patch(
    model: Any,
    source: Any,
    base: Any,
    metric: Callable[[Tensor], Any],
    *,
    receivers: Sequence[Head] | str = "logits",
    senders: Sequence[Head] | None = None,
    roles: Sequence[str] = _ROLES,
    positions: Any = None,
    progress: bool = True,
) -> Tensor:
    """The metric when one head tells the receivers what it said in another run: `[layer, head]`, NaN for heads not asked for.

    For each sender, as in arXiv 2211.00593 (IOI): the base run with the sender's output from
    `source` and every other head's held as in the base run, so that only the path through norms and
    sparse steps is left; then the base run with what the receivers read on that path. Steps are
    computed anew: in CRATE they re-code the stream, and no path goes around them. Where nothing
    came through, the value is metric(model(base)).

    source, base: two inputs of one shape. metric(logits) -> a number. receivers: (layer, head)
    pairs, or "logits". senders: None for every head before the last receiver. roles: which of "q",
    "k", "v" the receivers hear it in. positions: of the sender's output, such as
    `hooks.edit.patch_positions([(2, 3)], model.cfg.grid)`. Two forwards for each sender. Raises
    ValueError for heads there are not, inputs that differ in shape, and a metric that is no number.
    """
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    to = [] if isinstance(receivers, str) else heads_of("receivers", receivers, layers, heads)
    if isinstance(receivers, str) and receivers != "logits":
        raise ValueError(f"receivers={receivers!r}: give 'logits' or (layer, head) pairs.")
    check_runs(model, source, base)
    _check_roles(roles)
    last = max((layer for layer, _ in to), default=layers)
    before = [(layer, head) for layer in range(last) for head in range(heads)]
    chosen = before if senders is None else heads_of("senders", senders, layers, heads)
    late = [pair for pair in chosen if pair[0] >= last]
    if late or not chosen:
        raise ValueError(
            f"senders: no head of layer {last} or later is heard by the receivers, {late[0] if late else 'and none is left'}."
        )
    names = [full_name("attn.hook_z", layer) for layer in range(layers)]
    found = torch.full((layers, heads), torch.nan)
    with torch.no_grad():
        spoken, held = (
            model.run_with_cache(inputs, names_filter=names)[1] for inputs in (source, base)
        )
        for layer, head in tqdm(chosen, desc="path patching", disable=not progress):
            frozen = [(name, edit.patch(held[name])) for name in names]
            told = edit.patch(spoken[names[layer]], heads=head, positions=positions)
            frozen[layer] = (names[layer], edit.compose(frozen[layer][1], told))
            heard: dict[str, Tensor] = {}
            out = model.run_with_hooks(base, fwd_hooks=[*_listening(to, roles, heard), *frozen])
            if to:
                out = model.run_with_hooks(base, fwd_hooks=_saying(to, roles, heard))
            found[layer, head] = as_number(metric(out))
    return found


def _listening(
    to: list[Head], roles: Sequence[str], heard: dict[str, Tensor]
) -> list[tuple[str, Any]]:
    def listen(tensor: Tensor, hook: Any) -> None:
        heard[hook.name] = tensor.clone()

    return [
        (full_name(f"attn.hook_{role}", layer), listen)
        for layer in sorted({pair[0] for pair in to})
        for role in roles
    ]


def _saying(
    to: list[Head], roles: Sequence[str], heard: dict[str, Tensor]
) -> list[tuple[str, Any]]:
    edits = []
    for layer in sorted({pair[0] for pair in to}):
        heads = [head for own, head in to if own == layer]
        for role in roles:
            name = full_name(f"attn.hook_{role}", layer)
            edits.append((name, edit.patch(heard[name], heads=heads)))
    return edits


def check_runs(model: Any, source: Any, base: Any) -> None:
    """ValueError for a model without logits, and for two inputs that are not of one shape."""
    if model.cfg.kind not in ("vision", "text"):
        raise ValueError(
            "paths are patched in a classifier of images or a language model; of a CLIP give a tower."
        )
    if not isinstance(source, Tensor) or not isinstance(base, Tensor) or source.shape != base.shape:
        got = " and ".join(
            str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__
            for x in (source, base)
        )
        raise ValueError(
            f"source and base are {got}: give two tensors of one shape, preprocessed images or tokens."
        )


def _check_roles(roles: Any) -> None:
    if not isinstance(roles, (list, tuple)) or not roles or set(roles) - set(_ROLES):
        raise ValueError(f"roles={roles!r}: give some of 'q', 'k', 'v', such as ('q',).")


def heads_of(name: str, pairs: Any, layers: int, heads: int) -> list[Head]:
    """(layer, head) pairs as such; ValueError for heads there are not, and for none."""
    right = isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and all(checks.is_int(number) for number in pair)
        for pair in pairs
    )
    if (
        not right
        or not pairs
        or not all(0 <= layer < layers and 0 <= head < heads for layer, head in pairs)
    ):
        raise ValueError(
            f"{name}={pairs!r}: give (layer, head) pairs, layers 0 to {layers - 1}, heads 0 to {heads - 1}."
        )
    return [(int(layer), int(head)) for layer, head in pairs]


def as_number(value: Any) -> float:
    """What a metric returned, as a float; ValueError for what is no finite number."""
    one = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    number = float(value) if one else math.nan
    if not math.isfinite(number):
        got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"the metric returned {got}: return one finite number, such as (logits[:, 3] - logits[:, 5]).mean()."
        )
    return number
