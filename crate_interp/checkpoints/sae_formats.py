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
from crate_interp.models.sae import NORMALIZATIONS, SAEConfig, bias_shapes

KEYS = ("W_enc", "b_enc", "W_dec", "b_dec")
# options of ci.load that only autoencoders have
GIVEN_FIELDS = ("hook_name", "scaling_factor")
SAELENS_CONFIG, SAELENS_WEIGHTS = "cfg.json", "sae_weights.safetensors"
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


def is_sae(contents: Contents) -> bool:
    """Tells whether a file has the keys of a sparse autoencoder."""
    return {"W_enc", "W_dec"} <= set(contents.tensors)


def config_of(contents: Contents) -> SAEConfig:
    """Returns the config of a sparse autoencoder.

    Raises CheckpointError for a tensor that is missing, unexpected or of another shape, for a
    config that contradicts the tensors, and if nothing says which hook point is read.
    """
    tensors, where, cfg = contents.tensors, contents.where, contents.cfg
    cfg = _saved(contents, cfg) if isinstance(cfg, SAEConfig) else _published(contents)
    wanted = {"W_enc": (cfg.d_in, cfg.d_sae), "W_dec": (cfg.d_sae, cfg.d_in)} | bias_shapes(cfg)
    if set(tensors) != set(wanted):
        raise CheckpointError(
            f"{where} has the keys {', '.join(tensors)}; a sparse autoencoder of architecture "
            f"{cfg.architecture!r} has {', '.join(wanted)}."
        )
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise CheckpointError(
                f"{where}: {name} is {list(tensors[name].shape)}; expected {list(size)}."
            )
    return cfg


def _published(contents: Contents) -> SAEConfig:
    """Returns the config of an autoencoder as CRATE-LM's authors publish it."""
    tensors, config, where = contents.tensors, contents.config, contents.where
    if set(tensors) != set(KEYS):
        raise CheckpointError(
            f"{where} has the keys {', '.join(tensors)}; "
            f"a sparse autoencoder has {', '.join(KEYS)}."
        )
    hook_name = _hook_name(contents.given, config.get("act_name"), where)
    d_in, d_sae = _checked_sizes(tensors, config, ("act_size", "dict_size"), where)
    l1_coeff = config.get("l1_coeff")
    if not isinstance(l1_coeff, (int, float, type(None))):
        raise CheckpointError(
            f"{where}: its config says l1_coeff={checks.shown(l1_coeff)}; expected a number."
        )
    return SAEConfig(
        hook_name=hook_name,
        d_in=d_in,
        d_sae=d_sae,
        l1_coeff=l1_coeff,
        model_name=config.get("model_name"),
    )


def _saved(contents: Contents, cfg: SAEConfig) -> SAEConfig:
    """Returns the config of a folder that save_pretrained wrote, updated with the given fields."""
    given, where, fields = contents.given, contents.where, cfg.to_dict()
    _hook_name(given, cfg.hook_name, where)
    _checked_sizes(contents.tensors, fields, ("d_in", "d_sae"), where)
    return SAEConfig(**fields | given)


def _hook_name(given: Mapping[str, Any], said: object, where: str) -> str:
    """Returns the hook point that an autoencoder reads: the given one, or else its config's.

    Raises CheckpointError if neither gives a point, or if any field but hook_name is given.
    """
    if unknown := set(given) - {"hook_name"}:
        raise CheckpointError(
            f"a sparse autoencoder has no {', '.join(sorted(unknown))}: "
            "only hook_name can be given."
        )
    hook_name = given.get("hook_name", said)
    if not isinstance(hook_name, str):
        raise CheckpointError(
            f"{where}: nothing says which hook point the autoencoder reads (no _cfg.json lies "
            "next to the file). Give the point: ci.load(..., hook_name='blocks.0.mlp.hook_post')."
        )
    return hook_name


def _checked_sizes(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], names: tuple[str, str], where: str
) -> tuple[int, int]:
    """Returns d_in and d_sae.

    names: the names of these two sizes in the config. Raises CheckpointError if W_enc is not
    `[d_in, d_sae]`, or if the config contradicts one of the two sizes.
    """
    shape = tuple(tensors["W_enc"].shape) if "W_enc" in tensors else ()
    if len(shape) != 2 or not all(shape):
        raise CheckpointError(f"{where}: W_enc is {list(shape)}; expected [d_in, d_sae].")
    for name, value in zip(names, shape, strict=True):
        if config.get(name, value) != value:
            raise CheckpointError(
                f"{where}: its config says {name}={checks.shown(config[name])}, "
                f"but the tensors make it {value}."
            )
    return shape


def is_saelens(folder: Path) -> bool:
    """Tells whether a folder holds a sparse autoencoder in SAELens' format."""
    return (folder / SAELENS_CONFIG).is_file() and (folder / SAELENS_WEIGHTS).is_file()


def read_saelens(folder: Path, given: Mapping[str, Any]) -> Contents:
    """Returns config and weights of a folder in SAELens' format.

    given: hook_name, scaling_factor. Raises CheckpointError for an unknown architecture or option,
    for tensors that do not fit, and if nothing says which hook point is read.
    """
    if unknown := set(given) - set(GIVEN_FIELDS):
        raise CheckpointError(
            f"a sparse autoencoder has no {', '.join(sorted(unknown))}: "
            f"only {' and '.join(GIVEN_FIELDS)} can be given."
        )
    config = folder / SAELENS_CONFIG
    content = read_weights.read_json(config)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{config} does not hold the config of a sparse autoencoder: expected a dict."
        )
    values = _flat(content, config)
    values |= {name: value for name, value in given.items() if value is not None}
    fields = _fields(values, config)
    weights = read_weights.read_file(folder / SAELENS_WEIGHTS)
    tensors, where = weights.tensors, weights.where
    for name, value in tensors.items():
        read_weights.check_dense(name, value, where)
    d_in, d_sae = _checked_sizes(tensors, values, ("d_in", "d_sae"), where)
    try:
        cfg = SAEConfig(d_in=d_in, d_sae=d_sae, **fields)
    except ValueError as error:
        raise CheckpointError(f"{config}: {error}") from None
    tensors = _folded(tensors, values, values.get("architecture", "standard"), where)
    return Contents(tensors, where, family="sae", cfg=cfg)


def _flat(content: dict[str, Any], config: Path) -> dict[str, Any]:
    """Returns the options of a config as one flat dict, under the names of SAELens 6."""
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{config}: metadata={checks.shown(metadata)}; expected a dict.")
    values = {**metadata, **content}
    for old, new in (("hook_point", "hook_name"), ("hook_point_head_index", "hook_head_index")):
        values.setdefault(new, values.get(old))
    if isinstance(values.get("normalize_activations"), bool):
        values["normalize_activations"] = _AVERAGE if values["normalize_activations"] else "none"
    activation = values.get("activation_fn", values.get("activation_fn_str"))
    if activation == "topk":  # before SAELens 6 such an architecture is called "standard"
        more = values.get("activation_fn_kwargs")
        k = more.get("k") if isinstance(more, dict) else None
        values |= {"architecture": "topk", "k": values.get("k", k)}
    elif activation not in (None, "relu"):
        _refuse(config, "activation_fn", activation, ("relu", "topk"))
    return values


def _fields(values: dict[str, Any], config: Path) -> dict[str, Any]:
    """Returns the fields of a SAEConfig, without sizes.

    Raises CheckpointError for options that are not supported.
    """
    architecture = values.get("architecture", "standard")
    normalize = values.get("normalize_activations") or "none"
    head = values.get("hook_head_index")
    for name, value, known in (
        ("architecture", architecture, tuple(_ARCHITECTURES)),
        ("normalize_activations", normalize, (*NORMALIZATIONS, _AVERAGE)),
        ("reshape_activations", values.get("reshape_activations") or "none", ("none", "hook_z")),
        ("hook_head_index", "none" if head is None else head, ("none",)),
    ):
        if value not in known:
            _refuse(config, name, value, known)
    factor = values.get("scaling_factor")
    if normalize == _AVERAGE and factor is None:
        raise CheckpointError(
            f"{config}: normalize_activations is {_AVERAGE!r}, but the factor is missing: "
            "give scaling_factor=F, where F is sqrt(d_in) divided by the mean length of an "
            "activation, or scaling_factor=1 if the factor was folded into the weights."
        )
    if not isinstance(values.get("hook_name"), str):
        raise CheckpointError(
            f"{config}: nothing says which hook point the autoencoder reads. Give the point: "
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
    """Returns the tensors with the factors and norms of features folded into the weights."""
    d_in, d_sae = tensors["W_enc"].shape
    scale = tensors.pop("scaling_factor", None)  # scales of features, from fine-tuning
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if shapes.get("W_dec") != (d_sae, d_in) or shapes.get("b_enc", (d_sae,)) != (d_sae,):
        return tensors  # `config_of` refuses these shapes
    if scale is not None and not bool((scale == 1).all()):
        if not values.get("finetuning_scaling_factor") or tuple(scale.shape) != (d_sae,):
            raise CheckpointError(
                f"{where} holds a scaling_factor {list(scale.shape)}, but its config does not say "
                "that features are scaled (finetuning_scaling_factor)."
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
                f"{where}: topk_threshold is {list(threshold.shape)}; expected one number."
            )
        tensors["threshold"] = torch.full((d_sae,), float(threshold))
    return tensors


def _refuse(config: Path, name: str, value: object, known: tuple[str, ...]) -> None:
    raise CheckpointError(
        f"{config}: {name}={checks.shown(value)} is not supported; expected {', '.join(known)}."
    )
