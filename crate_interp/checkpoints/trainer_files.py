"""What trainers write: folders with files beside the weights, and weights in several files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crate_interp.checkpoints.read_weights import Contents, read_config, read_content, read_json
from crate_interp.checkpoints.state_dicts import ANCHORS, PLAIN, Choice, find_weights
from crate_interp.config import CrateConfig, check_names
from crate_interp.core.errors import CheckpointError
from crate_interp.models.saving import CONFIG, LIBRARY, WEIGHTS

GivenConfig = CrateConfig | Mapping[str, Any] | str | Path
_STEP = re.compile(r"checkpoint-(\d{1,12})")


def fields_of(config: object, given: Mapping[str, Any], family: str | None) -> dict[str, Any]:
    """Returns the fields of the config given as `config=`, together with the fields in `given`.

    config: a CrateConfig, a dict of its fields, the path of a config.json or of its folder, or
    None. Raises CheckpointError if `config` is none of these, or contradicts `given` or `family`.
    """
    if config is None:
        return dict(given) | ({} if family is None else {"family": family})
    fields = _config_fields(config)
    assumed = fields.pop("assumed", ())
    for name, value in {**given, **({"family": family} if family else {})}.items():
        told = value if name in assumed else fields.get(name, value)
        one, other = (list(x) if isinstance(x, tuple) else x for x in (told, value))
        headless = name == "n_classes" and value == 0  # the head is left out
        if one != other and not headless:
            raise CheckpointError(
                f"{name}={value!r} contradicts config=, which says {told!r}: "
                "give only one of the two."
            )
    unsure = [name for name in assumed if name not in given]
    return fields | dict(given) | ({"assumed": unsure} if unsure else {})


def _config_fields(config: object) -> dict[str, Any]:
    """Returns the fields of a CrateConfig, a dict, or a config.json of ours, given by its path."""
    if isinstance(config, CrateConfig):
        return config.to_dict()
    content, where = config, f"config={config!r}"
    if isinstance(config, (str, Path)):
        path = Path(config).expanduser()
        where = str(path / CONFIG if path.is_dir() else path)
        content = read_json(Path(where))
        if content is None:
            raise CheckpointError(f"config={str(config)!r}: there is no {where}.")
    if isinstance(content, Mapping) and content.get("library") == LIBRARY:
        content = content.get("config")
    if not isinstance(content, Mapping) or not isinstance(content.get("family"), str):
        raise CheckpointError(
            f"{where} holds no config of a hooked model: give a CrateConfig such as model.cfg, a "
            "dict of its fields with a `family`, or the path of the config.json of save_pretrained."
        )
    check_names(content)
    return dict(content)


def is_hooked(tensors: Mapping[str, Any]) -> bool:
    """Tells whether some key ends with the name of a parameter that only hooked models have."""
    return any(key.endswith(ANCHORS) for key in tensors)


def config_of(contents: Contents) -> CrateConfig:
    """Returns the config of a hooked model from the given fields.

    Raises CheckpointError if the given fields lack family, d_model or n_layers.
    """
    where, fields = contents.where, fields_of(None, contents.given, contents.family)
    if not {"family", "d_model", "n_layers"} <= set(fields):
        raise CheckpointError(
            f"{where} has the names of a hooked model, but no config.json next to it. Put its "
            "config.json there, or load the folder that model.save_pretrained(folder) writes; in "
            "Python, the whole config is ci.load(file, config=model.cfg)."
        )
    cfg = CrateConfig.from_dict(fields)
    cfg.assume(fields)
    return cfg


def trained_folder(folder: Path) -> tuple[Path, Path | None] | None:
    """Returns two paths for a folder that a Trainer wrote: of the weights and of our config.json.

    The weights are in the folder itself, or else in its last checkpoint-N. The config may lie next
    to the weights, in the folder, or in the folder's parent. The second path is None if there is no
    config. For any other folder the result is None.
    """
    steps = {
        int(match[1]): part
        for part in (folder.iterdir() if folder.is_dir() else ())
        if (match := _STEP.fullmatch(part.name)) and weights_in(part)
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


def read_sharded(index: Path, choice: Choice = PLAIN) -> Contents:
    """Returns the weights in the files that an index names; they lie in the folder of the index.

    Raises CheckpointError for a file that is missing, or whose name leads out of the folder.
    """
    content: dict[str, Any] = {}
    for name in files_of(read_json(index), str(index), INDEXES[index.name]):
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, but {index.name} names it: download it into the folder."
            )
        held = read_content(path)
        content |= held if isinstance(held, Mapping) else {}
    found = find_weights(content, str(index), choice)
    config = read_config(index.parent / CONFIG)
    return Contents(found.tensors, str(index), config, folder=index.parent, notes=found.notes)


def files_of(index: object, where: str, suffix: str) -> list[str]:
    """Returns the names of the files that an index of weights names.

    Raises CheckpointError unless they are plain names with this ending: others lead out of the
    folder, or to a file of another kind.
    """
    mapped = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(mapped, Mapping) or not mapped:
        raise CheckpointError(f"{where} has no weight_map: it is no index of weights.")
    for name in mapped.values():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(suffix):
            raise CheckpointError(
                f"{where} names {str(name)[:80]!r}: expected {suffix} files in the same folder."
            )
    return sorted(set(mapped.values()))
