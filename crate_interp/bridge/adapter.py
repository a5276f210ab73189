"""ci.to_bridge, and the adapters through which TransformerLens' bridge wraps models.

pyproject.toml names CrateAdapter as an entry point of `transformer_lens.architectures`, so
TransformerLens finds it where crate_interp is installed, without crate_interp being imported.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from inspect import signature
from operator import attrgetter
from types import MethodType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import ArchitectureAdapter, TransformerBridge, sources
from transformer_lens.model_bridge import generalized_components as parts
from transformer_lens.model_bridge.exceptions import StopAtLayerException
from transformer_lens.model_bridge.generalized_components import vision_embeddings
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.supported_architectures.vit import ViTArchitectureAdapter
from transformers import PreTrainedTokenizerBase

from crate_interp.models.hook_aliases import IN_BLOCK, IN_MODEL
from crate_interp.models.hooked import HookedModel, check_stream
from crate_interp.models.language import HookedCrateLM
from crate_interp.models.vision import HookedCrate


class Part(GeneralizedComponent):
    """Wraps one module of a hooked model and calls it; the computation stays in the model.

    `hook_in` and `hook_out` are the model's own hook points if the model has points for these
    tensors (`linked`), and otherwise new points. root: the hooked model.
    """

    hook_aliases: dict[str, str | list[str]] = {}
    property_aliases: dict[str, str] = {}

    def __init__(self, name: str, submodules: dict[str, GeneralizedComponent] | None = None):
        # not super(), because an attention part is an AttentionBridge only by name
        GeneralizedComponent.__init__(self, name, submodules=submodules)
        # in __dict__, so that the root is not a submodule
        self.__dict__.update(linked=set(), root=None, given=None)

    @property
    def wrapped(self) -> Any:
        """The wrapped module of the model."""
        return self._modules["_original_component"]

    def forward(self, first: Tensor, *args: object, **kwargs: object) -> Any:
        """Returns the output of the model's part, between the hooks of the bridge."""
        given = first if "hook_in" in self.linked else self.hook_in(first)
        out = self.wrapped(given, *args, **kwargs)
        return out if "hook_out" in self.linked else self.hook_out(out)


class EmbedPart(Part):
    """Embeds tokens or images. `given`: vectors to use instead of the tokens' embeddings."""

    def forward(self, first: Tensor, *args: object, **kwargs: object) -> Any:
        """Returns the embedding, or the given replacement."""
        return super().forward(first, *args, **kwargs) if self.given is None else self.given

    @property
    def W_E(self) -> Float[Tensor, "rows d_model"]:
        """The embedding, `[rows, d_model]`."""
        return self.wrapped.W_E if hasattr(self.wrapped, "W_E") else self.root.W_E


class PositionsPart(Part):
    """The table of position embeddings, which is a parameter of the model, not a module."""

    W_pos = property(lambda self: self.root.W_pos)  # [pos, d_model]


class UnembedPart(Part):
    """The map to logits. If a linear map to features comes before, `W_U` and `b_U` combine both."""

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding, `[d_model, d_vocab]`."""
        features = getattr(self.root, "features", None)
        return self.wrapped.W_U if features is None else features.weight.T @ self.wrapped.W_U

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """The bias of the logits, `[d_vocab]`."""
        features = getattr(self.root, "features", None)
        return self.wrapped.b_U if features is None else self.wrapped(features.bias)


class BlockPart(Part):
    """One layer. TransformerLens sets its fields for `stop_at_layer` and `start_at_layer`."""

    is_list_item = True
    hook_out_is_single_residual_stream = True
    _stop_at_layer_idx: int | None = None
    _start_at_layer_idx: int | None = None
    _start_residual: Tensor | None = None

    def forward(self, first: Tensor, *args: object, **kwargs: object) -> Any:
        """Returns the stream after the block; raises StopAtLayerException if the run stops here."""
        layer = int(str(self.name).rsplit(".", 1)[-1])
        if layer == self._stop_at_layer_idx:
            raise StopAtLayerException(first)
        if layer == self._start_at_layer_idx:
            self.root.check_start(layer)
            first = check_stream(self.root, cast(Tensor, self._start_residual))
        return super().forward(first, *args, **kwargs)


class AttentionPart(Part, parts.PositionEmbeddingsAttentionBridge):
    """Attention of any family.

    This is a subclass of TransformerLens' attention only because TransformerLens allows split
    inputs for no other class; no code of the base class runs.
    """

    supports_attn_result = True

    def set_original_component(self, component: nn.Module) -> None:  # pyright: ignore
        """Sets the module to wrap, without the projections that the base class looks for."""
        GeneralizedComponent.set_original_component(self, component)

    def setup_hook_compatibility(self) -> None:
        """Does nothing: the points have TransformerLens' shapes already."""

    # of the model's own attention, as [head, d_model, d_head], [head, d_head, d_model], [d_model]
    W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O = (  # pyright: ignore
        property(attrgetter(f"wrapped.{name}"))
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
    )


class StepPart(Part):
    """The sparse step, or the MLP of a plain transformer."""

    @property
    def b_in(self) -> Float[Tensor, "d_mlp"]:
        """The vector added to `W_in`'s output before the ReLU: the bias, or minus thresholds."""
        if hasattr(self.wrapped, "threshold"):
            return -self.wrapped.threshold
        bias = self.wrapped.fc_in.bias if hasattr(self.wrapped, "fc_in") else None
        return torch.zeros_like(self.wrapped.W_in[0]) if bias is None else bias


# A point is found under our name and under the bridge's name; its `name` is ours. JacobianLens
# looks for a point whose `name` is `hook_out`, so a layer's part has a separate point for it, after
# hook_resid_post. The unembedding has separate points too.
_OWN = ("hook_out", "unembed.hook_in")
_IN_BLOCK = IN_BLOCK | {"ln1.hook_in": "hook_resid_pre"}


def bridge_names(model: HookedModel) -> dict[str, HookPoint]:
    """Returns the points of a model, by the names that bridges use for them."""
    names = {name: ours[0] for name, ours in IN_MODEL.items() if name not in _OWN} | {
        f"blocks.{layer}.{name}": f"blocks.{layer}.{ours}"
        for layer in range(model.cfg.n_layers)
        for name, ours in _IN_BLOCK.items()
        if name not in _OWN
    }
    points = dict(model.hook_dict)
    return {name: points[ours] for name, ours in names.items() if ours in points}


# name of an architecture -> path of the hooked model within the module
ARCHITECTURES = {
    "HookedCrate": "",
    "HookedCrateLM": "",
    "CrateForImageClassification": "model.",
    "CrateForCausalLM": "model.",
}
_VISION = ("HookedCrate", "CrateForImageClassification")
_SAME = (
    "d_model", "d_head", "n_heads", "n_layers", "n_ctx", "d_mlp", "act_fn", "eps", "model_name",
    "normalization_type", "final_rms", "positional_embedding_type", "default_prepend_bos",
    "use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in",
)  # fmt: skip


class CrateAdapter(ArchitectureAdapter):
    """Maps a `HookedCrate` or a `HookedCrateLM`, or the Hugging Face model around one.

    The bridge's parts call the modules of the model, so logits are those of the model bit for bit,
    and its hook points are the model's. Our bridges lack three things: compatibility mode (folding
    norms into weights has no meaning if one matrix is query, key, value and output, and ISTA reads
    the same dictionary three times), a cache of keys and values (`bridge.generate` runs the whole
    text for every token; `model.generate` keeps a cache), and `verify_models`, which boots models
    by name.
    """

    applicable_phases: list[int] = []
    supports_compatibility_mode = False
    supports_kv_cache = False
    supports_hf_output_attentions = False

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__(cfg)
        self.prefix = ARCHITECTURES[str(cfg.architecture)]
        cfg.is_visual_model = cfg.architecture in _VISION
        inside = {"attn": AttentionPart("attn"), "mlp": StepPart("mlp")}
        self.component_mapping = {
            "embed": EmbedPart(f"{self.prefix}embed"),
            "blocks": BlockPart(f"{self.prefix}blocks", submodules=inside),
            "ln_final": Part(f"{self.prefix}ln_final"),
            "unembed": UnembedPart(f"{self.prefix}unembed"),
        }

    def prepare_model(self, hf_model: nn.Module) -> None:
        """Takes the config from the model, and adapts its forward to the bridge's arguments."""
        model = self._hooked(hf_model)
        for name in _SAME:
            setattr(self.cfg, name, getattr(model.cfg, name, getattr(self.cfg, name)))
        self.cfg.attention_dir = "causal" if model.cfg.causal else "bidirectional"
        self.supports_generation = self.supports_causal_loss = bool(model.cfg.causal)
        self.cfg.d_vocab = self.cfg.d_vocab_out = model.W_U.shape[1]
        softcap = getattr(model.cfg, "softcap", None)
        if softcap is not None:
            self.cfg.output_logits_soft_cap = softcap
        # a batch of texts is padded, and padding needs a mask
        self.supports_batched_generation = "attention_mask" in signature(model.forward).parameters
        forward = _text_forward if model.cfg.kind == "text" else _image_forward
        model.forward = MethodType(forward, model)

    def setup_hook_compatibility(self, bridge: TransformerBridge) -> None:
        """Gives the bridge the model's hook points; TransformerLens calls this method last."""
        model = self._hooked(bridge.original_model)
        if "hook_pos_embed" in model.hook_dict:
            bridge.pos_embed = PositionsPart("pos_embed")
        modules = bridge.named_modules(remove_duplicate=False)
        parts_by_name = {name: module for name, module in modules if isinstance(module, Part)}
        for part in parts_by_name.values():
            part.__dict__["root"] = model
        for block in bridge.blocks:
            block.config = block.attn.config = model.cfg  # the bridge sets switches in this config
        for name, point in bridge_names(model).items():
            place, end = name.rsplit(".", 1)
            part = parts_by_name.get(place)
            if part is not None:
                setattr(part, end, point)
                part.linked.add(end)
            bridge._hook_registry[name] = point
        bridge._hook_registry.pop("pos_embed.hook_in", None)  # a table of parameters has no input
        for name, point in model.hook_dict.items():
            bridge._hook_registry[name] = point
            point.name = name
            if "." not in name:
                bridge.__dict__[name] = point

    def _hooked(self, module: nn.Module) -> HookedModel:
        model: Any = module.get_submodule(self.prefix.rstrip("."))
        return model


def _image_forward(self: Any, pixel_values: Tensor) -> Tensor:
    """Runs an image model's forward, with the argument name of a bridge."""
    return type(self).forward(self, pixel_values)


def _text_forward(
    self: Any,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """Runs a language model's forward, with the argument names of a bridge.

    inputs_embeds: vectors to use instead of the tokens' embeddings. labels: ignored, because the
    bridge computes the loss itself.
    """
    more = {} if attention_mask is None else {"attention_mask": attention_mask}
    if inputs_embeds is None:
        return type(self).forward(self, input_ids, **more)
    self.embed.__dict__["given"] = inputs_embeds
    try:
        tokens = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        return type(self).forward(self, tokens, **more)
    finally:
        self.embed.__dict__["given"] = None


# the attributes in which torch and TransformerLens keep a module's hooks
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks",
)  # fmt: skip
_LENS_HOOKS = ("fwd_hooks", "bwd_hooks")


def to_bridge(model: object) -> TransformerBridge:
    """Returns TransformerLens' TransformerBridge over a copy of a hooked model.

    The bridge's logits are the model's bit for bit, and its hook points are the model's. Each point
    has the model's name (`blocks.0.hook_resid_pre`, `blocks.0.attn.hook_u`), which is `point.name`,
    and the name that other bridges use (`blocks.0.hook_in`, `blocks.0.attn.hook_in`). The copy has
    the model's weights, switches, mode and tokenizer, and none of its hooks. The model itself does
    not change, and later changes of model or copy do not reach the other.

    model: a HookedCrate (also the image tower of a CLIP, `clip.visual`) or a HookedCrateLM. Use the
    bridge for tools that ask for one: `attention_head_subspace_affinity`, `JacobianLens`,
    `ioi_eval`. Everything else in TransformerLens takes the model itself.

    A bridge differs from the model: `pos_slice` cuts axis 1 of every point, even the classes of
    `unembed.hook_out` in an image model; a `names_filter` function that matches no point raises
    no error; `stop_at_layer=n_layers` returns logits; `generate` runs the whole text again for each
    token; `state_dict` has only the parameters called weight or bias, so save the model;
    `tokens_to_residual_directions` leaves out the weight of ln_final; the name of a special token
    in a text is read as that token. Image models have no `start_at_layer`, no `logit_lens` and no
    attribution patching, which all need tokens.

    Compatibility mode is refused. It would fold norms into the weights after them, but U is query,
    key, value and output at once, and an ISTA step reads its dictionary three times. So
    `direct_logit_attribution(bridge, ...)` is refused too; on the model itself it is exact. The
    singular vectors of w_in and w_out are refused if the code is the stream (CRATE's ISTA).

    Raises ValueError for a model without logits or for anything but a hooked model.
    """
    if not isinstance(model, (HookedCrate, HookedCrateLM)) or not model.has_logits:
        given = f"cannot make a bridge of {type(model).__name__}"
        raise ValueError(f"{given}: give a hooked model with logits; of a CLIP, model.visual.")
    # registered here too, for a crate_interp that is on the path without being installed
    ArchitectureAdapterFactory.discover_entry_points()
    for name in ARCHITECTURES:
        ArchitectureAdapterFactory.register_adapter(name, CrateAdapter)
    cfg = model.cfg
    bridge = sources.build_bridge_from_module(
        bare_copy(model),
        type(model).__name__,
        tl_config=TransformerBridgeConfig(
            d_model=cfg.d_model, d_head=cfg.d_head, n_layers=cfg.n_layers, n_ctx=cfg.n_ctx,
            n_heads=cfg.n_heads, device=str(cfg.device),
        ),
        model_name=cfg.model_name or cfg.family,
    )  # fmt: skip
    tokenizer = _tokenizer(model)
    if tokenizer is not None:
        # set here, because the builder would look on the Hub for a tokenizer with bos
        found = sources.detect_tokenizer_bos_eos(tokenizer)
        bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = found
        bridge.tokenizer = tokenizer
    return bridge


def bare_copy(model: HookedModel) -> HookedModel:
    """Returns a copy of a model without its hooks, some of which cannot be copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name in _HOOKS + (_LENS_HOOKS if isinstance(module, HookPoint) else ()):
            kept = module.__dict__[name]
            memo[id(kept)] = OrderedDict() if isinstance(kept, dict) else []
    tokenizer = getattr(model, "tokenizer", None)
    memo[id(tokenizer)] = tokenizer
    return copy.deepcopy(model, memo)


def _tokenizer(model: Any) -> Any:
    """Returns a copy of the model's tokenizer, or None if a bridge cannot use its type.

    In the copy, the name of a special token in a text is read as that token, because that is how a
    bridge puts bos first.
    """
    held = getattr(model, "tokenizer", None)
    if not isinstance(held, PreTrainedTokenizerBase):
        return None
    tokenizer: Any = copy.deepcopy(held)
    tokenizer.split_special_tokens = False
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
    return tokenizer


class Embeddings(vision_embeddings.VisionEmbeddingsBridge):
    """The embedding of patches; DINOv2 interpolates its positions by itself."""

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Returns the tokens of images, CLS and registers first."""
        # DINOv2 does not take the last keyword
        return GeneralizedComponent.forward(self, pixel_values, bool_masked_pos=bool_masked_pos)


class Dinov2Adapter(ViTArchitectureAdapter):
    """The adapter of Dinov2Model, Dinov2ForImageClassification and their variants with registers.

    `hook_attn_out` and `hook_mlp_out` come after the layer's scale, so they hold exactly the terms
    added to the stream. The scales are `attn_scale` and `mlp_scale` of a layer. A classifier reads
    the CLS token and the mean of the patches, so it cannot be an `unembed`.
    """

    def prepare_model(self, hf_model: nn.Module) -> None:
        """Sets where the parts of this model are, which depends on its class."""
        names = ("dinov2", "dinov2_with_registers")
        prefix = next((f"{name}." for name in names if hasattr(hf_model, name)), "")
        kind, maps = parts.MLPBridge, {"in": "fc1", "out": "fc2"}
        if getattr(hf_model.config, "use_swiglu_ffn", False):
            kind = parts.GatedMLPBridge
            maps = {"gate": "gate_proj", "in": "up_proj", "out": "down_proj"}
        heads = _linear_maps({role: f"{role}_proj" for role in "qkvo"})
        inside = {
            "ln1": self._norm("norm1"),
            "attn": parts.AttentionBridge(name="attention", config=self.cfg, submodules=heads),
            "attn_scale": GeneralizedComponent(name="layer_scale1"),
            "ln2": self._norm("norm2"),
            "mlp": kind(name="mlp", config=self.cfg, submodules=_linear_maps(maps)),
            "mlp_scale": GeneralizedComponent(name="layer_scale2"),
        }
        names = {f"hook_{part}_out": f"{part}_scale.hook_out" for part in ("attn", "mlp")}
        names |= {"hook_mlp_in": "mlp.hook_in"}
        layer = f"{prefix}encoder.layer"
        self.component_mapping = {
            "embed": Embeddings(name=f"{prefix}embeddings"),
            "blocks": parts.BlockBridge(name=layer, submodules=inside, hook_alias_overrides=names),
            "ln_final": self._norm(f"{prefix}layernorm"),
        }

    def _norm(self, name: str) -> parts.NormalizationBridge:
        own: Any = {"config": self.cfg, "use_native_layernorm_autograd": True}
        return parts.NormalizationBridge(name=name, **own)


def _linear_maps(names: dict[str, str]) -> dict[str, Any]:
    return {role: parts.LinearBridge(name=name) for role, name in names.items()}


# architecture -> the adapter that TransformerLens lacks
OURS = {
    f"{name}{head}": Dinov2Adapter
    for name in ("Dinov2", "Dinov2WithRegisters")
    for head in ("Model", "ForImageClassification")
}


def build(
    network: nn.Module, adapter: Callable[..., Any] | None = None, tokenizer: object = None
) -> nn.Module:
    """Builds a TransformerBridge around a network and replaces the network's parts.

    adapter: the adapter's class; None means ours if we have one for this network, or else
    TransformerLens' own. Nothing is registered globally. Raises ValueError for a network without an
    adapter.
    """
    config: Any = network.config
    name, dtype = type(network).__name__, next(network.parameters()).dtype
    config._attn_implementation = "eager"  # other implementations return no attention patterns
    chosen = adapter or OURS.get(name)
    if chosen is None:
        options: Any = {"hf_config": config, "tokenizer": tokenizer}
        return sources.build_bridge_from_module(network, name, **options)
    made = chosen(sources.build_bridge_config_from_hf(config, name, name, dtype))
    made.prepare_model(network)
    made.cfg.device = str(next(network.parameters()).device)
    return TransformerBridge(network, made, tokenizer)
