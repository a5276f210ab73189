"""Batches that arrive in their own order: a DataLoader, an IterableDataset, a generator.

A stream is read once, from the start.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.data.item_samples import is_item_data, names_of
from crate_interp.data.items import (
    Item,
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

_SHUFFLES = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def is_batches(data: object) -> bool:
    """Tells whether data are batches, or items of unknown number, that arrive one after another."""
    if isinstance(data, (DataLoader, IterableDataset)):
        return not isinstance(data, Table)
    if is_item_data(data):
        given: Any = data
        return isinstance(data, list) and bool(data) and _is_batch(given[0])
    return (
        isinstance(data, Iterable)
        and not isinstance(data, (str, bytes, Mapping, Table))
        and (not is_array(data))
    )


def _is_batch(thing: Any) -> bool:
    """Tells whether the first of a list is a batch of images: an array with a batch axis."""
    try:
        item = item_of(thing, "data[0]")
    except ValueError:
        return False
    return is_array(item.value) and item.value.ndim == 4


def batch_stream(data: Iterable[Any], preprocess: Preprocess, limit: int | None = None) -> Stream:
    """Returns the images of batches as a stream.

    Batches are a tensor `[batch, channels, height, width]`, a list of pictures, (images, labels),
    or a dictionary of these; items without a batch axis are taken too.

    Raises ValueError for a DataLoader that shuffles, an empty stream, and, as it is read, a stream
    that begins with another sample when it is read again.
    """
    checks.limit(limit)
    rows, print_ = _rows_of(data, _separated, limit)
    names = names_of(data) or names_of(getattr(data, "dataset", None))

    def held(found: Sequence[Any], start: int) -> Samples:
        def read(first: int, stop: int) -> Tensor:
            return images_of(found[first - start : stop - start], first, preprocess)

        return _held(found, start, read, print_, names)

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
            yield from (Item(torch.tensor(row)) for row in window_rows(texts))
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
    names: tuple[str, ...] | None = None,
) -> Samples:
    """Returns items of a stream as samples; the first item has the number start."""
    known = known_labels([item.label for item in found])
    more: Any = {"names": names, "start": start, "of": start + len(found)}
    return Samples(len(found), known, fingerprint, read, **more)


def _rows_of(
    data: Any, separated: Callable[[Any], Iterator[Item]], limit: int | None
) -> tuple[Callable[[], Iterator[Any]], str]:
    """Returns a function that reads the samples from the start, and then the fingerprint."""
    _check_order(data)
    once = iter(data) is data  # a generator, for example, which cannot begin again
    found = separated(data)
    first = next(found, None)
    print_ = "" if first is None else digest_of(first).hex()
    kept = [found] if once else []

    def rows() -> Iterator[Item]:
        if once and not kept:
            raise ValueError(
                "the iterator was read to its end or given before, and cannot begin again. Give "
                "something that can, such as a DataLoader or a list of batches."
            )
        items = chain([] if first is None else [first], kept[0]) if kept else separated(data)
        for number, item in enumerate(islice(items, limit)):
            if not number and digest_of(item).hex() != print_:
                raise ValueError(
                    "the stream begins with another sample when it is read again: it shuffles, or "
                    "has a random transform. Give data with a fixed order and no random steps."
                )
            if once and number == 1:
                kept.clear()
            yield item

    many = "all samples" if limit is None else f"the first {limit}"
    return rows, f"stream of {type(data).__name__}:begins sha256 {print_[:16]}:{many}"


def _check_order(data: Any) -> None:
    """Raises ValueError for a DataLoader whose order is random."""
    if not isinstance(data, DataLoader):
        return
    for sampler in (data.sampler, getattr(data.batch_sampler, "sampler", None)):
        if isinstance(sampler, _SHUFFLES):
            raise ValueError(
                f"the DataLoader shuffles ({type(sampler).__name__}), so its samples have no fixed "
                "order. Give loader.dataset, or DataLoader(dataset, shuffle=False)."
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
    copied = getattr(value, "clone", None) or getattr(value, "copy", None)
    return copied() if copied else value


def _of_batch(batch: Item, tokens: bool, number: int) -> Iterator[Item]:
    """Yields the samples of a batch, or the one sample that it is."""
    value, axes = batch.value, 2 if tokens else 4
    several = value.ndim == axes if is_array(value) else isinstance(value, (list, tuple))
    if not several or (tokens and is_tokens(value)):
        yield batch
        return
    labels = [None] * len(value) if batch.label is None else batch.label
    if len(labels) != len(value):
        raise ValueError(
            f"a batch after {number} samples has {len(value)} samples and {len(labels)} labels."
        )
    for one, label in zip(value, labels, strict=True):
        yield Item(one, label)
