"""From numbers by sample to words: means, intervals, excess over nulls, shares of ceilings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIM_OF, NUMBERS, Number
from crate_interp.audits.number_tables import NO_EPS
from crate_interp.results.result import Result
from crate_interp.stats.bootstrap import studentised
from crate_interp.stats.contrasts import Difference, against_networks, paired
from crate_interp.stats.significance import LEVEL, holm

KEPT, BROKEN, UNDECIDED, NOT_APPLICABLE = "kept", "broken", "undecided", "not applicable"
_NEAR = 0.01  # of the way from the ceiling to the bound
_ROUNDING = 1e-9  # numbers of the audit are of order 1
_CEILED = ("compresses", "descends", "share")
WORDS = {
    "shuffled": "a shuffled update",
    "random map": "random output maps",
    "random D": "random dictionaries",
}
PLACE = ["layer", "frame", "eps", "basis", "tokens"]
COLUMNS = [
    "claim", "number", *PLACE, "n", "value", "low", "high", "null", "excess", "excess_low",
    "excess_high", "untrained", "difference", "difference_low", "difference_high", "gain",
    "gain_low", "gain_high", "ceiling", "share", "construction", "by_construction", "p", "verdict",
    "reason",
]  # fmt: skip


@dataclass(frozen=True)
class Tests:
    """P-values `[cell]`: that a number passes, and that it fails. Two-sided: twice one-sided."""

    kept: np.ndarray
    broken: np.ndarray


def cells(result: Result) -> pd.DataFrame:
    """Returns a row for each layer, number and setting: `AuditResult.table()`."""
    parts = [*_of_numbers(result), *_of_weights(result), _missing(result)]
    rows: Any = pd.concat([part for part in parts if len(part)], ignore_index=True)
    order = {name: place for place, name in enumerate(NUMBERS)}
    rows = rows.assign(_order=rows["number"].map(order))
    rows = rows.sort_values(["_order", *PLACE], kind="stable", ignore_index=True)
    rows["eps"] = rows["eps"].where(rows["eps"] != NO_EPS)
    return rows.reindex(columns=COLUMNS)


def by_sample(table: pd.DataFrame, of: str, name: str) -> Any:
    """Returns a number as cells by samples (or by seeds and samples); what is missing is NaN."""
    if name not in table or not len(table):
        return pd.DataFrame()
    ids = [column for column in ("seed", "sample") if column in table]
    rows: Any = table.loc[(table["of"] == of) & table[name].notna(), [*PLACE, *ids, name]]
    return rows.set_index([*PLACE, *ids])[name].unstack(ids)


def _of_numbers(result: Result) -> Iterator[pd.DataFrame]:
    own, twins = result.table("numbers"), result.table("untrained")
    for name, facts in NUMBERS.items():
        if facts.of_weights:
            continue
        values = by_sample(own, "layer", name)
        if not len(values):
            continue
        found = _cells(name, facts, own, twins, values)
        found["claim"], found["number"] = CLAIM_OF[name], name
        yield found.reset_index()


def _cells(
    name: str, facts: Number, own: pd.DataFrame, twins: pd.DataFrame, values: pd.DataFrame
) -> Any:
    """Returns the cells of one number, with its tests adjusted over layers."""
    resampled = studentised(values.to_numpy().T)
    found = pd.DataFrame(index=values.index)
    found["n"] = values.notna().sum(axis=1)
    found["value"] = resampled.mean
    found["low"], found["high"] = resampled.interval()
    others = by_sample(twins, "layer", name).reindex(values.index)
    found["untrained"] = others.mean(axis=1) if len(others.columns) else np.nan
    n = found["n"].to_numpy()
    against = against_networks(resampled.mean, resampled.error, _by_seed(others), n)
    _add(found, "difference", against)
    free = _limits(found, facts, name, own, values)  # at its ceiling: no null has to be beaten
    tests = {"": _within(facts, resampled, values)}
    if facts.null:
        excess, gain = (step(found, facts, name, own, values) for step in (_excess, _gain))
        # weights drawn once for all samples: only the spread over draws tells about new ones
        tests |= {} if facts.null == facts.draws else {facts.null: excess}
        tests[facts.draws] = gain
    beaten = {key: test for key, test in tests.items() if key}
    kept = [np.where(free, 0.0, test.kept) for test in beaten.values()]
    broken = [np.where(free, 1.0, test.broken) for test in beaten.values()]
    kept, broken = [tests[""].kept, *kept], [tests[""].broken, *broken]
    _decide(found, Tests(np.maximum.reduce(kept), np.minimum.reduce(broken)))
    found["reason"] = [
        _reason(row, facts, {key: float(test.kept[place]) for key, test in tests.items()})
        for place, row in enumerate(found.to_dict("records"))
    ]
    return found


def _reason(row: dict[str, Any], facts: Number, p: dict[str, float]) -> str:
    """Returns why a cell within its bounds is not kept, from the tests that it did not pass."""
    low, high = facts.bounds
    inside = low <= row["value"] <= high
    if row["verdict"] == BROKEN and inside:
        return f"within its bounds, but worse than {WORDS[facts.null]}"
    if row["verdict"] != UNDECIDED or not inside or not p[""] <= LEVEL:
        return ""
    failed = [WORDS[key] for key, value in p.items() if key and value > LEVEL]
    if not failed:
        return "within its bounds, but not after the correction for the number of layers"
    if pd.isna(row.get("gain", np.nan)) and facts.null:
        return "within its bounds; random weights and nulls were not measured on these samples"
    return f"within its bounds, but not shown to be better than {' and '.join(failed)}"


def _within(facts: Number, resampled: Any, values: pd.DataFrame) -> Tests:
    """Tests whether the true mean lies in the bounds of a number; two-sided, so twice one-sided.

    If all samples lie on one side of a bound, p is at most that of a sign test: resamples of nearly
    constant numbers have no spread, and bootstrap-t alone would not decide.
    """
    low, high = facts.bounds
    table, n = values.to_numpy(), values.notna().sum(axis=1).to_numpy()

    def beyond(bound: float, sign: int) -> np.ndarray:
        p = resampled.above(bound) if sign > 0 else resampled.below(bound)
        every = np.where(np.isnan(table), True, sign * (table - bound) > 0).all(axis=1)
        return np.where(every, np.minimum(p, 0.5**n), p)

    kept = np.maximum(beyond(low, 1), beyond(high, -1))
    broken = np.minimum(beyond(low, -1), beyond(high, 1))
    return Tests(2 * kept, 2 * broken)


def _excess(found: Any, facts: Number, name: str, own: pd.DataFrame, values: Any) -> Tests:
    """Adds the null and the excess over it, paired by sample."""
    null = by_sample(own, facts.null, name).reindex(index=values.index, columns=values.columns)
    found["null"] = null.mean(axis=1)
    ones = np.ones(len(values))
    if not len(null) or null.isna().to_numpy().all():
        return Tests(ones, ones)
    over = paired((values - null).to_numpy().T)
    _add(found, "excess", over)
    return _better(over, facts)


def _gain(found: Any, facts: Number, name: str, own: pd.DataFrame, values: Any) -> Tests:
    """Adds how far the value lies from that of random weights, as one new draw of them."""
    ones = np.ones(len(values))
    drawn = [of for of in own["of"].unique() if of.startswith(f"{facts.draws} ")]
    tables = [by_sample(own, of, name).reindex(index=values.index) for of in sorted(drawn)]
    if not tables or not len(tables[0].columns):
        return Tests(ones, ones)
    over = [values.reindex(columns=table.columns) - table for table in tables]
    together: Any = sum(over[1:], over[0]) / len(over)
    n, error = together.count(axis=1).to_numpy(), together.sem(axis=1).to_numpy()
    means = np.stack([table.mean(axis=1).to_numpy() for table in over])
    # the difference of each draw is 0 minus it, so that the sign is that of the layer
    gain = against_networks(np.zeros(len(values)), error, -means, n)
    _add(found, "gain", gain)
    return _better(gain, facts)


def _add(found: Any, name: str, difference: Difference) -> None:
    """Adds a difference and its interval as columns."""
    found[name] = difference.value
    found[f"{name}_low"], found[f"{name}_high"] = difference.ends


def _better(difference: Difference, facts: Number) -> Tests:
    """Tests whether a difference is on the better side of 0, or on the worse one."""
    # on neither side: what rounding leaves of equal numbers is no difference
    equal = np.isnan(difference.value) | (np.abs(difference.value) < _ROUNDING)
    better = 1 if facts.better > 0 else -1
    kept, broken = difference.towards(better), difference.towards(-better)
    return Tests(np.where(equal, 1.0, kept), np.where(equal, 1.0, broken))


def _by_seed(table: Any) -> np.ndarray:
    """Returns the mean over samples of each twin, `[seed, cell]`."""
    if not len(table.columns):
        return np.zeros((0, len(table)))
    return table.T.groupby(level="seed").mean().to_numpy()


def _limits(found: Any, facts: Number, name: str, own: pd.DataFrame, values: Any) -> np.ndarray:
    """Adds the ceiling, the share of it, and what an ideal layer reaches.

    Returns where the value is within 1 % of the way from its ceiling to its bound, on the samples
    that have a ceiling.
    """
    low, high = facts.bounds
    ceiling = by_sample(own, "ceiling", name).reindex(values.index)
    same, found["ceiling"] = found["value"], np.nan if facts.top is None else facts.top
    if name in _CEILED and len(ceiling.columns):
        same = values.reindex(columns=ceiling.columns).mean(axis=1)
        found["ceiling"] = ceiling.mean(axis=1)
    best = found["ceiling"]
    share = (same / best).where(best > 0 if name == "share" else best < 0)
    found["share"] = share if name in _CEILED else found["value"] if facts.top == 1.0 else np.nan
    ideal = by_sample(own, "construction", name).reindex(values.index)
    found["construction"] = ideal.mean(axis=1) if len(ideal.columns) else np.nan
    reached = found["construction"]
    does = reached.notna() & (reached.abs() > _ROUNDING)  # a layer that does nothing is no excuse
    found["by_construction"] = does & ~reached.between(low, high)
    bound = facts.low if facts.better > 0 else facts.high
    if bound is None:
        return np.zeros(len(found), dtype=bool)
    near = (same - found["ceiling"]).abs() <= _NEAR * (bound - found["ceiling"]).abs()
    return near.to_numpy()


def _decide(found: Any, tests: Tests) -> None:
    """Adds p and the verdict, adjusted over the layers of each setting by Holm's method."""
    places = found.index.to_frame(index=False)
    setting = places.groupby(PLACE[1:], sort=False).ngroup().to_numpy()
    kept, broken = np.ones(len(found)), np.ones(len(found))
    for group in np.unique(setting):
        at = setting == group
        kept[at], broken[at] = holm(tests.kept[at]), holm(tests.broken[at])
    found["p"] = np.minimum(np.minimum(kept, broken), 1.0)
    words = np.where(kept <= LEVEL, KEPT, np.where(broken <= LEVEL, BROKEN, UNDECIDED))
    found["verdict"] = words


def _of_weights(result: Result) -> Iterator[pd.DataFrame]:
    """Yields the cells of weights: their value is exact, and several twins have several."""
    own: Any = result.table("weights")
    twins: Any = result.table("untrained_weights")
    for name, facts in NUMBERS.items():
        rows: Any = own[own["number"] == name] if facts.of_weights else own[:0]
        if not len(rows):
            continue
        found: Any = rows.reset_index(drop=True)
        found["claim"] = CLAIM_OF[name]
        found = found.assign(frame="", eps=NO_EPS, basis="", tokens="", n=1)
        found["low"] = found["high"] = found["value"]
        others: Any = twins[twins["number"] == name] if len(twins) else twins
        table = others.pivot(index="seed", columns="layer", values="value") if len(others) else None
        if table is not None:
            table = table.reindex(columns=found["layer"])
            found["untrained"] = table.mean().to_numpy()
            zero = np.zeros(len(found))
            against = against_networks(found["value"].to_numpy(), zero, table.to_numpy())
            _add(found, "difference", against)
        low, high = facts.bounds
        kept = found["value"].between(low, high)
        if found["null"].notna().any():
            over = found["value"] - found["null"]
            found["excess"] = found["excess_low"] = found["excess_high"] = over
            kept &= facts.better * over > 0
        found["ceiling"] = np.nan if facts.top is None else facts.top
        found["share"] = found["value"] if facts.top == 1.0 else np.nan
        found["by_construction"] = False
        found["p"] = 0.0
        zero = found["value"].isna()
        found["verdict"] = np.where(zero, UNDECIDED, np.where(kept, KEPT, BROKEN))
        found["reason"] = np.where(zero, "the weights are zero", "")
        yield found


def _missing(result: Result) -> pd.DataFrame:
    rows = [
        {"layer": layer, "claim": CLAIM_OF[name], "number": name, "reason": reason}
        | {"frame": "", "eps": NO_EPS, "basis": "", "tokens": "", "n": 0}
        | {"verdict": NOT_APPLICABLE, "by_construction": False}
        for layer, reasons in enumerate(result.meta["reasons"])
        for name, reason in reasons.items()
    ]
    return pd.DataFrame(rows)


def nulls(result: Result) -> pd.DataFrame:
    """Returns a row for each null and limit: means over samples with their standard errors."""
    own = result.table("numbers")
    rows: list[pd.DataFrame] = []
    for of in [name for name in own["of"].unique() if name != "layer"] if len(own) else []:
        for name in NUMBERS:
            values = by_sample(own, of, name)
            if len(values):
                found = pd.DataFrame(
                    {"n": values.notna().sum(axis=1), "value": values.mean(axis=1)}
                )
                found["error"] = values.sem(axis=1)
                rows.append(found.reset_index().assign(of=of, number=name))
    columns = ["of", "number", *PLACE, "n", "value", "error"]
    table: Any = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=columns)
    table["eps"] = table["eps"].where(table["eps"] != NO_EPS)
    return table[columns]
