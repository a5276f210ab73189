"""to_bridge: a hooked model behind TransformerLens' bridge."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge, sources
from transformer_lens.model_bridge import generalized_components as parts
from transformer_lens.model_bridge.generalized_components import vision_embeddings
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.supported_architectures.vit import ViTArchitectureAdapter
from transformers import PreTrainedTokenizerBase

from crate_interp.bridge.adapter import ARCHITECTURES, CrateAdapter
from crate_interp.models.hooked import HookedModel
from crate_interp.models.language import HookedCrateLM
from crate_interp.models.vision import HookedCrate

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
        raise ValueError(
            f"cannot make a bridge of {type(model).__name__}: give a hooked model with logits, "
            "such as ci.load(...) returns; for a CLIP, give model.visual."
        )
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
        self.component_mapping = {
            "embed": Embeddings(name=f"{prefix}embeddings"),
            "blocks": parts.BlockBridge(
                name=f"{prefix}encoder.layer",
                hook_alias_overrides={
                    "hook_attn_out": "attn_scale.hook_out",
                    "hook_mlp_out": "mlp_scale.hook_out",
                    "hook_mlp_in": "mlp.hook_in",
                },
                submodules={
                    "ln1": self._norm("norm1"),
                    "attn": parts.AttentionBridge(
                        name="attention",
                        config=self.cfg,
                        submodules=_linear_maps({role: f"{role}_proj" for role in "qkvo"}),
                    ),
                    "attn_scale": GeneralizedComponent(name="layer_scale1"),
                    "ln2": self._norm("norm2"),
                    "mlp": kind(name="mlp", config=self.cfg, submodules=_linear_maps(maps)),
                    "mlp_scale": GeneralizedComponent(name="layer_scale2"),
                },
            ),
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
