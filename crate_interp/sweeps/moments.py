"""Moments of statistics per head, of which no value by sample is kept; and standard errors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from crate_interp.results.result import Merge, Result, Table
from crate_interp.stats.contrasts import mean_error, of_sums

STATISTIC = ["probe", "statistic", "layer"]
TOGETHER = -1  # in place of a head's number: the moments of each sample's mean over heads


# count, mean and sum of squared deviations: each `[column]`, in float64
Moments = Sequence[Any]


def both_moments(mine: Moments, theirs: Moments) -> Moments:
    """Returns the moments of two sets of values together (Chan, Golub, LeVeque 1979)."""
    n = mine[0] + theirs[0]
    step = theirs[1] - mine[1]
    squares = mine[2] + theirs[2] + step**2 * (mine[0] * theirs[0] / n)
    return n, mine[1] + step * (theirs[0] / n), squares


def merged_moments(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
    """Returns the moments of both sets of samples together."""
    keys = [*STATISTIC, "head", *(["group"] if "group" in mine else [])]
    both: Any = mine.merge(theirs, on=keys, how="outer", suffixes=("", "_other"), sort=False)
    both = both.fillna({name: 0 for name in both if name not in keys})
    names, ends = ("n", "mean", "squares"), ("", "_other")
    n, mean, squares = both_moments(*([both[f"{name}{end}"] for name in names] for end in ends))
    merged = both[keys].assign(n=n.astype("int64"), mean=mean, squares=squares)
    order = pd.concat([mine[keys], theirs[keys]]).drop_duplicates()
    return order.merge(merged, on=keys).reset_index(drop=True)


def moments_of(result: Result) -> Any:
    """Returns n, mean, std over samples, and the error of the mean, by statistic, layer and head.

    std divides by n - 1 and is NaN for n < 2. independent: the number of independent samples, over
    which the error is (`stats.contrasts.by_group`).
    """
    keys, moments = [*STATISTIC, "head"], result.stored["moments"]
    if "group" not in moments or not len(moments):
        table = _with_std(moments)
        return table.assign(error=table["std"] / np.sqrt(table["n"]), independent=table["n"])
    parts: Any = moments.assign(total=moments["n"] * moments["mean"])
    sums = parts.groupby(keys, sort=False)[["n", "total"]].transform("sum")
    parts["squares"] += parts["n"] * (parts["mean"] - sums["total"] / sums["n"]) ** 2
    table: Any = parts.groupby(keys, sort=False, as_index=False)[["n", "total", "squares"]].sum()
    table["mean"] = table["total"] / table["n"]
    wide: Any = parts.pivot(index="group", columns=keys, values=["total", "n"]).fillna(0)
    order = pd.MultiIndex.from_frame(table[keys])
    error, count = mean_error(of_sums(wide["total"][order].to_numpy(), wide["n"][order].to_numpy()))
    return _with_std(table).assign(error=error, independent=count)


def _with_std(moments: pd.DataFrame) -> Any:
    several = moments["n"] > 1
    variance = np.where(several, moments["squares"] / (moments["n"] - 1).clip(lower=1), np.nan)
    return moments.assign(std=np.sqrt(variance))


def errors_over_groups(result: Result) -> dict[tuple, tuple[float, float]]:
    """Returns the standard error of each mean over groups of samples, and the number of groups.

    Keys: (probe, statistic, layer), also for the mean over heads; and (probe, statistic, layer,
    head).
    """
    found: dict[tuple, tuple[float, float]] = {}
    for layer, part in result.table("samples").groupby("layer"):
        columns = part.columns[3:]
        pairs = mean_error(result.by_group(part[columns].to_numpy(float), part["sample"]))
        for column, error, count in zip(columns, *pairs, strict=True):
            found[(*column.split("."), layer)] = (float(error), float(count))
    for row in moments_of(result).itertuples():
        place = (row.probe, row.statistic, row.layer)
        place = place if row.head == TOGETHER else (*place, row.head)
        found[place] = (float(row.error), float(row.independent))
    return found


def errors(result: Any, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Returns the standard error of the mean of each row of `layers()` or `heads()`, and its n.

    n: the number of independent samples. NaN for a statistic of the weights. If samples are not
    independent (`Result.by_group`), the error is over groups.
    """
    std, n = rows["std"].to_numpy(float), rows["n"].to_numpy(float)
    if result.independent[1] == result.meta["unit"]:
        return std / np.sqrt(n), n
    keys = [name for name in ("probe", "statistic", "layer", "head") if name in rows]
    places = zip(*(rows[key] for key in keys), strict=True)
    found = [result.errors_over_groups.get(place, (np.nan, 0)) for place in places]
    error, count = np.array(found, dtype=float).reshape(-1, 2).T
    return error, count


def to_bytes(values: Tensor | np.ndarray) -> bytes:
    """Returns the bytes of numbers as float64: the first byte of each, then the second, and so on.

    Sums of few float32 numbers end in zeros, which a file then compresses.
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return array.astype(np.float64, order="C").reshape(-1, 1).view(np.uint8).T.tobytes()


def from_bytes(content: bytes, *shape: int) -> np.ndarray:
    """Returns a new float64 array from the bytes of `to_bytes`; one length in `shape` may be -1."""
    planes = np.frombuffer(content, dtype=np.uint8).reshape(8, -1)
    return np.ascontiguousarray(planes.T).view(np.float64).reshape(shape)


def added(array: str, *keys: str) -> Merge:
    """Returns a merge rule that adds rows with equal `keys`.

    The rule adds the arrays in column `array`, and the numbers in all other columns except the
    keys. Rows keep the order of the first table.
    """

    def merge(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
        both, rows = pd.concat([mine, theirs], ignore_index=True), []
        for _, own in both.groupby(list(keys), sort=False):
            total = own.drop(columns=[array, *keys]).sum().to_dict()
            cells = sum(from_bytes(cell, -1) for cell in own[array])
            same = own.iloc[0][list(keys)].to_dict()
            rows.append({**same, **total, array: to_bytes(np.asarray(cells))})
        return pd.DataFrame(rows, columns=mine.columns)

    return merge
