"""The settings of an audit, which of them hold for a sample, and the table of its numbers."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
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

    eps: the main eps; grid: all eps. draws: how often the update is shuffled. part: the numbers of
    the samples that have baselines, the grid and the star. limited: the numbers of samples that
    also have upper limits, operators, constructions and random output maps. has_cls: whether token
    0 is CLS. star: whether to measure also with orthonormal U, and also on patches without CLS, but
    not with both changes at once. tokens: on how many tokens of each sample the lasso is solved.
    """

    eps: float
    grid: tuple[float, ...]
    nulls: tuple[str, ...]
    draws: int
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
    order = {name: place for place, name in enumerate((*NUMBERS, *BESIDE))}
    wanted = {name for *_, cells in rows for numbers in cells.values() for name in numbers}
    names = sorted(wanted, key=lambda name: order[name])
    columns: dict[str, list[Any]] = {name: [] for name in ("sample", "layer", *KEYS, *names)}
    for layer, start, cells in rows:
        for key, numbers in cells.items():
            count = len(next(iter(numbers.values())))
            columns["sample"].append(np.arange(start, start + count))
            columns["layer"].append(np.full(count, layer))
            for name, value in zip(KEYS, key, strict=True):
                kind = float if name == "eps" else object
                columns[name].append(np.full(count, value, dtype=kind))
            for name in names:
                own = numbers.get(name)
                columns[name].append(np.full(count, np.nan) if own is None else own.numpy())
    table = pd.DataFrame({name: np.concatenate(parts or [[]]) for name, parts in columns.items()})
    for name in KEYS:
        if name != "eps":
            table[name] = table[name].astype(str)
    return table.sort_values(["sample", "layer", *KEYS], kind="stable", ignore_index=True)
