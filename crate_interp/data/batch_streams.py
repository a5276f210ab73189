"""Batches that arrive in their own order: a DataLoader, an IterableDataset, a generator.

A stream is read once, from the start.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
    default_convert,
)

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.data.groups import windows_of_texts
from crate_interp.data.item_samples import DRAWS, is_item_data, masks_of, names_of
from crate_interp.data.items import (
    Item,
    ItemData,
    digest_of,
    images_of,
    is_array,
    is_tokens,
    item_of,
    known_labels,
    label_of,
    tokens_of,
)
from crate_interp.data.samples import Preprocess, Samples
from crate_interp.data.streams import Stream, not_empty
from crate_interp.data.tables import Table, checked


def is_batches(data: object) -> bool:
    """Tells whether data are batches, or items of unknown number, that arrive one after another."""
    if isinstance(data, DataLoader):
        return not is_loader(data)
    if isinstance(data, IterableDataset):
        return not isinstance(data, Table)
    if is_item_data(data):
        given: Any = data
        return isinstance(data, list) and bool(data) and _is_batch(given[0])
    return (
        isinstance(data, Iterable)
        and not isinstance(data, (str, bytes, Mapping, Table))
        and (not is_array(data))
    )


def is_loader(data: object) -> TypeGuard[DataLoader]:
    """Tells whether data is a DataLoader of a map-style dataset, which gives samples by number."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    return data.batch_size is not None or data.batch_sampler is not None or not _gives_batches(data)


def _drops_last(loader: DataLoader) -> bool:
    return loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)


def _gives_batches(loader: DataLoader) -> bool:
    """Tells whether the items of a loader's dataset are batches themselves."""
    dataset: Any = loader.dataset
    value = item_of(dataset[0], "data[0]").value if len(dataset) else None
    if not is_array(value):
        return isinstance(value, (list, tuple)) and not is_tokens(value)
    tokens = value.ndim == 2 and str(value.dtype).endswith(("int32", "int64"))
    return value.ndim == 4 or tokens


def _is_batch(thing: Any) -> bool:
    """Tells whether the first of a list is a batch of images: an array with a batch axis."""
    try:
        item = item_of(thing, "data[0]")
    except ValueError:
        return False
    return is_array(item.value) and item.value.ndim == 4


def batch_stream(
    data: Iterable[Any],
    preprocess: Preprocess,
    limit: int | None = None,
    preprocess_masks: Preprocess | None = None,
) -> Stream:
    """Returns the images of batches as a stream.

    Batches are a tensor `[batch, channels, height, width]`, a list of pictures, (images, labels),
    or a dictionary of these; items without a batch axis are taken too.

    A DataLoader must be of an IterableDataset; `samples_of_loader` is for others. Raises ValueError
    for a DataLoader with several workers, each of which would read the whole stream, or with
    drop_last; for an empty stream; and, as it is read, for a stream that begins with another sample
    when it is read again.
    """
    checks.limit(limit)
    rows, print_ = _rows_of(data, _separated, limit)
    names = names_of(data) or names_of(getattr(data, "dataset", None))

    def held(found: Sequence[Any], start: int) -> Samples:
        def items(first: int, stop: int) -> Sequence[Item]:
            return found[first - start : stop - start]

        read = lambda first, stop: images_of(items(first, stop), first, preprocess)  # noqa: E731
        masks = None
        if any(item.mask is not None for item in found):
            numbers = range(start, start + len(found))
            masks = masks_of(items, numbers, preprocess_masks)
        return _held(found, start, read, print_, names=names, masks=masks)

    return not_empty(Stream(rows, held, print_, limit), "image")


def token_stream(
    data: Iterable[Any],
    window_rows: Callable[[Iterable[str]], Iterator[list[int]]],
    limit: int | None,
) -> Stream:
    """Returns the tokens of batches as a stream, or windows of their texts.

    window_rows: turns texts into windows. Raises ValueError as `batch_stream` does.
    """
    checks.limit(limit)

    def windows(data: Any) -> Iterator[Item]:
        items = _separated(data, tokens=True)
        first = next(items, None)
        if first is None:
            return
        items = chain([first], items)
        if isinstance(first.value, str):
            texts = checked(item.value for item in items)
            windows = windows_of_texts(window_rows, texts)
            yield from (Item(torch.tensor(row), group=text) for row, text in windows)
        else:
            yield from items

    rows, print_ = _rows_of(data, windows, limit)

    def held(found: Sequence[Any], start: int) -> Samples:
        tokens = torch.stack(
            [tokens_of(item.value, f"sample {n}") for n, item in enumerate(found, start)]
        )
        read = lambda first, stop: tokens[first - start : stop - start]  # noqa: E731
        return _held(found, start, read, print_)

    return not_empty(Stream(rows, held, print_, limit), "text")


def _held(
    found: Sequence[Any],
    start: int,
    read: Callable[[int, int], Tensor],
    fingerprint: str,
    **more: Any,
) -> Samples:
    """Returns items of a stream as samples; the first item has the number start."""
    known = known_labels([item.label for item in found])
    place = {"start": start, "of": start + len(found)}
    groups = None if found[0].group is None else tuple(item.group for item in found)
    return Samples(len(found), known, fingerprint, read, **place, groups=groups, **more)


def _rows_of(
    data: Any, separated: Callable[[Any], Iterator[Item]], limit: int | None
) -> tuple[Callable[[], Iterator[Any]], str]:
    """Returns a function that reads the samples from the start, and then the fingerprint."""
    _check_loader(data)
    once = iter(data) is data  # a generator, for example, which cannot begin again
    found = separated(data)
    first = next(found, None)
    print_ = "" if first is None else digest_of(first).hex()
    for _ in range(0 if once or first is None else DRAWS):
        _check_begins(next(separated(data), None), print_)
    kept = [found] if once else []

    def rows() -> Iterator[Item]:
        if once and not kept:
            raise ValueError(
                "the iterator was read to its end or given before, and cannot begin again. Give "
                "something that can, such as a DataLoader or a list of batches."
            )
        items = chain([] if first is None else [first], kept[0]) if kept else separated(data)
        for number, item in enumerate(islice(items, limit)):
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


def _check_loader(data: Any) -> None:
    """Raises ValueError for a DataLoader that may shuffle, repeat or leave out what it draws."""
    if not isinstance(data, DataLoader):
        return
    wrong = {
        "num_workers=0": isinstance(data.dataset, IterableDataset) and data.num_workers > 1,
        "drop_last=False": _drops_last(data),
        "shuffle=False": not isinstance(data.dataset, IterableDataset)
        and type(data.sampler) is not SequentialSampler,
    }
    wanted = [words for words, found in wrong.items() if found]
    if wanted:
        raise ValueError(
            "the DataLoader does not give each sample once, in order: write "
            f"DataLoader(dataset, {', '.join(wanted)})."
        )


def _separated(data: Any, tokens: bool = False) -> Iterator[Item]:
    """Yields the samples of batches one by one."""
    number, batches = 0, iter(data)
    while True:
        try:
            thing = next(batches)
        except StopIteration:
            return
        except Exception as error:  # the code of a dataset is its user's
            raise ValueError(
                f"the stream failed after {number} samples ({type(error).__name__}: "
                f"{plain(error, 300)}). Finished work is kept: the same call with out=DIR "
                "continues from there."
            ) from error
        batch = item_of(thing, f"batch {number}")
        for item in _of_batch(batch, tokens, number):
            label = label_of(item.label, f"sample {number}")
            yield Item(_copied(item.value), label, _copied(item.mask))
            number += 1


def _copied(value: Any) -> Any:
    """Returns a copy of a sample: a stream may fill the same memory with its next batch."""
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _of_batch(batch: Item, tokens: bool, number: int) -> Iterator[Item]:
    """Yields the samples of a batch, or the one sample that it is."""
    value, axes = batch.value, 2 if tokens else 4
    several = value.ndim == axes if is_array(value) else isinstance(value, (list, tuple))
    if not several or (tokens and is_tokens(value)):
        yield batch
        return
    parts = {"labels": batch.label, "masks": batch.mask}
    for name, part in parts.items():
        if part is not None and len(part) != len(value):
            raise ValueError(
                f"a batch after {number} samples has {len(value)} samples and {len(part)} {name}."
            )
    empty = [None] * len(value)
    labels, masks = (empty if part is None else part for part in parts.values())
    for one, label, mask in zip(value, labels, masks, strict=True):
        yield Item(one, label, mask)


@dataclass(frozen=True)
class Collated:
    """The samples of a DataLoader's dataset, each as the loader's collate_fn gives it alone."""

    dataset: ItemData
    collate: Callable[[list[Any]], object]
    classes: tuple[str, ...] | None
    tokens: bool

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Item:
        """Returns a sample; raises ValueError unless the batch of one sample is one sample."""
        batch = item_of(self.collate([self.dataset[number]]), f"sample {number} alone")
        items = list(_of_batch(batch, self.tokens, number))
        if len(items) != 1:
            raise ValueError(
                f"the loader's collate_fn makes {len(items)} samples of sample {number} alone: "
                "give loader.dataset, or a collate_fn that gives one."
            )
        return items[0]


def samples_of_loader(loader: DataLoader, tokens: bool = False) -> Any:
    """Returns what a DataLoader of a map-style dataset draws from: each sample once, in order.

    That is its dataset; of a SubsetRandomSampler only the samples of its indices, in ascending
    order. A collate_fn of its own is applied to each sample alone. tokens: whether samples are
    tokens or texts. Warns if the loader itself would shuffle, repeat or leave out samples.
    """
    dataset: Any = loader.dataset
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    chosen = sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler
    if isinstance(sampler, (SubsetRandomSampler, list, tuple, range)):
        numbers = sorted({int(number) for number in chosen})
        select: Any = getattr(dataset, "select", None)  # of a datasets.Dataset
        dataset = select(numbers) if isinstance(dataset, Table) else Subset(dataset, numbers)
    kinds = [type(one) for one in (sampler, loader.batch_sampler) if one is not None]
    if not {SequentialSampler, BatchSampler}.issuperset(kinds) or _drops_last(loader):
        warnings.warn(
            f"the DataLoader's order ({', '.join(kind.__name__ for kind in kinds)}) is left aside: "
            f"{len(dataset):,} samples of its dataset are read, each once, in ascending order. To "
            "measure some of them, give torch.utils.data.Subset(dataset, numbers).",
            stacklevel=2,
        )
    if loader.collate_fn in (default_collate, default_convert):
        return dataset
    return Collated(dataset, loader.collate_fn, names_of(loader.dataset), tokens)
