"""The findings of a comparison in words: how many differences are evidence, and the largest."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.results.grouped_samples import counted
from crate_interp.results.result import Result, as_text
from crate_interp.stats.significance import LEVEL

_SIGNS = {1: "+", -1: "-", 0: "?", None: "."}
SHOWN = 3  # number of statistics with the largest differences to show


def headline(result: Result, named: Callable[[str], str] = str, shown: int = SHOWN) -> str:
    """Returns how many differences are evidence, and the largest with direction and interval.

    named: a function that returns the title of a "probe.statistic".
    """
    most = "; ".join(list_of_largest(result, named, shown))
    return " ".join([*sentences(result), *([f"The largest: {most}."] if most else [])])


def sign(row: Mapping[str, Any]) -> int | None:
    """Returns a row's sign: 1 if a is higher than b, -1 if lower, 0 if undecided.

    Returns None if the row cannot be tested. A statistic of the weights of single networks, and a
    difference that is equal in all samples, have no p, so the sign is that of the excess over
    untrained networks; without any difference there is no sign.
    """
    known, beyond = not np.isnan(row["p"]), not np.isnan(row["excess_p"])
    if not known and (not beyond or row["difference"] == 0):
        return None
    value, holds = (
        (row["difference"], bool(row["holds"]))
        if known
        else (row["excess"], row["excess_p"] <= LEVEL)
    )
    return int(np.sign(value)) if holds else 0


def overview(result: Result) -> str:
    """Returns a table as text: each statistic's signs, and lowest and highest difference."""
    table: Any = result.table("differences")
    beside = {"untrained": "untrained", "excess": "beyond untrained"}
    if not (table["untrained"].fillna(0) != 0).any():
        # without untrained networks that differ between sides, the whole difference is beyond them
        beside = {}
    header = ["statistic", "layers", "a - b", *beside.values()]
    rows: list[list[str]] = []
    for (probe, statistic), own in table.groupby(["probe", "statistic"], sort=False):
        signs = "".join(
            "o" if way and row["excess_p"] > LEVEL else _SIGNS[way]
            for row in own.to_dict("records")
            for way in [sign(row)]
        )
        cells = [span(own[name].to_numpy()) for name in ("difference", *beside)]
        rows.append([f"{probe}.{statistic}", signs, *cells])
    return as_text(header, rows)


def span(values: np.ndarray) -> str:
    """Returns the lowest and the highest value, such as "-0.3 to +2", or "" for no values."""
    if np.isnan(values).all():
        return ""
    low, high = (signed(float(end)) for end in (np.nanmin(values), np.nanmax(values)))
    return low if low == high else f"{low} to {high}"


def signed(value: float) -> str:
    """Returns a number with its sign and three digits; 0 gets no sign."""
    return "0" if value == 0 else f"{value:+.3g}"


def evidence(differences: pd.DataFrame) -> pd.Series:
    """Returns which rows of `differences` other trainings would show, as a column of bool.

    Those that hold and exceed the spread between untrained networks; where that spread is unknown,
    all that hold.
    """
    table: Any = differences
    known = bool(table["excess_p"].notna().any())
    return table["holds"] & (table["excess_p"] <= LEVEL) if known else table["holds"]


def sentences(result: Result) -> list[str]:
    """Returns how many differences are evidence, and what stands beside that number.

    That is how many differences hold between these networks, and how many between two untrained
    networks, which differ by their seeds alone.
    """
    table: Any = result.table("differences")
    one, two = (result.meta[side] for side in "ab")
    start, count = f"{one['name']} against {two['name']}: ", int(table["p"].notna().sum())
    if len(table) and not (table["difference"].fillna(0) != 0).any():
        return [f"{start}every difference is 0."]
    if not count:
        return [f"{start}no difference has an interval."]
    held, beyond = int(table["holds"].sum()), int(evidence(table).sum())
    single = len(one["networks"]) == len(two["networks"]) == 1
    among, chance = (
        f"of {counted(count, 'differences')}",
        f"(by chance at most {LEVEL * count:.2g})",
    )
    if beyond <= LEVEL * count:
        start += "no evidence of a difference: "
    holding = f"hold{'s' if held < 2 else ''}"
    if table["excess_p"].notna().any():
        same = one["untrained"] == two["untrained"]
        spread = (
            "the spread between random initialisations" if same else "that of untrained networks"
        )
        verb = "exceeds" if beyond < 2 else "exceed"
        said = [f"{start}{beyond or 'none'} {among} {verb} {spread} {chance}."]
        said.append(f"{held or 'None'} {holding} between these networks.")
    else:
        unknown = "; whether other seeds differ as much is unknown" if single else ""
        said = [f"{start}{held or 'none'} {among} {holding} {chance}{unknown}."]
    if "untrained_p" in table and table["untrained_p"].notna().any():  # not in older results
        twins = int((table["untrained_p"] <= LEVEL).sum())
        said.append(f"Two untrained networks, compared in the same way, differ in {twins}.")
    return said


def list_of_largest(
    result: Result, named: Callable[[str], str] = str, shown: int = SHOWN
) -> list[str]:
    """Returns the largest differences as texts, with direction and interval."""
    units = {name: about[0] for name, about in result.meta["statistics"].items()}
    depth = result.meta["a"]["n_layers"]
    return [_said(row, named, units, depth) for row in largest(result, shown)]


def largest(result: Result, shown: int = SHOWN) -> list[dict[str, Any]]:
    """Returns the rows of the largest differences that are evidence, one for each statistic.

    Of a statistic it is the layer in which a and b differ most. Statistics have different units, so
    they are ordered by the largest difference relative to the larger of the two means. There are
    none if there are no more than by chance.
    """
    table: Any = result.table("differences")
    rows = table[evidence(table)]
    if len(rows) <= LEVEL * table["p"].notna().sum():
        return []
    most = np.maximum(rows["a"].abs(), rows["b"].abs())
    share = rows["difference"].abs() / most.where(most > 0, 1.0)
    rows = rows.assign(share=share, size=rows["difference"].abs())
    rows = rows.assign(most=rows.groupby(["probe", "statistic"])["share"].transform("max"))
    ordered = rows.sort_values(["most", "size"], ascending=False, kind="stable")
    return ordered.drop_duplicates(["probe", "statistic"]).head(shown).to_dict("records")


def _said(
    row: dict[str, Any], named: Callable[[str], str], units: Mapping[str, str | None], depth: int
) -> str:
    """Returns a difference with its interval, the two values, and the untrained difference."""
    statistic = f"{row['probe']}.{row['statistic']}"
    unit = f" {units[statistic]}" if units[statistic] else ""
    way, start = ("higher" if row["difference"] > 0 else "lower"), f"in {place(row, depth)}"
    both, beside = f"{row['a']:.4g} against {row['b']:.4g}{unit}", ""
    if not np.isnan(row["untrained"]) and row["untrained"] != 0:
        beside = f"; untrained {signed(row['untrained'])}, beyond untrained {signed(row['excess'])}"
    size, *ends = (abs(row[name]) for name in ("difference", "low", "high"))
    low, high = sorted(ends)
    within = f"{size:.3g} ({low:.3g} to {high:.3g})"
    return f"{named(statistic)}: {way} {start} by {within}, {both}{beside}"


def place(row: dict[str, Any], depth: int | None = None) -> str:
    """Returns the layers of a row in words, such as "layer 3" or "layers 3 and 6".

    depth: how many layers a has; the layer of this number is the stream after the last.
    """
    own, other = int(row["layer"]), int(row["layer_b"])
    if own == depth:
        return "the stream after the last layer"
    return f"layer {own}" if own == other else f"layers {own} and {other}"
