"""Folds many tables in one order: the same pairs are merged, whoever made them and when."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def folded(parts: Iterable[T], merge: Callable[[T, T], T]) -> T | None:
    """Returns parts merged pairwise in their order, as a tournament: ((0 1) (2 3)) 4.

    Which pairs are merged depends on how many parts there are and on nothing else. A table of n
    parts is copied log2 n times; one after the other would copy it n times. None without parts.
    """
    waiting: list[tuple[int, Any]] = []  # (how many merges deep, part), deepest first
    for part in parts:
        depth = 0
        while waiting and waiting[-1][0] == depth:
            part, depth = merge(waiting.pop()[1], part), depth + 1
        waiting.append((depth, part))
    if not waiting:
        return None
    result = waiting.pop()[1]
    while waiting:
        result = merge(waiting.pop()[1], result)
    return result
