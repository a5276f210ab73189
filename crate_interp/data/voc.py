"""Folders in the style of PASCAL VOC.

Images are in JPEGImages/, masks in SegmentationClass/, lists of names in
ImageSets/Segmentation/.
"""

from os.path import isdir
from pathlib import Path

from crate_interp.core.pictures import header, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.class_maps import check_mask, mask_reader
from crate_interp.data.folder_listing import (
    inside,
    names_and_sizes,
    path_and_option,
    pictures_under,
)
from crate_interp.data.picture_contents import Files
from crate_interp.data.samples import Preprocess, Samples, picture_samples

IMAGES, MASKS, SPLITS = "JPEGImages", "SegmentationClass", "ImageSets/Segmentation"


def voc_samples(where: str, preprocess: Preprocess, preprocess_masks: Preprocess | None) -> Samples:
    """Returns the images in the list of "DIR:SPLIT", or all images of "DIR" that have a mask.

    The images of a split have the order of its list; without a split they are ordered by name.
    Masks hold classes as palette indices or grey levels; 255 is ignored in every data set of this
    kind. Images are turned upright by their EXIF orientation, and each mask must fit the upright
    image. There are no labels, because an image has several classes.

    Raises ValueError for missing folders, an unknown split, names without an image or a mask, and
    masks whose size is not that of their image.
    """
    folder, split = path_and_option(where)
    if not isdir(folder):
        raise ValueError(f"{quoted(folder)} is not a folder: give voc:DIR or voc:DIR:SPLIT.")
    for name in (IMAGES, MASKS):
        if not isdir(folder / name):
            raise ValueError(
                f"{quoted(folder)} has no folder {name}: give voc:DIR with {IMAGES}/ and {MASKS}/."
            )
    images, masks = _by_name(folder / IMAGES), _by_name(folder / MASKS)
    names = [name for name in images if name in masks] if split is None else _split(folder, split)
    if not names:
        raise ValueError(f"the data is empty: no image in {quoted(folder / IMAGES)} has a mask.")
    for name in names:
        for kind, found in ((IMAGES, images), (MASKS, masks)):
            if name not in found:
                raise ValueError(
                    f"{quoted(name)} of split {quoted(str(split))} has no file in "
                    f"{quoted(folder / kind)}."
                )
        mode, size = header(masks[name], f"the image {quoted(masks[name])}")
        image_size = header(images[name], f"the image {quoted(images[name])}")[1]
        check_mask(mode, size, image_size, quoted(name))
    pictures, drawn = [images[name] for name in names], [masks[name] for name in names]
    paths = [*pictures, *drawn]
    below = [path.relative_to(folder).as_posix() for path in paths]
    listing, drawn_below = names_and_sizes(paths, below), below[len(names) :]
    files = Files(
        folder,
        lambda start, stop: enumerate(below[start:stop], start),
        lambda start, stop: enumerate(drawn_below[start:stop], start),
    )

    read_masks = mask_reader(preprocess_masks, lambda start, stop: drawn[start:stop])
    return picture_samples(pictures, f"voc:{listing}", preprocess, read_masks, files)


def _by_name(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in pictures_under(folder)
    }


def _split(folder: Path, split: str) -> list[str]:
    """Returns the names in the list of a split: the first word of every line."""
    known = sorted(path.stem for path in (folder / SPLITS).glob("*.txt"))
    if split not in known:
        there = f"there are no lists in {SPLITS}/"
        if known:
            there = f"give one of {plain(', '.join(known), 1000)}"
        raise ValueError(
            f"no split of {quoted(folder)} is called {quoted(split)}: {there}. "
            "voc:DIR takes all images that have a mask."
        )
    path = folder / SPLITS / f"{split}.txt"
    text = path.read_text("utf-8", errors="surrogateescape")  # file names may be any bytes
    names = [line.split()[0] for line in text.splitlines() if line.strip()]
    if not names:
        raise ValueError(f"the data is empty: {quoted(path)} holds no name.")
    for name in names:
        inside(folder / IMAGES, name, path)
    return names
