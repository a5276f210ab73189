"""COCO: class maps from its annotations, and masks in its format for results."""

import json
from collections.abc import Sequence
from functools import partial
from operator import index
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Bool
from PIL import Image
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.files import digest_of_bytes
from crate_interp.core.pictures import Later, check_file, check_image, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.class_maps import IGNORE, mask_reader
from crate_interp.data.coco_regions import MOST_EDGE, check_region, paint, runs_of
from crate_interp.data.picture_contents import Files
from crate_interp.data.picture_files import inside, names_and_sizes, path_and_option
from crate_interp.data.samples import Preprocess, Samples, picture_samples

_NEEDED = {  # table -> fields that its rows must have
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "segmentation"),
    "categories": ("id",),
}
_USABLE = {  # field -> function that tells whether a value can be used; other fields are ids
    "file_name": lambda value: isinstance(value, str),
    "segmentation": lambda value: True,
    "width": lambda value: checks.is_int(value) and 0 < value < 2**31,
    "height": lambda value: checks.is_int(value) and 0 < value < 2**31,
}
MOST_COVERED = 10_000_000_000  # painted pixels of one class map, with overlaps; takes some seconds


def coco_samples(
    where: str, preprocess: Preprocess, preprocess_masks: Preprocess | None
) -> Samples:
    """Returns the images of "ANNOTATIONS.json:IMAGEDIR", in the order of the annotations.

    For "ANNOTATIONS.json" alone, the images are in the folder of this file. Classes are the
    categories, numbered from 1 in the order of their ids. Where objects overlap, the smaller object
    is on top; crowds are 255, below the objects. There are no labels. Images are turned upright by
    their EXIF orientation; width, height and annotations are those of the upright image.

    Raises ValueError if pycocotools is missing, for files that are not in COCO's format,
    for more than 254 categories, for names that lead out of the folder, and for images that are
    missing or have another size. Also refuses, before drawing anything, images of more than
    50,000,000 pixels, and annotations of one image that cover more than MOST_COVERED pixels or have
    edges longer than MOST_EDGE.
    """
    _pycocotools()
    path, option = path_and_option(where)
    folder = Path(expanduser(option)) if option else path.parent
    tables, annotated = _read(path)
    if not isdir(folder):
        raise ValueError(f"{quoted(folder)} is not a folder: give coco:ANNOTATIONS.json:IMAGEDIR.")
    images, classes = tables["images"], _classes(path, tables["categories"])
    paths = _image_files(path, folder, images)
    regions = _by_image(path, tables, classes)
    names = [row["file_name"] for row in images]
    listing = names_and_sizes(paths, names)
    files = Files(folder, lambda start, stop: enumerate(names[start:stop], start))

    def masks_of(start: int, stop: int) -> list[Later]:
        return [
            Later(
                partial(_class_map, (row["height"], row["width"]), regions[row["id"]], classes),
                f"the mask of image {row['id']}",
            )
            for row in images[start:stop]
        ]

    read_masks = mask_reader(preprocess_masks, masks_of)
    fingerprint = f"coco:{listing}:annotations:{annotated}"
    return picture_samples(paths, fingerprint, preprocess, read_masks, files)


def coco_image_ids(where: str) -> list[int]:
    """Returns the ids of the images of "ANNOTATIONS.json" or "ANNOTATIONS.json:IMAGEDIR".

    The ids are in the order of the samples.
    """
    return [row["id"] for row in _read(path_and_option(where)[0])[0]["images"]]


def coco_results(
    masks: Bool[Tensor, "mask height width"] | Bool[np.ndarray, "mask height width"],
    image_id: SupportsIndex,
    scores: Sequence[float] | Tensor | np.ndarray,
) -> list[dict[str, Any]]:
    """Returns masks of one image in COCO's format for results, which pycocotools' loadRes reads.

    Masks must have the size of the image in the annotations. Empty masks are left out. Every mask
    gets the category 1, because the masks show objects, not classes. Run COCOeval with
    `params.useCats = 0`. COCOeval ignores these masks if `params.catIds` lacks 1; the categories of
    COCO itself include 1.

    Raises ValueError if scores are not finite or not one per mask, or if pycocotools is missing.
    """
    encode = _pycocotools().encode
    masks = np.asarray(masks.cpu() if isinstance(masks, Tensor) else masks)
    values = [float(score) for score in scores]
    if len(values) != len(masks):
        raise ValueError(f"{len(masks)} masks have {len(values)} scores: give one score per mask.")
    if not np.isfinite(values).all():
        raise ValueError("scores hold NaN or Inf: give finite numbers, larger for better masks.")
    results = []
    for mask, score in zip(masks, values, strict=True):
        if mask.any():
            rle = encode(np.asfortranarray(mask.astype(np.uint8)))
            rle = {
                "size": [int(side) for side in rle["size"]],
                "counts": rle["counts"].decode("ascii"),
            }
            results.append(
                {"image_id": index(image_id), "category_id": 1, "segmentation": rle, "score": score}
            )
    return results


def _read(path: Path) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Returns the three tables of an annotation file, and the digest of its bytes.

    Raises ValueError if a table, or a field of a row, is missing.
    """
    what = f"the annotations {quoted(path)}"
    check_file(path, what)
    try:
        data = path.read_bytes()
        content = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {what}: {plain(error)}") from None
    for table, fields in _NEEDED.items():
        rows = content.get(table) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{quoted(path)} holds no COCO annotations: it has no list {table}.")
        for number, row in enumerate(rows):
            for field in fields:
                if field not in row or not _USABLE.get(field, _is_id)(row[field]):
                    raise ValueError(
                        f"{quoted(path)}: number {number} of its {table} has no usable {field}."
                    )
        if len({row["id"] for row in rows}) != len(rows):
            raise ValueError(f"{quoted(path)} gives an id twice in its {table}.")
    return content, digest_of_bytes(data)


def _is_id(value: Any) -> bool:
    # a file could choose larger integers that all collide as keys of a dict
    return checks.is_int(value) and -(2**53) < value < 2**53


def _image_files(path: Path, folder: Path, images: list[dict[str, Any]]) -> list[Path]:
    for row in images:
        checks.pixels(f"image {row['id']} in {quoted(path)}", row["height"], row["width"])
    paths = [inside(folder, row["file_name"], path) for row in images]
    for row, file in zip(images, paths, strict=True):
        width, height = check_image(file, bits=16)
        if (row["width"], row["height"]) != (width, height):
            raise ValueError(
                f"{quoted(path)} gives {quoted(row['file_name'])} as {row['height']} x "
                f"{row['width']}, but the image is {height} x {width}: masks would not fit it."
            )
    return paths


def _classes(path: Path, categories: list[dict[str, Any]]) -> dict[int, int]:
    """Returns the class of each category, by the category's id."""
    if len(categories) >= IGNORE:
        raise ValueError(f"{quoted(path)} has {len(categories)} categories: give at most 254.")
    return {
        identity: number
        for number, identity in enumerate(sorted(row["id"] for row in categories), 1)
    }


def _by_image(
    path: Path, tables: dict[str, Any], classes: dict[int, int]
) -> dict[int, list[dict[str, Any]]]:
    """Returns image id -> its annotations; raises ValueError if an annotation cannot be drawn."""
    images = {row["id"]: row for row in tables["images"]}
    found: dict[int, list[dict[str, Any]]] = {identity: [] for identity in images}
    work: dict[int, tuple[int, int]] = {}
    for row in tables["annotations"]:
        what = f"annotation {row['id']} in {quoted(path)}"
        if row["image_id"] not in images or row["category_id"] not in classes:
            unknown = "image_id" if row["image_id"] not in images else "category_id"
            raise ValueError(f"{what} has the {unknown} {row[unknown]}, which is not in the file.")
        image = images[row["image_id"]]
        more = check_region(row["segmentation"], (image["height"], image["width"]), what)
        before = work.get(image["id"], (0, 0))
        covered, edge = before[0] + more[0], before[1] + more[1]
        if covered > MOST_COVERED or edge > MOST_EDGE:
            raise ValueError(
                f"the annotations of image {image['id']} in {quoted(path)} cover {covered:,} "
                f"pixels or more, with edges of {edge:,}: at most {MOST_COVERED:,} pixels and "
                f"edges of {MOST_EDGE:,} are drawn. Leave some annotations out."
            )
        work[image["id"]] = covered, edge
        found[image["id"]].append(row)
    return found


def _class_map(
    size: tuple[int, int], rows: list[dict[str, Any]], classes: dict[int, int]
) -> Image.Image:
    """Draws the class map of an image; memory holds only this map, and run lengths."""
    drawn = np.zeros(size[::-1], np.uint8)  # column by column, in the order of run lengths
    crowds = [(runs_of(row["segmentation"], size), IGNORE) for row in rows if row.get("iscrowd")]
    objects = [
        (runs_of(row["segmentation"], size), classes[row["category_id"]])
        for row in rows
        if not row.get("iscrowd")
    ]
    objects.sort(key=lambda pair: -pair[0][1::2].sum())  # the smallest comes last, so it is on top
    for runs, number in crowds + objects:
        paint(drawn.reshape(-1), runs, number)
    return Image.fromarray(np.ascontiguousarray(drawn.T))


def _pycocotools() -> Any:
    try:
        from pycocotools import mask
    except ImportError:
        raise ValueError("COCO needs pycocotools: pip install 'crate_interp[coco]'.") from None
    return mask
