"""Turns the masks that data sets store into class maps."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from crate_interp.core.pictures import Picture
from crate_interp.data.samples import Pictures, Preprocess

MODES = ("1", "L", "P")
IGNORE = 255


def check_mask(mode: str, size: tuple[int, int], image_size: tuple[int, int], what: str) -> None:
    """Raises ValueError if a mask has colours, or another size than its image.

    Sizes are (width, height). what: the image's name in errors.
    """
    if mode not in MODES:
        raise ValueError(
            f"the mask of {what} has mode {mode!r}: give one number per pixel, as 8-bit grey "
            "(Pillow's mode L), a palette (mode P), or black and white (mode 1)."
        )
    if size != image_size:
        raise ValueError(
            f"the mask of {what} is {size[1]} x {size[0]}, "
            f"but its image is {image_size[1]} x {image_size[0]}: give both the same size."
        )


def is_binary(masks: Iterable[Image.Image]) -> bool:
    """Tells whether masks hold only 0 and 255, so that 255 means the object, not "ignore".

    Pass the masks of the whole data set: a single image may have only background and ignored
    pixels. Black and white masks (mode "1") are skipped: their white is class 1 in any case.
    """
    for mask in masks:
        values = np.asarray(mask) if mask.mode in ("L", "P") else np.zeros(1)
        if ((values != 0) & (values != IGNORE)).any():
            return False
    return True


def class_maps(
    preprocess_masks: Preprocess, masks: Sequence[Picture], binary: bool
) -> UInt8[Tensor, "batch height width"]:
    """Returns the class maps of masks (pictures or paths), after the model's resize and crop.

    binary: whether the masks hold only 0 and 255; 255 then becomes class 1.
    """
    maps = preprocess_masks(list(masks))
    return maps.where(maps != IGNORE, 1) if binary else maps


def unresized(masks: Pictures) -> UInt8[Tensor, "batch height width"]:
    """Returns the numbers of masks that are pictures of one size, as `preprocess_masks` does."""
    return torch.stack([torch.from_numpy(np.array(mask).astype(np.uint8)) for mask in masks])


def mask_reader(
    preprocess_masks: Preprocess | None,
    masks_of: Callable[[int, int], Sequence[Picture]],
    binary: bool = False,
) -> Callable[[int, int], UInt8[Tensor, "batch height width"]] | None:
    """Returns a function that reads class maps, or None if `preprocess_masks` is None.

    The function takes start and stop, and reads the class maps of the samples from start up to, not
    including, stop. masks_of(start, stop) returns the masks of these samples.
    """
    if preprocess_masks is None:
        return None
    return lambda start, stop: class_maps(preprocess_masks, masks_of(start, stop), binary)
