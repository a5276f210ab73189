"""Which samples of which data a result is of: lists of {fingerprint, start, stop}."""

from collections.abc import Callable, Sequence
from typing import Any

Range = dict[str, Any]


def of(fingerprint: str | None, start: int, stop: int) -> list[Range]:
    """Returns the samples start to stop - 1 of one data set; None stands for unknown data."""
    return [{"fingerprint": fingerprint, "start": start, "stop": stop}]


def different(mine: Sequence[Range], theirs: Sequence[Range]) -> bool:
    """Tells whether two lists are not of one and the same known data set."""
    prints = {entry["fingerprint"] for entry in (*mine, *theirs)}
    return len(prints) > 1 or None in prints


def shift(mine: Sequence[Range], theirs: Sequence[Range], next_number: Callable[[], int]) -> int:
    """Returns what to add to the numbers of their samples so that none is a number of ours.

    Samples of one data set keep their numbers. Raises ValueError if a sample is in both lists.
    """
    for entry in theirs:
        for own in mine:
            same = entry["fingerprint"] == own["fingerprint"] is not None
            low, high = max(entry["start"], own["start"]), min(entry["stop"], own["stop"])
            if same and low < high:
                raise ValueError(
                    f"samples {low} to {high - 1} are in both results: "
                    "give results of different samples."
                )
    return next_number() - theirs[0]["start"] if different(mine, theirs) else 0


def joined(mine: Sequence[Range], theirs: Sequence[Range]) -> list[Range]:
    """Returns both lists as one; ranges of one data set that touch become one."""
    entries = [dict(entry) for entry in (*mine, *theirs)]
    if not different(mine, theirs):
        entries.sort(key=lambda entry: entry["start"])
    kept: list[Range] = entries[:1]
    for entry in entries[1:]:
        last = kept[-1]
        if (
            entry["fingerprint"] == last["fingerprint"] is not None
            and entry["start"] == last["stop"]
        ):
            last["stop"] = entry["stop"]
        else:
            kept.append(entry)
    return kept
