"""Which samples belong together: the windows of a document, the pictures of a patient."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.data.samples import Samples
from crate_interp.data.tables import Table

Rows = Callable[[Iterable[str]], Iterator[list[int]]]


class Numbered:
    """Texts as they are read; number: that of the text read last."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.number = texts, -1

    def __iter__(self) -> Iterator[str]:
        for self.number, text in enumerate(self.texts):  # noqa: B020
            yield text


def windows_of_texts(window_rows: Rows, texts: Iterable[str]) -> Iterator[tuple[list[int], int]]:
    """Yields each window of tokens, with the number of the text that its last token is of."""
    numbered = Numbered(texts)
    for row in window_rows(numbered):
        yield row, numbered.number


def grouped(samples: Samples, groups: object, table: Table | None) -> Samples:
    """Returns samples with the groups that a user gives.

    groups: a list with the group of each sample, a number or a text; or the name of a column of
    `table`, whose windows have the group of the text that they are of.

    Raises ValueError for a column that is not there, for too few groups, and for other values.
    """
    if isinstance(groups, str):
        columns = [] if table is None else (table.column_names or [])
        if groups not in columns:
            hint = checks.did_you_mean(groups, columns) if columns else ""
            raise ValueError(
                f"groups={plain(groups, 50)!r} is no column of the data: give one of its columns "
                f"({plain(', '.join(columns), 300) or 'it has none'}), or a list with the group of "
                f"each sample. {hint}".rstrip()
            )
        whole: Any = table
        rows = list(whole.with_format(None)[groups])
        texts = samples.groups or range(samples.start, samples.start + samples.n)
        groups = [rows[number] for number in texts]
    return dataclasses.replace(samples, groups=group_numbers(groups, samples.n))


def group_numbers(groups: object, n: int) -> tuple[int, ...]:
    """Returns a number for the group of each of n samples, from 0 in order of appearance.

    Raises ValueError for fewer than n groups, and for any that is neither a number nor a text.
    """
    groups = getattr(groups, "tolist", lambda: groups)()
    if not isinstance(groups, Sequence) or len(groups) < n:
        raise ValueError(
            f"groups={checks.shown(groups)}: give one entry for each of the {n} samples."
        )
    numbers: dict[Any, int] = {}
    for place, name in enumerate(groups[:n]):
        if not isinstance(name, (str, int)):
            raise ValueError(
                f"groups[{place}] is of type {type(name).__name__}: give a number or a text."
            )
        numbers.setdefault(name, len(numbers))
    return tuple(numbers[name] for name in groups[:n])
