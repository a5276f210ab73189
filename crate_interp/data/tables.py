"""A datasets.Dataset as samples, also those that are embedded in the package or on the Hub.

Pictures are decoded here, not by datasets, which would open any file that a row names and every
format that Pillow knows.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from crate_interp.core import checks
from crate_interp.core.files import digest
from crate_interp.core.pictures import SIXTEEN_BITS, Later, Undecodable, decoded, header, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.items import MASK_KEYS, Item, item_samples
from crate_interp.data.samples import ImageReading, Samples

if TYPE_CHECKING:  # the import takes a second, so it waits until a data set is opened
    import datasets

EMBEDDED = ("fashion", "pictures", "held-out-text", "repeats")
_ASSETS = Path(__file__).parent.parent / "assets"
_HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*):(\w[\w.\[\]:%+-]*)", re.ASCII)


Table = Any  # a datasets.Dataset, whose import takes a second


def is_table(data: object) -> bool:
    """Tells whether data is a datasets.Dataset, also one that another object wraps."""
    return hasattr(data, "features") and hasattr(data, "column_names")


def embedded(name: str) -> "datasets.Dataset":
    """Returns the embedded data set `name`: images with labels (and masks), texts, or tokens.

    Raises ValueError, which suggests the nearest names, if there is no data set of that name.
    """
    import datasets
    import pyarrow.parquet

    # read from the table, since Dataset.from_parquet would write a copy into the user's cache
    return datasets.Dataset(pyarrow.parquet.read_table(_embedded_file(name)))


def embedded_samples(name: str, how: ImageReading) -> Samples:
    """Returns the images of an embedded data set; its fingerprint is the digest of its file."""
    return table_samples(embedded(name), how, f"embedded:{name}:{digest(_embedded_file(name))}")


def _embedded_file(name: str) -> Path:
    return _ASSETS / f"{checks.one_of('embedded data', name, EMBEDDED)}.parquet"


def from_hub(name: str) -> Table:
    """Returns the data set "owner/name:split", fetched from the Hub by datasets.

    The split may be a sum of slices, such as "train[:10%]+test". Raises ValueError if the name has
    another form, before anything is asked, and if the data set cannot be loaded.
    """
    parts = _HUB_NAME.fullmatch(name)
    if parts is None or ".." in name:
        raise ValueError(f"'hf:{plain(name)}': write hf:owner/name:split (hf:ylecun/mnist:test).")
    import datasets

    try:
        return datasets.load_dataset(parts[1], split=parts[2])
    except Exception as error:  # errors of many libraries: network, missing repository, wrong split
        raise ValueError(f"cannot load 'hf:{name}': {plain(error, 300)}") from error


def hub_samples(name: str, how: ImageReading) -> Samples:
    """Returns the samples of a data set on the Hub."""
    return table_samples(from_hub(name), how)


def table_samples(table: Table, how: ImageReading, fingerprint: str | None = None) -> Samples:
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
    columns = columns_of(table, masks=how.masks is not None)
    if table.format["type"] == "custom":
        raise ValueError("the dataset has a transform, not run here: give data.with_format(None).")
    rows, labels = columns.undecoded(table), ()
    if columns.label:
        cells = rows.select_columns([columns.label])[columns.label]
        labels = [columns.label_of(cell) for cell in cells]
    pictures = rows.select_columns(list(columns.modes))

    def read(start: int, stop: int) -> list[Item]:
        cells = pictures[start:stop]
        rows = (dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True))
        return list(columns.items(rows, start))

    return item_samples(
        read, range(len(table)), fingerprint or f"datasets:{table._fingerprint}", how,
        masked=columns.mask is not None, labels=labels, names=columns.names,
    )  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """The columns of a table that samples use, and the modes of pictures; see `table_samples`."""

    image: str
    mask: str | None
    label: str | None
    modes: dict[str, str | None]
    names: tuple[str, ...] | None

    def label_of(self, cell: object) -> Any:
        """Returns a label. -1 of a ClassLabel means that a row has none, as datasets says."""
        return None if self.names is not None and cell == -1 else cell

    def undecoded(self, table: Table) -> Any:
        """Returns the table with only these columns, and with pictures that are not decoded."""
        import datasets

        label = [] if self.label is None else [self.label]
        rows = table.with_format(None).select_columns([*self.modes, *label])
        for name in self.modes:
            rows = rows.cast_column(name, datasets.Image(decode=False))
        return rows

    def items(self, rows: Iterable[Mapping[str, Any]], first: int = 0) -> Iterator[Item]:
        """Yields rows as items, whose pictures and masks are decoded when they are read.

        first: the number of the first row.
        """
        for number, row in enumerate(rows, first):
            mask = self._later(row[self.mask], self.mask, number) if self.mask else None
            label = self.label_of(row.get(self.label)) if self.label else None
            yield Item(self._later(row[self.image], self.image, number), label, mask)

    def _later(self, cell: Any, name: str, number: int) -> Later:
        what = f"the {plain(name)} of sample {number}"
        make = partial(_decoded, cell, what, self.modes[name])
        return Later(make, what, partial(_size, cell, what))


def _size(cell: Any, what: str) -> tuple[int, int]:
    return header(BytesIO(_bytes(cell, what)), what)[1]


def columns_of(table: Table, masks: bool = True) -> Columns:
    """Returns the columns of a data set. Raises ValueError if it has no image column."""
    import datasets

    features: Any = table.features or {}
    pictures = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if not pictures:
        columns = f"its columns are {_names(table)}, but this model reads images"
        raise ValueError(f"the dataset has no image column; {columns}: give pictures or a folder.")
    classes = [name for name, one in features.items() if isinstance(one, datasets.ClassLabel)]
    plain_labels = [name for name in ("label", "labels") if _is_plain(features.get(name))]
    label = next(iter([*classes, *plain_labels]), None)
    names = getattr(features[label], "names", None) if label else None
    image = next((name for name in pictures if name not in MASK_KEYS), pictures[0])
    mask = next((name for name in MASK_KEYS if name in pictures and name != image), None)
    mask = mask if masks else None
    modes = {name: features[name].mode for name in (image, mask) if name is not None}
    return Columns(image, mask, label, modes, None if names is None else tuple(names))


def _is_plain(feature: Any) -> bool:
    """Tells whether a column holds plain values, or lists of them."""
    import datasets

    inner = getattr(feature, "feature", None)
    return isinstance(feature, datasets.Value) if inner is None else _is_plain(inner)


def _bytes(cell: Mapping[str, Any] | None, what: str) -> bytes:
    """Returns the bytes of a picture; raises ValueError if a cell only names a file."""
    if cell is None or (cell["bytes"] is None and cell["path"] is None):
        raise Undecodable(f"{what} is missing: the column holds None.")
    if cell["bytes"] is None:
        words = f"{what} is the name of a file, {quoted(cell['path'])}, which is not opened"
        raise ValueError(f'{words}: give "imagefolder:DIR".')
    return cell["bytes"]


def _decoded(cell: Mapping[str, Any] | None, what: str, mode: str | None) -> Image.Image:
    image = decoded(_bytes(cell, what), what)
    # Pillow would cut 16 bits down to 8; the model's preprocess says what happens to them
    return image if mode is None or image.mode in SIXTEEN_BITS else image.convert(mode)


def text_column(table: Table) -> str:
    """Returns the name of the first text column. Raises ValueError if there is none."""
    import datasets

    for name, feature in (table.features or {}).items():
        if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
            return name
    columns = f"its columns are {_names(table)}, but this model reads text"
    raise ValueError(f"the dataset has no text column; {columns}: give texts or a file.")


def _names(dataset: Table) -> str:
    return plain(", ".join(dataset.column_names or []), 1000) or "none"
