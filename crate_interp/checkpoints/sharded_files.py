"""Reads weights in several files, and the index that says which file holds which tensor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from crate_interp.checkpoints.read_weights import Contents, read_config, read_content, read_json
from crate_interp.checkpoints.state_dicts import PLAIN, Choice, find_weights
from crate_interp.core.errors import CheckpointError
from crate_interp.models.saving import CONFIG, WEIGHTS

# name of an index, as Hugging Face writes it -> how the names of its files end
INDEXES = {"model.safetensors.index.json": ".safetensors", "pytorch_model.bin.index.json": ".bin"}
_LONGEST_NAME, _MOST_FILES, _SHOWN = 200, 500, 4


def weights_in(folder: Path) -> Path | None:
    """Returns the weights of a folder: model.safetensors, or else an index of files, or None."""
    return next((folder / name for name in (WEIGHTS, *INDEXES) if (folder / name).exists()), None)


def read_sharded(index: Path, choice: Choice = PLAIN) -> Contents:
    """Returns the weights in the files that an index names; they lie in the folder of the index.

    Raises CheckpointError for a file that is missing, that holds other tensors than the index
    says, or whose name leads out of the folder.
    """
    content: dict[str, Any] = {}
    for name, keys in _files(index).items():
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, but {index.name} names it: download it into the folder."
            )
        content |= _held(read_content(path), keys, path, index)
    found = find_weights(content, str(index), choice=choice)
    config = read_config(index.parent / CONFIG)
    return Contents(found.tensors, str(index), config, folder=index.parent, notes=found.notes)


def _files(index: Path) -> dict[str, set[str]]:
    """Returns the names of the files that an index names, and the keys that each should hold."""
    content = read_json(index)
    mapped = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise CheckpointError(f"{index} has no weight_map: it is no index of weights.")
    return checked_files(mapped, str(index), INDEXES[index.name], _MOST_FILES)


def checked_files(
    mapped: Mapping[str, Any], where: str, suffix: str, most: int
) -> dict[str, set[str]]:
    """Returns the names of the files that a weight_map names, and the keys of each.

    where: the index's name in errors. Raises CheckpointError unless they are at most `most` plain
    names with this ending, since other names lead out of the folder of the index.
    """
    files: dict[str, set[str]] = {}
    for key, name in mapped.items():
        plain = isinstance(name, str) and len(name) <= _LONGEST_NAME and name.endswith(suffix)
        if not plain or name != Path(name).name or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{where} names {str(name)[:80]!r}: expected {suffix} files in the same folder."
            )
        files.setdefault(name, set()).add(key)
    if len(files) > most:
        raise CheckpointError(f"{where} names {len(files)} files: no model has so many.")
    return files


def _held(content: object, keys: set[str], path: Path, index: Path) -> dict[str, Any]:
    """Returns the tensors of a file; raises CheckpointError unless their names are `keys`."""
    items = content.items() if isinstance(content, Mapping) else ()
    held = {key: value for key, value in items if isinstance(value, Tensor)}
    if set(held) != keys:
        odd = sorted(map(str, set(held) ^ keys))
        raise CheckpointError(
            f"{path} holds other tensors than {index.name} says; they differ in "
            f"{', '.join(odd[:_SHOWN])}{', ...' if odd[_SHOWN:] else ''}. Download both again."
        )
    return held
