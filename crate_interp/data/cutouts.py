"""Objects with alpha pasted on backgrounds: a data set of images with exact masks."""

from collections.abc import Iterator
from dataclasses import dataclass
from os.path import isdir
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crate_interp.core.pictures import loaded, opened, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.folder_listing import (
    first_folders,
    names_and_sizes,
    names_under,
    path_and_option,
    size_of,
)
from crate_interp.data.items import Item, item_samples
from crate_interp.data.picture_contents import Files
from crate_interp.data.samples import ImageReading, Samples

SIDE = 224  # pixels of a composite's side, before the model's own resize
COVER = (0.03, 0.97)  # the allowed share of the canvas that an object covers
BACKGROUNDS = "backgrounds"
SHARE = (0.45, 0.8)  # the longer side of an object, as a share of the picture's side


def cutout_samples(where: str, how: ImageReading) -> Samples:
    """Returns one composite for each object in "DIR" or "DIR:SEED" (SEED is 0 by default).

    Composites are 224 x 224 before the model's resize. Objects are PNG and WebP files anywhere
    under DIR whose alpha (> 127) covers 3 to 97 % of the canvas; other files, and files that cannot
    be read, are skipped. Backgrounds are squares cut from the pictures in DIR/backgrounds, or
    smooth colour noise if there is no such folder. An object's label is the first folder on its
    path below DIR; masks have one class. The same seed and files give the same composites.

    Raises ValueError if DIR is not a folder or has no objects.
    """
    folder, option = path_and_option(where)
    seed = option or "0"
    if not isdir(folder) or not (seed.isascii() and seed.isdecimal() and len(seed) < 20):
        raise ValueError(
            f"cutouts:{plain(where, 1000)} is not a folder: give cutouts:DIR or cutouts:DIR:SEED, "
            "where SEED is a whole number."
        )
    backgrounds = folder / BACKGROUNDS
    behind = names_under(backgrounds)

    files = names_under(folder, (".png", ".webp"))
    files = [name for name in files if not name.startswith(f"{BACKGROUNDS}/")]
    names = [name for name in files if _is_object(folder / name)]
    if not names:
        raise ValueError(
            f"the folder {quoted(folder)} has no objects: none of its {len(files)} PNG and WebP "
            f"files has an alpha band that covers {COVER[0]:.0%} to {COVER[1]:.0%} of its canvas."
        )
    composites = Composites(folder, names, behind, int(seed))
    paths = [folder / name for name in names] + [backgrounds / name for name in behind]
    known = names + [path.name for path in paths[len(names) :]]
    print_ = f"cutouts:seed={int(seed)}:{names_and_sizes(known, map(size_of, paths))}"
    return item_samples(
        composites.items, range(len(names)), print_, how, masked=True, binary=True,
        labels=first_folders(names), files=Files(folder, composites.files, composites.files),
    )  # fmt: skip


@dataclass(frozen=True)
class Composites:
    """Objects, each on a background of those in the folder BACKGROUNDS, or on noise."""

    folder: Path
    names: list[str]
    behind: list[str]
    seed: int

    def background(self, index: int) -> tuple[str | None, np.random.Generator]:
        """Returns the name of a composite's background, and the generator that drew it."""
        rng = np.random.default_rng((self.seed, index))
        count = len(self.behind)
        return f"{BACKGROUNDS}/{self.behind[rng.integers(count)]}" if count else None, rng

    def files(self, start: int, stop: int) -> Iterator[tuple[int, str]]:
        """Yields the number of each composite with the names of its files."""
        for index in range(start, stop):
            yield index, self.names[index]
            name, _ = self.background(index)
            if name is not None:
                yield index, name

    def items(self, start: int, stop: int) -> list[Item]:
        """Returns composites with their masks."""
        items = []
        for index in range(start, min(stop, len(self.names))):
            name, rng = self.background(index)
            if name is None:  # a random colour with soft spots of similar colours
                colours = rng.uniform(40, 216, 3) + rng.normal(0, 40, (5, 5, 3))
                spots = Image.fromarray(colours.clip(0, 255).astype(np.uint8))
                square = spots.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            else:
                square = random_square(loaded(self.folder / name)[0].convert("RGB"), SIDE, rng)
            cutout = loaded(self.folder / self.names[index])[0].convert("RGBA")
            picture, mask = paste(cutout, square, rng)
            items.append(Item(picture, mask=mask))
        return items


def _is_object(path: Path) -> bool:
    try:
        with opened(path, "") as image:
            if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
                return False
            share = np.mean(np.asarray(image.convert("RGBA").getchannel("A")) > 127)
    except Exception:
        # each decoder of Pillow raises its own errors; one bad file among many is skipped
        return False
    return bool(COVER[0] <= share <= COVER[1])


def paste(
    cutout: Image.Image,
    background: Image.Image,
    rng: np.random.Generator,
    share: tuple[float, float] = SHARE,
) -> tuple[Image.Image, Image.Image]:
    """Returns an object at a random place and scale on a square background, and its mask.

    cutout: mode RGBA. It is cropped to its alpha and scaled so that its longer side is a share of
    the background's, drawn between the two numbers of `share`. The mask (mode "L", 0 or 255) is
    alpha > 127 after scaling. The same state of the generator gives the same picture.
    """

    cutout = cutout.crop(cutout.getchannel("A").getbbox())
    size = background.width
    scale = size * rng.uniform(*share) / max(cutout.size)
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
    """Returns a random square of a picture, mirrored half the time, scaled to `size` x `size`.

    The side of the square is at least half the shorter side of the picture.
    """
    short = min(background.size)
    side = int(rng.integers(max(1, short // 2), short + 1))
    left = int(rng.integers(background.width - side + 1))
    top = int(rng.integers(background.height - side + 1))
    box: Any = (left, top, left + side, top + side)
    square = background.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else square
