"""Arrays in the cells of a table: a cell holds the bytes of an array's float64 numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from crate_interp.results.result import Merge


def to_bytes(values: Tensor) -> bytes:
    """Returns the bytes of a tensor's numbers as float64, row by row."""
    return values.detach().cpu().double().contiguous().numpy().tobytes()


def from_bytes(content: bytes, *shape: int) -> np.ndarray:
    """Returns a new float64 array from the bytes of `to_bytes`; one length in `shape` may be -1."""
    return np.frombuffer(content, dtype=np.float64).reshape(shape).copy()


def added(array: str, *keys: str) -> Merge:
    """Returns a merge rule that adds rows with equal `keys`.

    The rule adds the arrays in column `array`, and the numbers in all other columns except the
    keys. Rows keep the order of the first table.
    """

    def merge(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
        both = pd.concat([mine, theirs], ignore_index=True)
        rows = [_sum(own, array, keys) for _, own in both.groupby(list(keys), sort=False)]
        return pd.DataFrame(rows, columns=mine.columns)

    return merge


def _sum(rows: pd.DataFrame, array: str, keys: tuple[str, ...]) -> dict[str, Any]:
    total = rows.drop(columns=[array, *keys]).sum().to_dict()
    cells = sum(from_bytes(cell, -1) for cell in rows[array])
    return {**rows.iloc[0][list(keys)].to_dict(), **total, array: np.asarray(cells).tobytes()}
