"""TransformerLens' adapter for DINOv2, with and without registers, which it does not have itself.

The layers of transformers' Dinov2Model are those of its ViT, with a learned scale of each channel
(LayerScale) between attention, or MLP, and the stream.
"""

from typing import Any

from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    GatedMLPBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.generalized_components.vision_embeddings import (
    VisionEmbeddingsBridge,
)
from transformer_lens.model_bridge.supported_architectures.vit import ViTArchitectureAdapter


class Embeddings(VisionEmbeddingsBridge):
    """The embedding of patches; DINOv2 interpolates its positions without being told."""

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Returns the tokens of images, CLS and registers first."""
        # the last keyword is one that DINOv2 does not take
        return GeneralizedComponent.forward(self, pixel_values, bool_masked_pos=bool_masked_pos)


class Dinov2Adapter(ViTArchitectureAdapter):
    """The adapter of Dinov2Model, Dinov2ForImageClassification and those with registers.

    `hook_attn_out` and `hook_mlp_out` are what is added to the stream: after the scale. The layers
    have it as `attn_scale` and `mlp_scale`. A classifier reads the CLS token beside the mean of the
    patches, and so is no `unembed`.
    """

    def prepare_model(self, hf_model: nn.Module) -> None:
        """Sets where the parts of this model lie, which differs between its classes."""
        inner = next(
            (name for name in ("dinov2", "dinov2_with_registers") if hasattr(hf_model, name)), None
        )
        swiglu = bool(getattr(hf_model.config, "use_swiglu_ffn", False))
        self.component_mapping = self._parts("" if inner is None else f"{inner}.", swiglu)

    def _parts(self, prefix: str, swiglu: bool) -> dict[str, Any]:
        return {
            "embed": Embeddings(name=f"{prefix}embeddings"),
            "blocks": BlockBridge(
                name=f"{prefix}encoder.layer",
                hook_alias_overrides={
                    "hook_attn_out": "attn_scale.hook_out",
                    "hook_mlp_out": "mlp_scale.hook_out",
                    "hook_mlp_in": "mlp.hook_in",
                },
                submodules={
                    "ln1": self._norm("norm1"),
                    "attn": AttentionBridge(
                        name="attention",
                        config=self.cfg,
                        submodules={
                            role: LinearBridge(name=f"{role}_proj") for role in ("q", "k", "v", "o")
                        },
                    ),
                    "attn_scale": GeneralizedComponent(name="layer_scale1"),
                    "ln2": self._norm("norm2"),
                    "mlp": self._mlp(swiglu),
                    "mlp_scale": GeneralizedComponent(name="layer_scale2"),
                },
            ),
            "ln_final": self._norm(f"{prefix}layernorm"),
        }

    def _norm(self, name: str) -> NormalizationBridge:
        return NormalizationBridge(name=name, config=self.cfg, use_native_layernorm_autograd=True)

    def _mlp(self, swiglu: bool) -> MLPBridge:
        if swiglu:
            names = {"gate": "gate_proj", "in": "up_proj", "out": "down_proj"}
            kind: Any = GatedMLPBridge
        else:
            names, kind = {"in": "fc1", "out": "fc2"}, MLPBridge
        parts = {part: LinearBridge(name=name) for part, name in names.items()}
        return kind(name="mlp", config=self.cfg, submodules=parts)
