"""Samples that arrive one after another: a datasets.IterableDataset, a loader, a generator.

A stream is read once, from the start; how many samples it has is known at its end.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.data.groups import windows_of_texts
from crate_interp.data.item_samples import DRAWS, is_item_data, is_pair, masks_of, names_of
from crate_interp.data.items import (
    Item,
    digest_of,
    images_of,
    is_array,
    item_of,
    known_labels,
    label_of,
    separated_batch,
    tokens_of,
)
from crate_interp.data.loaders import drops_last, is_loader
from crate_interp.data.samples import Preprocess, Samples
from crate_interp.data.tables import Table, checked, columns_of, samples_of_cells, text_column

# a row of a table as {column: value}, the tokens of a window, or an item of a batch
Row = dict[str, Any] | Item
WindowRows = Callable[[Iterable[str]], Iterator[list[int]]]


@dataclass(frozen=True)
class Stream:
    """Samples that arrive in chunks; their number is known only at the end.

    rows() reads from the start of the stream, and yields all rows or the first `limit`. held(rows,
    start) turns rows into samples; the first sample gets the number `start`. fingerprint: made from
    names and columns, or from the first sample, not from all content.
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
    """Tells whether data are rows, items or batches of unknown number, one after another."""
    if isinstance(data, DataLoader):
        return not is_loader(data)
    if isinstance(data, Table):
        return not hasattr(data, "__len__")
    if isinstance(data, IterableDataset):
        return True
    if isinstance(data, (str, bytes, Mapping, Samples)) or is_array(data) or is_pair(data):
        return False
    if is_item_data(data):
        return isinstance(data, list) and bool(data) and _is_batch(data[0])
    return isinstance(data, Iterable)


def _is_batch(thing: Any) -> bool:
    """Tells whether the first of a list is a batch of images: an array with a batch axis."""
    try:
        item = item_of(thing, "data[0]")
    except ValueError:
        return False
    return is_array(item.value) and item.value.ndim == 4


def image_stream(
    data: Any,
    preprocess: Preprocess,
    limit: int | None = None,
    preprocess_masks: Preprocess | None = None,
) -> Stream:
    """Returns the images of a stream of rows, batches or items.

    The columns of rows are chosen as in `data/tables.py`. Batches are a tensor `[batch, channels,
    height, width]`, a list of pictures, (images, labels), or a dictionary of these; items without a
    batch axis are taken too. A DataLoader must be of an IterableDataset; `samples_of_loader` is for
    others.

    Raises ValueError if there is no image, for a DataLoader that would not give each sample once,
    in order, and, as it is read, for a stream that begins with another sample when it is read
    again.
    """
    checks.limit(limit)
    if isinstance(data, Table):
        dataset = _resolved(data)
        columns, print_ = columns_of(dataset), _fingerprint(dataset, limit)
        undecoded = columns.undecoded(dataset)
        rows = lambda: islice((row for row, _ in _each(undecoded, "rows")), limit)  # noqa: E731

        def held(rows: Sequence[Any], start: int) -> Samples:
            def cells(name: str, first: int, stop: int) -> list[Any]:
                return [row[name] for row in rows[first - start : stop - start]]

            label, numbers = columns.label, range(start, start + len(rows))
            labels = columns.labels_of(row[label] for row in rows) if label else None
            functions = preprocess, preprocess_masks
            return samples_of_cells(cells, numbers, labels, columns, print_, *functions)

    else:
        rows, print_ = _rows_of(data, _separated, limit)
        names = names_of(data) or names_of(getattr(data, "dataset", None))

        def held(rows: Sequence[Any], start: int) -> Samples:
            items = lambda first, stop: rows[first - start : stop - start]  # noqa: E731
            read = lambda first, stop: images_of(items(first, stop), first, preprocess)  # noqa: E731
            masks = None
            if any(item.mask is not None for item in rows):
                masks = masks_of(items, range(start, start + len(rows)), preprocess_masks)
            return _held(rows, start, read, print_, names=names, masks=masks)

    return _not_empty(Stream(rows, held, print_, limit), "image")


def text_stream(data: Any, window_rows: WindowRows, limit: int | None) -> Stream:
    """Returns a stream of texts as windows of tokens, or the tokens of its batches.

    window_rows: turns texts into windows as the texts arrive. Raises ValueError if there is no
    text, and as `image_stream` does.
    """
    checks.limit(limit)

    def windows(texts: Iterable[object]) -> Iterator[Item]:
        pairs = windows_of_texts(window_rows, checked(texts))
        return (Item(torch.tensor(row), group=text) for row, text in pairs)

    def items_of(data: Any) -> Iterator[Item]:
        items = _separated(data, tokens=True)
        first = next(items, None)
        if first is not None:
            every = chain([first], items)
            texts = isinstance(first.value, str)
            yield from windows(item.value for item in every) if texts else every

    if isinstance(data, Table):
        dataset = _resolved(data)
        name, print_ = text_column(dataset), _fingerprint(dataset, limit)
        alone = dataset.with_format(None).select_columns([name])
        rows = lambda: islice(windows(row[name] for row, _ in _each(alone, "rows")), limit)  # noqa: E731
    else:
        rows, print_ = _rows_of(data, items_of, limit)

    def held(rows: Sequence[Any], start: int) -> Samples:
        found = [
            tokens_of(item.value, f"sample {number}") for number, item in enumerate(rows, start)
        ]
        tokens = torch.stack(found)
        return _held(rows, start, lambda first, stop: tokens[first - start : stop - start], print_)

    return _not_empty(Stream(rows, held, print_, limit), "text")


def _held(
    items: Sequence[Any],
    start: int,
    read: Callable[[int, int], Tensor],
    fingerprint: str,
    **more: Any,
) -> Samples:
    """Returns items of a stream as samples; the first item has the number start."""
    labels = known_labels([item.label for item in items])
    groups = None if items[0].group is None else tuple(item.group for item in items)
    of = start + len(items)
    return Samples(len(items), labels, fingerprint, read, start=start, of=of, groups=groups, **more)


def _not_empty(stream: Stream, what: str) -> Stream:
    """Returns a stream; raises ValueError, saying that `what` is missing, if it has no row."""
    if next(stream.rows(), None) is None:
        raise ValueError(f"the data is empty: there is no {what} in the stream.")
    return stream


def _each(data: Iterable[Any], what: str) -> Iterator[tuple[Any, int]]:
    """Yields what data gives, with its number; raises ValueError if it cannot be read."""
    things, number = iter(data), 0
    while True:
        try:
            thing = next(things)
        except StopIteration:
            return
        except Exception as error:  # the code of a dataset is its user's, or of many libraries
            raise ValueError(
                f"the stream failed after {number} {what} ({type(error).__name__}: "
                f"{plain(error, 300)}). Finished work is kept: the same call with out=DIR "
                "continues from there."
            ) from error
        yield thing, number
        number += 1


# a stream of rows


def _resolved(data: Table) -> Any:
    """Returns a stream with known columns: the columns it states, or those of its first rows.

    Raises ValueError if it has no row, or if its columns stay unknown.
    """
    dataset: Any = data
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


def _fingerprint(dataset: Any, limit: int | None) -> str:
    """Returns the names and columns of a stream, and the limit, as one line."""
    info = dataset.info
    known = (info.dataset_name or info.builder_name, info.config_name, dataset.split)
    names = ":".join(plain(name, 200) if name else "?" for name in known)
    features = hashlib.sha256(repr(sorted(dataset.features.items())).encode()).hexdigest()[:16]
    many = "all rows" if limit is None else f"the first {limit}"
    return f"stream:{names}:features {features}:{many}:content not hashed"


# a stream of batches


def _rows_of(
    data: Any, separated: Callable[[Any], Iterator[Item]], limit: int | None
) -> tuple[Callable[[], Iterator[Any]], str]:
    """Returns a function that reads the samples from the start, and then the fingerprint."""
    if isinstance(data, DataLoader):
        iterable = isinstance(data.dataset, IterableDataset)
        wrong = {
            "num_workers=0": iterable and data.num_workers > 1,  # each would read the whole stream
            "drop_last=False": drops_last(data),
            "shuffle=False": not iterable and type(data.sampler) is not SequentialSampler,
        }
        wanted = [words for words, found in wrong.items() if found]
        if wanted:
            raise ValueError(
                "the DataLoader does not give each sample once, in order: write "
                f"DataLoader(dataset, {', '.join(wanted)})."
            )
    once = iter(data) is data  # a generator, for example, which cannot begin again
    items = separated(data)
    first = next(items, None)
    print_ = "" if first is None else digest_of(first).hex()
    for _ in range(0 if once or first is None else DRAWS):
        _check_begins(next(separated(data), None), print_)
    kept = [items] if once else []

    def rows() -> Iterator[Item]:
        if once and not kept:
            raise ValueError(
                "the iterator was read to its end or given before, and cannot begin again. Give "
                "something that can, such as a DataLoader or a list of batches."
            )
        every = chain([] if first is None else [first], kept[0]) if kept else separated(data)
        for number, item in enumerate(islice(every, limit)):
            if not number:
                _check_begins(item, print_)
            if once and number == 1:
                kept.clear()
            yield item

    many = "all samples" if limit is None else f"the first {limit}"
    return rows, f"stream of {type(data).__name__}:begins sha256 {print_[:16]}:{many}"


def _check_begins(item: Item | None, wanted: str) -> None:
    """Raises ValueError if the first sample of a stream has not the digest `wanted`."""
    if item is None or digest_of(item).hex() != wanted:
        raise ValueError(
            "the stream begins with another sample when it is read again: it shuffles, or has a "
            "random transform. Give data with a fixed order and no random steps."
        )


def _separated(data: Any, tokens: bool = False) -> Iterator[Item]:
    """Yields the samples of batches one by one."""
    number = 0
    for thing, place in _each(data, "batches"):
        for item in separated_batch(item_of(thing, f"batch {place}"), tokens, number):
            label = label_of(item.label, f"sample {number}")
            yield Item(_copied(item.value), label, _copied(item.mask))
            number += 1


def _copied(value: Any) -> Any:
    """Returns a copy of a sample: a stream may fill the same memory with its next batch."""
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value
