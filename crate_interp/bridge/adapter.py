"""The adapter through which TransformerLens' bridge wraps hooked models.

pyproject.toml names it as an entry point of the group `transformer_lens.architectures`, so
TransformerLens finds it where crate_interp is installed, without crate_interp being imported.
"""

from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import ArchitectureAdapter, TransformerBridge

from crate_interp.bridge.bridge_modules import (
    AttentionPart,
    BlockPart,
    EmbedPart,
    Part,
    PositionsPart,
    StepPart,
    UnembedPart,
)
from crate_interp.bridge.point_names import bridge_names
from crate_interp.models.hooked import HookedModel

# name of an architecture -> where in the module the hooked model lies
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
    and its hook points are the model's. Three things a bridge of ours does not have: compatibility
    mode (folding norms into weights has no meaning where one matrix is query, key, value and
    output, and ISTA reads the same dictionary three times), a cache of keys and values
    (`bridge.generate` runs the whole text for every token; `model.generate` keeps a cache), and
    `verify_models`, which boots models by name.
    """

    applicable_phases: list[int] = []
    supports_compatibility_mode = False
    supports_kv_cache = False
    supports_hf_output_attentions = False

    def __init__(self, cfg: TransformerBridgeConfig) -> None:
        super().__init__(cfg)
        self.prefix = ARCHITECTURES[str(cfg.architecture)]
        visual = cfg.architecture in _VISION
        self.supports_generation = self.supports_causal_loss = not visual
        cfg.is_visual_model = visual
        inside = {"attn": AttentionPart("attn"), "mlp": StepPart("mlp")}
        self.component_mapping = {
            "embed": EmbedPart(f"{self.prefix}embed"),
            "blocks": BlockPart(f"{self.prefix}blocks", submodules=inside),
            "ln_final": Part(f"{self.prefix}ln_final"),
            "unembed": UnembedPart(f"{self.prefix}unembed"),
        }

    def prepare_model(self, hf_model: nn.Module) -> None:
        """Takes the config from the model, and lets its forward take what a bridge passes."""
        model = self._hooked(hf_model)
        for name in _SAME:
            setattr(self.cfg, name, getattr(model.cfg, name, getattr(self.cfg, name)))
        self.cfg.attention_dir = "causal" if model.cfg.causal else "bidirectional"
        self.cfg.d_vocab = self.cfg.d_vocab_out = model.W_U.shape[1]
        softcap = getattr(model.cfg, "softcap", None)
        if softcap is not None:
            self.cfg.output_logits_soft_cap = softcap
        # padding needs a mask
        self.supports_batched_generation = "attention_mask" in signature(model.forward).parameters
        model.forward = MethodType(_image_forward if model.has_cls else _text_forward, model)

    def setup_hook_compatibility(self, bridge: TransformerBridge) -> None:
        """Gives the bridge the model's hook points; TransformerLens calls it in the end."""
        model = self._hooked(bridge.original_model)
        if "hook_pos_embed" in model.hook_dict:
            bridge.pos_embed = PositionsPart("pos_embed")
        for part in bridge.modules():
            if isinstance(part, Part):
                part.__dict__["root"] = model
        for block in bridge.blocks:
            block.config = block.attn.config = model.cfg  # where the bridge writes its switches
        for name, point in bridge_names(model).items():
            place, end = name.rsplit(".", 1)
            part = bridge.get_submodule(place) if _has(bridge, place) else None
            if isinstance(part, Part):
                part.link(end, point)
            bridge._hook_registry[name] = point
        bridge._hook_registry.pop("pos_embed.hook_in", None)  # a table reads nothing
        for name, point in model.hook_dict.items():
            bridge._hook_registry[name] = point
            point.name = name
            if "." not in name:
                bridge.__dict__[name] = point

    def _hooked(self, module: nn.Module) -> HookedModel:
        model: Any = module.get_submodule(self.prefix.rstrip("."))
        return model


def _has(bridge: nn.Module, place: str) -> bool:
    try:
        bridge.get_submodule(place)
    except AttributeError:
        return False
    return True


def _image_forward(self: Any, pixel_values: Tensor) -> Tensor:
    """The forward of an image model under the name by which a bridge passes images."""
    return type(self).forward(self, pixel_values)


def _text_forward(
    self: Any,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """The forward of a language model under the names by which a bridge passes tokens.

    inputs_embeds: vectors in place of those of the tokens. labels are the bridge's: it computes the
    loss by itself.
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
