"""The modules of a hooked model as TransformerLens' bridge wants them: thin, around what runs."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.exceptions import StopAtLayerException
from transformer_lens.model_bridge.generalized_components import (
    PositionEmbeddingsAttentionBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from crate_interp.models.hooked import check_stream


class Part(GeneralizedComponent):
    """Wraps one module of a hooked model and calls it; the mathematics stays where it is.

    `hook_in` and `hook_out` are hook points of the model, where it has one for that tensor
    (`linked`), and fire by themselves where it has none. root: the hooked model.
    """

    hook_aliases: dict[str, str | list[str]] = {}
    property_aliases: dict[str, str] = {}

    def __init__(self, name: str, submodules: dict[str, GeneralizedComponent] | None = None):
        # not super(): an attention part is an AttentionBridge by name alone
        GeneralizedComponent.__init__(self, name, submodules=submodules)
        self.__dict__["linked"] = set()
        self.__dict__["root"] = None  # in __dict__, so that it is no submodule

    def link(self, end: str, point: HookPoint) -> None:
        """Makes a point of the model the part's `hook_in` or `hook_out`."""
        setattr(self, end, point)
        self.linked.add(end)

    @property
    def own(self) -> Any:
        """The wrapped module of the model."""
        return self._modules["_original_component"]

    def forward(self, first: Tensor, *args: object, **kwargs: object) -> Any:
        """Returns what the part of the model computes, between the hooks of the bridge."""
        given = first if "hook_in" in self.linked else self.hook_in(first)
        out = self.own(given, *args, **kwargs)
        return out if "hook_out" in self.linked else self.hook_out(out)


class EmbedPart(Part):
    """Tokens or images to vectors. `given`: vectors that stand in for those of the tokens."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["given"] = None

    def forward(self, first: Tensor, *args: object, **kwargs: object) -> Any:
        """Returns the embedding, or the one that was given in its place."""
        return super().forward(first, *args, **kwargs) if self.given is None else self.given

    @property
    def W_E(self) -> Float[Tensor, "rows d_model"]:
        """The embedding, `[rows, d_model]`."""
        return self.own.W_E if hasattr(self.own, "W_E") else self.root.W_E


class PositionsPart(Part):
    """The table of position embeddings, which is a parameter of the model and no module."""

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        """The position embeddings, `[pos, d_model]`."""
        return self.root.W_pos


class UnembedPart(Part):
    """The map to logits; behind a linear map to features, `W_U` and `b_U` are both in one."""

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding, `[d_model, d_vocab]`."""
        features = getattr(self.root, "features", None)
        if features is not None:
            return features.weight.T @ self.own.weight.T
        return self.own.W_U if hasattr(self.own, "W_U") else self.own.weight.T

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """The bias of the logits, `[d_vocab]`."""
        features = getattr(self.root, "features", None)
        if features is not None:
            return self.own(features.bias)
        bias = getattr(self.own, "bias", None)
        return self.W_U.new_zeros(self.W_U.shape[1]) if bias is None else bias


class BlockPart(Part):
    """One layer. TransformerLens sets the fields for `stop_at_layer` and `start_at_layer`."""

    is_list_item = True
    hook_out_is_single_residual_stream = True
    _stop_at_layer_idx: int | None = None
    _start_at_layer_idx: int | None = None
    _start_residual: Tensor | None = None

    def forward(self, first: Tensor, *args: object, **kwargs: object) -> Any:
        """Returns the stream after the block. Raises StopAtLayerException where a run stops."""
        layer = int(str(self.name).rsplit(".", 1)[-1])
        if layer == self._stop_at_layer_idx:
            raise StopAtLayerException(first)
        if layer == self._start_at_layer_idx:
            first = self._started(layer)
        return super().forward(first, *args, **kwargs)

    def _started(self, layer: int) -> Tensor:
        lambdas = self.root.x0_lambdas if self.root.cfg.rotary else None
        if lambdas is not None and bool(lambdas[layer + 1 :].any()):
            raise ValueError(
                f"start_at_layer={layer}: layers after that add the embedding x0 (x0_lambdas), "
                "which a stream does not hold."
            )
        return check_stream(self.root, cast(Tensor, self._start_residual))


class AttentionPart(Part, PositionEmbeddingsAttentionBridge):
    """Attention of any family.

    The base class is there because the bridge turns split inputs on for its subclasses alone;
    nothing of it runs.
    """

    supports_attn_result = True

    def set_original_component(self, component: nn.Module) -> None:  # pyright: ignore
        """Takes the module to wrap, which has no projections of the base class's kind."""
        GeneralizedComponent.set_original_component(self, component)

    def setup_hook_compatibility(self) -> None:
        """Does nothing: the points have TransformerLens' shapes already."""

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        """The maps to the queries, `[head, d_model, d_head]`."""
        return self.own.W_Q

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        """The maps to the keys, `[head, d_model, d_head]`."""
        return self.own.W_K

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        """The maps to the values, `[head, d_model, d_head]`."""
        return self.own.W_V

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """The output maps, `[head, d_head, d_model]`."""
        return self.own.W_O

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The bias of the output, `[d_model]`."""
        return self.own.b_O

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        """The biases of the queries, `[head, d_head]`."""
        return self._bias(0)

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:
        """The biases of the keys, `[head, d_head]`."""
        return self._bias(1)

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        """The biases of the values, `[head, d_head]`."""
        return self._bias(2)

    def _bias(self, role: int) -> Float[Tensor, "head d_head"]:
        """Returns a bias of queries, keys or values: zeros where the codes have none."""
        cfg, projection = self.own.cfg, getattr(self.own, "qkv_proj", None)
        if projection is None or projection.bias is None:
            return self.own.W_Q.new_zeros(cfg.n_heads, cfg.d_head)
        return projection.bias.unflatten(0, (3, cfg.n_heads, cfg.d_head))[role]


class StepPart(Part):
    """The sparse step, or the MLP of a plain transformer."""

    @property
    def b_in(self) -> Float[Tensor, "d_mlp"]:
        """What is added to `W_in`'s output before the ReLU: the bias, or minus the thresholds."""
        if hasattr(self.own, "threshold"):
            return -self.own.threshold
        bias = self.own.fc_in.bias if hasattr(self.own, "fc_in") else None
        return torch.zeros_like(self.own.W_in[0]) if bias is None else bias
