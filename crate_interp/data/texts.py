"""Sequences and texts as samples: each item of a list, a window of tokens, or a short text whole.

Items of lists and datasets are read when they are needed. Before that, all are read once, for their
digests and labels.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from crate_interp.core import checks, errors, run_options
from crate_interp.core.files import digest_of_bytes
from crate_interp.core.pictures import Undecodable, quoted
from crate_interp.core.safe_text import plain
from crate_interp.data import items, tables
from crate_interp.data.items import Item, is_array, known_labels
from crate_interp.data.samples import ImageReading, Samples

# How often the first and the last sample are drawn again. Each sample is also read twice, so a
# random flip stays unnoticed in n samples with probability 2^-(n + 2 DRAWS), below 0.1 %.
DRAWS = 5
Sized = Any  # a list, a tuple or a torch Dataset: it has a length, and gives items by number


def tensor_samples(images: Tensor | np.ndarray, how: ImageReading) -> Samples:
    """Returns the images of a tensor or array `[n, channels, height, width]`.

    A uint8 array may be `[n, height, width, channels]` with 1 or 3 channels.

    Floats count as preprocessed; uint8 images (0 to 255) are preprocessed when they are read. The
    fingerprint is that of the entire tensor. Raises ValueError for other shapes and dtypes, and if
    the wanted images are floats with NaN, Inf or pixels of 0 to 255.
    """
    images = torch.as_tensor(images).detach()
    floats = images.is_floating_point()
    if images.ndim != 4 or not (floats or images.dtype == torch.uint8):
        shape = f"{images.dtype} of shape {list(images.shape)}"
        words = f"data is {shape}, but this model reads images"
        raise ValueError(f"{words}: give [n, channels, height, width], floats or uint8.")
    images = items.upright_array(images, "data")
    for number, image in enumerate(images[: how.limit] if floats else ()):
        items.image_of(image, number, how.pictures)
    digest = hashlib.sha256(f"{images.dtype} {list(images.shape)}".encode())
    for part in images.split(256):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)

    name = f"tensor:sha256:{digest.hexdigest()}"
    return Samples(len(images), None, name, lambda start, stop: how.pictures(images[start:stop]))


def is_pair(data: object) -> bool:
    """Tells whether data is all images (or tokens) with all labels, as a pair or a dictionary."""
    if isinstance(data, Mapping):
        return True
    tensors = getattr(data, "tensors", None)  # of a torch TensorDataset
    if isinstance(tensors, tuple) and len(tensors) in (1, 2):
        return True
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    value, second = data
    if isinstance(data, list):  # a batch as a DataLoader gives it; else a list of items
        return is_array(value) and is_array(second) and second.ndim < value.ndim
    return is_array(value) or isinstance(value, (list, tuple))


def parts_of_pair(data: object) -> Item:
    """Returns all values, labels and masks of a pair, a dictionary or a TensorDataset.

    Raises ValueError unless there are as many labels, and as many masks, as values.
    """
    for name, read in (("attention_mask", 1), ("token_type_ids", 0), ("segments", 0)):
        part = data.get(name) if isinstance(data, Mapping) else None
        if part is not None and bool((np.asarray(part) != read).any()):
            raise ValueError(
                f"data[{name!r}] holds other numbers than {read}, and questions read every token, "
                "in segment 0: give tokens without padding, in windows of one length."
            )
    whole = items.item_of(getattr(data, "tensors", data), "data")
    count, labels = len(whole.value), whole.label
    if labels is not None and not of_each_token(whole):
        labels = [items.label_of(label, f"sample {number}") for number, label in enumerate(labels)]
    for name, part in (("labels", labels), ("masks", whole.mask)):
        if part is not None and len(part) != count:
            raise ValueError(f"data has {count} samples and {len(part)} {name}: give one for each.")
    return Item(whole.value, labels, whole.mask)


def of_each_token(whole: Item) -> bool:
    """Tells whether the labels of all samples are tokens, one for each token of the values."""
    value, label = whole.value, whole.label
    return is_array(value) and is_array(label) and value.ndim == 2 and value.shape == label.shape


def labelled(samples: Samples, labels: list[Any] | None) -> Samples:
    """Returns samples with labels, which become part of the fingerprint."""
    if labels is None:
        return samples
    print_ = f"{samples.fingerprint}:labels:{digest_of_bytes(repr(labels).encode())}"
    return dataclasses.replace(samples, labels=labels[: samples.n], fingerprint=print_)


def pair_samples(data: object, how: ImageReading) -> Samples:
    """Returns images with their labels or masks as samples.

    data: (images, labels), (images, masks), {"image": ..., "label": ...} or a TensorDataset; images
    are an array or a list of pictures. Raises ValueError as `parts_of_pair` does.
    """
    whole = parts_of_pair(data)
    masks = whole.mask
    if not is_array(whole.value):
        parts = ([None] * len(whole.value) if one is None else one for one in (whole.label, masks))
        return sequence_samples(list(map(Item, whole.value, *parts)), how)
    samples = labelled(tensor_samples(whole.value, how), whole.label)
    if masks is None:
        return samples
    each = b"".join(items.digest_of(Item(None, mask=mask)) for mask in masks)
    print_ = f"{samples.fingerprint}:masks:{digest_of_bytes(each)}"
    pairs = [Item(value, mask=mask) for value, mask in zip(whole.value, masks, strict=True)]
    masked = items.item_samples(pairs, range(len(masks)), print_, how).masks
    return dataclasses.replace(samples, masks=masked, fingerprint=print_)


def is_sequence(data: object) -> bool:
    """Tells whether data has a length and gives its items by number: a Dataset, a list, a tuple."""
    sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return sized and not isinstance(data, (str, bytes, Mapping)) and not is_array(data)


def names_of(data: object) -> tuple[str, ...] | None:
    """Returns the names of classes that a dataset gives, `classes` or `class_to_idx`, or None."""
    while isinstance(data, Subset):
        data = data.dataset
    classes, numbers = getattr(data, "classes", None), getattr(data, "class_to_idx", None)
    if not classes and isinstance(numbers, Mapping):
        names = {number: name for name, number in numbers.items()}
        classes = [names.get(number) for number in range(len(names))]
    named = isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)
    return tuple(map(str, classes or ())) if named else None


def read_item(data: Sized, number: int) -> Item:
    """Returns an item. Raises Undecodable for an unreadable file."""
    try:
        thing = data[number]
    except OSError as error:  # Pillow's error for a file that is not a picture is one of these
        raise Undecodable(f"cannot read data[{number}]: {plain(error, 300)}") from error
    item = items.item_of(thing, f"data[{number}]")
    return Item(item.value, items.label_of(item.label, f"data[{number}]"), item.mask)


def sequence_samples(data: Sized, how: ImageReading) -> Samples:
    """Returns the wanted items of a dataset or list as samples of images.

    Items are a picture (PIL image, path or array), (picture, label), (picture, mask), or a
    dictionary of these. Floats count as preprocessed. Names of labels are the dataset's `classes`,
    or the keys of its `class_to_idx`. The fingerprint is a digest of pixels, files and labels; an
    item that cannot be decoded has a digest of the error.

    Raises ValueError for items of other forms, and for floats that `preprocess` refuses. Reading a
    sample raises it for an item that has changed since it was digested.
    """
    count = len(data) if how.limit is None else min(how.limit, len(data))
    digests, labels, masked = [], [], False
    for number in run_options.tqdm(range(count), desc="reading items once", delay=3, leave=False):
        try:
            item = read_item(data, number)
            digests.append(items.digest_of(item))
        except Undecodable as error:
            item = Item(None)
            digests.append(hashlib.sha256(str(error).encode()).digest())
        if is_array(item.value) and torch.as_tensor(item.value).is_floating_point():
            items.image_of(item.value, number, how.pictures)
        labels.append(item.label)
        masked = masked or item.mask is not None
    print_ = f"items:{digest_of_bytes(b''.join(digests))}"
    read = partial(_same_items, data, digests)
    ends = () if isinstance(data, (list, tuple)) or not count else {0, count - 1}
    for number in [*ends] * DRAWS:
        with suppress(Undecodable):
            read(number, number + 1)
    more = {"masked": masked, "labels": labels, "names": names_of(data)}
    return items.item_samples(read, range(count), print_, how, **more)


def _same_items(data: Any, digests: Sequence[bytes], start: int, stop: int) -> list[Item]:
    again = [read_item(data, number) for number in range(start, stop)]
    for number, item in enumerate(again, start):
        if items.digest_of(item) != digests[number]:
            words = f"data[{number}] is not the same when it is read twice"
            raise ValueError(f"{words}: take random steps out of the dataset's transform.")
    return again


WindowRows = Callable[[Iterable[str]], Iterator[list[int]]]
_IDS = "input_ids"


@dataclass(frozen=True)
class TextReading:
    """How texts become tokens; see `open_text`. limit: how many samples are wanted, or None."""

    windows: Callable[[Iterable[str]], Tensor | Iterator[list[int]]]
    limit: int | None = None
    encode: Callable[[str], Tensor] | None = None


class NumberedTexts:
    """Texts as they are read; number: that of the text read last."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.number = texts, -1

    def __iter__(self) -> Iterator[str]:
        for self.number, text in enumerate(self.texts):  # noqa: B020
            yield text


def windows_of_texts(cut: WindowRows, texts: Iterable[str]) -> Iterator[tuple[list[int], int]]:
    """Yields each window of tokens, with the number of the text that its last token is of."""
    numbered = NumberedTexts(texts)
    for row in cut(numbered):
        yield row, numbered.number


def checked_texts(texts: Iterable[object]) -> Iterator[str]:
    """Yields texts; raises ValueError if one is not a string."""
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {place} is {checks.quote(text)}: give only strings.")
        yield text


def token_samples(tokens: Tensor | np.ndarray, how: TextReading | None = None) -> Samples:
    """Returns token ids `[n, pos]` as samples; raises ValueError for anything else."""
    tokens = tokens_of(tokens, "data", "[n, pos]")
    if 0 in tokens.shape:
        raise ValueError(f"the data is empty: tokens have shape {list(tokens.shape)}.")
    digest = hashlib.sha256(f"tokens {list(tokens.shape)}".encode())
    digest.update(tokens.cpu().contiguous().numpy().data)
    fingerprint = f"tokens:sha256:{digest.hexdigest()}"
    return Samples(len(tokens), None, fingerprint, lambda start, stop: tokens[start:stop])


def tokens_of(value: object, where: str, axes: str = "[pos]") -> Tensor:
    """Returns token ids with these axes; raises ValueError unless they are whole numbers."""
    with suppress(TypeError, ValueError, RuntimeError):
        tokens = torch.as_tensor(value)
        odd = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
        if tokens.ndim == len(axes.split()) and not odd:
            return tokens.long()
    given = f"{where} is {checks.quote(value)}, but this model reads text"
    raise ValueError(f"{given}: give texts, or token ids, whole numbers {axes}.")


def _stacked(rows: list[Tensor]) -> Samples:
    """Returns rows of token ids as samples; raises ValueError for several lengths."""
    lengths = sorted(set(map(len, rows)))
    if len(lengths) > 1:
        have = f"the rows of token ids have {lengths[0]} to {lengths[-1]} tokens"
        raise ValueError(f"{have}: give rows of one length, or give the texts.")
    return token_samples(torch.stack(rows))


def pair_of_text(data: object, how: TextReading) -> Samples:
    """Returns (tokens, labels), a dictionary or a TensorDataset as samples."""
    whole = parts_of_pair(data)
    if of_each_token(whole):
        samples = token_samples(whole.value)
        answers = tokens_of(whole.label, "labels", "[n, pos]")
        print_ = f"{samples.fingerprint}:labels:{token_samples(answers).fingerprint}"
        return dataclasses.replace(samples, answers=answers.cpu(), fingerprint=print_)
    if is_array(whole.value):
        return labelled(token_samples(whole.value), whole.label)
    return text_sequence(whole.value, how, whole.label)


def text_sequence(data: Sized, how: TextReading, labels: list[Any] | None = None) -> Samples:
    """Returns a list or Dataset of texts, or of token ids of one length, as samples.

    Texts that fill no window when they are joined are taken text by text, if `how` can encode them.
    Raises ValueError for items that are neither, and for tokens of several lengths.
    """
    if len(data) and not isinstance(read_item(data, 0).value, str):
        count = len(data) if how.limit is None else min(how.limit, len(data))
        items = [read_item(data, number) for number in range(count)]
        rows = [tokens_of(item.value, f"data[{number}]") for number, item in enumerate(items)]
        return labelled(_stacked(rows), known_labels(item.label for item in items) or labels)
    every = (read_item(data, number).value for number in range(len(data)))
    texts = list(checked_texts(every))  # before work starts
    if not texts:
        raise ValueError("the data is empty: there is no text in it.")
    try:
        return _window_samples(how, texts)
    except errors.ShortTextError:
        if how.encode is None:
            raise
    rows = [how.encode(text)[0].cpu() for text in texts]
    lengths = tuple(map(len, rows))
    if len(set(lengths)) == 1:
        return token_samples(torch.stack(rows))
    whole = token_samples(torch.cat(rows)[None])
    print_ = f"texts:{digest_of_bytes(f'{whole.fingerprint} {lengths}'.encode())}"
    read = lambda start, stop: torch.stack(rows[start:stop])  # noqa: E731
    return Samples(len(rows), None, print_, read, lengths=lengths)


def _window_samples(how: TextReading, texts: Iterable[str]) -> Samples:
    """Returns the windows of texts as samples, grouped by text if they come row by row."""
    numbered = NumberedTexts(texts)
    rows = how.windows(numbered)
    if isinstance(rows, Tensor):
        return token_samples(rows)
    joined, groups = array("q"), []
    for row in rows:
        joined.extend(row)
        groups.append(numbered.number)
    tokens = torch.frombuffer(joined, dtype=torch.int64).view(len(groups), -1)
    several = len(set(groups)) < len(groups)  # of some text
    return dataclasses.replace(token_samples(tokens), groups=tuple(groups) if several else None)


def table_of_text(table: tables.Table, how: TextReading) -> Samples:
    """Returns the token ids of a table, or the windows of its first text column.

    Raises ValueError for ids in rows of several lengths.
    """
    if _IDS not in (table.column_names or ()):
        return _window_samples(how, checked_texts(table[tables.text_column(table)]))
    return _stacked([tokens_of(list(row), f"row {n}") for n, row in enumerate(table[_IDS])])


def file_of_text(path: str | Path, how: TextReading) -> Samples:
    """Returns the windows of a text file; raises ValueError for a file that is not UTF-8."""
    try:
        return text_sequence([Path(path).read_text(encoding="utf-8")], how)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{quoted(path)} is not a text file in UTF-8: {plain(error)}.") from None
