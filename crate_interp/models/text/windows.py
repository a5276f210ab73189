"""Texts, joined by a separator, in windows of equal length."""

from array import array
from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor


def rows_of(
    texts: Iterable[list[int]],
    n_ctx: int,
    between: int | None,
    first: int | None = None,
    advice: str = "give longer texts.",
) -> Iterator[list[int]]:
    """Yields windows of n_ctx tokens, while the token ids of the texts come.

    between: the separator. first: a token that begins each window. The last window is dropped if it
    is short. Raises ValueError if there is no separator and a second text, or if no window is full;
    advice: what the error says then.
    """
    begin = [] if first is None else [first]
    length = n_ctx - len(begin)
    waiting: list[int] = []
    short = True  # as long as no window is full
    for place, ids in enumerate(texts):
        if place and between is None:
            raise ValueError(
                "the tokenizer has no separator to join texts with: give one string, or token ids."
            )
        waiting += ([between] if place and between is not None else []) + ids
        starts = range(0, len(waiting) - length + 1, length)
        for start in starts:
            yield begin + waiting[start : start + length]
        if starts:
            short, waiting = False, waiting[starts[-1] + length :]
    if short:
        raise ValueError(f"the texts have {len(waiting)} tokens, a window has {n_ctx}: {advice}")


def stacked(rows: Iterable[list[int]], n_ctx: int) -> Int[Tensor, "window n_ctx"]:
    """Returns rows as one tensor: 8 bytes a token, of which there is no other copy."""
    joined = array("q")
    for row in rows:
        joined.extend(row)
    return torch.frombuffer(joined, dtype=torch.int64).view(-1, n_ctx)
