"""Real forwards of one sample in which codes are edited: nodes removed, kept alone, or set."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.graphs.derivatives import (
    CODE,
    Explained,
    Hook,
    Values,
    directions,
    frozen_points,
)
from crate_interp.circuits.head_ablation import may_share
from crate_interp.models.hooked import HookedModel

_THRESHOLDS = (
    ("mlp.hook_pre", "mlp.hook_post"),
    ("mlp.hook_pre_init", "mlp.hook_post_init"),
)
_NUMBERS = 2**26  # of the largest activation of a batch of edited copies


def copies_at_once(case: Explained) -> int:
    """Returns how many copies of the sample one forward may take."""
    pos, cfg = len(case.values.embedded), case.model.cfg
    answers = len(case.values.logits) * (pos if cfg.kind == "text" else 1)
    return max(1, _NUMBERS // max(pos * max(pos * cfg.n_heads, cfg.d_mlp * 2), answers))


@torch.no_grad()
def without(case: Explained, layer: int, nodes: Int[Tensor, "node 2"]) -> Float[Tensor, "node"]:
    """Returns the target without each node (token, atom) of a layer, one at a time.

    A code of 0 takes its place; layer -1 stands for embeddings, which become 0. The layers below
    do not run again, except in nanochat-crate.
    """
    found, model = [], case.model
    for group in nodes.to(case.values.embedded.device).split(copies_at_once(case)):
        if not may_share(model):  # later layers read the embedding again
            point = "hook_embed" if layer < 0 else full_name(CODE, layer)
            hooks = [(point, partial(_zeroed, nodes=group))]
            logits = model.run_with_hooks(_copies(case, len(group)), fwd_hooks=hooks)
        else:
            copies = _without_in_stream(model, case.values, layer, group)
            logits = model(copies, start_at_layer=layer + 1)
        found.append(case.question.of(logits).double().cpu())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def _copies(case: Explained, count: int) -> Tensor:
    return case.sample.expand(count, *case.sample.shape[1:])


def _zeroed(value: Tensor, hook: Any, nodes: Int[Tensor, "copy 2"]) -> Tensor:
    """Returns copies in each of which a node is 0; atom -1 stands for the whole token."""
    value = value.clone()
    for copy, (pos, atom) in enumerate(nodes.tolist()):
        value[copy, pos, slice(None) if atom < 0 else atom] = 0
    return value


def _without_in_stream(
    model: HookedModel, values: Values, layer: int, nodes: Int[Tensor, "copy 2"]
) -> Float[Tensor, "copy pos d_model"]:
    """Returns copies of the stream after a layer, in each of which a node is missing."""
    places = torch.arange(len(nodes), device=nodes.device), nodes[:, 0]
    if layer < 0:
        copies = values.embedded.repeat(len(nodes), 1, 1)
        copies[places] = 0
        return copies
    copies = values.streams[layer].repeat(len(nodes), 1, 1)
    lost = values.codes[layer][nodes[:, 0], nodes[:, 1], None]
    copies[places] -= lost * directions(model, layer)[nodes[:, 1]]
    return copies


@torch.no_grad()
def keeping(
    case: Explained,
    nodes: list[Int[Tensor, "copy node"]],
    *,
    others: bool = False,
    axes: list[Float[Tensor, "atom axis"]] | None = None,
) -> Float[Tensor, "copy"]:
    """Returns the target if only some nodes of each layer stay and the others are 0.

    nodes: their numbers in the flat code of each layer, for each copy of the sample. others: the
    others stay and these are 0. axes: an orthonormal basis of the codes of each layer, one axis a
    column, in which the nodes are coordinates.
    """

    def edit(code: Tensor, hook: Any, chosen: Tensor, axis: Tensor | None) -> Tensor:
        mask = torch.zeros_like(code).flatten(1).scatter_(1, chosen.to(code.device), 1.0)
        mask = (1 - mask if others else mask).view_as(code)
        return code * mask if axis is None else ((code @ axis) * mask) @ axis.T

    found = []
    names = [full_name(CODE, layer) for layer in range(len(nodes))]
    turned = axes or [None] * len(nodes)
    for group in zip(*(one.split(copies_at_once(case)) for one in nodes), strict=True):
        edits = [partial(edit, chosen=c, axis=a) for c, a in zip(group, turned, strict=True)]
        hooks = list(zip(names, edits, strict=True))
        logits = case.model.run_with_hooks(_copies(case, len(group[0])), fwd_hooks=hooks)
        found.append(case.question.of(logits).double().cpu())
    return torch.cat(found)


@torch.no_grad()
def baselines(case: Explained, freeze: tuple[str, ...]) -> list[float]:
    """Returns the target without all nodes of a layer, for each layer, with what is frozen held.

    Which codes are on in the layers above stays as it is, as do patterns and norms that `freeze`
    names. If both are frozen, the network is affine in the codes, and the target is the sum of the
    layer's attributions and of this baseline.
    """
    model, sample, values = case.model, case.sample, case.values
    layers = range(model.cfg.n_layers)
    pairs = [pair for pair in _THRESHOLDS if full_name(pair[0], 0) in model.hook_dict.keys()]
    pairs = pairs if _has_thresholds(model) else []
    points = frozen_points(model, freeze)
    masked = [(full_name(pre, n), full_name(post, n)) for pre, post in pairs for n in layers]
    names = [*points, *(pre for pre, _ in masked)]
    cache = model.run_with_cache(sample, names_filter=names)[1] if names else {}
    found = []
    for layer in layers:
        held: list[Hook] = [(name, partial(_held, value=cache[name])) for name in points]
        for pre, post in masked:
            before: list[Tensor] = []
            held += [(pre, partial(_note, into=before))]
            held += [(post, partial(_masked, before=before, mask=cache[pre] > 0))]
        if not may_share(model):
            held.append((full_name(CODE, layer), lambda code, hook: torch.zeros_like(code)))
            logits = model.run_with_hooks(sample, fwd_hooks=held)
        else:
            written = values.codes[layer] @ directions(model, layer)
            stream = (values.streams[layer] - written)[None]
            after = [hook for hook in held if _is_above(hook[0], layer)]
            logits = model.run_with_hooks(stream, fwd_hooks=after, start_at_layer=layer + 1)
        found.append(float(case.question.of(logits)[0]))
    return found


def _has_thresholds(model: HookedModel) -> bool:
    """Tells whether a node's value is its pre-threshold value or 0: a ReLU, not a GELU."""
    return "gelu" not in model.cfg.sparse_step


def _is_above(name: str, layer: int) -> bool:
    return not name.startswith("blocks.") or int(name.split(".")[1]) > layer


def _held(current: Tensor, hook: Any, value: Tensor) -> Tensor:
    return value.expand_as(current)


def _note(value: Tensor, hook: Any, into: list[Tensor]) -> None:
    into[:] = [value]


def _masked(value: Tensor, hook: Any, before: list[Tensor], mask: Tensor) -> Tensor:
    return before[0] * mask
