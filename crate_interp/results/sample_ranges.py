"""Which samples results are of: ranges of a data set, and groups of samples."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int, Shaped

from crate_interp.stats import contrasts, intervals

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
                raise ValueError(f"samples {low} to {high - 1} are in both results.")
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
            known = [name for name in CONTENTS if name in kept[-1] and name in entry]
            contents = {name: total([kept[-1][name], entry[name]]) for name in known}
            both = _place(kept[-1]) | contents | {"stop": entry["stop"]}
            if "groups" in kept[-1] and "groups" in entry:
                runs = [*kept[-1]["groups"], *entry["groups"]]
                both |= grouped(group for group, many in runs for _ in range(many))
            kept[-1] = both
        else:
            kept.append(entry)
    return kept


def _place(entry: Range) -> Range:
    return {name: value for name, value in entry.items() if name not in (*CONTENTS, "groups")}


def _first(entry: Range) -> int:
    return entry.get("first", entry["start"])


def counted(n: int, unit: str) -> str:
    """Returns a number and its unit, such as "1 image" and "1,024 images"."""
    return f"{n:,} {unit.removesuffix('s') if n == 1 else unit}"


class GroupedSamples:
    """What a result says about its samples, from `meta`: data, n_samples and unit."""

    meta: dict[str, Any]

    @cached_property
    def _group_of(self) -> pd.Series | None:
        """The group of each sample, by its number; None if samples are independent."""
        known = groups_of(self.meta.get("data", []))
        return None if known is None else pd.Series(known[:, 1], index=known[:, 0])

    def by_group(
        self, values: Shaped[np.ndarray, "n c"], samples: Iterable[Any]
    ) -> Shaped[np.ndarray, "free c"]:
        """Returns one value per group of samples (`stats.contrasts.by_group`), for an interval.

        samples: the numbers of the n samples. Where samples are independent, the values stay.
        """
        return contrasts.by_group(values, self.groups_at(samples))

    def mean_change(
        self, changes: Shaped[np.ndarray, "n c"], samples: Iterable[Any], metric: str
    ) -> contrasts.Difference:
        """Returns the mean change of each column, with its interval and p.

        The answer to an image flips or does not (`intervals.paired_shares`); a text has several.
        """
        if metric == "accuracy" and self.independent[1] == "images":
            return intervals.paired_shares(changes)
        return contrasts.paired(self.by_group(changes, samples))

    def groups_at(self, samples: Iterable[Any]) -> Int[np.ndarray, "n"] | None:
        """Returns the groups of the samples with these numbers; None if they are independent."""
        return None if self._group_of is None else self._group_of.loc[list(samples)].to_numpy()

    @property
    def independent(self) -> tuple[int, str]:
        """How many independent things were measured, and their name: samples, texts or groups."""
        n, unit = self.meta["n_samples"], self.meta["unit"]
        count = n if self._group_of is None else self._group_of.nunique()
        if count >= n:
            return n, unit
        return count, "texts" if unit == "windows" else "groups"

    def counted_samples(self) -> str:
        """Returns the number of samples in words, such as "375 windows of 22 texts"."""
        samples = counted(self.meta["n_samples"], self.meta["unit"])
        count, what = self.independent
        return samples if what == self.meta["unit"] else f"{samples} of {counted(count, what)}"

    @property
    def few(self) -> str:
        """What there are too few of, where there is no interval: samples, texts or groups."""
        what = self.independent[1]
        return "samples" if what == self.meta["unit"] else what

    def interval_words(self, low: float, high: float, **form: str) -> str:
        """Returns an interval as words (`stats.intervals.interval_words`)."""
        return intervals.interval_words(low, high, of=self.few, **form)
