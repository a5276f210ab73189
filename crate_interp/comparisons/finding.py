"""What a comparison found, in words: how many differences hold, and the largest of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from crate_interp.comparisons.contrasts import LEVEL
from crate_interp.results import Result

SHOWN = 3  # of the statistics with the largest differences


def headline(result: Result, named: Callable[[str], str] = str, shown: int = SHOWN) -> str:
    """Returns how many differences hold, and the largest of them with direction and interval.

    named: returns what to call a "probe.statistic".
    """
    said = [words.removesuffix(".") for words in sentences(result, named, shown)]
    return f"{'; '.join([said[0], *(words[0].lower() + words[1:] for words in said[1:])])}."


def sentences(result: Result, named: Callable[[str], str] = str, shown: int = SHOWN) -> list[str]:
    """Returns the finding as sentences: how many differences hold, then the largest."""
    table: Any = result.table("differences")
    one, two = (result.meta[side]["name"] for side in "ab")
    tested = table["p"].notna()
    count, held = int(tested.sum()), int(table["holds"].sum())
    start = f"{one} against {two}: "
    if not count:
        return [f"{start}no difference has an interval."]
    if not (table["difference"].fillna(0) != 0).any():
        return [f"{start}every difference is 0."]
    among = f"of {count} differences"
    if not held:
        return [f"{start}none {among} holds at 95 %, adjusted over layers."]
    words = f"{start}{held} {among} hold at 95 %, adjusted over layers"
    if table["excess_p"].notna().any():
        beyond = int((table["holds"] & (table["excess_p"] <= LEVEL)).sum())
        words += f", {beyond} of them beyond untrained networks"
    return [f"{words}.", f"The largest: {'; '.join(map(_said(named), largest(result, shown)))}."]


def largest(result: Result, shown: int = SHOWN) -> list[dict[str, Any]]:
    """Returns the rows of the largest differences that hold, one for each statistic.

    Large is what is a large share of the larger of the two means: statistics have many units.
    Those that hold beyond untrained networks come first.
    """
    table: Any = result.table("differences")
    rows = table[table["holds"]]
    most = np.maximum(rows["a"].abs(), rows["b"].abs())
    share = rows["difference"].abs() / most.where(most > 0, 1.0)
    beyond = rows["excess_p"] <= LEVEL
    ordered = rows.assign(share=share, beyond=beyond).sort_values(
        ["beyond", "share"], ascending=False, kind="stable"
    )
    return ordered.drop_duplicates(["probe", "statistic"]).head(shown).to_dict("records")


def _said(named: Callable[[str], str]) -> Callable[[dict[str, Any]], str]:
    def words(row: dict[str, Any]) -> str:
        way = "higher" if row["difference"] > 0 else "lower"
        name = named(f"{row['probe']}.{row['statistic']}")
        beside = "" if np.isnan(row["untrained"]) else f"; untrained {row['untrained']:+.3g}"
        return (
            f"{name} is {way} in {place(row)}, {row['a']:.4g} against {row['b']:.4g} "
            f"({row['difference']:+.3g}, {row['low']:+.3g} to {row['high']:+.3g}{beside})"
        )

    return words


def place(row: dict[str, Any]) -> str:
    """Returns which layers a row is of, such as "layer 3" or "layers 3 and 6"."""
    own, other = int(row["layer"]), int(row["layer_b"])
    return f"layer {own}" if own == other else f"layers {own} and {other}"
