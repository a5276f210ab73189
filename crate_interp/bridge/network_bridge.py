"""TransformerLens bridges around transformers networks, with TransformerLens' adapters or ours."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge, sources
from transformer_lens.model_bridge import generalized_components as parts
from transformer_lens.model_bridge.generalized_components import vision_embeddings
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.supported_architectures.vit import ViTArchitectureAdapter


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
        own = {"config": self.cfg, "use_native_layernorm_autograd": True}
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
        try:
            return sources.build_bridge_from_module(
                network, name, hf_config=config, tokenizer=tokenizer
            )
        except (ValueError, KeyError) as error:
            raise ValueError(f"TransformerLens has no bridge to {name}: {error}") from None
    made = chosen(sources.build_bridge_config_from_hf(config, name, name, dtype))
    made.prepare_model(network)
    made.cfg.device = str(next(network.parameters()).device)
    return TransformerBridge(network, made, tokenizer)
