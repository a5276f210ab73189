"""Masks as the model sees them: resized and cropped like its pictures.

The classes of neighbouring pixels are not mixed.
"""

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from crate_interp.config import CrateConfig
from crate_interp.core.pictures import loaded
from crate_interp.models.preprocess import Pictures, resize_and_crop, sequence, stack


def preprocess_masks(cfg: CrateConfig, masks: Pictures) -> UInt8[Tensor, "batch height width"]:
    """Returns class maps of the model's size.

    masks: a PIL image, a path, a sequence of either, or a uint8 or bool array or tensor
    `[batch, height, width]`. They are resized and cropped as by `preprocess`, each pixel taking
    the value of the nearest one. Values are kept: the grey level of 8-bit grey, the index of a
    palette ("P"), 0 and 1 of black and white ("1").

    Raises ValueError for other modes, dtypes and shapes, unreadable files, no masks, and sizes
    that `preprocess` refuses.
    """
    arrays = isinstance(masks, (torch.Tensor, np.ndarray))
    pictures = _pictures(torch.as_tensor(masks)) if arrays else sequence(masks, "mask")
    return stack([_fit(cfg, *loaded(mask, "mask")) for mask in pictures], "mask")


def _pictures(masks: Tensor) -> list[Image.Image]:
    if masks.dtype not in (torch.uint8, torch.bool) or masks.ndim != 3:
        raise ValueError(
            f"masks are {masks.dtype} of shape {list(masks.shape)}: "
            "give uint8 or bool [batch, height, width]."
        )
    return [Image.fromarray(mask) for mask in masks.to(torch.uint8).cpu().numpy()]


def _fit(cfg: CrateConfig, mask: Image.Image, what: str) -> UInt8[Tensor, "height width"]:
    if mask.mode not in ("1", "L", "P"):
        raise ValueError(
            f"{what} has mode {mask.mode!r}: give one number per pixel, 8-bit grey or a palette "
            "(modes L and P), or black and white (mode 1)."
        )
    # as grey by its numbers: convert("L") would make grey of a palette's colours
    numbers = Image.fromarray(np.array(mask).astype(np.uint8))
    return torch.from_numpy(np.array(resize_and_crop(cfg, numbers, Image.Resampling.NEAREST, what)))
