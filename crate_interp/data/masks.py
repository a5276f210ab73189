"""Masks as data sets store them -> class maps: which values are classes, and whether a mask belongs to its image."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

MODES = ("1", "L", "P")
IGNORE = 255


def check_mask(mode: str, size: tuple[int, int], image_size: tuple[int, int], what: str) -> None:
    """ValueError for a mask that holds colours, or whose size is not its image's; sizes are (width, height)."""
    if mode not in MODES:
        raise ValueError(
            f"the mask of {what} has mode {mode!r}: give one number per pixel, 8-bit grey or a palette "
            "(Pillow's modes L and P), or black and white (mode 1)."
        )
    if size != image_size:
        raise ValueError(
            f"the mask of {what} is {size[1]} x {size[0]}, its image {image_size[1]} x {image_size[0]}: "
            "a mask has the size of its image."
        )


def is_binary(masks: Iterable[Image.Image]) -> bool:
    """Whether masks hold nothing but 0 and 255, so that 255 is the object and not "ignore".

    To be asked of a whole data set: a single image may have background and ignored pixels only. Black and white masks
    (mode "1") settle nothing, since their white is class 1 in either case.
    """
    for mask in masks:
        values = np.asarray(mask) if mask.mode in ("L", "P") else np.zeros(1)
        if ((values != 0) & (values != IGNORE)).any():
            return False
    return True


def class_maps(
    preprocess_masks: Callable[[Any], Tensor], masks: Sequence[Any], binary: bool
) -> UInt8[Tensor, "batch height width"]:
    """Class maps, after the model's resize and crop, of pictures or paths; in binary masks 255 becomes class 1."""
    maps = preprocess_masks(list(masks))
    return maps.where(maps != IGNORE, 1) if binary else maps
