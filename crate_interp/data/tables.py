"""A datasets.Dataset as samples: its image column, its label column, its mask column."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from crate_interp.data.masks import check_mask, class_maps, is_binary
from crate_interp.data.samples import Samples

MASK_COLUMNS = ("mask", "masks", "segmentation", "label_mask", "annotation", "seg")


def table_samples(
    dataset: Any,
    preprocess: Callable[[Any], Tensor],
    preprocess_masks: Callable[[Any], Tensor] | None = None,
    fingerprint: str | None = None,
) -> Samples:
    """The first image column that holds no masks; the labels of a ClassLabel column, or of one called label or labels.

    Masks are the image column called mask, masks, segmentation, label_mask, annotation or seg (the first of these names)
    beside another image column. Values 0 and 255 alone, in the whole data set: 255 is class 1. Otherwise values are
    classes and 255 is ignored. What is wrong with a mask is said when masks are read, since not every use reads them.
    """
    import datasets

    features = dataset.features or {}
    columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise ValueError(
            f"the dataset has no image column; its columns are {', '.join(dataset.column_names) or 'none'}."
        )
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "the dataset is a stream without a length: give a map-style datasets.Dataset."
        )
    label = next((n for n, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    label = label or next((n for n in ("label", "labels") if n in features), None)
    names = getattr(features[label], "names", None) if label else None
    image = next((name for name in columns if name not in MASK_COLUMNS), columns[0])
    mask = next((name for name in MASK_COLUMNS if name in columns and name != image), None)
    without_masks = (
        dataset.remove_columns([mask]) if mask else dataset
    )  # which would be decoded for nothing
    return Samples(
        n=len(dataset),
        labels=list(dataset[label]) if label else None,
        fingerprint=fingerprint or f"datasets:{dataset._fingerprint}",
        read=lambda start, stop: preprocess(_pictures(without_masks, image, start, stop)),
        masks=None
        if mask is None or preprocess_masks is None
        else _masks(dataset, image, mask, preprocess_masks),
        names=None if names is None else tuple(names),
    )


def _masks(
    dataset: Any, image: str, mask: str, preprocess_masks: Callable[[Any], Tensor]
) -> Callable[[int, int], Tensor]:
    only_masks, without_masks = dataset.select_columns([mask]), dataset.remove_columns([mask])

    @cache
    def binary() -> bool:
        """Of the whole data set, and only when the first mask is asked for: every mask may have to be read."""
        return is_binary(
            _pictures(only_masks, mask, index, index + 1)[0] for index in range(len(dataset))
        )

    def masks(start: int, stop: int) -> Tensor:
        drawn, shown = (
            _pictures(only_masks, mask, start, stop),
            _pictures(without_masks, image, start, stop),
        )
        for index, (one, picture) in enumerate(zip(drawn, shown, strict=True), start):
            check_mask(one.mode, one.size, picture.size, f"sample {index}")
        return class_maps(preprocess_masks, drawn, binary())

    return masks


def _pictures(dataset: Any, column: str, start: int, stop: int) -> list[Any]:
    try:
        pictures = list(dataset[start:stop][column])
    except Exception as error:  # every decoder of Pillow has its own
        raise ValueError(
            f"cannot read the {column} of samples {start} to {stop - 1}: {error}"
        ) from error
    missing = [start + index for index, picture in enumerate(pictures) if picture is None]
    if missing:
        raise ValueError(f"sample {missing[0]} has no {column}: the column holds None.")
    return pictures
