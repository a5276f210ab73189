"""The samples that a result covers: lists of {fingerprint, start, stop}.

An entry stands for the samples from `start` up to, not including, `stop`, of the data with this
fingerprint. If results of different data were merged, `first` is the number of the entry's first
sample in the merged result. `content` and `mask_content` are digests of the samples' picture files
and mask files, if the fingerprint leaves out what these files hold: sums modulo 2**256, in
hexadecimal, with one summand for each file of each sample. `groups` says which samples are not
independent, such as the windows of a document: a list of [group, count], for `count` samples in a
row.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from jaxtyping import Int

Range = dict[str, Any]
CONTENTS = ("content", "mask_content")


def of(fingerprint: str | None, start: int, stop: int) -> list[Range]:
    """Returns the samples from `start` to `stop - 1` of one data set; None means unknown data."""
    return [{"fingerprint": fingerprint, "start": start, "stop": stop}]


def grouped(groups: Iterable[int]) -> Range:
    """Returns the entry `groups` for samples with these groups."""
    return {"groups": [[int(group), len(list(same))] for group, same in groupby(groups)]}


def groups_of(data: Sequence[Range]) -> Int[np.ndarray, "n 2"] | None:
    """Returns the number and the group of each sample, or None if no entry has groups.

    Samples of an entry without groups are groups of their own, and so are groups of other data.
    """
    if not any("groups" in entry for entry in data):
        return None
    numbers, names = [], []
    for place, entry in enumerate(data):
        count = entry["stop"] - entry["start"]
        numbers += range(_first(entry), _first(entry) + count)
        whose = entry["fingerprint"] or place
        if "groups" in entry:
            names += [(whose, group) for group, many in entry["groups"] for _ in range(many)]
        else:
            names += [(whose, "sample", number) for number in range(count)]
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers, [known[name] for name in names]]).T


def total(contents: Iterable[str]) -> str:
    """Returns the sum modulo 2**256 of hexadecimal numbers."""
    return f"{sum(int(one, 16) for one in contents) % 2**256:064x}"


def different(mine: Sequence[Range], theirs: Sequence[Range]) -> bool:
    """Tells whether two lists are of different data sets; unknown data counts as different."""
    prints = {entry["fingerprint"] for entry in (*mine, *theirs)}
    return len(prints) > 1 or None in prints


def same(mine: Sequence[Range], theirs: Sequence[Range]) -> bool:
    """Tells whether two lists are of the same samples, of files with the same content.

    Contents that only one list has, such as those of a result without masks, are not compared.
    """
    return [_place(entry) for entry in mine] == [_place(entry) for entry in theirs] and all(
        own[name] == other[name]
        for own, other in zip(mine, theirs, strict=True)
        for name in CONTENTS
        if name in own and name in other
    )


def shift(mine: Sequence[Range], theirs: Sequence[Range]) -> int:
    """Returns the number to add to the sample numbers of `theirs`, so that they follow `mine`.

    It is 0 if all samples are of one data set. Raises ValueError if a sample is in both lists.
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
    if not mine or not theirs or not different(mine, theirs):
        return 0
    following = max(_first(entry) + entry["stop"] - entry["start"] for entry in mine)
    return following - min(_first(entry) for entry in theirs)


def joined(mine: Sequence[Range], theirs: Sequence[Range]) -> list[Range]:
    """Returns both lists as one; adjacent ranges of the same data set are joined."""
    if different(mine, theirs):
        added = shift(mine, theirs)
        return [*mine, *({**entry, "first": _first(entry) + added} for entry in theirs)]
    entries = sorted((dict(entry) for entry in (*mine, *theirs)), key=lambda e: e["start"])
    kept: list[Range] = entries[:1]
    for entry in entries[1:]:
        if entry["start"] == kept[-1]["stop"]:
            both = _place(kept[-1]) | _summed(kept[-1], entry) | {"stop": entry["stop"]}
            if "groups" in kept[-1] and "groups" in entry:
                runs = [*kept[-1]["groups"], *entry["groups"]]
                both |= grouped(group for group, many in runs for _ in range(many))
            kept[-1] = both
        else:
            kept.append(entry)
    return kept


def _place(entry: Range) -> Range:
    return {name: value for name, value in entry.items() if name not in (*CONTENTS, "groups")}


def _summed(mine: Range, theirs: Range) -> dict[str, str]:
    """Returns the contents of two ranges together, as far as both are known."""
    known = [name for name in CONTENTS if name in mine and name in theirs]
    return {name: total([mine[name], theirs[name]]) for name in known}


def _first(entry: Range) -> int:
    return entry.get("first", entry["start"])
