"""Samples that arrive one after another: a datasets.IterableDataset, a loader, a generator.

A stream is read once, from the start; how many samples it has is known at its end. A DataLoader of
a map-style dataset has a length, and so is not a stream: each sample of its dataset is read once.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeGuard

import torch
from torch.utils import data as loading
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from crate_interp.core import checks, safe_text
from crate_interp.data import items, texts
from crate_interp.data.items import Item, is_array
from crate_interp.data.samples import ImageReading, Samples
from crate_interp.data.tables import columns_of, is_table, text_column

Row = Item


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
    files: None = None

    def chunks(self, size: int) -> Iterator[tuple[int, list[Row]]]:
        """Yields each chunk's first row number, and its rows; the last chunk may be short."""
        rows, start = self.rows(), 0
        while held := list(islice(rows, size)):
            yield start, held
            start += len(held)

    def first_samples(self) -> Samples:
        """Returns the first `limit` samples, whose rows stay in memory, undecoded.

        Raises ValueError if there is no limit.
        """
        if self.limit is None:
            words = "the dataset is a stream, whose samples are needed more than once"
            raise ValueError(f"{words}: give limit=n, or data with a length.")
        return self.held(list(self.rows()), 0)


def is_stream(data: object) -> bool:
    """Tells whether data are rows, items or batches of unknown number, one after another."""
    if isinstance(data, DataLoader):
        return not is_loader(data)
    if is_table(data):
        return not hasattr(data, "__len__")
    if isinstance(data, IterableDataset):
        return True
    if isinstance(data, (str, bytes, Mapping, Samples)) or is_array(data) or texts.is_pair(data):
        return False
    if not texts.is_sequence(data):
        return isinstance(data, Iterable)
    first: Any = data[0] if isinstance(data, list) and data else None
    if isinstance(first, (tuple, list, Mapping)):
        with suppress(ValueError):
            first = items.item_of(first, "data[0]").value
    return is_array(first) and first.ndim == 4  # a list of batches


def image_stream(data: Any, how: ImageReading) -> Stream:
    """Returns the images of a stream of rows, batches or items.

    The columns of rows are chosen as in `data/tables.py`. Batches are a tensor `[batch, channels,
    height, width]`, a list of pictures, (images, labels), or a dictionary of these; items without a
    batch axis are taken too. A DataLoader must be of an IterableDataset; `samples_of_loader` is for
    others.

    Raises ValueError if there is no image, for a DataLoader that would not give each sample once,
    in order, and, as it is read, for a stream that begins with another sample when it is read
    again.
    """
    if is_table(data):
        dataset, print_ = _resolved(data, how.limit)
        columns = columns_of(dataset, masks=how.masks is not None)
        rows, names = columns.undecoded(dataset), columns.names
        read = lambda: columns.items(rows)  # noqa: E731
    else:
        read, print_ = _items_of(data, _separated, how.limit)
        names = texts.names_of(data) or texts.names_of(getattr(data, "dataset", None))

    def samples_of_rows(rows: Sequence[Item], start: int) -> Samples:
        numbers, labels = range(start, start + len(rows)), [item.label for item in rows]
        return items.item_samples(list(rows), numbers, print_, how, labels=labels, names=names)

    return _stream(read, samples_of_rows, print_, how.limit, "image")


def text_stream(data: Any, window_rows: texts.WindowRows, limit: int | None) -> Stream:
    """Returns a stream of texts as windows of tokens, or the tokens of its batches.

    window_rows: turns texts into windows as the texts arrive. Raises ValueError if there is no
    text, and as `image_stream` does.
    """

    def windows(words: Iterable[object]) -> Iterator[Item]:
        pairs = texts.windows_of_texts(window_rows, texts.checked_texts(words))
        return (Item(torch.tensor(row), group=text) for row, text in pairs)

    def items_of(data: Any) -> Iterator[Item]:
        rest = _separated(data, tokens=True)
        for first in rest:
            every = chain([first], rest)
            words = isinstance(first.value, str)
            yield from windows(item.value for item in every) if words else every

    def samples_of_rows(rows: Sequence[Item], start: int) -> Samples:
        tokens = [texts.tokens_of(item.value, f"sample {n}") for n, item in enumerate(rows, start)]
        whole, of = torch.stack(tokens), start + len(rows)
        labels = items.known_labels(item.label for item in rows)
        groups = None if rows[0].group is None else tuple(item.group or 0 for item in rows)
        cut = lambda first, stop: whole[first - start : stop - start]  # noqa: E731
        return Samples(len(rows), labels, print_, cut, start=start, of=of, groups=groups)

    if is_table(data):
        dataset, print_ = _resolved(data, limit)
        name = text_column(dataset)
        alone = dataset.with_format(None).select_columns([name])
        read = lambda: windows(row[name] for row in alone)  # noqa: E731
    else:
        read, print_ = _items_of(data, items_of, limit)
    return _stream(read, samples_of_rows, print_, limit, "text")


def _stream(
    read: Callable[[], Iterator[Item]], first: Any, fingerprint: str, limit: int | None, what: str
) -> Stream:
    """Returns a stream of the first items; raises ValueError, which says `what`, for no item."""
    checks.limit(limit)
    stream = Stream(lambda: islice(read(), limit), first, fingerprint, limit)
    if next(stream.rows(), None) is None:
        raise ValueError(f"the data is empty: there is no {what} in the stream.")
    return stream


def _resolved(dataset: Any, limit: int | None) -> tuple[Any, str]:
    """Returns a table with known columns (stated, or read from its first rows), and its print.

    Raises ValueError if it has no row, or if its columns stay unknown.
    """
    if dataset.features is None and hasattr(dataset, "_resolve_features"):
        with suppress(Exception):  # no row to look at, or rows with different columns
            dataset = dataset._resolve_features()
    if not dataset.features:
        raise ValueError("the stream states no columns: give data.cast(datasets.Features(...)).")
    info = dataset.info
    known = (info.dataset_name or info.builder_name, info.config_name, dataset.split)
    names = ":".join(safe_text.plain(name, 200) if name else "?" for name in known)
    features = hashlib.sha256(repr(sorted(dataset.features.items())).encode()).hexdigest()[:16]
    many = "all rows" if limit is None else f"the first {limit}"
    return dataset, f"stream:{names}:features {features}:{many}:content not hashed"


def _items_of(
    data: Any, separated: Callable[[Any], Iterator[Item]], limit: int | None
) -> tuple[Callable[[], Iterator[Any]], str]:
    """Returns a function that reads the samples from the start, and then the fingerprint."""
    if isinstance(data, DataLoader):
        iterable = isinstance(data.dataset, IterableDataset)
        # each of several workers would read the whole stream
        in_order = data.num_workers < 2 if iterable else type(data.sampler) is SequentialSampler
        if not in_order or _drops_last(data):
            raise ValueError(
                "the DataLoader does not give each sample once, in order: write "
                "DataLoader(dataset, num_workers=0, drop_last=False, shuffle=False)."
            )
    once = iter(data) is data  # a generator, for example, which cannot begin again
    begun = separated(data)
    first = next(begun, None)
    print_ = "" if first is None else items.digest_of(first).hex()
    rest = [begun] if once else []

    def read() -> Iterator[Item]:
        if once and not rest:
            raise ValueError("the iterator cannot restart: give a DataLoader or a list of batches.")
        every = separated(data)
        if once:
            every = chain([] if first is None else [first], rest[0])
        for number, item in enumerate(every):
            if number == 0 and items.digest_of(item).hex() != print_:
                words = "the stream begins with another sample when it is read again"
                raise ValueError(f"{words}: give a fixed order, without random transforms.")
            if number == 1:
                rest.clear()
            yield item

    for _ in range(0 if once or first is None else texts.DRAWS):
        next(read())
    many = "all samples" if limit is None else f"the first {limit}"
    return read, f"stream of {type(data).__name__}:begins sha256 {print_[:16]}:{many}"


def _separated(data: Any, tokens: bool = False) -> Iterator[Item]:
    """Yields the samples of batches one by one."""
    number = 0
    for place, thing in enumerate(data):
        for item in items.separated_batch(items.item_of(thing, f"batch {place}"), tokens, number):
            label = items.label_of(item.label, f"sample {number}")
            yield Item(_copied(item.value), label, _copied(item.mask))
            number += 1


def _copied(value: Any) -> Any:
    """Returns a copy of a sample: a stream may fill the same memory with its next batch."""
    if not is_array(value):
        return value
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def is_loader(data: object) -> TypeGuard[DataLoader]:
    """Tells whether data is a DataLoader of a map-style dataset, which gives samples by number."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    if data.batch_size is not None or data.batch_sampler is not None:
        return True
    dataset: Any = data.dataset  # whose items may be batches themselves
    value = items.item_of(dataset[0], "data[0]").value if len(dataset) else None
    if not is_array(value):
        return not isinstance(value, (list, tuple)) or items.is_tokens(value)
    tokens = value.ndim == 2 and str(value.dtype).endswith(("int32", "int64"))
    return value.ndim != 4 and not tokens


def _drops_last(loader: DataLoader) -> bool:
    """Tells whether a loader leaves out a last batch that is short."""
    return loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)


@dataclass(frozen=True)
class CollatedItems:
    """The samples of a DataLoader's dataset, each as the loader's collate_fn gives it alone."""

    loader: DataLoader
    dataset: loading.Dataset
    classes: tuple[str, ...] | None
    tokens: bool

    def __len__(self) -> int:
        dataset: Any = self.dataset
        return len(dataset)

    def __getitem__(self, number: int) -> Item:
        """Returns a sample; raises ValueError unless the batch of one sample is one sample."""
        thing = self.loader.collate_fn([self.dataset[number]])
        batch = items.item_of(thing, f"sample {number} alone")
        alone = list(items.separated_batch(batch, self.tokens, number))
        if len(alone) != 1:
            raise ValueError(f"the collate_fn makes {len(alone)} samples of one: give the dataset.")
        return alone[0]


def samples_of_loader(loader: DataLoader, tokens: bool = False) -> Any:
    """Returns what a DataLoader of a map-style dataset draws from: each sample once, in order.

    These are the samples of the loader's dataset; with a SubsetRandomSampler, only the samples of
    its indices, in ascending order. A collate_fn of its own is applied to each sample alone.
    tokens: whether samples are tokens or texts. Warns if the loader itself would shuffle, repeat or
    leave out samples.
    """
    dataset: Any = loader.dataset
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, (loading.SubsetRandomSampler, list, tuple, range)):
        numbers = sorted({int(number) for number in getattr(sampler, "indices", sampler)})
        dataset = dataset.select(numbers) if is_table(dataset) else loading.Subset(dataset, numbers)
    kinds = {type(one) for one in (sampler, loader.batch_sampler) if one is not None}
    if not kinds <= {SequentialSampler, loading.BatchSampler} or _drops_last(loader):
        warnings.warn(
            f"the DataLoader's order is left aside: {len(dataset):,} samples of its dataset are "
            "read, each once, in ascending order. To measure some of them, give "
            "torch.utils.data.Subset(dataset, numbers).",
            stacklevel=2,
        )
    if loader.collate_fn in (loading.default_collate, loading.default_convert):
        return dataset
    return CollatedItems(loader, dataset, texts.names_of(loader.dataset), tokens)
