"""Checks of what a transformers folder asks for, before transformers opens any of its files."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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
        fields["resize"] = _side(found["size"], folder)
        fields["interpolation"] = _filter(found.get("resample", 2), folder)
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


def _filter(number: object, folder: Path) -> str:
    if type(number) is not int or number not in _FILTERS:
        raise CheckpointError(
            f"{folder / _FILE} resizes with filter {number!r}: known filters are "
            f"{', '.join(map(str, _FILTERS))} ({', '.join(_FILTERS.values())})."
        )
    return _FILTERS[number]


WEIGHTS, SHARDS, SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"
_LAYERS = ("num_hidden_layers", "n_layer")
_MOST_HEADER = 2**24
# a network may have _MOST_TIMES as many numbers as its files hold, and _SPARE more
_SPARE, _MOST_TIMES = 2**20, 2


def shards_of(index: object, where: str) -> list[str]:
    """Returns the files that an index of weights names.

    Raises CheckpointError unless they are safetensors files in the folder of the index, because
    transformers would follow any path, and would give any other file to torch.load.
    """
    if isinstance(index, Mapping) and not isinstance(index.get("metadata"), dict):
        raise CheckpointError(f"{where} has no metadata.")
    return files_of(index, where, SUFFIX)


def sizes_of(folder: Path) -> dict[str, int]:
    """Returns the size of each tensor in the weights of a folder.

    Raises CheckpointError unless they are regular safetensors files.
    """
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists():
        names = shards_of(read_json(folder / SHARDS), str(folder / SHARDS))
    sizes: dict[str, int] = {}
    for path in (folder / name for name in names):
        if not path.is_file():
            raise CheckpointError(f"{path} is missing or not a regular file.")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER, path.stat().st_size):
            raise CheckpointError(f"{path} is not a safetensors file: is it truncated or renamed?")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118
                    sizes[name] = prod(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a readable checkpoint: {error}.") from None
    return sizes


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


def check_counts(config: Mapping[str, Any], sizes: Mapping[str, int], where: str) -> None:
    """Raises CheckpointError if a config claims more layers or labels than the tensors allow.

    Each layer or label takes time and memory when transformers reads the config or makes the
    network.
    """
    most = dict.fromkeys(_LAYERS, len(sizes)) | {"num_labels": sum(sizes.values())}
    for name in most.keys() & config.keys():
        count = config[name]
        if type(count) is not int or not 0 <= count <= most[name]:
            raise CheckpointError(
                f"{where} says {name}={str(count)[:80]}, but the weights are {len(sizes)} tensors."
            )


def check_total(network: type, config: object, sizes: Mapping[str, int], where: str) -> None:
    """Raises CheckpointError if a config asks for far more numbers than the files hold.

    config: transformers' config. Nothing is allocated.
    """
    with torch.device("meta"):
        made = network(config)
    wanted = sum(value.numel() for value in (*made.parameters(), *made.buffers()))
    held = sum(sizes.values())
    if wanted > _MOST_TIMES * held + _SPARE:
        raise CheckpointError(
            f"{where} asks for a network of {wanted} numbers, but the weight files hold {held}."
        )
