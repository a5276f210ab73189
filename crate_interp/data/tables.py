"""A datasets.Dataset as samples: its image column, its label column, its mask column."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, runtime_checkable

from PIL import Image
from torch import Tensor

from crate_interp.data.masks import check_mask, class_maps, is_binary
from crate_interp.data.samples import Preprocess, Samples

MASK_COLUMNS = ("mask", "masks", "segmentation", "label_mask", "annotation", "seg")


@runtime_checkable
class Table(Protocol):
    """What tells a datasets.Dataset: importing datasets takes a second, so nobody has to."""

    @property
    def features(self) -> Mapping[str, Any] | None: ...

    @property
    def column_names(self) -> list[str] | None: ...


def table_samples(
    table: Table,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None = None,
    fingerprint: str | None = None,
) -> Samples:
    """Returns the first image column that holds no masks, with labels and masks if there are any.

    Labels are the ClassLabel column, or else the column called label or labels. Masks are the
    image column called mask, masks, segmentation, label_mask, annotation or seg (the first of
    these names) beside another image column. Where the masks of the whole data set hold nothing
    but 0 and 255, 255 is class 1. Otherwise values are classes and 255 is ignored. Errors in
    masks are raised when masks are read, since not every use reads them.

    Raises ValueError if there is no image column, and for a stream without a length.
    """
    import datasets

    dataset: Any = table
    features = dataset.features or {}
    columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if not columns:
        raise ValueError(f"the dataset has no image column; its columns are {_names(dataset)}.")
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "the dataset is a stream without a length: give a map-style datasets.Dataset."
        )
    label = next((n for n, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    label = label or next((n for n in ("label", "labels") if n in features), None)
    names = getattr(features[label], "names", None) if label else None
    image = next((name for name in columns if name not in MASK_COLUMNS), columns[0])
    mask = next((name for name in MASK_COLUMNS if name in columns and name != image), None)
    # masks would be decoded for nothing whenever images are read
    without_masks = dataset.remove_columns([mask]) if mask else dataset
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


def texts_of(table: Table) -> list[str]:
    """Returns the first text column.

    Raises ValueError if there is none.
    """
    import datasets

    kinds = ("string", "large_string")
    dataset: Any = table
    for name, feature in (dataset.features or {}).items():
        if isinstance(feature, datasets.Value) and feature.dtype in kinds:
            return list(dataset[name])
    raise ValueError(f"the dataset has no text column; its columns are {_names(dataset)}.")


def _names(dataset: Table) -> str:
    return ", ".join(dataset.column_names or []) or "none"


def _masks(
    dataset: Any, image: str, mask: str, preprocess_masks: Preprocess
) -> Callable[[int, int], Tensor]:
    only_masks, without_masks = dataset.select_columns([mask]), dataset.remove_columns([mask])

    @cache
    def binary() -> bool:
        """Looks at the whole data set, and only once a mask is asked for: it is slow."""
        return is_binary(
            _pictures(only_masks, mask, index, index + 1)[0] for index in range(len(dataset))
        )

    def masks(start: int, stop: int) -> Tensor:
        drawn = _pictures(only_masks, mask, start, stop)
        shown = _pictures(without_masks, image, start, stop)
        for index, (one, picture) in enumerate(zip(drawn, shown, strict=True), start):
            check_mask(one.mode, one.size, picture.size, f"sample {index}")
        return class_maps(preprocess_masks, drawn, binary())

    return masks


def _pictures(dataset: Any, column: str, start: int, stop: int) -> list[Image.Image]:
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
