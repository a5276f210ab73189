"""From numbers by sample to words: means, intervals, excess over nulls, shares of ceilings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIMS, NUMBERS, Number
from crate_interp.audits.tables import NO_EPS
from crate_interp.results import Result
from crate_interp.sweeps.bootstrap import against_networks, holm, studentised

KEPT, BROKEN, UNDECIDED, NOT_APPLICABLE = "kept", "broken", "undecided", "not applicable"
ALPHA = 0.05
_NEAR = 0.01  # of the way from the ceiling to the bound
WORDS = {
    "shuffled": "a shuffled update",
    "random map": "random output maps",
    "random D": "random dictionaries",
    "": "untrained networks",
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
    """One-sided p-values `[cell]`: that a number is in its bounds, and that it is not."""

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
        found["claim"], found["number"] = claim_of(name), name
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
    against = against_networks(resampled.mean, resampled.error, _by_seed(others))
    found["difference"], found["difference_low"], found["difference_high"] = against[:3]
    _limits(found, facts, name, own, values)
    within, tests = _within(facts, resampled), []
    if facts.null:
        tests = [_excess(found, facts, name, own, values), _gain(found, facts, name, own, values)]
    free = _at_ceiling(found, facts)  # nothing can be better, so no null has to be beaten
    kept = np.maximum.reduce([np.where(free, 0.0, test.kept) for test in tests] + [within.kept])
    broken = np.minimum.reduce(
        [np.where(free, 1.0, test.broken) for test in tests] + [within.broken]
    )
    _decide(found, Tests(kept, broken))
    low, high = _bounds(facts)
    worse = (found["verdict"] == BROKEN) & found["value"].between(low, high)
    found.loc[worse, "reason"] = f"within its bounds, but worse than {WORDS[facts.null]}"
    same = (found["verdict"] == UNDECIDED) & (within.kept <= ALPHA)
    found.loc[same, "reason"] = _not_beyond(facts)
    return found


def _not_beyond(facts: Number) -> str:
    others = dict.fromkeys((WORDS[facts.null], WORDS[facts.draws]))
    return f"within its bounds, but not shown to be better than {' and '.join(others)}"


def _at_ceiling(found: Any, facts: Number) -> np.ndarray:
    """Tells where a value is within 1 % of the way from its ceiling to its bound."""
    bound = facts.low if facts.better > 0 else facts.high
    if bound is None:
        return np.zeros(len(found), dtype=bool)
    ceiling = found["ceiling"]
    return ((found["value"] - ceiling).abs() <= _NEAR * (bound - ceiling).abs()).to_numpy()


def _bounds(facts: Number) -> tuple[float, float]:
    low = -np.inf if facts.low is None else facts.low
    return low, np.inf if facts.high is None else facts.high


def _within(facts: Number, resampled: Any) -> Tests:
    """Tests whether the true mean lies in the bounds of a number; two-sided, so twice one-sided."""
    low, high = _bounds(facts)
    kept = np.maximum(resampled.above(low), resampled.below(high))
    broken = np.minimum(resampled.below(low), resampled.above(high))
    return Tests(2 * kept, 2 * broken)


def _excess(found: Any, facts: Number, name: str, own: pd.DataFrame, values: Any) -> Tests:
    """Adds the null and the excess over it, paired by sample."""
    null = by_sample(own, facts.null, name).reindex(index=values.index, columns=values.columns)
    found["null"] = null.mean(axis=1)
    ones = np.ones(len(values))
    if not len(null) or null.isna().to_numpy().all():
        return Tests(0 * ones, ones)
    resampled = studentised((values - null).to_numpy().T)
    found["excess"] = resampled.mean
    found["excess_low"], found["excess_high"] = resampled.interval()
    better, worse = resampled.below(0.0), resampled.above(0.0)
    if facts.better > 0:
        better, worse = worse, better
    level = (resampled.error == 0) & (resampled.mean == 0)  # on neither side
    better, worse = (np.where(level, 1.0, p) for p in (better, worse))
    there = ~np.isnan(resampled.mean)
    return Tests(np.where(there, 2 * better, 0.0), np.where(there, 2 * worse, 1.0))


def _gain(found: Any, facts: Number, name: str, own: pd.DataFrame, values: Any) -> Tests:
    """Adds how far the value lies from that of random weights, as one new draw of them."""
    ones = np.ones(len(values))
    drawn = [of for of in own["of"].unique() if of.startswith(f"{facts.draws} ")]
    tables = [by_sample(own, of, name).reindex(index=values.index) for of in sorted(drawn)]
    if not tables or not len(tables[0].columns):
        return Tests(0 * ones, ones)
    over = [values.reindex(columns=table.columns) - table for table in tables]
    paired: Any = sum(over[1:], over[0]) / len(over)
    error = (paired.std(axis=1) / paired.notna().sum(axis=1) ** 0.5).to_numpy()
    means = np.stack([table.mean(axis=1).to_numpy() for table in over])
    # the difference of each draw is 0 minus it, so that the sign is that of the layer
    against = against_networks(np.zeros(len(values)), error, -means)
    found["gain"], found["gain_low"], found["gain_high"] = against[:3]
    better = against[3 if facts.better > 0 else 4]
    return Tests(np.where(np.isnan(found["gain"]), 0.0, 2 * better), ones)


def _by_seed(table: Any) -> np.ndarray:
    """Returns the mean over samples of each twin, `[seed, cell]`."""
    if not len(table.columns):
        return np.zeros((0, len(table)))
    return table.T.groupby(level="seed").mean().to_numpy()


def _limits(found: Any, facts: Number, name: str, own: pd.DataFrame, values: pd.DataFrame) -> None:
    """Adds the ceiling, the share of it, and what an ideal layer reaches."""
    ceiling = by_sample(own, "ceiling", name).reindex(values.index)
    top = np.nan if facts.top is None else facts.top
    found["ceiling"] = ceiling.mean(axis=1) if len(ceiling.columns) else top
    found["share"] = np.nan
    if len(ceiling.columns) and name in ("compresses", "descends"):
        same = values.reindex(columns=ceiling.columns).mean(axis=1)
        found["share"] = (same / found["ceiling"]).where(found["ceiling"] < 0)
    elif facts.top == 1.0:
        found["share"] = found["value"]
    ideal = by_sample(own, "construction", name).reindex(values.index)
    found["construction"] = ideal.mean(axis=1) if len(ideal.columns) else np.nan
    low, high = _bounds(facts)
    reached = found["construction"]
    found["by_construction"] = reached.notna() & ~reached.between(low, high)


def _decide(found: Any, tests: Tests) -> None:
    """Adds p and the verdict, adjusted over the layers of each setting by Holm's method."""
    places = found.index.to_frame(index=False)
    setting = places.groupby(PLACE[1:], sort=False).ngroup().to_numpy()
    kept, broken = np.ones(len(found)), np.ones(len(found))
    for group in np.unique(setting):
        at = setting == group
        kept[at], broken[at] = holm(tests.kept[at]), holm(tests.broken[at])
    found["p"] = np.minimum(np.minimum(kept, broken), 1.0)
    words = np.where(kept <= ALPHA, KEPT, np.where(broken <= ALPHA, BROKEN, UNDECIDED))
    found["verdict"] = words
    found["reason"] = ""


def _of_weights(result: Result) -> Iterator[pd.DataFrame]:
    """Yields the cells of weights: their value is exact, and several twins have several."""
    own: Any = result.table("weights")
    twins: Any = result.table("untrained_weights")
    for name, facts in NUMBERS.items():
        rows: Any = own[own["number"] == name] if facts.of_weights else own[:0]
        if not len(rows):
            continue
        found: Any = rows.reset_index(drop=True)
        found["claim"] = claim_of(name)
        found = found.assign(frame="", eps=NO_EPS, basis="", tokens="", n=1)
        found["low"] = found["high"] = found["value"]
        others: Any = twins[twins["number"] == name] if len(twins) else twins
        table = others.pivot(index="seed", columns="layer", values="value") if len(others) else None
        if table is not None:
            table = table.reindex(columns=found["layer"])
            found["untrained"] = table.mean().to_numpy()
            zero = np.zeros(len(found))
            against = against_networks(found["value"].to_numpy(), zero, table.to_numpy())
            found["difference"], found["difference_low"], found["difference_high"] = against[:3]
        low, high = _bounds(facts)
        kept = found["value"].between(low, high)
        if found["null"].notna().any():
            over = found["value"] - found["null"]
            found["excess"] = found["excess_low"] = found["excess_high"] = over
            kept &= facts.better * over > 0
        found["ceiling"] = np.nan if facts.top is None else facts.top
        found["share"] = found["value"] if facts.top == 1.0 else np.nan
        found["by_construction"] = False
        found["p"] = 0.0
        found["verdict"] = np.where(kept, KEPT, BROKEN)
        found["reason"] = ""
        yield found


def _missing(result: Result) -> pd.DataFrame:
    rows = [
        {"layer": layer, "claim": claim_of(name), "number": name, "reason": reason}
        | {"frame": "", "eps": NO_EPS, "basis": "", "tokens": "", "n": 0}
        | {"verdict": NOT_APPLICABLE, "by_construction": False}
        for layer, reasons in enumerate(result.meta["reasons"])
        for name, reason in reasons.items()
    ]
    return pd.DataFrame(rows)


def claim_of(name: str) -> str:
    """Returns the claim that a number belongs to."""
    return next(claim for claim, facts in CLAIMS.items() if name in facts.parts)


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
                found["error"] = values.std(axis=1) / found["n"] ** 0.5
                rows.append(found.reset_index().assign(of=of, number=name))
    columns = ["of", "number", *PLACE, "n", "value", "error"]
    table: Any = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=columns)
    table["eps"] = table["eps"].where(table["eps"] != NO_EPS)
    return table[columns]
