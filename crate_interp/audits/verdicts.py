"""The cells of an audit: each number with its interval, its nulls and limits, and its verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIM_OF, NULLS, NUMBERS, Number
from crate_interp.audits.setting import NO_EPS
from crate_interp.results.result import Result
from crate_interp.stats import bootstrap, verdicts
from crate_interp.stats.contrasts import Difference, against_networks, mean_error, paired

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
# column of a kind of random networks -> how the table of untrained networks calls their weights
_COPIES = {"untrained": "drawn", "shuffled": "shuffled"}
Columns = dict[str, Any]  # the cells of a number: an array `[cell]` for each column
# number -> a row per part ("layer", a null or a limit) and cell, a column per (seed and) sample
Parts = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Measured:
    """A measured number: a row of values per cell, a column per sample, and what is beside it."""

    name: str
    values: pd.DataFrame
    own: Parts
    result: Result

    @property
    def number(self) -> Number:
        """The record of the number."""
        return NUMBERS[self.name]

    def by_group(self, values: pd.DataFrame) -> np.ndarray:
        """Returns values [cell, sample] as [group, cell], with the same means, for intervals."""
        return self.result.by_group(values.to_numpy(float).T, values.columns)

    def beside(self, of: str) -> Any:
        """Returns the number's values for a null or limit in these cells; NaN if not measured."""
        return by_sample(self.own, of, self.name).reindex(self.values.index)


def cells(result: Result) -> pd.DataFrame:
    """Returns a row for each layer, number and setting: `AuditResult.table()`."""
    own = parts_of(result.table("numbers"))
    copies = {
        kind: parts_of(untrained_rows(result, "untrained", weights))
        for kind, weights in _COPIES.items()
    }
    parts = [*_of_weights(result), _missing(result)]
    for name, number in NUMBERS.items():
        values = pd.DataFrame() if number.of_weights else by_sample(own, "layer", name)
        if len(values):
            parts.append(_cells(Measured(name, values, own, result), copies))
    rows: Any = pd.concat([part for part in parts if len(part)], ignore_index=True)
    order = {name: place for place, name in enumerate(NUMBERS)}
    rows = rows.assign(_order=rows["number"].map(order))
    rows = rows.sort_values(["_order", *PLACE], kind="stable", ignore_index=True)
    rows["eps"] = rows["eps"].where(rows["eps"] != NO_EPS)
    return rows.reindex(columns=COLUMNS)


def parts_of(table: pd.DataFrame) -> Parts:
    """Returns each number of the layer, each null and each limit; missing values are NaN."""
    if not len(table):
        return {}
    ids = [column for column in ("seed", "sample") if column in table]
    rows: Any = table.set_index(["of", *PLACE, *ids])
    wide = {name: rows[name].dropna().unstack(ids) for name in NUMBERS if name in rows}
    return {name: values.sort_index() for name, values in wide.items() if len(values)}


def by_sample(parts: Parts, of: str, name: str) -> Any:
    """Returns a number as a table: a row per cell, a column per sample (or seed and sample).

    of: "layer", or the name of the null or limit whose values are wanted.
    """
    if name not in parts or of not in parts[name].index.unique("of"):
        return pd.DataFrame()
    return parts[name].loc[of].dropna(axis=1, how="all")


def untrained_rows(result: Result, name: str, weights: str) -> Any:
    """Returns the rows of a table of untrained networks whose weights are "drawn" or "shuffled".

    Older saved results have none with shuffled weights, and no such column.
    """
    table: Any = result.table(name)
    return table[table["weights"] == weights].drop(columns="weights")


def _cells(measured: Measured, copies: dict[str, Parts]) -> pd.DataFrame:
    """Returns the cells of one number, with its tests adjusted over layers.

    If the baseline is random weights, the test of the gain replaces the test of the excess. Each
    draw of weights serves all samples, so only the variation over draws shows what new weights
    would do.
    """
    number, values, result = measured.number, measured.values, measured.result
    free = measured.by_group(values)
    resampled, n = bootstrap.studentised(free), (~np.isnan(free)).sum(axis=0)
    mean, (low, high) = resampled.mean, resampled.interval()
    columns: Columns = {"claim": CLAIM_OF[measured.name], "number": measured.name}
    columns |= {"n": values.notna().sum(axis=1).to_numpy(), "value": mean, "low": low, "high": high}
    for kind, parts in copies.items():
        others = by_sample(parts, "layer", measured.name).reindex(values.index)
        if len(others.columns):
            by_seed = others.T.groupby(level="seed").mean().to_numpy()
            difference = against_networks(mean, resampled.error, by_seed, n)
            columns |= _beside(kind, mean, difference, others.mean(axis=1).to_numpy())
    limits, at_ceiling = _limits(measured, mean)
    columns |= limits
    rivals: dict[str, verdicts.Tests] = {}
    if number.null:
        null = measured.beside(number.null).reindex(columns=values.columns)
        excess, gain = paired(measured.by_group(values - null)), _gains(measured)
        columns |= {"null": null.mean(axis=1).to_numpy()} | _columns("excess", excess)
        columns |= _columns("gain", gain[0]) if gain else {}
        blank = verdicts.Tests(*np.ones((2, len(mean))))
        over_draws = [verdicts.better(one, number.better or -1) for one in gain] or [blank]
        rivals[NULLS[number.null].words] = verdicts.better(excess, number.better or -1)
        rivals[NULLS[number.draws].words] = verdicts.Tests(
            *(np.maximum.reduce(ways) for ways in zip(*over_draws, strict=True))
        )
    there = values.notna().T
    groups = result.groups_at(there.index)
    independent = (there if groups is None else there.groupby(groups).any()).sum().to_numpy()
    settings = values.index.to_frame(index=False).groupby(PLACE[1:], sort=False)
    columns |= verdicts.decide(
        (number.bounds[0] <= mean) & (mean <= number.bounds[1]),
        verdicts.within(values.to_numpy(), number.bounds, resampled, independent),
        rivals,
        family=settings.ngroup().to_numpy(),
        exempt=at_ceiling,
        compared=~np.isnan(columns.get("gain", np.full(len(mean), np.nan))),
    )
    return pd.DataFrame(columns, index=values.index).reset_index()


def _columns(name: str, difference: Difference) -> Columns:
    """Returns a difference and the ends of its interval as columns."""
    return {name: difference.value, f"{name}_low": difference.low, f"{name}_high": difference.high}


def _gains(measured: Measured) -> list[Difference]:
    """Returns the gains over random weights: over all draws, then over each group of eight draws.

    If one group does not show what the others show, the verdict depends on the weights that were
    drawn, so it is undecided.
    """
    start = f"{measured.number.draws} "
    parts = measured.own[measured.name].index.unique("of")
    tables = [measured.beside(of) for of in sorted(parts) if of.startswith(start)]
    if not tables or not len(tables[0].columns):
        return []
    count = max(len(tables) // _GROUP, 1)
    groups = [tables, *(tables[first::count] for first in range(count))]
    return [_over_draws(measured, group) for group in groups]


def _over_draws(measured: Measured, tables: list[Any]) -> Difference:
    """Returns the mean gain over draws of random weights, with the interval of one more draw."""
    samples = sorted(set().union(*(table.columns for table in tables)))
    values = measured.values.reindex(columns=samples)
    draws = np.stack([table.reindex(columns=samples).to_numpy(float) for table in tables])
    over = values.to_numpy(float) - draws  # [draw, cell, sample]
    mean = pd.DataFrame(over.mean(axis=0), values.index, values.columns)
    error, n = mean_error(measured.by_group(mean))
    means: Any = pd.DataFrame(over.reshape(-1, over.shape[2])).mean(axis=1)
    means = means.to_numpy().reshape(len(tables), -1)
    # `against_networks` returns 0 minus the mean of `-means`, which is the mean gain over draws
    return against_networks(np.zeros(means.shape[1]), error, -means, n)


def _beside(kind: str, value: np.ndarray, difference: Difference, mean: np.ndarray) -> Columns:
    """Returns the columns of untrained networks, or the interval of one more shuffled network."""
    if kind == "untrained":
        return {"untrained": mean} | _columns("difference", difference)
    low, high = difference.ends
    return {"shuffled": mean, "shuffled_low": value - high, "shuffled_high": value - low}


def _limits(measured: Measured, mean: np.ndarray) -> tuple[Columns, np.ndarray]:
    """Returns the columns about the ceiling and about the construction (an ideal layer).

    Also returns which cells are at their upper limit (ceiling): their mean, over samples that have
    a limit, is within 1 % of the way from the limit to the bound. Such cells need not beat a
    baseline.
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


def _of_weights(result: Result) -> Iterator[pd.DataFrame]:
    """Yields the cells for what is measured on weights: exact values, with twins that vary."""
    own: Any = result.table("weights")
    for name, number in NUMBERS.items():
        rows: Any = own[own["number"] == name].reset_index(drop=True)
        if not number.of_weights or not len(rows):
            continue
        value, over = rows["value"].to_numpy(), (rows["value"] - rows["null"]).to_numpy()
        kept = (number.bounds[0] <= value) & (value <= number.bounds[1])
        columns: Columns = dict.fromkeys(("low", "high"), value)
        if not np.isnan(over).all():
            columns |= dict.fromkeys(("excess", "excess_low", "excess_high"), over)
            kept &= number.better * over > 0
        for kind, weights in _COPIES.items():
            others = untrained_rows(result, "untrained_weights", weights)
            others = others[others["number"] == name] if len(others) else others
            if len(others):
                table: Any = others.pivot(index="seed", columns="layer", values="value")
                table = table.reindex(columns=rows["layer"])
                against = against_networks(value, np.zeros(len(value)), table.to_numpy())
                columns |= _beside(kind, value, against, table.mean().to_numpy())
        columns["ceiling"] = np.nan if number.top is None else number.top
        columns["share"] = value if number.top == 1.0 else np.nan
        zero = np.isnan(value)
        known = np.where(kept, verdicts.KEPT, verdicts.BROKEN)
        columns["verdict"] = np.where(zero, verdicts.UNDECIDED, known)
        columns["reason"] = np.where(zero, "the weights are zero", "")
        yield rows.assign(claim=CLAIM_OF[name], n=1, p=0.0, **_NOWHERE, **columns)


def _missing(result: Result) -> pd.DataFrame:
    rows = [
        (layer, CLAIM_OF[name], name, reason)
        for layer, reasons in enumerate(result.meta["reasons"])
        for name, reason in reasons.items()
    ]
    table = pd.DataFrame(rows, columns=["layer", "claim", "number", "reason"])
    return table.assign(n=0, verdict=verdicts.NOT_APPLICABLE, **_NOWHERE)


def nulls(result: Result) -> pd.DataFrame:
    """Returns a row for each null or limit, number and setting: a mean with its standard error."""
    numbers: Any = result.table("numbers")
    parts, rows = parts_of(numbers), []
    for of in numbers["of"].unique():
        for name in parts if of != "layer" else ():
            values = by_sample(parts, of, name)
            if len(values):
                error, _ = mean_error(result.by_group(values.to_numpy(float).T, values.columns))
                found = {"n": values.count(axis=1), "value": values.mean(axis=1), "error": error}
                rows.append(pd.DataFrame(found).reset_index().assign(of=of, number=name))
    columns = ["of", "number", *PLACE, "n", "value", "error"]
    table: Any = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=columns)
    table["eps"] = table["eps"].where(table["eps"] != NO_EPS)
    return table[columns]
