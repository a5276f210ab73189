"""A datasets.Dataset as samples: its image column, its label column, its mask column.

Pictures are decoded here, not by datasets, which would open any file that a row names and every
format that Pillow knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from typing import Any, Protocol, runtime_checkable

from PIL import Image
from torch import Tensor

from crate_interp.data.masks import check_mask, class_maps, is_binary
from crate_interp.data.samples import Preprocess, Samples
from crate_interp.pictures import Later, decoded, header, quoted
from crate_interp.words import plain

MASK_COLUMNS = ("mask", "masks", "segmentation", "label_mask", "annotation", "seg")
# How datasets puts the files that a table names into it. Who types it says that they may be read.
EMBED = (
    "from datasets.table import embed_table_storage; data = data.with_format('arrow')"
    ".map(embed_table_storage, batched=True).with_format(None)"
)


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

    Labels are the ClassLabel column, or else the column called label or labels, unless it holds
    pictures or the like. Masks are the image column called mask, masks, segmentation,
    label_mask, annotation or seg (the first of these names) beside another image column. Where
    the masks of the whole data set hold nothing but 0 and 255, 255 is class 1. Otherwise values
    are classes and 255 is ignored. Pictures are read from the bytes in the table alone, and
    turned upright; a format such as "torch" is left aside. Errors in masks are raised when masks
    are read, since not every use reads them.

    Raises ValueError if there is no image column, for a stream without a length, and for a
    transform; reading raises it for a row that names a file instead of holding its bytes.
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
    if dataset.format["type"] == "custom":
        raise ValueError(
            "the dataset has a transform, for which datasets would decode any file: "
            "give data.with_format(None), or the pictures that the transform makes."
        )
    label = next((n for n, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    label = label or next((n for n in ("label", "labels") if _is_plain(features.get(n))), None)
    names = getattr(features[label], "names", None) if label else None
    image = next((name for name in columns if name not in MASK_COLUMNS), columns[0])
    mask = next((name for name in MASK_COLUMNS if name in columns and name != image), None)
    images = _column(dataset, image)
    return Samples(
        n=len(dataset),
        labels=list(dataset.with_format(None).select_columns([label])[label]) if label else None,
        fingerprint=fingerprint or f"datasets:{dataset._fingerprint}",
        read=lambda start, stop: preprocess(images.pictures(start, stop)),
        masks=None
        if mask is None or preprocess_masks is None
        else _masks(images, _column(dataset, mask), preprocess_masks),
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
    return plain(", ".join(dataset.column_names or []), 1000) or "none"


def _is_plain(feature: Any) -> bool:
    """Tells whether a column holds values, or lists of values, that nothing has to decode."""
    import datasets

    inner = getattr(feature, "feature", None)
    return isinstance(feature, datasets.Value) if inner is None else _is_plain(inner)


@dataclass(frozen=True)
class _Column:
    """A column of pictures as files in memory; `mode` is what the table makes of them, or None."""

    rows: Any
    name: str
    mode: str | None

    def files(self, start: int, stop: int) -> list[tuple[bytes, str]]:
        """Returns the bytes of the files, and how errors call them."""
        cells = self.rows[start:stop][self.name]
        return [
            (self._bytes(cell, number), self._what(number))
            for number, cell in enumerate(cells, start)
        ]

    def pictures(self, start: int, stop: int) -> list[Later]:
        """Returns the pictures, of which none is decoded yet."""
        return [
            Later(partial(_decoded, data, what, self.mode), what)
            for data, what in self.files(start, stop)
        ]

    def _what(self, number: int) -> str:
        return f"the {plain(self.name)} of sample {number}"

    def _bytes(self, cell: Mapping[str, Any] | None, number: int) -> bytes:
        if cell is None or (cell["bytes"] is None and cell["path"] is None):
            raise ValueError(f"sample {number} has no {plain(self.name)}: the column holds None.")
        if cell["bytes"] is None:
            raise ValueError(
                f"{self._what(number)} is the name of a file, {quoted(cell['path'])}, without its "
                "bytes: no file that a table names is opened. For a folder of pictures give "
                f'"imagefolder:DIR". If you trust the table, put the files into it first: {EMBED}'
            )
        return cell["bytes"]


def _column(dataset: Any, name: str) -> _Column:
    import datasets

    # alone: whatever else a row holds would be decoded with it
    alone = dataset.with_format(None).select_columns([name])
    rows = alone.cast_column(name, datasets.Image(decode=False))
    return _Column(rows, name, dataset.features[name].mode)


def _decoded(data: bytes, what: str, mode: str | None) -> Image.Image:
    image = decoded(data, what)
    try:
        return image if mode in (None, image.mode) else image.convert(mode)
    except ValueError as error:
        raise ValueError(f"{what} cannot become mode {plain(mode)}: {plain(error)}") from None


def _masks(
    images: _Column, drawn: _Column, preprocess_masks: Preprocess
) -> Callable[[int, int], Tensor]:
    @cache
    def binary() -> bool:
        """Looks at the whole data set, and only once a mask is asked for: it is slow."""
        return is_binary(
            drawn.pictures(index, index + 1)[0].make() for index in range(len(drawn.rows))
        )

    def masks(start: int, stop: int) -> Tensor:
        pairs = zip(drawn.files(start, stop), images.files(start, stop), strict=True)
        for index, (one, picture) in enumerate(pairs, start):
            mode, size = header(BytesIO(one[0]), one[1])
            shown = header(BytesIO(picture[0]), picture[1])[1]
            check_mask(drawn.mode or mode, size, shown, f"sample {index}")
        return class_maps(preprocess_masks, drawn.pictures(start, stop), binary())

    return masks
