"""A datasets.IterableDataset as samples: rows arrive one by one, and their number is unknown."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.data.groups import windows_of_texts
from crate_interp.data.items import Item
from crate_interp.data.samples import Preprocess, Samples
from crate_interp.data.tables import Table, checked, columns_of, row_samples, text_column

# a row of a table as {column: value}, the tokens of a window, or an item of a batch
Row = dict[str, Any] | Item


@dataclass(frozen=True)
class Stream:
    """Samples that arrive in chunks; their number is known only at the end.

    rows() reads from the start of the stream, and yields all rows or the first `limit`. held(rows,
    start) turns rows into samples; the first sample gets the number `start`. fingerprint: made from
    the names and columns of the data, not from its content.
    """

    rows: Callable[[], Iterator[Row]]
    held: Callable[[Sequence[Row], int], Samples]
    fingerprint: str
    limit: int | None = None
    start: int = 0
    n: None = None
    listing: None = None
    files: None = None

    def chunks(self, size: int) -> Iterator[tuple[int, list[Row]]]:
        """Yields each chunk's first row number, and its rows; the last chunk may be short."""
        rows, start = self.rows(), 0
        while held := list(islice(rows, size)):
            yield start, held
            start += len(held)

    def kept(self) -> Samples:
        """Returns the first `limit` samples, whose rows stay in memory, undecoded.

        Raises ValueError if there is no limit.
        """
        if self.limit is None:
            raise ValueError(
                "the dataset is a stream, but its samples are needed more than once: give limit=n, "
                "which keeps the first n samples in memory, or data with a length, such as "
                "loader.dataset or a map-style datasets.Dataset."
            )
        return self.held(list(self.rows()), 0)


def is_stream(data: object) -> bool:
    """Tells whether data is a datasets.IterableDataset: a table without a length."""
    return isinstance(data, Table) and not hasattr(data, "__len__")


def image_stream(
    data: Table,
    preprocess: Preprocess,
    limit: int | None = None,
    preprocess_masks: Preprocess | None = None,
) -> Stream:
    """Returns the images of a stream; columns are chosen as in `data/tables.py`.

    Raises ValueError if there is no image column, if the stream is empty, or if datasets would
    decode pictures for a step of the stream.
    """
    checks.limit(limit)
    dataset = _resolved(data)
    columns = columns_of(dataset)
    print_ = _fingerprint(dataset, limit)
    undecoded = columns.undecoded(dataset)

    def held(rows: Sequence[Row], start: int) -> Samples:
        return row_samples(rows, start, columns, print_, preprocess, preprocess_masks)

    return not_empty(Stream(lambda: islice(_rows(undecoded), limit), held, print_, limit), "image")


def text_stream(
    data: Table, window_rows: Callable[[Iterable[str]], Iterator[list[int]]], limit: int | None
) -> Stream:
    """Returns the texts of a stream as windows of tokens.

    window_rows: turns texts into windows as the texts arrive. Raises ValueError if there is no text
    column, or if the stream is empty.
    """
    checks.limit(limit)
    dataset = _resolved(data)
    name = text_column(dataset)
    print_ = _fingerprint(dataset, limit)
    alone = dataset.with_format(None).select_columns([name])

    def rows() -> Iterator[Row]:
        texts = (row[name] for row in _rows(alone))
        windows = islice(windows_of_texts(window_rows, checked(texts)), limit)
        yield from (Item(row, group=text) for row, text in windows)

    def held(rows: Sequence[Any], start: int) -> Samples:
        tokens = torch.tensor([row.value for row in rows], dtype=torch.long)
        read = lambda first, stop: tokens[first - start : stop - start]  # noqa: E731
        of, groups = start + len(rows), tuple(row.group for row in rows)
        return Samples(len(rows), None, print_, read, start=start, of=of, groups=groups)

    return not_empty(Stream(rows, held, print_, limit), "text")


def _rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a data set; raises ValueError if a row cannot be read."""
    rows, number = iter(dataset), 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # errors of many libraries: network, damaged files
            raise ValueError(
                f"the stream failed after {number} rows ({plain(error, 300)}). Finished work "
                "is kept: the same call with out=DIR continues from there."
            ) from error
        yield row
        number += 1


def not_empty(stream: Stream, what: str) -> Stream:
    """Returns a stream; raises ValueError, saying that `what` is missing, if it has no row."""
    if next(stream.rows(), None) is None:
        raise ValueError(f"the data is empty: there is no {what} in the stream.")
    return stream


def _resolved(data: Table) -> Any:
    """Returns a stream with known columns: the columns it states, or those of its first rows.

    Raises ValueError if it has no row, or if its columns stay unknown.
    """
    dataset: Any = data
    _check_steps(dataset)  # before any row is read
    if dataset.features is None and hasattr(dataset, "_resolve_features"):
        try:
            dataset = dataset._resolve_features()
        except Exception:  # no row to look at, or rows with different columns
            pass
    if not dataset.features:
        if next(iter(dataset), None) is None:
            raise ValueError("the data is empty: there is no row in the stream.")
        raise ValueError(
            "the stream does not state its columns: set them with "
            "data = data.cast(datasets.Features(...))."
        )
    return dataset


def _check_steps(dataset: Any) -> None:
    """Raises ValueError if a step of a stream, such as a map, gets pictures that datasets decodes.

    To decode a picture, datasets opens any file that a row names. The steps are found in private
    attributes, because datasets has no public list of them.
    """
    import datasets

    left = [getattr(dataset, "_ex_iterable", None)]
    while left:
        step = left.pop()
        inner = [getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or [])]
        left += [one for one in inner if one is not None]
        features = getattr(step, "_features", None) or {}
        names = [
            name
            for name, feature in features.items()
            if isinstance(feature, datasets.Image) and feature.decode
        ]
        if names and type(step).__name__ == "FormattedExamplesIterable":
            raise ValueError(
                f"the stream has a step, such as map or filter, for which datasets would decode "
                f"{plain(names[0])!r} from any file. Before this step, put data = data.cast_column("
                f"{plain(names[0])!r}, datasets.Image(decode=False))."
            )


def _fingerprint(dataset: Any, limit: int | None) -> str:
    """Returns the names and columns of a stream, and the limit, as one line."""
    info = dataset.info
    known = (info.dataset_name or info.builder_name, info.config_name, dataset.split)
    names = ":".join(plain(name, 200) if name else "?" for name in known)
    features = hashlib.sha256(repr(sorted(dataset.features.items())).encode()).hexdigest()[:16]
    many = "all rows" if limit is None else f"the first {limit}"
    return f"stream:{names}:features {features}:{many}:content not hashed"
