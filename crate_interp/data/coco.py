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
    size_of,
)
from crate_interp.data.items import IGNORE, Item
from crate_interp.data.picture_contents import inside
from crate_interp.data.samples import ImageReading, Samples

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
    if not isdir(folder):
        raise ValueError(f"{quoted(folder)} is not a folder: give coco:ANNOTATIONS.json:IMAGEDIR.")
    try:
        data = path.read_bytes()
        content = json.loads(data)
        names = [row["file_name"] for row in content["images"]]
        sizes = {row["id"]: (row["width"], row["height"]) for row in content["images"]}
        ids = sorted({row["id"] for row in content["categories"]})
        regions: dict[Any, list[Any]] = {number: [] for number in sizes}
        classes = {one: number for number, one in enumerate(ids, 1)}
        for row in content["annotations"]:
            region = (row["segmentation"], row.get("iscrowd"), classes[row["category_id"]])
            regions[row["image_id"]].append(region)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"cannot read the annotations {quoted(path)}: {plain(repr(error))}. Give a JSON file "
            "in COCO's format, with images, annotations and categories."
        ) from None
    if len(ids) >= IGNORE or len(sizes) != len(names):
        raise ValueError(f"{quoted(path)} has more than 254 categories, or an image id twice.")
    paths, items = [inside(folder, name, path) for name in names], []
    for file, (number, size) in zip(paths, sizes.items(), strict=True):
        found = header(file, f"the image {quoted(file)}")[1]
        if size != found:
            raise ValueError(f"{quoted(file)} is {found}, but {quoted(path)} says {size}.")
        if not all(_is_drawable(region[0], size[::-1]) for region in regions[number]):
            raise ValueError(f"an annotation of image {number} in {quoted(path)} cannot be drawn.")
        draw = partial(_class_map, size[::-1], regions[number])
        mask = Later(draw, f"the mask of image {number}", partial(tuple, size))
        items.append(Item(file, mask=mask))
    annotated = f"annotations:{digest_of_bytes(data)}"
    fingerprint = f"coco:{names_and_sizes(names, map(size_of, paths))}:{annotated}"
    return file_samples(items, folder, names, how, fingerprint, binary=False)


def _class_map(size: tuple[int, int], regions: list[Any]) -> Image.Image:
    """Draws the class map of an image of (height, width): crowds, then objects by falling size."""
    drawn = np.zeros(size, np.uint8)
    masks = [(_mask(runs, size), crowd, number) for runs, crowd, number in regions]
    masks.sort(key=lambda one: (not one[1], 0 if one[1] else -one[0].sum(dtype=np.int64)))
    for mask, crowd, number in masks:
        drawn[mask > 0] = IGNORE if crowd else number
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
    images, masks = (
        {splitext(name)[0]: f"{kind}/{name}" for name in names_under(folder / kind)}
        for kind in (VOC_IMAGES, VOC_MASKS)
    )
    both = [name for name in images if name in masks]
    names = both if split is None else _split(folder, split)
    lacking = [name for name in names if name not in both]
    if lacking or not names:
        what = f"{quoted(lacking[0])} lacks" if lacking else "every image lacks"
        raise ValueError(f"{what} its image or its mask in {quoted(folder)}.")
    below, drawn = [images[name] for name in names], [masks[name] for name in names]
    pairs = zip(below, drawn, strict=True)
    items = [Item(folder / image, mask=folder / mask) for image, mask in pairs]
    sizes = (size_of(folder / name) for name in below + drawn)
    print_ = f"voc:{names_and_sizes(below + drawn, sizes)}"
    return file_samples(items, folder, below, how, print_, drawn, binary=False)


def _split(folder: Path, split: str) -> list[str]:
    """Returns the names in the list of a split: the first word of every line."""
    path = folder / VOC_SPLITS / f"{split}.txt"
    known = sorted(one.stem for one in path.parent.glob("*.txt"))
    if split not in known:
        raise ValueError(
            f"no split of {quoted(folder)} is called {quoted(split)}: give one of "
            f"{plain(', '.join(known), 1000)}, or voc:DIR for all images with a mask."
        )
    text = path.read_text("utf-8", errors="surrogateescape")  # file names may be any bytes
    return [line.split()[0] for line in text.splitlines() if line.strip()]
