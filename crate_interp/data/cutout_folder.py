"""A folder of objects with alpha as a data set: each is pasted on a background, with its mask."""

from os.path import isdir
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from crate_interp.core.pictures import check_image, loaded, opened, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.class_maps import class_maps
from crate_interp.data.cutouts import paste, random_square
from crate_interp.data.picture_files import (
    first_folders,
    names_and_sizes,
    path_and_option,
    pictures_under,
)
from crate_interp.data.samples import Preprocess, Samples

SIDE = 224  # of a composite, before the model's own resize
COVER = (0.03, 0.97)  # the share of its canvas that an object takes
BACKGROUNDS = "backgrounds"


def cutout_samples(
    where: str,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None,
) -> Samples:
    """Returns one composite for each object in "DIR" or "DIR:SEED" (default 0).

    Composites are 224 x 224 before the model's resize. Objects are PNG and WebP files anywhere
    under DIR whose alpha (> 127) covers 3 to 97 % of the canvas; other files are skipped, also
    unreadable ones. Backgrounds are squares cut from the pictures in DIR/backgrounds, or smooth
    colour noise where there is no such folder. Labels are the first folder below DIR; masks
    have one class. The same seed and files give the same composites.

    Raises ValueError for missing folders, no objects, and backgrounds that cannot be read.
    """
    folder, option = path_and_option(where)
    if not isdir(folder):
        raise ValueError(f"{quoted(folder)} is no folder: give cutouts:DIR or cutouts:DIR:SEED.")
    if option is not None and not (option.isascii() and option.isdecimal() and len(option) < 20):
        raise ValueError(
            f"cutouts:{plain(where, 1000)}: the seed {quoted(option)} is no whole number: "
            "give cutouts:DIR:3 or the like."
        )
    seed = int(option or 0)
    backgrounds, objects = _backgrounds(folder / BACKGROUNDS), _objects(folder)
    names = [path.relative_to(folder).as_posix() for path in objects]
    listing = names_and_sizes(objects + backgrounds, names + [path.name for path in backgrounds])

    def composites(start: int, stop: int) -> list[tuple[Image.Image, Image.Image]]:
        return [
            _composite(objects[index], backgrounds, (seed, index))
            for index in range(start, min(stop, len(names)))
        ]

    def read_masks(start: int, stop: int) -> Tensor:
        assert preprocess_masks is not None
        return class_maps(
            preprocess_masks, [mask for _, mask in composites(start, stop)], binary=True
        )

    return Samples(
        n=len(names),
        labels=first_folders(names),
        fingerprint=f"cutouts:seed={seed}:{listing}",
        read=lambda start, stop: preprocess([picture for picture, _ in composites(start, stop)]),
        masks=read_masks if preprocess_masks else None,
    )


def _objects(folder: Path) -> list[Path]:
    paths = [
        path
        for path in pictures_under(folder, (".png", ".webp"))
        if path.relative_to(folder).parts[0] != BACKGROUNDS
    ]
    objects = [path for path in paths if _is_object(path)]
    if not objects:
        looked = (
            f"{len(paths)} PNG and WebP files were skipped: none has"
            if paths
            else "there is no PNG or WebP file with"
        )
        raise ValueError(
            f"the folder {quoted(folder)} has no objects: {looked} an alpha band that covers "
            f"{COVER[0]:.0%} to {COVER[1]:.0%} of its canvas."
        )
    return objects


def _is_object(path: Path) -> bool:
    try:
        with opened(path, "") as image:
            if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
                return False
            share = np.mean(np.asarray(image.convert("RGBA").getchannel("A")) > 127)
    except Exception:  # every decoder of Pillow has its own; one bad file among many is skipped
        return False
    return bool(COVER[0] <= share <= COVER[1])


def _backgrounds(folder: Path) -> list[Path]:
    if not isdir(folder):
        return []
    paths = pictures_under(folder)
    if not paths:
        raise ValueError(
            f"the folder {quoted(folder)} has no images: put backgrounds there, or remove it."
        )
    for path in paths:
        check_image(path)
    return paths


def _composite(
    cutout: Path, backgrounds: list[Path], seed: tuple[int, int]
) -> tuple[Image.Image, Image.Image]:
    rng = np.random.default_rng(seed)
    if backgrounds:
        picture = loaded(backgrounds[int(rng.integers(len(backgrounds)))])[0].convert("RGB")
        background = random_square(picture, SIDE, rng)
    else:
        background = _smooth_noise(rng)
    return paste(loaded(cutout)[0].convert("RGBA"), background, rng)


def _smooth_noise(rng: np.random.Generator) -> Image.Image:
    """Returns a random colour with soft spots of colours near it."""
    colours = rng.uniform(40, 216, 3) + rng.normal(0, 40, (5, 5, 3))
    spots = Image.fromarray(colours.clip(0, 255).astype(np.uint8))
    return spots.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
