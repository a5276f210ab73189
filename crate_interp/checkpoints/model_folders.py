"""Folders and configs of models: those of save_pretrained, of trainers, and of autoencoders.

SAELens' format is a folder with cfg.json and sae_weights.safetensors. Two kinds of such folders are
read: those of decoderesearch/SAELens 6 (`sae_lens/saes/sae.py`, `save_model`), and those of earlier
versions, which have a flat cfg.json. SAELens itself is not needed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crate_interp.checkpoints import read_weights
from crate_interp.checkpoints.read_weights import Contents, read_config, read_file, read_json
from crate_interp.checkpoints.state_dicts import find_weights
from crate_interp.config import CrateConfig, check_names
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.models.redunet import ReduNetConfig
from crate_interp.models.sae import NORMALIZATIONS, SAEConfig
from crate_interp.models.saving import CONFIG, LIBRARY, WEIGHTS

Configs = CrateConfig | SAEConfig | ReduNetConfig
STEPS = "steps"  # subfolder of files step-N.safetensors: the weights after step N of a training

# Fields that decide which tensors exist and what the tensors mean. A given field must not
# contradict the folder's config.
STRUCTURE = (
    "family", "d_model", "n_layers", "n_heads", "d_head", "d_mlp", "variant", "sparse_step",
    "n_classes", "d_features", "channels", "n_ctx", "d_vocab", "bias", "decoder_n_layers",
    "decoder_n_heads", "d_embed", "text_d_model", "text_n_layers", "text_n_heads",
    "window_pattern", "output_matrix", "stem", "class_layers",
)  # fmt: skip


def read_own_config(folder: Path, overrides: dict[str, Any]) -> Configs:
    """Returns the config of a folder, with `overrides` in place of the folder's fields.

    Raises CheckpointError if the folder was not written by save_pretrained, or if an override
    that decides the shapes of tensors contradicts the folder's config.
    """
    path = folder / CONFIG
    content = read_json(path)
    if not isinstance(content, dict) or content.get("library") != LIBRARY:
        raise CheckpointError(f"{path} was not written by crate_interp: give its weight file.")
    if content.get("format") != 1:
        raise CheckpointError(f"{path} has format {content.get('format')!r}; this version reads 1.")
    try:
        fields = dict(content["config"])
        if fields.get("family") in ("sae", "redunet"):
            return (SAEConfig if fields["family"] == "sae" else ReduNetConfig)(**fields)
        stored = CrateConfig.from_dict(fields)
        sure: dict[str, Any] = {"grid_guessed": False} if "image_size" in overrides else {}
        sure["assumed"] = [name for name in stored.assumed if name not in overrides]
        cfg = CrateConfig.from_dict(fields | sure | overrides)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{error} The other fields come from {path}.") from None
    for name in STRUCTURE:
        headless = name == "n_classes" and cfg.kind == "vision" and cfg.n_classes == 0
        if name in overrides and getattr(cfg, name) != getattr(stored, name) and not headless:
            said = f"which says {getattr(stored, name)!r}"
            raise CheckpointError(f"{name}={overrides[name]!r} contradicts {path}, {said}.")
    return cfg


def weights_of(folder: Path, revision: str | None, elsewhere: str | None = None) -> Path:
    """Returns the path of a folder's weights, or of the weights after a step of training.

    elsewhere: the end of the error's text if the folder has no steps. Raises CheckpointError, with
    a list of the folder's steps, for a revision that is none of these steps.
    """
    steps = {path.stem: path for path in (folder / STEPS).glob("step-*.safetensors")}
    names = sorted(steps, key=lambda name: (len(name), name))
    if revision is None:
        return folder / WEIGHTS
    if revision not in steps:
        ways = f"give one of {', '.join(names)}, or None." if names else elsewhere
        said = f"{folder.name} has no revision {revision!r}"
        raise CheckpointError(f"{said}: {ways or 'it has no steps.'}")
    return steps[revision]


GivenConfig = CrateConfig | Mapping[str, Any] | str | Path


def fields_of(config: object, overrides: Mapping[str, Any], family: str | None) -> dict[str, Any]:
    """Returns the fields of the config given as `config=`, together with the fields in `overrides`.

    config: a CrateConfig, a dict of its fields, the path of a config.json or of its folder, or
    None. Raises CheckpointError if `config` is none of these, or contradicts `overrides` or
    `family`.
    """
    if config is None:
        return dict(overrides) | ({} if family is None else {"family": family})
    fields = _config_fields(config)
    assumed = fields.pop("assumed", ())
    for name, value in {**overrides, "family": family or fields["family"]}.items():
        told = value if name in assumed else fields.get(name, value)
        one, other = (list(x) if isinstance(x, tuple) else x for x in (told, value))
        headless = name == "n_classes" and value == 0  # the head is left out
        if one != other and not headless:
            raise CheckpointError(f"{name}={value!r} contradicts config=, which says {told!r}.")
    unsure = [name for name in assumed if name not in overrides]
    return fields | dict(overrides) | ({"assumed": unsure} if unsure else {})


def _config_fields(config: object) -> dict[str, Any]:
    """Returns the fields of a CrateConfig, a dict, or a config.json of ours, given by its path."""
    if isinstance(config, CrateConfig):
        return config.to_dict()
    content: Any = config
    if isinstance(config, (str, Path)):
        path = Path(config).expanduser()
        content = read_json(path / CONFIG if path.is_dir() else path)
    if isinstance(content, Mapping) and content.get("library") == LIBRARY:
        content = content.get("config")
    if not isinstance(content, Mapping) or not isinstance(content.get("family"), str):
        raise CheckpointError(
            f"config={config!r} is not a config of a hooked model: give a CrateConfig such as "
            "model.cfg, a dict of its fields with a `family`, or the path of its config.json."
        )
    check_names(content)
    return dict(content)


def trained_folder(folder: Path) -> tuple[Path, Path | None] | None:
    """Returns two paths for a folder that a Trainer wrote: of the weights and of our config.json.

    The weights are in the folder itself, or else in its last checkpoint-N. The config may lie next
    to the weights, in the folder, or in the folder's parent. The second path is None if there is no
    config. For any other folder the result is None.
    """
    steps = {
        int(match[1]): part
        for part in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d{1,12})", part.name)) and weights_in(part)
    }
    place = folder if weights_in(folder) or not steps else steps[max(steps)]
    weights = weights_in(place)
    if weights is None:
        return None
    beside = [one / CONFIG for one in (place, folder, folder.parent)]
    ours = (path for path in beside if path.exists() and not read_config(path))
    return weights, next(ours, None)


# name of an index, as Hugging Face writes it -> how the names of its files end
INDEXES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}


def weights_in(folder: Path) -> Path | None:
    """Returns the weights of a folder: model.safetensors, or else an index of files, or None."""
    return next((folder / name for name in (WEIGHTS, *INDEXES) if (folder / name).exists()), None)


def read_sharded(index: Path, **choice: object) -> Contents:
    """Returns the weights in the files that an index names; they lie in the folder of the index.

    choice: as in `find_weights`. Raises CheckpointError for a file that is missing, or whose name
    leads out of the folder.
    """
    content: dict[str, Any] = {}
    for name in files_of(read_json(index), str(index), INDEXES[index.name]):
        held: Any = read_weights.read_content(index.parent / name)
        content |= held
    options: Any = choice
    tensors, notes = find_weights(content, str(index), **options)
    config = read_config(index.parent / CONFIG)
    return Contents(tensors, str(index), config, folder=index.parent, notes=notes)


def files_of(index: object, where: str, suffix: str) -> list[str]:
    """Returns the names of the files that an index of weights names.

    Raises CheckpointError unless they are plain names with this ending: others lead out of the
    folder, or to a file of another kind.
    """
    mapped = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(mapped, Mapping) or not mapped:
        raise CheckpointError(f"{where} has no weight_map: it is not a weight index.")
    for name in mapped.values():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(suffix):
            said = f"{where} names {str(name)[:80]!r}"
            raise CheckpointError(f"{said}: expected {suffix} files in the same folder.")
    return sorted(set(mapped.values()))


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
    content = read_json(config)
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
    weights = read_file(folder / SAELENS_WEIGHTS)
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
