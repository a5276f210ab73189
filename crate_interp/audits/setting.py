"""The settings of an audit, which of them hold for a sample, and the table of its numbers."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.audits.claims import BESIDE, NUMBERS

KEYS = ["of", "frame", "eps", "basis", "tokens"]
NO_EPS = 0.0  # the eps of numbers that do not depend on eps
# (of, frame, eps, basis, tokens); of: "layer", or the name of a null or limit
Key = tuple[str, str, float, str, str]
Cells = dict[Key, dict[str, Tensor]]  # key -> name of a number -> values `[batch]`


@dataclass(frozen=True)
class Setting:
    """The settings of an audit.

    eps: the main eps; grid: all eps. part: the numbers of
    the samples that have baselines, the grid and the star. limited: the numbers of samples that
    also have upper limits, operators, constructions and random output maps. has_cls: whether token
    0 is CLS. star: whether to measure also with orthonormal U, and also on patches without CLS, but
    not with both changes at once. tokens: on how many tokens of each sample the lasso is solved.
    """

    eps: float
    grid: tuple[float, ...]
    nulls: tuple[str, ...]
    part: Set[int]
    limited: Set[int]
    has_cls: bool
    causal: bool
    star: bool
    tokens: int
    seed: int

    def kind(self, sample: int) -> tuple[bool, bool]:
        """Returns whether a sample has nulls, and whether it has limits."""
        return sample in self.part, sample in self.limited

    def at(self, sample: int) -> "Setting":
        """Returns the settings of the sample with this number."""
        if sample in self.limited:
            return self
        if sample in self.part:
            return replace(self, limited=frozenset())
        return replace(self, limited=frozenset(), grid=(self.eps,), nulls=(), star=False)


def table_of(rows: Sequence[tuple[int, int, Cells]]) -> pd.DataFrame:
    """Returns the numbers as a table: sample, layer, KEYS, and a column for each number."""
    cells = [(start, layer, *cell) for layer, start, own in rows for cell in own.items()]
    counts = [len(next(iter(numbers.values()))) for *_, numbers in cells]
    places = [(start, layer, *key) for start, layer, key, _ in cells]
    names = ["sample", "layer", *KEYS]
    table: Any = pd.DataFrame(places, columns=names, dtype=None if cells else float)
    table = table.astype({name: float if name == "eps" else str for name in KEYS})
    table = table.loc[table.index.repeat(counts)]
    table["sample"] += np.concatenate([range(0), *map(range, counts)]).astype(int)
    blank = {n: torch.full((n,), torch.nan, dtype=torch.float64) for n in counts}
    for name in (*NUMBERS, *BESIDE):
        if any(name in numbers for *_, numbers in cells):
            parts = [own.get(name, blank[n]) for (*_, own), n in zip(cells, counts, strict=True)]
            table[name] = torch.cat(parts).numpy()
    return table.sort_values(names, kind="stable", ignore_index=True)
