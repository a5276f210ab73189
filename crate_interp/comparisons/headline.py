"""The findings of a comparison in words: how many differences hold, and the largest of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from crate_interp.results.grouped_samples import counted
from crate_interp.results.result import Result, as_text
from crate_interp.stats.significance import LEVEL

_SIGNS = {1: "+", -1: "-", 0: "?", None: "."}
SHOWN = 3  # number of statistics with the largest differences to show


def headline(result: Result, named: Callable[[str], str] = str, shown: int = SHOWN) -> str:
    """Returns how many differences hold, and the largest of them with direction and interval.

    named: a function that returns the title of a "probe.statistic".
    """
    said = [words.removesuffix(".") for words in sentences(result, named, shown)]
    return f"{'; '.join([said[0], *(words[0].lower() + words[1:] for words in said[1:])])}."


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
        signs = "".join(_SIGNS[sign(row)] for row in own.to_dict("records"))
        cells = [span(own[name].to_numpy()) for name in ("difference", *beside)]
        rows.append([f"{probe}.{statistic}", signs, *cells])
    return f"{as_text(header, rows)}\n{by_chance(result)}".strip()


def by_chance(result: Result) -> str:
    """Returns a sentence on how many statistics differ, and how many would by chance, or ""."""
    words = _in_statistics(result)
    return f"Some layer differs {words}." if words else ""


def _in_statistics(result: Result) -> str:
    """Returns in how many statistics with intervals a layer differs, and how many have none."""
    table: Any = result.table("differences")
    by_name = table.groupby(["probe", "statistic"])
    tested = by_name["p"].apply(lambda p: p.notna().any())
    count, held = int(tested.sum()), int(by_name["holds"].any()[tested].sum())
    if not count:
        return ""
    words = (
        f"in {held} of {counted(count, 'statistics')} with intervals (by chance in at most "
        f"{LEVEL * count:.2g}"
    )
    without = len(tested) - count
    if without:
        words += f"; {without} more {'has' if without == 1 else 'have'} none"
    return f"{words})"


def span(values: np.ndarray) -> str:
    """Returns the lowest and the highest value, such as "-0.3 to +2", or "" for no values."""
    if np.isnan(values).all():
        return ""
    low, high = (signed(float(end)) for end in (np.nanmin(values), np.nanmax(values)))
    return low if low == high else f"{low} to {high}"


def signed(value: float) -> str:
    """Returns a number with its sign and three digits; 0 gets no sign."""
    return "0" if value == 0 else f"{value:+.3g}"


def sentences(result: Result, named: Callable[[str], str] = str, shown: int = SHOWN) -> list[str]:
    """Returns the findings as sentences: how many differences hold, then the largest of them.

    The first sentence also says how many would hold by chance, if there were no differences.
    """
    table: Any = result.table("differences")
    one, two = (result.meta[side]["name"] for side in "ab")
    tested = table[table["p"].notna()]
    count, held = len(tested), int(tested["holds"].sum())
    start = f"{one} against {two}: "
    if len(table) and not (table["difference"].fillna(0) != 0).any():
        return [f"{start}every difference is 0."]
    if not count:
        return [f"{start}no difference has an interval."]
    among = f"of {counted(count, 'differences')}"
    ending = f"at 95 %, adjusted over layers (by chance at most {LEVEL * count:.2g}"
    if not held:
        return [f"{start}no evidence of a difference: none {among} holds {ending})."]
    words = f"{start}{held} {among} hold {ending}), {_in_statistics(result)}"
    if table["excess_p"].notna().any():
        changed = int((table["holds"] & (table["excess_p"] <= LEVEL)).sum())
        # if both sides share untrained networks, these differ by 0 but show how trainings scatter
        same = not (table["untrained"].fillna(0) != 0).any()
        beyond = "the spread between random initialisations" if same else "that of untrained ones"
        words += f"; {changed or 'none'} exceed{'' if changed > 1 else 's'} {beyond}"
    most = "; ".join(list_of_largest(result, named, shown))
    return [f"{words}.", f"The largest: {most}."]


def list_of_largest(
    result: Result, named: Callable[[str], str] = str, shown: int = SHOWN
) -> list[str]:
    """Returns the largest differences that hold as texts, with direction and interval."""
    units = {name: about[0] for name, about in result.meta["statistics"].items()}
    depth = result.meta["a"]["n_layers"]
    return [_said(row, named, units, depth) for row in largest(result, shown)]


def largest(result: Result, shown: int = SHOWN) -> list[dict[str, Any]]:
    """Returns the rows of the largest differences that hold, one for each statistic.

    Of a statistic it is the layer in which a and b differ most. Statistics have different units, so
    they are ordered by the largest difference relative to the larger of the two means. Those that
    untrained networks do not have come first.
    """
    table: Any = result.table("differences")
    rows = table[table["holds"]]
    most = np.maximum(rows["a"].abs(), rows["b"].abs())
    share = rows["difference"].abs() / most.where(most > 0, 1.0)
    unlike = rows["excess_p"] <= LEVEL
    rows = rows.assign(share=share, unlike=unlike, size=rows["difference"].abs())
    of = rows.groupby(["probe", "statistic"])
    rows = rows.assign(first=of["unlike"].transform("max"), most=of["share"].transform("max"))
    ordered = rows.sort_values(["first", "most", "size"], ascending=False, kind="stable")
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
