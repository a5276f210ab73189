"""Objects with alpha pasted on backgrounds: images whose masks are exact."""

from typing import Any

import numpy as np
from PIL import Image

SHARE = (0.45, 0.8)  # of the picture's side: what the longer side of an object takes


def paste(
    cutout: Image.Image, background: Image.Image, rng: np.random.Generator
) -> tuple[Image.Image, Image.Image]:
    """Returns an object at a random place and scale on a square background, and its mask.

    cutout: mode RGBA. It is cropped to its alpha and scaled so that its longer side is 45 to
    80 % of the background's. The mask (mode "L", 0 or 255) is alpha > 127 after scaling. The
    same state of the generator gives the same picture. Raises ValueError for a cut-out that is
    transparent everywhere.
    """
    box = cutout.getchannel("A").getbbox()
    if box is None:
        raise ValueError("the cut-out is transparent everywhere: there is no object in it.")
    cutout = cutout.crop(box)
    size = background.width
    scale = size * rng.uniform(*SHARE) / max(cutout.size)
    width, height = (max(1, round(side * scale)) for side in cutout.size)
    small = cutout.resize((width, height), Image.Resampling.BICUBIC)
    place = (int(rng.integers(size - width + 1)), int(rng.integers(size - height + 1)))
    alpha = small.getchannel("A")
    picture = background.convert("RGB")
    picture.paste(small.convert("RGB"), place, alpha)
    mask = Image.new("L", (size, size))
    mask.paste(alpha.point([0] * 128 + [255] * 128), place)
    return picture, mask


def random_square(background: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """Returns a random square of a picture, perhaps mirrored, scaled to `size` x `size`.

    The side of the square is at least half the shorter side of the picture.
    """
    short = min(background.size)
    side = int(rng.integers(max(1, short // 2), short + 1))
    left = int(rng.integers(background.width - side + 1))
    top = int(rng.integers(background.height - side + 1))
    box: Any = (left, top, left + side, top + side)
    square = background.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else square
