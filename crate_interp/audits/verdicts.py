"""Turns the numbers of all samples into verdicts.

Numbers become cells with intervals, cells become tests, and tests become a verdict and its reason.
Each step returns new columns and leaves its input tables unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIM_OF, NULLS, NUMBERS, Number
from crate_interp.audits.setting import NO_EPS
from crate_interp.results.result import Result
from crate_interp.stats.bootstrap import studentised
from crate_interp.stats.contrasts import Difference, against_networks, mean_error, paired
from crate_interp.stats.intervals import LEVEL, holm

KEPT, BROKEN, UNDECIDED, NOT_APPLICABLE = "kept", "broken", "undecided", "not applicable"
_NEAR = 0.01  # how near its ceiling a value must be, as a share of the way from ceiling to bound
_GROUP = 8  # draws of random weights, each group of which has to show a verdict
_ROUNDING = 1e-9  # tolerance for rounding; the audit's numbers are of order 1
PLACE = ["layer", "frame", "eps", "basis", "tokens"]
COLUMNS = [
    "claim", "number", *PLACE, "n", "value", "low", "high", "null", "excess", "excess_low",
    "excess_high", "untrained", "difference", "difference_low", "difference_high", "shuffled",
    "shuffled_low", "shuffled_high", "gain", "gain_low", "gain_high", "ceiling", "share",
    "construction", "by_construction", "p", "verdict", "reason",
]  # fmt: skip


# the setting of numbers of weights, which depend on no data and so on no frame
_NOWHERE = {"frame": "", "eps": NO_EPS, "basis": "", "tokens": "", "by_construction": False}
Columns = dict[str, Any]  # the cells of a number: an array `[cell]` for each column
# "layer", or the name of a null or limit -> a row per cell and sample, a column per number
Parts = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Tests:
    """P-values `[cell]` of a number, each twice the one-sided p.

    kept: small if the number is shown to pass. broken: small if it is shown to fail.
    """

    kept: np.ndarray
    broken: np.ndarray


@dataclass(frozen=True)
class Measured:
    """A measured number: the layer's values, and the tables with the values to compare with.

    values: a row per cell, a column per sample. own: the numbers of this network. twins,
    shuffled: the numbers of the untrained networks, and of those with shuffled weights. result:
    knows which samples belong together.
    """

    name: str
    number: Number
    values: pd.DataFrame
    own: Parts
    twins: Parts
    shuffled: Parts
    result: Result

    def by_group(self, values: pd.DataFrame) -> np.ndarray:
        """Returns values [cell, sample] as [group, cell], with the same means, for intervals."""
        return self.result.by_group(values.to_numpy(float).T, values.columns)

    def beside(self, of: str) -> Any:
        """Returns the number's values for a null or limit in these cells; NaN if not measured."""
        return by_sample(self.own, of, self.name).reindex(self.values.index)


def cells(result: Result) -> pd.DataFrame:
    """Returns a row for each layer, number and setting: `AuditResult.table()`."""
    own = parts_of(result.table("numbers"))
    twins, mixed = (parts_of(made(result, "untrained", kind)) for kind in ("drawn", "shuffled"))
    parts: list[pd.DataFrame] = []
    for name, number in NUMBERS.items():
        values = pd.DataFrame() if number.of_weights else by_sample(own, "layer", name)
        if len(values):
            parts.append(_cells(Measured(name, number, values, own, twins, mixed, result)))
    parts += [*_of_weights(result), _missing(result)]
    rows: Any = pd.concat([part for part in parts if len(part)], ignore_index=True)
    order = {name: place for place, name in enumerate(NUMBERS)}
    rows = rows.assign(_order=rows["number"].map(order))
    rows = rows.sort_values(["_order", *PLACE], kind="stable", ignore_index=True)
    rows["eps"] = rows["eps"].where(rows["eps"] != NO_EPS)
    return rows.reindex(columns=COLUMNS)


def parts_of(table: pd.DataFrame) -> Parts:
    """Returns the rows of each part: the layer, each null and each limit."""
    if not len(table):
        return {}
    ids = [column for column in ("seed", "sample") if column in table]
    numbers = [name for name in NUMBERS if name in table]
    rows: Any = table[["of", *PLACE, *ids, *numbers]].set_index([*PLACE, *ids])
    return {of: own[numbers] for of, own in rows.groupby("of", sort=False)}


def by_sample(parts: Parts, of: str, name: str) -> Any:
    """Returns a number as a table: a row per cell, a column per sample (or seed and sample).

    of: "layer", or the name of the null or limit whose values are wanted. Missing values are NaN.
    """
    if of not in parts or name not in parts[of]:
        return pd.DataFrame()
    values: Any = parts[of][name].dropna()
    return values.unstack([column for column in values.index.names if column not in PLACE])


def made(result: Result, name: str, weights: str) -> Any:
    """Returns the rows of a table of untrained networks whose weights are "drawn" or "shuffled".

    Older saved results have none with shuffled weights, and no such column.
    """
    table: Any = result.table(name)
    if "weights" not in table:
        return table if weights == "drawn" else table[:0]
    return table[table["weights"] == weights].drop(columns="weights")


def _cells(measured: Measured) -> pd.DataFrame:
    """Returns the cells of one number, with its tests adjusted over layers."""
    number, values = measured.number, measured.values
    free = measured.by_group(values)
    resampled, n = studentised(free), (~np.isnan(free)).sum(axis=0)
    low, high = resampled.interval()
    columns: Columns = {"n": values.notna().sum(axis=1).to_numpy(), "value": resampled.mean}
    columns |= {"low": low, "high": high} | _untrained(measured, resampled.mean, resampled.error, n)
    limits, at_ceiling = _limits(measured, resampled.mean)
    columns |= limits
    tests = {"": _within(measured, resampled)}
    if number.null:
        excess, tests[number.null] = _excess(measured)
        gain, tests[number.draws] = _gain(measured)
        columns |= excess | gain
    # if the null is random weights, the test of the gain replaces the test of the excess: each draw
    # of weights serves all samples, so only the variation over draws shows what to expect of new
    # weights
    columns |= _decided(values.index, list(tests.values()), at_ceiling)
    columns["reason"] = [
        _reason(row, number, {key: float(test.kept[place]) for key, test in tests.items()})
        for place, row in enumerate(pd.DataFrame(columns).to_dict("records"))
    ]
    columns |= {"claim": CLAIM_OF[measured.name], "number": measured.name}
    return pd.DataFrame(columns, index=values.index).reset_index()


def _reason(row: dict[str, Any], number: Number, p: dict[str, float]) -> str:
    """Returns why a cell within its bounds is not kept: the tests that it did not pass."""
    low, high = number.bounds
    inside = low <= row["value"] <= high
    if row["verdict"] == BROKEN and inside:
        return f"within its bounds, but worse than {NULLS[number.null].words}"
    if row["verdict"] != UNDECIDED or not inside or not p[""] <= LEVEL:
        return ""
    failed = [NULLS[key].words for key, value in p.items() if key and value > LEVEL]
    if not failed:
        return (
            "within its bounds, but this is not shown after the correction for the number of layers"
        )
    if pd.isna(row.get("gain", np.nan)) and number.null:
        return "within its bounds; random weights and nulls were not measured on these samples"
    return f"within its bounds, but not shown to be better than {' and '.join(failed)}"


def _within(measured: Measured, resampled: Any) -> Tests:
    """Tests whether the true mean lies within a number's bounds; p is twice the one-sided p.

    If all samples lie on one side of a bound by more than rounding, p is at most that of a sign
    test, of groups where samples are not independent. So numbers that are nearly or exactly the
    same in all samples, which resamples cannot test, are decided too. A value on a bound counts as
    within it.
    """
    low, high = measured.number.bounds
    table, there = measured.values.to_numpy(), measured.values.notna().T
    groups = measured.result.groups_at(there.index)
    n = (there if groups is None else there.groupby(groups).any()).sum().to_numpy()

    def beyond(bound: float, sign: int, least: float) -> np.ndarray:
        p = resampled.above(bound) if sign > 0 else resampled.below(bound)
        every = np.where(np.isnan(table), True, sign * (table - bound) > least).all(axis=1)
        return np.fmin(np.where(np.isnan(p), 1.0, p), np.where(every, 0.5**n, 1.0))

    kept = np.maximum(beyond(low, 1, -_ROUNDING), beyond(high, -1, -_ROUNDING))
    broken = np.minimum(beyond(low, -1, _ROUNDING), beyond(high, 1, _ROUNDING))
    return Tests(2 * kept, 2 * broken)


def _columns(name: str, difference: Difference) -> Columns:
    """Returns a difference and the ends of its interval as columns."""
    low, high = difference.ends
    return {name: difference.value, f"{name}_low": low, f"{name}_high": high}


def _better(number: Number, difference: Difference) -> Tests:
    """Tests whether a difference is on the better side of 0, or on the worse one.

    A difference as small as rounding lies on neither side.
    """
    equal = np.isnan(difference.value) | (np.abs(difference.value) < _ROUNDING)
    better = 1 if number.better > 0 else -1
    kept, broken = difference.towards(better), difference.towards(-better)
    return Tests(np.where(equal, 1.0, kept), np.where(equal, 1.0, broken))


def _excess(measured: Measured) -> tuple[Columns, Tests]:
    """Returns the null and the excess over it, paired by sample, and the tests of the excess."""
    values, ones = measured.values, np.ones(len(measured.values))
    null = measured.beside(measured.number.null).reindex(columns=values.columns)
    columns: Columns = {"null": null.mean(axis=1).to_numpy()}
    if null.isna().to_numpy().all():
        return columns, Tests(ones, ones)
    over = paired(measured.by_group(values - null))
    return columns | _columns("excess", over), _better(measured.number, over)


def _gain(measured: Measured) -> tuple[Columns, Tests]:
    """Returns the gain over random weights, and tests if newly drawn ones would give it too.

    p is the largest of all draws and of each group of eight: where one group does not show what the
    others show, the verdict hangs on which weights were drawn, and so it is undecided.
    """
    ones = np.ones(len(measured.values))
    start = f"{measured.number.draws} "
    drawn = sorted(of for of in measured.own if of.startswith(start))
    tables = [measured.beside(of) for of in drawn]
    if not tables or not len(tables[0].columns):
        return {}, Tests(ones, ones)
    count = max(len(tables) // _GROUP, 1)
    groups = [tables, *(tables[first::count] for first in range(count))]
    parts = [_over_draws(measured, group) for group in groups]
    tests = [_better(measured.number, part) for part in parts]
    kept, broken = (
        np.maximum.reduce([getattr(test, way) for test in tests]) for way in ("kept", "broken")
    )
    return _columns("gain", parts[0]), Tests(kept, broken)


def _over_draws(measured: Measured, tables: list[Any]) -> Difference:
    """Returns the mean gain over draws of random weights, with the interval of one more draw."""
    over = [measured.values.reindex(columns=table.columns) - table for table in tables]
    mean: Any = sum(over[1:], over[0]) / len(over)
    error, n = mean_error(measured.by_group(mean))
    means = np.stack([table.mean(axis=1).to_numpy() for table in over])
    # `against_networks` returns 0 minus the mean of `-means`, which is the mean gain over draws
    return against_networks(np.zeros(means.shape[1]), error, -means, n)


def _untrained(measured: Measured, mean: np.ndarray, error: np.ndarray, n: np.ndarray) -> Columns:
    """Returns the means of untrained networks and of shuffled ones, and how this one differs.

    The difference is this network's value minus that of a new random network. n: over how many
    independent samples the mean is.
    """
    columns: Columns = {}
    for kind, twins in (("untrained", measured.twins), ("shuffled", measured.shuffled)):
        others = by_sample(twins, "layer", measured.name).reindex(measured.values.index)
        if len(others.columns):
            by_seed = others.T.groupby(level="seed").mean().to_numpy()
            difference = against_networks(mean, error, by_seed, n)
            columns |= _beside(kind, mean, difference, others.mean(axis=1).to_numpy())
    return columns


def _beside(kind: str, value: np.ndarray, difference: Difference, mean: np.ndarray) -> Columns:
    """Returns the columns of untrained networks, or the interval of one more shuffled network."""
    if kind == "untrained":
        return {"untrained": mean} | _columns("difference", difference)
    low, high = difference.ends
    return {"shuffled": mean, "shuffled_low": value - high, "shuffled_high": value - low}


def _limits(measured: Measured, mean: np.ndarray) -> tuple[Columns, np.ndarray]:
    """Returns the columns about the ceiling and about the construction (an ideal layer).

    Also returns which cells are at their ceiling: the mean over the samples that have a ceiling is
    within 1 % of the way from the ceiling to the bound. Such cells need not beat a null.
    """
    number, blank = measured.number, np.full(len(mean), np.nan)
    low, high = number.bounds
    same, best = mean, blank if number.top is None else np.full(len(mean), number.top)
    ceiling = measured.beside("ceiling")
    if number.ceiled and len(ceiling.columns):
        same = measured.values.reindex(columns=ceiling.columns).mean(axis=1).to_numpy()
        best = ceiling.mean(axis=1).to_numpy()
    share = same if number.top == 1.0 else blank
    if number.ceiled:
        there = best > 0 if number.better > 0 else best < 0
        share = np.divide(same, best, where=there, out=blank.copy())
    ideal = measured.beside("construction")
    reached = ideal.mean(axis=1).to_numpy() if len(ideal.columns) else blank
    does = np.abs(reached) > _ROUNDING  # an ideal layer without any effect misses no bound
    missed = does & ~((low <= reached) & (reached <= high))
    bound = number.low if number.better > 0 else number.high
    near = np.zeros(len(mean), dtype=bool)
    if bound is not None:
        near = np.abs(same - best) <= _NEAR * np.abs(bound - best)
    columns = {"ceiling": best, "share": share, "construction": reached, "by_construction": missed}
    return columns, near


def _decided(index: Any, tests: list[Tests], at_ceiling: np.ndarray) -> Columns:
    """Returns p, adjusted over the layers of each setting by Holm's method, and the verdict.

    tests: first the test of the bounds, then the tests against nulls, which a cell at its ceiling
    need not pass.
    """
    first, *others = tests
    kept = [first.kept, *(np.where(at_ceiling, 0.0, test.kept) for test in others)]
    broken = [first.broken, *(np.where(at_ceiling, 1.0, test.broken) for test in others)]
    kept, broken = np.maximum.reduce(kept), np.minimum.reduce(broken)
    setting = index.to_frame(index=False).groupby(PLACE[1:], sort=False).ngroup().to_numpy()
    for group in np.unique(setting):
        at = setting == group
        kept[at], broken[at] = holm(kept[at]), holm(broken[at])
    verdict = np.where(kept <= LEVEL, KEPT, np.where(broken <= LEVEL, BROKEN, UNDECIDED))
    return {"p": np.minimum(np.minimum(kept, broken), 1.0), "verdict": verdict}


def _of_weights(result: Result) -> Iterator[pd.DataFrame]:
    """Yields the cells for what is measured on weights: exact values, with twins that vary."""
    own: Any = result.table("weights")
    for name, number in NUMBERS.items():
        rows: Any = own[own["number"] == name].reset_index(drop=True)
        if not number.of_weights or not len(rows):
            continue
        value, over = rows["value"].to_numpy(), (rows["value"] - rows["null"]).to_numpy()
        low, high = number.bounds
        kept = (low <= value) & (value <= high)
        columns: Columns = dict.fromkeys(("low", "high"), value)
        if not np.isnan(over).all():
            columns |= dict.fromkeys(("excess", "excess_low", "excess_high"), over)
            kept &= number.better * over > 0
        for kind, weights in (("untrained", "drawn"), ("shuffled", "shuffled")):
            others = made(result, "untrained_weights", weights)
            others = others[others["number"] == name] if len(others) else others
            if len(others):
                table: Any = others.pivot(index="seed", columns="layer", values="value")
                table = table.reindex(columns=rows["layer"])
                against = against_networks(value, np.zeros(len(value)), table.to_numpy())
                columns |= _beside(kind, value, against, table.mean().to_numpy())
        columns["ceiling"] = np.nan if number.top is None else number.top
        columns["share"] = value if number.top == 1.0 else np.nan
        zero = np.isnan(value)
        columns["verdict"] = np.where(zero, UNDECIDED, np.where(kept, KEPT, BROKEN))
        columns["reason"] = np.where(zero, "the weights are zero", "")
        yield rows.assign(claim=CLAIM_OF[name], n=1, p=0.0, **_NOWHERE, **columns)


def _missing(result: Result) -> pd.DataFrame:
    rows = [
        {"layer": layer, "claim": CLAIM_OF[name], "number": name, "reason": reason}
        | {"n": 0, "verdict": NOT_APPLICABLE}
        | _NOWHERE
        for layer, reasons in enumerate(result.meta["reasons"])
        for name, reason in reasons.items()
    ]
    return pd.DataFrame(rows)


def nulls(result: Result) -> pd.DataFrame:
    """Returns a row for each null or limit, number and setting: a mean with its standard error."""
    rows: list[pd.DataFrame] = []
    for of, own in parts_of(result.table("numbers")).items():
        for name in own if of != "layer" else ():
            values = own[name].dropna().groupby(level=PLACE)
            found = {"n": values.count(), "value": values.mean()}
            if len(found["n"]):
                wide = own[name].dropna().unstack("sample").loc[found["n"].index]
                error, _ = mean_error(result.by_group(wide.to_numpy(float).T, wide.columns))
                found["error"] = pd.Series(error, found["n"].index)
                rows.append(pd.DataFrame(found).reset_index().assign(of=of, number=name))
    columns = ["of", "number", *PLACE, "n", "value", "error"]
    table: Any = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=columns)
    table["eps"] = table["eps"].where(table["eps"] != NO_EPS)
    return table[columns]
