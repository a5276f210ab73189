"""What transformers' preprocessor_config.json says, as fields of a config of ours."""

from pathlib import Path
from typing import Any

from crate_interp.checkpoints.formats.tensor_files import read_json
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError

_FILE = "preprocessor_config.json"
# Pillow's numbers of filters
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_FREE = ("dinov2", "dinov2_with_registers")  # interpolate their positions for any size


def preprocessing(folder: Path, config: object) -> dict[str, Any]:
    """Returns resize, crop, interpolation, mean and std, and the size of images if it is free.

    config: transformers' config of the network. Returns nothing where there is no file.

    Raises CheckpointError if pictures are to be scaled by anything but 1 / 255, for an unknown
    filter, and for sizes that are none.
    """
    found = read_json(folder / _FILE)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / _FILE} holds no JSON object.")
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
    raise CheckpointError(f"{folder / _FILE} has a size that is none: {size!r}.")


def _filter(number: object, folder: Path) -> str:
    if type(number) is not int or number not in _FILTERS:
        raise CheckpointError(
            f"{folder / _FILE} resizes with filter {number!r}: known are "
            f"{', '.join(map(str, _FILTERS))} ({', '.join(_FILTERS.values())})."
        )
    return _FILTERS[number]
