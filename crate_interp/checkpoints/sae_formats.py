"""Formats of sparse autoencoders: ours, SAELens', and the published N.pt with N_cfg.json.

SAELens' format is a folder with cfg.json and sae_weights.safetensors. Two kinds of such
folders are read: those of decoderesearch/SAELens 6 (`sae_lens/saes/sae.py`, `save_model`), and
those of earlier versions, which have a flat cfg.json. SAELens itself is not needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crate_interp.checkpoints import read_weights
from crate_interp.checkpoints.read_weights import Contents
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.models.sae import NORMALIZATIONS, SAEConfig

# options of ci.load that only autoencoders have
GIVEN_FIELDS = ("hook_name", "scaling_factor")
SAELENS_CONFIG, SAELENS_WEIGHTS = "cfg.json", "sae_weights.safetensors"
_PUBLISHED = {
    "hook_name": "act_name", "d_in": "act_size", "d_sae": "dict_size", "l1_coeff": "l1_coeff",
    "model_name": "model_name",
}  # fmt: skip
# name in cfg.json -> our name
_ARCHITECTURES = {
    "standard": "standard",
    "relu": "standard",
    "topk": "topk",
    "jumprelu": "jumprelu",
    "gated": "gated",
    "batchtopk": "jumprelu",  # after training, a threshold replaces the top k of a batch
    "matryoshka_batchtopk": "jumprelu",
}
_BATCHES = ("batchtopk", "matryoshka_batchtopk")
_AVERAGE = "expected_average_only_in"


def config_of(contents: Contents) -> SAEConfig:
    """Returns the config of a sparse autoencoder.

    The fields come from our own config, or from the file in which CRATE-LM's authors publish one.
    Raises CheckpointError for a tensor that is missing, unexpected or of another shape, for a
    config that contradicts the tensors, and if nothing says which hook point is read.
    """
    tensors, where, given = contents.tensors, contents.where, contents.given
    if unknown := set(given) - {"hook_name"}:
        raise CheckpointError(f"a sparse autoencoder has no {', '.join(sorted(unknown))}.")
    fields: dict[str, Any]
    if isinstance(contents.cfg, SAEConfig):
        fields = contents.cfg.to_dict()
    else:
        fields = {ours: contents.config.get(theirs) for ours, theirs in _PUBLISHED.items()}
    fields |= given
    if not isinstance(fields["hook_name"], str):
        raise CheckpointError(
            f"{where}: nothing says which hook point the autoencoder reads. Give the point: "
            "ci.load(..., hook_name='blocks.0.mlp.hook_post')."
        )
    return SAEConfig(**fields | _sizes(tensors, fields, where))


def _sizes(tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns d_in and d_sae; raises CheckpointError if the config contradicts the tensors."""
    shape = tuple(tensors["W_enc"].shape) if "W_enc" in tensors else ()
    if len(shape) != 2 or not all(shape):
        raise CheckpointError(f"{where}: W_enc is {list(shape)}; expected [d_in, d_sae].")
    sizes = {"d_in": shape[0], "d_sae": shape[1]}
    for name, value in sizes.items():
        if config.get(name) not in (None, value):
            said = f"{where}: its config says {name}={checks.quote(config[name])}"
            raise CheckpointError(f"{said}, but the tensors make it {value}.")
    return sizes


def read_saelens(folder: Path, overrides: Mapping[str, Any]) -> Contents:
    """Returns config and weights of a folder in SAELens' format.

    overrides: hook_name, scaling_factor. Raises CheckpointError for an unknown architecture or
    option, for tensors that do not fit, and if nothing says which hook point is read.
    """
    if unknown := set(overrides) - set(GIVEN_FIELDS):
        raise CheckpointError(f"a sparse autoencoder has no {', '.join(sorted(unknown))}.")
    config = folder / SAELENS_CONFIG
    content = read_weights.read_json(config)
    metadata = content.get("metadata") or {} if isinstance(content, dict) else None
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{config} does not hold the config of a sparse autoencoder.")
    values = {**metadata, **content}
    for old, new in (("hook_point", "hook_name"), ("hook_point_head_index", "hook_head_index")):
        values.setdefault(new, values.get(old))
    if isinstance(values.get("normalize_activations"), bool):  # before SAELens 6
        values["normalize_activations"] = _AVERAGE if values["normalize_activations"] else "none"
    activation = values.get("activation_fn", values.get("activation_fn_str", "relu"))
    if activation == "topk":  # before SAELens 6 such an architecture is called "standard"
        kwargs = values.get("activation_fn_kwargs")
        values["architecture"] = "topk"
        values.setdefault("k", kwargs.get("k") if isinstance(kwargs, dict) else None)
    values |= {name: value for name, value in overrides.items() if value is not None}
    fields = _fields(values, activation, config)
    weights = read_weights.read_file(folder / SAELENS_WEIGHTS)
    tensors, where = weights.tensors, weights.where
    for name, value in tensors.items():
        read_weights.check_dense(name, value, where)
    sizes = _sizes(tensors, values, where)
    _fold(tensors, sizes["d_sae"], values, where)
    return Contents(tensors, where, family="sae", cfg=SAEConfig(**fields, **sizes))


def _fields(values: dict[str, Any], activation: object, config: Path) -> dict[str, Any]:
    """Returns the fields of a SAEConfig, without sizes, from the options in SAELens' config."""
    architecture = values.get("architecture", "standard")
    normalize = values.get("normalize_activations") or "none"
    factor = values.get("scaling_factor")
    for name, value, known in (
        ("architecture", architecture, tuple(_ARCHITECTURES)),
        ("activation_fn", activation, ("relu", "topk", None)),
        ("normalize_activations", normalize, (*NORMALIZATIONS, _AVERAGE)),
        ("reshape_activations", values.get("reshape_activations") or "none", ("none", "hook_z")),
        ("hook_head_index", values["hook_head_index"], (None,)),
    ):
        if value not in known:
            some = ", ".join(map(str, known))
            raise CheckpointError(f"{config}: {name}={checks.quote(value)} is none of {some}.")
    if normalize == _AVERAGE and factor is None:
        raise CheckpointError(
            f"{config}: normalize_activations is {_AVERAGE!r}, but the factor is missing: "
            "give scaling_factor=F, sqrt(d_in) divided by the mean length of an activation."
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


def _fold(tensors: dict[str, Tensor], d_sae: int, values: dict[str, Any], where: str) -> None:
    """Folds the factors and norms of features into the weights."""
    architecture = values.get("architecture", "standard")
    scale = tensors.pop("scaling_factor", torch.ones(d_sae))  # of features, from fine-tuning

    if not bool((scale == 1).all()):
        if not values.get("finetuning_scaling_factor") or tuple(scale.shape) != (d_sae,):
            raise CheckpointError(
                f"{where} holds a scaling_factor {list(scale.shape)}, but its config does not say "
                "that features are scaled (finetuning_scaling_factor)."
            )
        tensors["W_dec"] = tensors["W_dec"] * scale[:, None]
    if architecture in ("topk", *_BATCHES) and values.get("rescale_acts_by_decoder_norm", False):
        norm = tensors["W_dec"].norm(dim=-1)
        for name in {"W_enc", "b_enc"} & set(tensors):
            tensors[name] = tensors[name] * norm
        tensors["W_dec"] = tensors["W_dec"] / torch.where(norm > 0, norm, 1.0)[:, None]
    if architecture in _BATCHES and "topk_threshold" in tensors:
        tensors["threshold"] = tensors.pop("topk_threshold").reshape(1).repeat(d_sae)
