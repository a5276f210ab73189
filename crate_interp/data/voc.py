"""Folders in the style of PASCAL VOC.

Images are in JPEGImages/, masks in SegmentationClass/, lists of names in
ImageSets/Segmentation/.
"""

from pathlib import Path

from torch import Tensor

from crate_interp.data.files import (
    inside,
    names_and_sizes,
    path_and_option,
    pictures_under,
)
from crate_interp.data.masks import check_mask, class_maps
from crate_interp.data.samples import Preprocess, Samples, picture_samples
from crate_interp.pictures import check_image, header

IMAGES, MASKS, SPLITS = "JPEGImages", "SegmentationClass", "ImageSets/Segmentation"


def voc_samples(
    where: str,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None,
) -> Samples:
    """Returns the images of "DIR:SPLIT" in the order of that list, or all of "DIR" with a mask.

    Without a split they are ordered by name. Masks hold classes as palette indices or grey
    levels; 255 is ignored in every data set of this kind. There are no labels, because an image
    has several classes.

    Raises ValueError for missing folders, an unknown split, names without image or mask, and
    masks whose size is not that of their image.
    """
    folder, split = path_and_option(where)
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder: give voc:DIR or voc:DIR:SPLIT.")
    for name in (IMAGES, MASKS):
        if not (folder / name).is_dir():
            raise ValueError(
                f"{str(folder)!r} has no folder {name}: "
                f"give voc:DIR with {IMAGES}/ and {MASKS}/ in DIR."
            )
    images, masks = _by_name(folder / IMAGES), _by_name(folder / MASKS)
    names = [name for name in images if name in masks] if split is None else _split(folder, split)
    if not names:
        raise ValueError(
            f"the data is empty: no image in {str(folder / IMAGES)!r} has a mask in {MASKS}/."
        )
    for name in names:
        for kind, found in ((IMAGES, images), (MASKS, masks)):
            if name not in found:
                raise ValueError(
                    f"{name!r} of split {split!r} has no file in {str(folder / kind)!r}."
                )
        check_mask(*header(masks[name]), check_image(images[name]), repr(name))
    pictures, drawn = [images[name] for name in names], [masks[name] for name in names]
    paths = [*pictures, *drawn]
    listing = names_and_sizes(paths, [path.relative_to(folder).as_posix() for path in paths])

    def read_masks(start: int, stop: int) -> Tensor:
        assert preprocess_masks is not None
        return class_maps(preprocess_masks, drawn[start:stop], binary=False)

    return picture_samples(
        pictures, f"voc:{listing}", preprocess, read_masks if preprocess_masks else None
    )


def _by_name(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in pictures_under(folder)
    }


def _split(folder: Path, split: str) -> list[str]:
    """Returns the names in the list of a split: the first word of every line."""
    known = sorted(path.stem for path in (folder / SPLITS).glob("*.txt"))
    if split not in known:
        there = f"there is {', '.join(known)}" if known else f"there are no lists in {SPLITS}/"
        raise ValueError(
            f"no split of {str(folder)!r} is called {split!r}: {there}. voc:DIR takes all masks."
        )
    path = folder / SPLITS / f"{split}.txt"
    names = [
        line.split()[0] for line in path.read_text(errors="replace").splitlines() if line.strip()
    ]
    if not names:
        raise ValueError(f"the data is empty: {str(path)!r} holds no name.")
    for name in names:
        inside(folder / IMAGES, name, path)
    return names
