"""A datasets.Dataset as samples: its image column, its label column, its mask column.

Pictures are decoded here, not by datasets, which would open any file that a row names and every
format that Pillow knows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from typing import Any, Protocol, runtime_checkable

from PIL import Image
from torch import Tensor

from crate_interp.core.pictures import SIXTEEN_BITS, Later, Undecodable, decoded, header, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.class_maps import check_mask, class_maps, is_binary
from crate_interp.data.samples import Preprocess, Samples

MASK_COLUMNS = ("mask", "masks", "segmentation", "label_mask", "annotation", "seg")
# An error shows this code to users who trust a table: the code copies the files that the table
# names into the table.
EMBED = (
    "from datasets.table import embed_table_storage; data = data.with_format('arrow')"
    ".map(embed_table_storage, batched=True).with_format(None)"
)
Cells = Callable[[str, int, int], Sequence[Any]]  # column, start, stop -> undecoded pictures


def check_not_several(data: object) -> None:
    """Raises ValueError, which names the splits, for a datasets.DatasetDict of several tables."""
    if isinstance(data, Mapping) and data and hasattr(data, "column_names"):
        splits = " or ".join(f'data["{plain(name, 200)}"]' for name in data)
        raise ValueError(f"the data is a {type(data).__name__}: give one split, {splits}.")


class _ByAttributes(type(Protocol)):
    """Finds a wrapped table too: since Python 3.12 Protocols pass over a wrapper's __getattr__."""

    def __instancecheck__(cls, data: object) -> bool:
        return hasattr(data, "features") and hasattr(data, "column_names")


@runtime_checkable
class Table(Protocol, metaclass=_ByAttributes):
    """A datasets.Dataset, recognised without importing datasets, which takes a second."""

    @property
    def features(self) -> Mapping[str, Any] | None:
        """The type of each column by its name, or None if the types are unknown."""
        ...

    @property
    def column_names(self) -> list[str] | None:
        """The names of the columns, or None if they are unknown."""
        ...


def table_samples(
    table: Table,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None = None,
    fingerprint: str | None = None,
) -> Samples:
    """Returns the images of a table as samples, with labels and masks if there are any.

    Images are the first image column that does not hold masks. Labels are the ClassLabel column. If
    there is none, they are the column called label or labels, unless it holds pictures or the like.
    If there are several image columns, masks are the column called mask, masks, segmentation,
    label_mask, annotation or seg (the first of these names that occurs). Values of masks are
    classes, and 255 is ignored; but if the masks of the whole data set hold only 0 and 255, 255 is
    class 1. Errors in masks are raised when the masks are read, since not every use reads them.
    Pictures are read only from bytes in the table, and turned upright. A format of the table, such
    as "torch", is ignored.

    Raises ValueError if there is no image column, or if the table has a transform. Reading a sample
    raises ValueError if its row names a file instead of holding the bytes of the file.
    """
    dataset: Any = table
    columns = columns_of(dataset)
    if dataset.format["type"] == "custom":
        raise ValueError(
            "the dataset has a transform, for which datasets would decode any file that a row "
            "names: give data.with_format(None), or a dataset of the pictures that the "
            "transform makes."
        )
    rows, label = columns.undecoded(dataset), columns.label
    alone = cache(lambda name: rows.select_columns([name]))
    labels = columns.labels_of(alone(label)[label]) if label else None
    return samples_of_cells(
        lambda name, start, stop: alone(name)[start:stop][name],
        range(len(dataset)),
        labels,
        columns,
        fingerprint or f"datasets:{dataset._fingerprint}",
        preprocess,
        preprocess_masks,
    )


@dataclass(frozen=True)
class Columns:
    """The columns of a table that samples use, and the modes of pictures; see `table_samples`."""

    image: str
    mask: str | None
    label: str | None
    modes: dict[str, str | None]
    names: tuple[str, ...] | None

    def labels_of(self, cells: Iterable[Any]) -> list[Any] | None:
        """Returns labels. -1 of a ClassLabel means that a row has none, as datasets says."""
        missing = None if self.names is None else -1
        labels = [None if cell == missing else cell for cell in cells]
        return None if self.names is not None and all(one is None for one in labels) else labels

    def undecoded(self, table: Table) -> Any:
        """Returns the table with only these columns, and with pictures that are not decoded."""
        import datasets

        dataset: Any = table
        wanted = [name for name in (self.image, self.mask, self.label) if name is not None]
        rows = dataset.with_format(None).select_columns(wanted)
        for name in self.modes:
            rows = rows.cast_column(name, datasets.Image(decode=False))
        return rows


def columns_of(table: Table) -> Columns:
    """Returns the columns of a data set. Raises ValueError if it has no image column."""
    import datasets

    features: Any = table.features or {}
    pictures = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if not pictures:
        raise ValueError(
            f"the dataset has no image column; its columns are {_names(table)}, but this model "
            "reads images: give data with images, or a language model."
        )
    label = next((n for n, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    label = label or next((n for n in ("label", "labels") if _is_plain(features.get(n))), None)
    names = getattr(features[label], "names", None) if label else None
    image = next((name for name in pictures if name not in MASK_COLUMNS), pictures[0])
    mask = next((name for name in MASK_COLUMNS if name in pictures and name != image), None)
    modes = {name: features[name].mode for name in (image, mask) if name is not None}
    return Columns(image, mask, label, modes, None if names is None else tuple(names))


def _is_plain(feature: Any) -> bool:
    """Tells whether a column holds plain values, or lists of them."""
    import datasets

    inner = getattr(feature, "feature", None)
    return isinstance(feature, datasets.Value) if inner is None else _is_plain(inner)


def samples_of_cells(
    cells: Cells,
    numbers: range,
    labels: list[Any] | None,
    columns: Columns,
    fingerprint: str,
    preprocess: Preprocess,
    preprocess_masks: Preprocess | None,
) -> Samples:
    """Returns rows as samples numbered by `numbers`; their masks decide whether 255 is a class."""
    image, mask = columns.image, columns.mask

    def files(name: str, start: int, stop: int) -> list[tuple[bytes, str]]:
        """Returns the bytes of each picture, and its name in errors."""
        pairs = enumerate(cells(name, start, stop), start)
        return [(_bytes(cell, name, number), _what(name, number)) for number, cell in pairs]

    def pictures(name: str, start: int, stop: int) -> list[Later]:
        mode = columns.modes[name]
        return [
            Later(partial(_decoded, data, what, mode), what)
            for data, what in files(name, start, stop)
        ]

    def readable(name: str) -> Iterator[Image.Image]:
        for number in numbers:
            with suppress(Undecodable):  # raised when it is read
                yield pictures(name, number, number + 1)[0].make()

    masks: Callable[[int, int], Tensor] | None = None
    if mask is not None and preprocess_masks is not None:

        @cache
        def binary() -> bool:
            """Looks at all masks, which is slow, and so waits until the first mask is read."""
            return is_binary(readable(mask))

        def checked_maps(start: int, stop: int) -> Tensor:
            pairs = zip(files(mask, start, stop), files(image, start, stop), strict=True)
            for index, ((drawn, what), (shown, name)) in enumerate(pairs, start):
                mode, size = header(BytesIO(drawn), what)
                image_size = header(BytesIO(shown), name)[1]
                check_mask(columns.modes[mask] or mode, size, image_size, f"sample {index}")
            return class_maps(preprocess_masks, pictures(mask, start, stop), binary())

        masks = checked_maps

    return Samples(
        n=len(numbers),
        labels=labels,
        fingerprint=fingerprint,
        read=lambda start, stop: preprocess(pictures(image, start, stop)),
        masks=masks,
        names=columns.names,
        start=numbers.start,
        of=numbers.stop,
    )


def _what(name: str, number: int) -> str:
    return f"the {plain(name)} of sample {number}"


def _bytes(cell: Mapping[str, Any] | None, name: str, number: int) -> bytes:
    if cell is None or (cell["bytes"] is None and cell["path"] is None):
        raise Undecodable(f"sample {number} has no {plain(name)}: the column holds None.")
    if cell["bytes"] is None:
        raise ValueError(
            f"{_what(name, number)} is the name of a file, {quoted(cell['path'])}, without its "
            'bytes: no file that a table names is opened. Give "imagefolder:DIR" with the folder '
            f"of the files. If you trust the table, first put the files into it: {EMBED}"
        )
    return cell["bytes"]


def _decoded(data: bytes, what: str, mode: str | None) -> Image.Image:
    image = decoded(data, what)
    # Pillow would cut 16 bits down to 8; the model's preprocess says what happens to them
    if mode in (None, image.mode) or image.mode in SIXTEEN_BITS:
        return image
    try:
        return image.convert(mode)
    except ValueError as error:
        raise Undecodable(f"{what} cannot become mode {plain(mode)}: {plain(error)}") from None


def text_column(table: Table) -> str:
    """Returns the name of the first text column. Raises ValueError if there is none."""
    import datasets

    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
            return name
    raise ValueError(
        f"the dataset has no text column; its columns are {_names(table)}, but this model "
        "reads text: give data with text, or a model of images."
    )


def checked(texts: Iterable[object]) -> Iterator[str]:
    """Yields texts; raises ValueError if one is not a string, or if UTF-8 cannot encode it."""
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            kind = type(text).__name__
            raise ValueError(f"entry {place} of the data is of type {kind}: give only strings.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text {place} holds half of a surrogate pair, at character {error.start}: give "
                "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace') instead."
            ) from None
        yield text


def _names(dataset: Table) -> str:
    return plain(", ".join(dataset.column_names or []), 1000) or "none"
