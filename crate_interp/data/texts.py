"""Texts and token ids as samples: each a window of tokens, or a whole text that fills no window."""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.errors import ShortTextError
from crate_interp.core.pictures import quoted
from crate_interp.core.safe_text import plain
from crate_interp.data.items import is_array, known_labels
from crate_interp.data.samples import Samples
from crate_interp.data.sequences import Sized, labelled, parts_of_pair, read_item
from crate_interp.data.tables import Table, text_column

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


def windows_of_texts(
    window_rows: WindowRows, texts: Iterable[str]
) -> Iterator[tuple[list[int], int]]:
    """Yields each window of tokens, with the number of the text that its last token is of."""
    numbered = NumberedTexts(texts)
    for row in window_rows(numbered):
        yield row, numbered.number


def checked_texts(texts: Iterable[object]) -> Iterator[str]:
    """Yields texts; raises ValueError if one is not a string."""
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {place} is {checks.shown(text)}: give only strings.")
        yield text


def token_samples(tokens: Tensor | np.ndarray, how: TextReading | None = None) -> Samples:
    """Returns token ids `[n, pos]` as samples; raises ValueError for anything else."""
    tokens = _ids(tokens, "data", "[n, pos]")
    if 0 in tokens.shape:
        raise ValueError(f"the data is empty: tokens have shape {list(tokens.shape)}.")
    digest = hashlib.sha256(f"tokens {list(tokens.shape)}".encode())
    digest.update(tokens.cpu().contiguous().numpy().data)
    fingerprint = f"tokens:sha256:{digest.hexdigest()}"
    return Samples(len(tokens), None, fingerprint, lambda start, stop: tokens[start:stop])


def tokens_of(value: object, where: str) -> Tensor:
    """Returns the token ids of one sample; raises ValueError unless they are whole numbers."""
    return _ids(value, where, "[pos]")


def _ids(value: object, where: str, axes: str) -> Tensor:
    """Returns whole numbers with these axes; raises ValueError for anything else."""
    with suppress(TypeError, ValueError, RuntimeError):
        tokens = torch.as_tensor(value)
        odd = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
        if tokens.ndim == len(axes.split()) and not odd:
            return tokens.long()
    raise ValueError(
        f"{where} is {checks.shown(value)}, but this model reads text: give texts, or token ids, "
        f"whole numbers {axes}."
    )


def _stacked(rows: list[Tensor]) -> Samples:
    """Returns rows of token ids as samples; raises ValueError for several lengths."""
    lengths = sorted(set(map(len, rows)))
    if len(lengths) > 1:
        raise ValueError(
            f"the rows of token ids have {lengths[0]} to {lengths[-1]} tokens: give rows of one "
            "length, since there is no padding, or the texts, which are cut into windows."
        )
    return token_samples(torch.stack(rows))


def pair_of_text(data: object, how: TextReading) -> Samples:
    """Returns (tokens, labels), a dictionary or a TensorDataset as samples."""
    whole = parts_of_pair(data)
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
        own_labels = known_labels(item.label for item in items)
        return labelled(_stacked(rows), own_labels or labels)
    every = (read_item(data, number).value for number in range(len(data)))
    texts = list(checked_texts(every))  # before work starts
    if not texts:
        raise ValueError("the data is empty: there is no text in it.")
    try:
        return _window_samples(how, texts)
    except ShortTextError:
        if how.encode is None:
            raise
    return _whole_texts([how.encode(text)[0].cpu() for text in texts])


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


def _whole_texts(rows: list[Tensor]) -> Samples:
    """Returns rows of token ids, which may differ in length, as samples."""
    lengths = tuple(map(len, rows))
    if len(set(lengths)) == 1:
        return token_samples(torch.stack(rows))
    whole = token_samples(torch.cat(rows)[None])
    digest = hashlib.sha256(f"{whole.fingerprint} {lengths}".encode()).hexdigest()
    print_, read = f"texts:sha256:{digest}", lambda start, stop: torch.stack(rows[start:stop])
    return Samples(len(rows), None, print_, read, lengths=lengths)


def table_of_text(table: Table, how: TextReading) -> Samples:
    """Returns the token ids of a table, or the windows of its first text column.

    Raises ValueError for ids in rows of several lengths.
    """
    if _IDS not in (table.column_names or ()):
        return _window_samples(how, checked_texts(table[text_column(table)]))
    return _stacked([tokens_of(list(row), f"row {n}") for n, row in enumerate(table[_IDS])])


def file_of_text(path: str | Path, how: TextReading) -> Samples:
    """Returns the windows of a text file; raises ValueError for a file that is not UTF-8."""
    try:
        return text_sequence([Path(path).read_text(encoding="utf-8")], how)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{quoted(path)} is not a text file in UTF-8: {plain(error)}.") from None
