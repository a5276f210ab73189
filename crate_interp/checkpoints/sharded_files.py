"""Reads weights in several files, and the index that says which file holds which tensor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crate_interp.checkpoints.read_weights import Contents, read_config, read_content, read_json
from crate_interp.checkpoints.state_dicts import PLAIN, Choice, find_weights
from crate_interp.core.errors import CheckpointError
from crate_interp.models.saving import CONFIG, WEIGHTS

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
