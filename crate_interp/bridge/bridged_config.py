"""The config of a bridged model, from its weights and from transformers' config."""

from typing import Any

from torch import nn

from crate_interp.bridge.bridged_layers import found
from crate_interp.config import CrateConfig

# names in transformers' configs for the largest number of tokens
_CONTEXT = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
_UNNAMED = "LABEL_0"  # transformers' name for a class without a name


def config_of(bridge: nn.Module, subspaces: str, given: dict[str, Any]) -> CrateConfig:
    """Returns the config of a bridge; `given` fields take precedence.

    Raises ValueError if the layers cannot be read, or if a given field contradicts the bridge.
    """
    network: Any = bridge.original_model
    theirs = getattr(network, "config", None)
    values = _sizes(bridge) | {
        "architecture": type(network).__name__,
        "subspaces": subspaces,
        "model_name": _name(theirs),
    }
    images = bool(getattr(bridge.cfg, "is_visual_model", False))
    values |= _of_images(bridge, theirs, values) if images else _of_text(bridge, theirs)
    wrong = [name for name in _sizes(bridge) if name in given and given[name] != values[name]]
    if wrong:
        raise ValueError(
            f"{wrong[0]}={given[wrong[0]]!r} contradicts the bridge, whose weights say "
            f"{values[wrong[0]]}."
        )
    return CrateConfig(**values | given)


def _sizes(bridge: Any) -> dict[str, Any]:
    """Returns the sizes shown by the weights of the first layer."""
    try:
        block = bridge.blocks[0]
        queries, values = found(block, "attn.W_Q"), found(block, "attn.W_V")
        norm, mlp = found(block, "ln1.original_component"), found(block, "mlp.W_out")
        layers = len(bridge.blocks)
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{_called(bridge)} has no layers of norm, attention, norm and MLP that can be read "
            f"({error}): give a bridge to a ViT, DeiT, DINOv2, GPT-2 or Llama."
        ) from None
    if queries.ndim != 3 or values.ndim != 3:
        raise ValueError(f"the heads of {_called(bridge)} cannot be told apart in its weights.")
    return {
        "n_layers": layers,
        "n_heads": len(queries),
        "d_model": queries.shape[1],
        "d_head": queries.shape[2],
        "value_heads": len(values),
        "d_mlp": len(mlp),
        "ln_eps": _eps(norm),
        "ln_final_eps": _eps(bridge.ln_final.original_component),
        "rms_norm": "RMS" in type(norm).__name__,
    }


def _eps(norm: Any) -> float:
    return float(getattr(norm, "eps", None) or norm.variance_epsilon)


def _called(bridge: Any) -> str:
    return type(getattr(bridge, "original_model", bridge)).__name__


def _name(theirs: Any) -> str | None:
    """Returns the model's name in the config, unless it is a local folder."""
    name = getattr(theirs, "_name_or_path", "") or ""
    return name if name.count("/") <= 1 and not name.startswith((".", "/", "~")) and name else None


def _of_images(bridge: Any, theirs: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    head = getattr(bridge.original_model, "classifier", None)
    head = getattr(head, "original_component", head)
    names = getattr(theirs, "id2label", None) or {}
    ordered = [names[key] for key in sorted(names)]
    wide = isinstance(head, nn.Linear)
    values: dict[str, Any] = {
        "family": "vit",
        "image_size": theirs.image_size,
        "patch_size": theirs.patch_size,
        "channels": theirs.num_channels,
        "special_tokens": special_tokens(bridge.original_model),
        "n_classes": head.out_features if wide else sizes["d_model"],
    }
    if wide and len(ordered) == head.out_features and ordered[0] != _UNNAMED:
        values["labels"] = ordered
    return values


def special_tokens(network: nn.Module) -> int:
    """Returns how many tokens an image network puts before its patches, including CLS.

    DeiT has a second token, for distillation; DINOv2 may have register tokens.
    """
    ours = ("cls_token", "distillation_token", "register_tokens")
    named = network.named_parameters()
    return sum(value.shape[1] for name, value in named if name.rsplit(".", 1)[-1] in ours)


def _of_text(bridge: Any, theirs: Any) -> dict[str, Any]:
    lengths = [getattr(theirs, name, None) for name in _CONTEXT]
    lengths = [length for length in lengths if isinstance(length, int) and length > 0]
    return {
        "family": "gpt",
        "n_ctx": lengths[0] if lengths else int(bridge.cfg.n_ctx),
        "d_vocab": int(theirs.vocab_size),
        "rotations": bridge.cfg.positional_embedding_type == "rotary",
    }
