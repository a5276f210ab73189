"""COCO and PASCAL VOC: images with class maps.

VOC has images in JPEGImages/, masks in SegmentationClass/, lists of names in
ImageSets/Segmentation/.
"""

import json
import warnings
from functools import partial
from os.path import expanduser, isdir, splitext
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from crate_interp.core.files import digest_of_bytes
from crate_interp.core.pictures import Later, header, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.folder_listing import (
    file_samples,
    names_and_sizes,
    names_under,
    path_and_option,
)
from crate_interp.data.items import IGNORE, Item, check_mask
from crate_interp.data.picture_contents import inside
from crate_interp.data.samples import ImageReading, Samples

_NEEDED = {  # table -> fields that its rows must have
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "segmentation"),
    "categories": ("id",),
}
VOC_IMAGES, VOC_MASKS, VOC_SPLITS = "JPEGImages", "SegmentationClass", "ImageSets/Segmentation"


def coco_samples(where: str, how: ImageReading) -> Samples:
    """Returns the images of "ANNOTATIONS.json:IMAGEDIR", in the order of the annotations.

    For "ANNOTATIONS.json" alone, the images are in the folder of this file. Classes are the
    categories, numbered from 1 in the order of their ids. Where objects overlap, the smaller object
    is on top; crowds are 255, below the objects. There are no labels. Images are turned upright by
    their EXIF orientation; width, height and annotations are those of the upright image.

    Raises ValueError if pycocotools is missing, for files that are not in COCO's format, for more
    than 254 categories, for names that lead out of the folder, for images that are missing or have
    another size, and for annotations that cannot be drawn.
    """
    _pycocotools()
    path, option = path_and_option(where)
    folder = Path(expanduser(option)) if option else path.parent
    tables, annotated = _read(path)
    if not isdir(folder):
        raise ValueError(f"{quoted(folder)} is not a folder: give coco:ANNOTATIONS.json:IMAGEDIR.")
    ids = sorted(row["id"] for row in tables["categories"])
    if len(ids) >= IGNORE:
        raise ValueError(f"{quoted(path)} has {len(ids)} categories: give at most 254.")
    classes = {one: number for number, one in enumerate(ids, 1)}
    names = [row["file_name"] for row in tables["images"]]
    paths = [inside(folder, name, path) for name in names]
    items: dict[Any, Item] = {}
    regions: dict[Any, list[Any]] = {row["id"]: [] for row in tables["images"]}
    for row, file in zip(tables["images"], paths, strict=True):
        size = (row["width"], row["height"])
        found = header(file, f"the image {quoted(file)}")[1]
        if size != found:
            raise ValueError(
                f"{quoted(path)} gives {quoted(row['file_name'])} as {size[1]} x {size[0]}, but "
                f"the image is {found[1]} x {found[0]}: masks would not fit it."
            )
        draw = partial(_class_map, size[::-1], regions[row["id"]], classes)
        what = f"the mask of image {row['id']}"
        items[row["id"]] = Item(file, mask=Later(draw, what, partial(tuple, size)))
    for row in tables["annotations"]:
        what = f"annotation {row['id']} in {quoted(path)}"
        for field, known in (("image_id", items), ("category_id", classes)):
            if row[field] not in known:
                raise ValueError(f"{what} has the {field} {row[field]}, which is not in the file.")
        size = items[row["image_id"]].mask.size()[::-1]
        if not _is_drawable(row["segmentation"], size):
            raise ValueError(
                f"the segmentation of {what} cannot be drawn: give polygons x, y, x, y, ..., or "
                f"run lengths of a {size[0]} x {size[1]} image."
            )
        regions[row["image_id"]].append(row)
    fingerprint = f"coco:{names_and_sizes(paths, names)}:annotations:{annotated}"
    return file_samples(list(items.values()), folder, names, how, fingerprint, binary=False)


def _read(path: Path) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Returns the three tables of an annotation file, and the digest of its bytes.

    Raises ValueError if a table, or a field of a row, is missing.
    """
    try:
        data = path.read_bytes()
        content = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read the annotations {quoted(path)}: {plain(error)}") from None
    for table, fields in _NEEDED.items():
        rows = content.get(table) if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise ValueError(f"{quoted(path)} holds no COCO annotations: it has no list {table}.")
        for number, row in enumerate(rows):
            for field in fields:
                if field not in row:
                    what = f"number {number} of its {table} has no {field}"
                    raise ValueError(f"{quoted(path)}: {what}.")
        if len({row["id"] for row in rows}) != len(rows):
            raise ValueError(f"{quoted(path)} gives an id twice in its {table}.")
    return content, digest_of_bytes(data)


def _class_map(
    size: tuple[int, int], rows: list[dict[str, Any]], classes: dict[int, int]
) -> Image.Image:
    """Draws the class map of an image of (height, width)."""
    drawn = np.zeros(size, np.uint8)
    crowds, objects = [], []
    for row in rows:
        mask = _mask(row["segmentation"], size)
        if row.get("iscrowd"):
            crowds.append((mask, IGNORE))
        else:
            objects.append((mask, classes[row["category_id"]]))
    objects.sort(key=lambda pair: -pair[0].sum(dtype=np.int64))  # the smallest, last, is on top
    for mask, number in crowds + objects:
        drawn[mask > 0] = number
    return Image.fromarray(drawn)


def _is_drawable(segmentation: Any, size: tuple[int, int]) -> bool:
    try:
        if isinstance(segmentation, list):
            return all(len(one) % 2 == 0 and np.isfinite(one).all() for one in segmentation)
        counts = segmentation["counts"]
        whole = isinstance(counts, str) or sum(counts) == size[0] * size[1]
        return whole and tuple(segmentation["size"]) == size
    except (TypeError, KeyError):
        return False


def _mask(segmentation: Any, size: tuple[int, int]) -> UInt8[np.ndarray, "height width"]:
    """Returns the pixels of polygons, or of (compressed) run lengths.

    Polygons of fewer than three points have no area.
    """
    coco, runs = _pycocotools(), segmentation
    if isinstance(runs, list):
        polygons = [polygon for polygon in runs if len(polygon) >= 6]
        if not polygons:
            return np.zeros(size, np.uint8)
        runs = coco.merge(coco.frPyObjects(polygons, *size))
    elif isinstance(runs["counts"], list):
        runs = coco.frPyObjects(runs, *size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, about pycocotools
        return coco.decode(runs)


def _pycocotools() -> Any:
    try:
        from pycocotools import mask
    except ImportError:
        raise ValueError("COCO needs pycocotools: pip install 'crate_interp[coco]'.") from None
    return mask


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
    for place in (folder, folder / VOC_IMAGES, folder / VOC_MASKS):
        if not isdir(place):
            raise ValueError(
                f"{quoted(place)} is not a folder: give voc:DIR or voc:DIR:SPLIT, where DIR has "
                f"{VOC_IMAGES}/ and {VOC_MASKS}/."
            )
    parts = {
        kind: {splitext(name)[0]: f"{kind}/{name}" for name in names_under(folder / kind)}
        for kind in (VOC_IMAGES, VOC_MASKS)
    }
    images, masks = parts.values()
    names = [name for name in images if name in masks] if split is None else _split(folder, split)
    if not names:
        raise ValueError(f"the data is empty: no image in {quoted(folder)} has a mask.")
    for name in names:
        for kind, files in parts.items():
            if name not in files:
                place = quoted(folder / kind)
                raise ValueError(f"{quoted(name)} of split {split!r} has no file in {place}.")
        mode, size = header(folder / masks[name], f"the image {quoted(folder / masks[name])}")
        image = folder / images[name]
        check_mask(mode, size, header(image, f"the image {quoted(image)}")[1], quoted(name))
    below, drawn = [images[name] for name in names], [masks[name] for name in names]
    pairs = zip(below, drawn, strict=True)
    items = [Item(folder / image, mask=folder / mask) for image, mask in pairs]
    print_ = f"voc:{names_and_sizes([folder / name for name in below + drawn], below + drawn)}"
    return file_samples(items, folder, below, how, print_, drawn, binary=False)


def _split(folder: Path, split: str) -> list[str]:
    """Returns the names in the list of a split: the first word of every line."""
    path = folder / VOC_SPLITS / f"{split}.txt"
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
        inside(folder / VOC_IMAGES, name, path)
    return names
