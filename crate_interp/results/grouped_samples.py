"""The samples of a result: how many are independent, and their values as intervals need them."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int, Shaped

from crate_interp.results import sample_ranges
from crate_interp.stats.contrasts import by_group
from crate_interp.stats.significance import interval_words


def counted(n: int, unit: str) -> str:
    """Returns a number and its unit, such as "1 image" and "1,024 images"."""
    return f"{n:,} {unit.removesuffix('s') if n == 1 else unit}"


class GroupedSamples:
    """What a result says about its samples, from `meta`: data, n_samples and unit."""

    meta: dict[str, Any]

    @cached_property
    def _group_of(self) -> pd.Series | None:
        """The group of each sample, by its number; None if samples are independent."""
        known = sample_ranges.groups_of(self.meta.get("data", []))
        return None if known is None else pd.Series(known[:, 1], index=known[:, 0])

    def by_group(
        self, values: Shaped[np.ndarray, "n c"], samples: Iterable[Any]
    ) -> Shaped[np.ndarray, "free c"]:
        """Returns one value per group of samples (`stats.contrasts.by_group`), for an interval.

        samples: the numbers of the n samples. Where samples are independent, the values stay.
        """
        return by_group(values, self.groups_at(samples))

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
        """Returns an interval as words (`stats.significance.interval_words`)."""
        return interval_words(low, high, of=self.few, **form)
