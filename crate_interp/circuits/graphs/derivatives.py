"""Derivatives between the codes of one sample: of the answer, of each node, and head by head.

In a forward whose codes are leaves, the nonlinearity of every node is cut: the derivative of a
node's pre-threshold value with respect to a code is that of all paths that pass through no other
code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.graphs.question import Question
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.edited_runs import Hook, with_gradients

CODE, PRE, Z = "mlp.hook_post", "mlp.hook_pre", "attn.hook_z"
FREEZABLE = ("pattern", "norm")
# the kind of attention -> what makes its output linear in the codes Z U_k once it is a constant
_PATTERNS = {
    "mssa": ("attn.hook_pattern",), "self": ("attn.hook_pattern",),
    "tssa": ("attn.hook_pi", "attn.hook_weight"),
    "cbsa": ("attn.hook_contract", "attn.hook_rep_pattern"),
}  # fmt: skip
_FIRST_NORM = full_name("ln1.hook_scale", 0)
_NORMS = ("ln1.hook_scale", "ln2.hook_scale")
_BYTES = 2**28  # of the gradients of several nodes at once


@dataclass(frozen=True)
class Explained:
    """A sample, an answer, a network's values for it, and the derivative of the target.

    codes, before: the code of each layer and its pre-threshold value, `[pos, atom]`. streams: the
    stream after each layer. embedded: the stream that the first layer reads, `[pos, d_model]`.
    slopes, slopes_before: the derivative of the target, through all layers above, with respect to
    codes and before; slope_embedded likewise.
    """

    model: HookedModel
    sample: Tensor
    question: Question
    freeze: Sequence[str]
    target: float
    logits: Float[Tensor, "answers"]
    codes: list[Float[Tensor, "pos atom"]]
    before: list[Float[Tensor, "pos atom"]]
    streams: list[Float[Tensor, "pos d_model"]]
    embedded: Float[Tensor, "pos d_model"]
    slopes: list[Float[Tensor, "pos atom"]]
    slopes_before: list[Float[Tensor, "pos atom"]]
    slope_embedded: Float[Tensor, "pos d_model"]

    def attribution(self, layer: int) -> Float[Tensor, "pos atom"]:
        """Returns code times derivative of the target; for layer -1 those of each embedding."""
        if layer < 0:
            return (self.embedded.double() * self.slope_embedded.double()).sum(-1, keepdim=True)
        return self.codes[layer].double() * self.slopes[layer].double()


def directions(model: HookedModel, layer: int) -> Float[Tensor, "atom d_model"]:
    """Returns what each atom of a layer writes into the stream."""
    block: Any = model.blocks[layer]
    return block.mlp.written()


def embedding_point(model: HookedModel) -> str:
    """Returns the point of the embeddings: in nanochat-crate later layers read them again."""
    return "hook_embed" if hasattr(model, "x0_lambdas") else full_name("hook_resid_pre", 0)


def frozen_points(model: HookedModel, freeze: Sequence[str]) -> list[str]:
    """Returns the points whose values are constants for derivatives."""
    kinds: list[str] = []
    if "pattern" in freeze:
        kinds += _PATTERNS[model.cfg.facts["attention"]]
    if "norm" in freeze:
        kinds += _NORMS
    found = [full_name(kind, layer) for layer in range(model.cfg.n_layers) for kind in kinds]
    return found + (["ln_final.hook_scale"] if "norm" in freeze else [])


def detaching(model: HookedModel, freeze: Sequence[str]) -> list[Hook]:
    """Returns hooks that make what is frozen a constant for derivatives.

    The scale of the first norm is always a constant. It only concerns embeddings, and these are
    whole tokens: the norm of a token does not change with its length, so that without this an
    embedding would have no effect through any head.
    """
    points = frozen_points(model, freeze)
    names = dict.fromkeys([_FIRST_NORM, *points])
    return [(name, lambda value, hook: value.detach()) for name in names]


def values(
    model: HookedModel, sample: Tensor, question: Question, freeze: Sequence[str]
) -> Explained:
    """Returns the values of a sample and the derivatives of the target; takes two forwards."""
    start, layers = embedding_point(model), range(model.cfg.n_layers)
    codes, before, streams = (
        [full_name(kind, layer) for layer in layers] for kind in (CODE, PRE, "hook_resid_post")
    )
    points = [start, *codes, *before]
    with torch.enable_grad():
        hooks = detaching(model, freeze)
        logits, acts = with_gradients(model, sample, [*points, *streams], hooks)
        target = question.of(logits)[0]
        found = torch.autograd.grad(target, [acts[name] for name in points])
    values = {name: one[0].detach() for name, one in acts.items()}
    slopes = dict(zip(points, (one[0] for one in found), strict=True))
    return Explained(
        model, sample, question, freeze, float(target.detach()), question.at(logits)[0].detach(),
        [values[name] for name in codes], [values[name] for name in before],
        [values[name] for name in streams], values[start],
        [slopes[name] for name in codes], [slopes[name] for name in before], slopes[start],
    )  # fmt: skip


class CutPass:
    """A forward of one sample whose codes are leaves: it gives the direct effects on any node."""

    def __init__(self, case: Explained) -> None:
        model, self.case = case.model, case
        # a code that replaces the stream: every path passes through each layer
        self.strict = not model.cfg.residual
        self.codes: list[Tensor] = []

        def cut(code: Tensor, hook: Any) -> Tensor:
            self.codes.append(code.detach().requires_grad_())
            return self.codes[-1]

        codes, before, heads = (
            [full_name(kind, layer) for layer in range(model.cfg.n_layers)]
            for kind in (CODE, PRE, Z)
        )
        start = embedding_point(model)
        hooks = [*detaching(model, case.freeze), *((name, cut) for name in codes)]
        with torch.enable_grad():
            logits, acts = with_gradients(model, case.sample, [start, *before, *heads], hooks)
            self.target = case.question.of(logits)
        self.embedded = acts[start]
        self.before, self.heads = [acts[name] for name in before], [acts[name] for name in heads]

    def sources(self, layer: int) -> list[int]:
        """Returns the layers whose codes a layer's nodes read; -1 stands for the embeddings.

        layer: n_layers stands for the target.
        """
        return [layer - 1] if self.strict else list(range(-1, layer))

    def leaf(self, layer: int) -> Tensor:
        """Returns the code of a layer `[1, pos, atom]`; for -1 the embeddings `[1, pos, d]`."""
        return self.embedded if layer < 0 else self.codes[layer]

    def at_once(self, layer: int) -> int:
        """Returns how many nodes of a layer may be differentiated at once."""
        cfg = self.case.model.cfg
        pos = self.embedded.shape[1]
        width = pos * (pos * cfg.n_heads * 2 + cfg.d_mlp * 2 + cfg.d_model * 8)
        depth = 1 if self.strict else layer + 1
        return max(1, _BYTES // (4 * width * depth))

    def effects(
        self, layer: int, nodes: Int[Tensor, "node"]
    ) -> tuple[dict[int, Float[Tensor, "node pos atom"]], Float[Tensor, "node head d_head"] | None]:
        """Returns the direct effects on nodes: value times derivative, by the layer of the source.

        nodes: the numbers of the nodes in the flat code of their layer; with layer = n_layers the
        target is the only node. The effects of an embedding are summed over its features,
        `[node, pos, 1]`. Also returns the derivative with respect to the heads of the node's own
        layer at its own token, or None for the target.
        """
        if layer == self.case.model.cfg.n_layers:
            outputs, places = self.target, None
        else:
            outputs = self.before[layer].flatten()[nodes]
            places = nodes // self.before[layer].shape[-1]
        sources = self.sources(layer)
        wanted = [self.leaf(one) for one in sources]
        wanted += [] if places is None else [self.heads[layer]]
        found = torch.autograd.grad(
            outputs, wanted, torch.eye(len(outputs)).to(outputs),
            retain_graph=True, is_grads_batched=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        effects = {}
        for source, slope in zip(sources, found, strict=False):
            product = self.leaf(source).detach()[0] * slope[:, 0]
            effects[source] = product.sum(-1, keepdim=True) if source < 0 else product
        if places is None:
            return effects, None
        heads = found[-1][:, 0]  # [node, pos, head, d_head]
        return effects, heads[torch.arange(len(heads)), places]

    def carried(self, layer: int, slope: Float[Tensor, "pos atom"]) -> float:
        """Returns the sum of all direct effects on a layer, each node weighted by its slope."""
        wanted = [self.leaf(one) for one in self.sources(layer)]
        found = torch.autograd.grad(
            self.before[layer], wanted, slope[None], retain_graph=True, materialize_grads=True
        )
        pairs = zip(wanted, found, strict=True)
        return sum(float((leaf.detach().double() * one.double()).sum()) for leaf, one in pairs)


def through_heads(
    case: Explained, layer: int, nodes: Int[Tensor, "source 2"]
) -> Float[Tensor, "source pos head d_head"]:
    """Returns how the heads of a layer change with nodes of the layer below, to first order.

    nodes: (token, atom) of each source in layer - 1; atom -1 with layer 0 is an embedding. The
    change is that of hook_z if the node's value is added once more.
    """
    model = case.model
    stream = case.embedded if layer == 0 else case.streams[layer - 1]
    heads: list[Tensor] = []

    def note(value: Tensor, hook: Any) -> None:
        heads[:] = [value]

    start = stream[None].clone().requires_grad_()
    hooks = [(full_name(Z, layer), note), *detaching(model, case.freeze)]
    with torch.enable_grad():  # a batch of derivatives of one backward pass, in its seed
        model.run_with_hooks(start, start_at_layer=layer, stop_at_layer=layer + 1, fwd_hooks=hooks)
        seed = torch.zeros_like(heads[0], requires_grad=True)
        (slope,) = torch.autograd.grad(heads[0], start, seed, create_graph=True)
    token, atom = nodes.T
    added = stream[token]
    if layer:
        code = case.codes[layer - 1][token, atom, None]
        added = code * directions(model, layer - 1)[atom]
    found: list[Tensor] = []
    size = max(1, _BYTES // (16 * len(stream) * (len(stream) * model.cfg.n_heads * 2 + 1)))
    for places, own in zip(token.split(size), added.split(size), strict=True):
        changes = slope.new_zeros(len(own), *slope.shape)
        changes[torch.arange(len(own)), 0, places] = own
        options: Any = {"retain_graph": True, "is_grads_batched": True}
        found.append(torch.autograd.grad(slope, seed, changes, **options)[0][:, 0])
    return torch.cat(found)
