"""Sparse autoencoders in SAELens' format: a folder with cfg.json and sae_weights.safetensors.

The format is that of decoderesearch/SAELens 6 (`sae_lens/saes/sae.py`, `save_model`) and of the
versions before it, whose cfg.json has everything on one level. SAELens itself is not needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crate_interp.checkpoints.formats.tensor_files import check_dense, read_file, read_json
from crate_interp.checkpoints.sae_formats import build, check_said, sizes
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.models.sae import NORMALIZATIONS, SAEConfig, SparseAutoencoder

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
# what cfg.json calls them, and what they are here
_ARCHITECTURES = {
    "standard": "standard",
    "relu": "standard",
    "topk": "topk",
    "jumprelu": "jumprelu",
    "gated": "gated",
    "batchtopk": "jumprelu",  # after training its threshold takes the place of the batch
    "matryoshka_batchtopk": "jumprelu",
}
_BATCHES = ("batchtopk", "matryoshka_batchtopk")
_AVERAGE = "expected_average_only_in"
_GIVEN = ("hook_name", "scaling_factor")


def is_lens(folder: Path) -> bool:
    """Tells whether a folder holds a sparse autoencoder in SAELens' format."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def from_folder(folder: Path, given: dict[str, Any], dtype: torch.dtype) -> SparseAutoencoder:
    """Returns the autoencoder of a folder; errors are those of `from_files`."""
    return from_files(folder / CONFIG, folder / WEIGHTS, given, dtype)


def from_files(
    config: Path, weights: Path, given: dict[str, Any], dtype: torch.dtype
) -> SparseAutoencoder:
    """Returns the autoencoder of a config and its weights.

    given: hook_name, scaling_factor. Raises CheckpointError for an architecture or an option that
    is not known, for tensors that do not fit, and if nothing says which point it reads.
    """
    if unknown := set(given) - set(_GIVEN):
        raise CheckpointError(
            f"a sparse autoencoder has no {', '.join(sorted(unknown))}: "
            f"only {' and '.join(_GIVEN)} can be given."
        )
    content = read_json(config)
    if not isinstance(content, dict):
        raise CheckpointError(f"{config} holds no config of a sparse autoencoder: wanted a dict.")
    values = _flat(content, config)
    values |= {name: value for name, value in given.items() if value is not None}
    fields, kind = _fields(values, config), values.get("architecture", "standard")
    tensors = dict(read_file(weights).tensors)
    where = str(weights)
    for name, value in tensors.items():
        check_dense(name, value, where)
    found = sizes(tensors, where)
    for name, value in zip(("d_in", "d_sae"), found, strict=True):
        check_said(values, name, value, where)
    try:
        cfg = SAEConfig(d_in=found[0], d_sae=found[1], **fields)
    except ValueError as error:
        raise CheckpointError(f"{config}: {error}") from None
    tensors = _folded(tensors, values, kind, where)
    return build(cfg, tensors, where, dtype)


def _flat(content: dict[str, Any], config: Path) -> dict[str, Any]:
    """Returns the options of a config on one level, under the names of SAELens 6."""
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{config}: metadata={checks.shown(metadata)}, wanted a dict.")
    values = {**metadata, **content}
    for old, new in (("hook_point", "hook_name"), ("hook_point_head_index", "hook_head_index")):
        values.setdefault(new, values.get(old))
    if isinstance(values.get("normalize_activations"), bool):
        values["normalize_activations"] = _AVERAGE if values["normalize_activations"] else "none"
    activation = values.get("activation_fn", values.get("activation_fn_str"))
    if activation == "topk":  # before SAELens 6 the architecture of such a one is "standard"
        more = values.get("activation_fn_kwargs")
        k = more.get("k") if isinstance(more, dict) else None
        values |= {"architecture": "topk", "k": values.get("k", k)}
    elif activation not in (None, "relu"):
        _refuse(config, "activation_fn", activation, ("relu", "topk"))
    return values


def _fields(values: dict[str, Any], config: Path) -> dict[str, Any]:
    """Returns the fields of a SAEConfig, without sizes.

    Raises CheckpointError for options that would be taken wrong.
    """
    architecture = values.get("architecture", "standard")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        _refuse(config, "architecture", architecture, _ARCHITECTURES)
    normalize = values.get("normalize_activations") or "none"
    if normalize not in (*NORMALIZATIONS, _AVERAGE):
        _refuse(config, "normalize_activations", normalize, (*NORMALIZATIONS, _AVERAGE))
    reshape = values.get("reshape_activations") or "none"
    if reshape not in ("none", "hook_z"):
        _refuse(config, "reshape_activations", reshape, ("none", "hook_z"))
    if values.get("hook_head_index") is not None:
        _refuse(config, "hook_head_index", values["hook_head_index"], ("none",))
    factor = values.get("scaling_factor")
    if normalize == _AVERAGE and factor is None:
        raise CheckpointError(
            f"{config}: normalize_activations is {_AVERAGE!r}, and nothing says by which factor: "
            "give scaling_factor=..., sqrt(d_in) over the mean length of an activation, or "
            "scaling_factor=1 if it was folded into the weights."
        )
    if not isinstance(values.get("hook_name"), str):
        raise CheckpointError(
            f"{config}: nothing says which point it reads. Give it: "
            "ci.saes.load(..., hook_name='blocks.0.hook_resid_post')."
        )
    model_name = values.get("model_name")
    return {
        "hook_name": values["hook_name"],
        "architecture": _ARCHITECTURES[architecture],
        "k": values.get("k") if architecture == "topk" else None,
        "apply_b_dec_to_input": values.get("apply_b_dec_to_input", True),
        "normalize_activations": "none" if normalize == _AVERAGE else normalize,
        "scaling_factor": 1.0 if factor is None else factor,
        "model_name": model_name if isinstance(model_name, str) else None,
    }


def _folded(
    tensors: dict[str, Tensor], values: dict[str, Any], kind: str, where: str
) -> dict[str, Tensor]:
    """Returns tensors in which factors and norms of features are part of the weights."""
    d_in, d_sae = tensors["W_enc"].shape
    scale = tensors.pop("scaling_factor", None)  # of features, from fine-tuning
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if shapes.get("W_dec") != (d_sae, d_in) or shapes.get("b_enc", (d_sae,)) != (d_sae,):
        return tensors  # `build` refuses them
    if scale is not None and not bool((scale == 1).all()):
        if not values.get("finetuning_scaling_factor") or tuple(scale.shape) != (d_sae,):
            raise CheckpointError(
                f"{where}: it holds a scaling_factor {list(scale.shape)}, and its config does not "
                "say that features are scaled (finetuning_scaling_factor)."
            )
        tensors["W_dec"] = tensors["W_dec"] * scale[:, None]
    if kind in ("topk", *_BATCHES) and values.get("rescale_acts_by_decoder_norm", False):
        norm = tensors["W_dec"].norm(dim=-1)
        for name in {"W_enc", "b_enc"} & set(tensors):
            tensors[name] = tensors[name] * norm
        tensors["W_dec"] = tensors["W_dec"] / torch.where(norm > 0, norm, 1.0)[:, None]
    if kind in _BATCHES and "topk_threshold" in tensors:
        threshold = tensors.pop("topk_threshold")
        if threshold.numel() != 1:
            raise CheckpointError(
                f"{where}: topk_threshold is {list(threshold.shape)}, wanted one number."
            )
        tensors["threshold"] = torch.full((d_sae,), float(threshold))
    return tensors


def _refuse(config: Path, name: str, value: object, known: Mapping[str, str] | tuple) -> None:
    raise CheckpointError(
        f"{config}: {name}={checks.shown(value)} is not known here: wanted {', '.join(known)}."
    )
