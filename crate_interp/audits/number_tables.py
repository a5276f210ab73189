"""The stored tables of an audit: a row per sample, layer and setting, a column per number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.attention import Cells
from crate_interp.audits.claims import BESIDE, NUMBERS

KEYS = ["of", "frame", "eps", "basis", "tokens"]
NO_EPS = 0.0  # the eps of numbers that do not depend on eps


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


def weights_of(layers: Sequence[tuple[int, dict[str, tuple[float, float]]]]) -> pd.DataFrame:
    """Returns the numbers of weights as a table: layer, number, value, null."""
    rows = [
        (layer, name, value, null)
        for layer, numbers in layers
        for name, (value, null) in numbers.items()
    ]
    return pd.DataFrame(rows, columns=["layer", "number", "value", "null"])
