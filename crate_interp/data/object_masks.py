"""Images with masks of objects: COCO, PASCAL VOC, and objects with alpha on backgrounds.

VOC has images in JPEGImages/, masks in SegmentationClass/, lists of names in
ImageSets/Segmentation/.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from os.path import expanduser, isdir, splitext
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from crate_interp.core.files import digest_of_bytes
from crate_interp.core.pictures import Later, header, loaded, opened, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data import folder_listing as listing
from crate_interp.data.folder_listing import file_samples, names_under, path_and_option, size_of
from crate_interp.data.items import IGNORE, Item, item_samples
from crate_interp.data.samples import Files, ImageReading, Samples, inside

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
        given = f"cannot read the annotations {quoted(path)}: {plain(repr(error))}"
        raise ValueError(f"{given}. Give a JSON file in COCO's format.") from None
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
    fingerprint = f"coco:{listing.names_and_sizes(names, map(size_of, paths))}:{annotated}"
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
            words = f"where DIR has {VOC_IMAGES}/ and {VOC_MASKS}/"
            raise ValueError(f"{quoted(place)} is not a folder: give voc:DIR, {words}.")
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
    print_ = f"voc:{listing.names_and_sizes(below + drawn, sizes)}"
    return file_samples(items, folder, below, how, print_, drawn, binary=False)


def _split(folder: Path, split: str) -> list[str]:
    """Returns the names in the list of a split: the first word of every line."""
    path = folder / VOC_SPLITS / f"{split}.txt"
    known = sorted(one.stem for one in path.parent.glob("*.txt"))
    if split not in known:
        given = f"no split of {quoted(folder)} is called {quoted(split)}"
        raise ValueError(f"{given}: give one of {plain(', '.join(known), 1000)}, or voc:DIR.")
    text = path.read_text("utf-8", errors="surrogateescape")  # file names may be any bytes
    return [line.split()[0] for line in text.splitlines() if line.strip()]


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
        given = f"cutouts:{plain(where, 1000)} is not a folder"
        raise ValueError(f"{given}: give cutouts:DIR, or cutouts:DIR:NUMBER with a seed.")
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
    print_ = f"cutouts:seed={int(seed)}:{listing.names_and_sizes(known, map(size_of, paths))}"
    return item_samples(
        composites.items, range(len(names)), print_, how, masked=True, binary=True,
        files=Files(folder, composites.files, composites.files),
        labels=listing.first_folders(names),
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
