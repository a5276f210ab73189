"""Folders and configs of models: those that save_pretrained wrote, and those of trainers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crate_interp.checkpoints.read_weights import Contents, read_config, read_content, read_json
from crate_interp.checkpoints.state_dicts import find_weights
from crate_interp.config import CrateConfig, check_names
from crate_interp.core.errors import CheckpointError
from crate_interp.models.sae import SAEConfig
from crate_interp.models.saving import CONFIG, LIBRARY, WEIGHTS

STEPS = "steps"  # subfolder of files step-N.safetensors: the weights after step N of a training

# Fields that decide which tensors exist and what the tensors mean. A given field must not
# contradict the folder's config.
STRUCTURE = (
    "family", "d_model", "n_layers", "n_heads", "d_head", "d_mlp", "variant", "sparse_step",
    "n_classes", "d_features", "channels", "n_ctx", "d_vocab", "bias", "decoder_n_layers",
    "decoder_n_heads", "d_embed", "text_d_model", "text_n_layers", "text_n_heads",
    "window_pattern", "output_matrix", "stem", "class_layers",
)  # fmt: skip


def read_own_config(folder: Path, overrides: dict[str, Any]) -> CrateConfig | SAEConfig:
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
        if fields.get("family") == "sae":
            return SAEConfig(**fields)
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
        held: Any = read_content(index.parent / name)
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
