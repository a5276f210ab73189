"""What a folder of transformers says of its pictures, its weights and its class."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from crate_interp.checkpoints.read_weights import read_json
from crate_interp.checkpoints.sharded_files import files_of
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError

_FILE = "preprocessor_config.json"
# Pillow's numbers for its filters
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# networks that interpolate their positions for any size
_FREE = ("dinov2", "dinov2_with_registers")


def preprocessing(folder: Path, config: object) -> dict[str, Any]:
    """Returns resize, crop, interpolation, mean, std, and image_size if the model takes any size.

    config: transformers' config of the network. Returns {} without preprocessor_config.json.

    Raises CheckpointError if pictures are to be scaled by anything but 1 / 255, for an unknown
    filter, and for a size in an unknown form.
    """
    found = read_json(folder / _FILE)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / _FILE} does not hold a JSON object.")
    factor = found.get("rescale_factor", 1 / 255)
    scaled = checks.is_number(factor) and abs(factor * 255 - 1) <= 1e-6
    if found.get("do_rescale") is False or not scaled:
        raise CheckpointError(
            f"{folder / _FILE} does not scale pictures to [0, 1]: give float images, and load the "
            "model from a folder without that file."
        )
    fields: dict[str, Any] = {}
    if found.get("do_resize", True) and "size" in found:
        number = found.get("resample", 2)
        if type(number) is not int or number not in _FILTERS:
            raise CheckpointError(
                f"{folder / _FILE} resizes with filter {number!r}: known filters are {_FILTERS}."
            )
        fields["resize"], fields["interpolation"] = _side(found["size"], folder), _FILTERS[number]
    if found.get("do_center_crop") and "crop_size" in found:
        fields["crop"] = _side(found["crop_size"], folder)
    channels = getattr(config, "num_channels", 3)
    if found.get("do_normalize", True):
        if "image_mean" in found and "image_std" in found:
            fields |= {"mean": found["image_mean"], "std": found["image_std"]}
    else:
        fields |= {"mean": [0.0] * channels, "std": [1.0] * channels}
    if getattr(config, "model_type", "") in _FREE:
        fields["interpolate_pos"] = True
        size = fields.get("crop", fields.get("resize"))
        if isinstance(size, tuple):
            fields["image_size"] = size
    return fields


def _side(size: Any, folder: Path) -> int | tuple[int, int]:
    """Returns (height, width), or the length of the shorter side."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and {"height", "width"} <= set(size):
        return size["height"], size["width"]
    if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
        return size["shortest_edge"]
    raise CheckpointError(
        f"{folder / _FILE} has the size {size!r}: expected a whole number, height and width, or "
        "shortest_edge."
    )


WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"


def shards_of(index: object, where: str) -> list[str]:
    """Returns the files that an index of weights names.

    Raises CheckpointError unless they are safetensors files in the folder of the index, because
    transformers would follow any path, and would give any other file to torch.load.
    """
    return files_of(index, where, ".safetensors")


def keys_of(folder: Path) -> list[str]:
    """Returns the names of the tensors in a folder; raises CheckpointError as `shards_of` does."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists():
        names = shards_of(read_json(folder / SHARDS), str(folder / SHARDS))
    keys: list[str] = []
    for name in names:
        with safe_open(folder / name, framework="pt", device="cpu") as file:
            keys += file.keys()
    return keys


def class_named(config: Mapping[str, Any], known: Sequence[str], where: str) -> str:
    """Returns the class that a config names in `architectures`, or the last known if it names none.

    Raises CheckpointError for any class but the known ones: another class may have other heads.
    """
    named = config.get("architectures")
    if named in (None, []):
        return known[-1]
    names = named if isinstance(named, list) else [named]
    if len(names) != 1 or names[0] not in known:
        raise CheckpointError(
            f"{where} says architectures={str(named)[:80]}, which is not known for model_type "
            f"{config['model_type']!r}: known are {', '.join(known)}. Load it with transformers, "
            "and save it as one of these classes."
        )
    return names[0]
