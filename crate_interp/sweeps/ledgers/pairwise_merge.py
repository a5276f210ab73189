"""Merges many tables in a fixed order: the same pairs, whoever made them and when."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def folded(parts: Iterable[T], merge: Callable[[T, T], T]) -> T | None:
    """Returns parts merged pairwise in their order, like a tournament: ((0 1) (2 3)) 4.

    The pairs depend only on the number of parts. A table of n parts is copied log2 n times; merging
    one after the other would copy it n times. None if there are no parts.
    """
    waiting: list[tuple[int, Any]] = []  # (number of merges, part), most merges first
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
