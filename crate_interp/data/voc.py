"""Folders in the style of PASCAL VOC.

Images are in JPEGImages/, masks in SegmentationClass/, lists of names in
ImageSets/Segmentation/.
"""

from functools import partial
from os.path import isdir
from pathlib import Path

from crate_interp.core.pictures import header, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.folder_listing import (
    file_samples,
    names_and_sizes,
    path_and_option,
    pictures_under,
)
from crate_interp.data.items import Item, check_mask, items_between
from crate_interp.data.picture_contents import inside
from crate_interp.data.samples import ImageReading, Samples

IMAGES, MASKS, SPLITS = "JPEGImages", "SegmentationClass", "ImageSets/Segmentation"


def voc_samples(where: str, how: ImageReading) -> Samples:
    """Returns the images in the list of "DIR:SPLIT", or all images of "DIR" that have a mask.

    The images of a split have the order of its list; without a split they are ordered by name.
    Masks hold classes as palette indices or grey levels; 255 is ignored in every data set of this
    kind. Images are turned upright by their EXIF orientation, and each mask must fit the upright
    image. There are no labels, because an image has several classes.

    Raises ValueError for missing folders, an unknown split, names without an image or a mask, and
    masks whose size is not that of their image.
    """
    folder, split = path_and_option(where)
    for place in (folder, folder / IMAGES, folder / MASKS):
        if not isdir(place):
            raise ValueError(
                f"{quoted(place)} is not a folder: give voc:DIR or voc:DIR:SPLIT, with {IMAGES}/ "
                f"and {MASKS}/ in DIR."
            )
    parts = {kind: _by_name(folder / kind) for kind in (IMAGES, MASKS)}
    images, masks = parts.values()
    names = [name for name in images if name in masks] if split is None else _split(folder, split)
    if not names:
        raise ValueError(f"the data is empty: no image in {quoted(folder / IMAGES)} has a mask.")
    for name in names:
        for kind, paths in parts.items():
            if name not in paths:
                place = quoted(folder / kind)
                raise ValueError(f"{quoted(name)} of split {split!r} has no file in {place}.")
        mode, size = header(masks[name], f"the image {quoted(masks[name])}")
        image_size = header(images[name], f"the image {quoted(images[name])}")[1]
        check_mask(mode, size, image_size, quoted(name))
    items = [Item(images[name], mask=masks[name]) for name in names]
    paths = [item.value for item in items] + [item.mask for item in items]
    below = [path.relative_to(folder).as_posix() for path in paths]
    return file_samples(
        partial(items_between, items, 0), folder, below[: len(names)], how,
        f"voc:{names_and_sizes(paths, below)}", mask_names=below[len(names) :], binary=False,
    )  # fmt: skip


def _by_name(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in pictures_under(folder)
    }


def _split(folder: Path, split: str) -> list[str]:
    """Returns the names in the list of a split: the first word of every line."""
    path = folder / SPLITS / f"{split}.txt"
    known = sorted(one.stem for one in path.parent.glob("*.txt"))
    if split not in known:
        raise ValueError(
            f"no split of {quoted(folder)} is called {quoted(split)}: give one of "
            f"{plain(', '.join(known), 1000) or 'none'}, or voc:DIR for all images with a mask."
        )
    text = path.read_text("utf-8", errors="surrogateescape")  # file names may be any bytes
    names = [line.split()[0] for line in text.splitlines() if line.strip()]
    if not names:
        raise ValueError(f"the data is empty: {quoted(path)} holds no name.")
    for name in names:
        inside(folder / IMAGES, name, path)
    return names
