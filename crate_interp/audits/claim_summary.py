"""Sums up the cells of an audit: a verdict per claim and layer, a line per claim, a headline."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIMS, NUMBERS, Claim, Number
from crate_interp.audits.objectives import KINDS
from crate_interp.audits.setting import NO_EPS
from crate_interp.audits.verdicts import BROKEN, KEPT, NOT_APPLICABLE, UNDECIDED
from crate_interp.config.families import FAMILIES
from crate_interp.probes.layer_reading import FRAMES
from crate_interp.results.result import Result
from crate_interp.results.statistic import low_to_high

DEPENDS, BY_CONSTRUCTION = "depends", "by construction"
_SOME = " of "  # in the tokens of a cell: "32 of 197"
_STILL = 1e-6  # a relative change below this counts as none
MARKS = {
    KEPT: "+", BROKEN: "-", DEPENDS: "~", BY_CONSTRUCTION: "c", UNDECIDED: "?", NOT_APPLICABLE: "",
}  # fmt: skip


def judged(result: Result) -> pd.DataFrame:
    """Returns a row for each claim and layer, with its verdict: `AuditResult.claims()`."""
    cells: Any = result.table("cells")
    # some numbers count at every eps, others at the main eps
    every = cells["number"].map(lambda name: NUMBERS[name].every_eps)
    eps = result.meta["settings"]["eps"]
    rows = cells[every | cells["eps"].isna() | (cells["eps"] == eps)]
    found: list[tuple] = []
    groups: Any = rows.groupby(["claim", "layer"], sort=False)
    for (claim, layer), group in groups:
        verdict = _verdict(group)
        reasons = _reasons(group)
        if verdict == BY_CONSTRUCTION:
            missed: Any = group[(group["verdict"] != KEPT) & group["by_construction"]]
            reasons = [
                f"an ideal layer misses the bound too ({NUMBERS[name].title}: {low_to_high(some)})"
                for name, some in missed.groupby("number", sort=False)["construction"]
            ]
        on = "" if verdict == NOT_APPLICABLE else _on(group, CLAIMS[str(claim)])
        found.append((claim, layer, verdict, on, "; ".join(reasons)))
    table = pd.DataFrame(found, columns=["claim", "layer", "verdict", "on", "reason"])
    order = {name: place for place, name in enumerate(CLAIMS)}
    key = lambda x: x.map(order) if x.name == "claim" else x  # noqa: E731
    return table.sort_values(["claim", "layer"], key=key, ignore_index=True)


def _reasons(group: Any) -> list[str]:
    """Returns why cells are not kept; a reason names its frames and eps unless it holds in all."""
    given: Any = group[group["reason"] != ""]
    found = []
    for reason, rows in given.groupby("reason", sort=False):
        frames = [name for name in dict.fromkeys(rows["frame"]) if name]
        whole = set(frames) == {name for name in group["frame"] if name}
        where = [] if whole or not frames else [", ".join(frames)]
        eps = sorted(set(rows["eps"].dropna()))
        if eps and set(eps) != set(group["eps"].dropna()):
            where.append(f"eps {', '.join(f'{one:g}' for one in eps)}")
        found.append(f"{' at '.join(where)}: {reason}" if where else str(reason))
    return found


def _verdict(group: Any) -> str:
    """Returns the verdict for the cells of one claim and layer."""
    group = group[group["verdict"] != NOT_APPLICABLE]
    if not len(group):
        return NOT_APPLICABLE
    missed = group[group["verdict"] != KEPT]
    if not len(missed):
        return KEPT
    if (missed["verdict"] == BROKEN).any() and missed["by_construction"].all():
        return BY_CONSTRUCTION
    by_number = [set(rows["verdict"]) for _, rows in group.groupby("number", sort=False)]
    if any(BROKEN in words and KEPT not in words for words in by_number):
        return BROKEN
    return DEPENDS if any({KEPT, BROKEN} <= words for words in by_number) else UNDECIDED


def _on(group: Any, claim: Claim) -> str:
    """Returns where each number of a claim holds, such as "stream, read: falls; unit: rises"."""
    said: list[str] = []
    for part in claim.numbers:
        rows = group[(group["number"] == part) & (group["verdict"] != NOT_APPLICABLE)]
        if len(rows):
            words = _in_frames(rows, claim, part)
            said.append(words if len(claim.numbers) == 1 else f"{NUMBERS[part].title}: {words}")
    return "; ".join(said)


def _in_frames(rows: Any, claim: Claim, part: str) -> str:
    low, high = NUMBERS[part].bounds

    def word(row: Any) -> str:
        ends = [row.value] if np.isnan(row.low) else [row.low, row.high]
        if claim.still and abs(row.value) < _STILL:
            return claim.still
        if low <= min(ends) and max(ends) <= high:
            return claim.held
        return claim.missed if max(ends) < low or min(ends) > high else UNDECIDED

    said: dict[str, list[str]] = {}
    for frame in [name for name in (*FRAMES, "") if name in set(rows["frame"])]:
        some = rows[rows["frame"] == frame]
        words = [word(row) for row in some.itertuples()]
        same = words[0] if len(set(words)) == 1 else _by_setting(some, words)
        said.setdefault(same, []).append(frame)
    return "; ".join(
        f"{', '.join(frames)}: {words}" if frames != [""] else words
        for words, frames in said.items()
    )


def _by_setting(rows: Any, words: Sequence[str]) -> str:
    """Returns words such as "falls (eps 10, 100), rises (eps 0.01, patches)"."""
    where: dict[str, list[str]] = {}
    for row, word in zip(rows.itertuples(), words, strict=True):
        name = f"{row.eps:g}"
        name = f"{name} orthonormal" if row.basis == "orthonormal" else name
        where.setdefault(word, []).append(f"{name} patches" if row.tokens == "patches" else name)
    return ", ".join(f"{word} (eps {', '.join(places)})" for word, places in where.items())


def main_rows(result: Result, name: str) -> Any:
    """Returns the rows of a table at the main eps, with U as stored and all tokens, for a page."""
    table = result.table(name)
    at = table["eps"].isna() | table["eps"].isin([NO_EPS, result.meta["settings"]["eps"]])
    tokens = table["tokens"].isin(["", "all"]) | table["tokens"].str.contains(_SOME)
    return table[at & table["basis"].isin(["", "stored"]) & tokens]


def overview(result: Result) -> pd.DataFrame:
    """Returns a row per claim: layers by verdict, and the range of the claim's first number.

    The column `layers` has a mark for each layer, see MARKS.
    """
    claims, cells = result.table("claims"), main_rows(result, "cells")
    rows: list[dict[str, Any]] = []
    for name, claim in CLAIMS.items():
        words = claims[claims["claim"] == name]["verdict"].tolist()
        first = next(iter(claim.numbers))
        some = cells[(cells["number"] == first) & (cells["verdict"] != NOT_APPLICABLE)]
        counts = {word: words.count(word) for word in MARKS}
        layers = "".join(MARKS[word] or "." for word in words)
        shown = ("value", "excess", "share", "untrained")
        spans = {column: low_to_high(some[column]) for column in shown}
        start = {"claim": claim.short, "name": name, "layers": layers}
        wanted = {"wanted": bounds_of(claim.numbers[first], short=True)}
        rows.append(start | counts | wanted | spans)
    return pd.DataFrame(rows)


def legend(result: Result) -> str:
    """Returns the meaning of signs, columns and rows of `AuditResult.text()`, as lines of text."""
    lines = [
        "layers: a sign for each layer. + kept, - broken, ~ depends on the frame or on eps, c "
        "missed by an ideal layer too, ? undecided, . not applicable.",
        "A number is kept if its 95 % interval lies within its bounds and it is better than its "
        "null and than a random D or W_O in the layer's place. It is broken if it lies outside its "
        "bounds or is worse than its null. For example, the lasso may fall, but less than with a "
        "random D. The comparison with a random D uses an interval over draws.",
        "wanted: the bounds of the value. value: lowest to highest mean over layers and frames"
        f", at eps {result.meta['settings']['eps']:g}. untrained: the value of random networks.",
        tokens_of(result),
        "",
        "Each row with its name in `claims()` and `table()`, and its numbers:",
    ]
    for name, claim in CLAIMS.items():
        lines.append(f"{claim.short} ({name}): {claim.says}")
        for part in claim.numbers:
            number = NUMBERS[part]
            lines.append(f"  {part}: {number.formula}; {bounds_of(number, short=True)}")
    return "\n".join(lines)


def tokens_of(result: Result) -> str:
    """Returns on which tokens the numbers of the sparse step were measured, as a text."""
    cells = result.table("cells")
    some: Any = cells[cells["tokens"].str.contains(_SOME)]
    said = "The sparse step is measured on all tokens of each sample."
    for tokens, rows in some.groupby("tokens"):
        names = " and ".join(f'"{NUMBERS[name].title}"' for name in rows["number"].unique())
        said += (
            f" Only {names} need the solution of the lasso: they, and all that they are compared "
            f"with, are measured on {tokens} tokens of each sample, evenly spaced."
        )
    return said


def bounds_of(number: Number, short: bool = False) -> str:
    """Returns a text such as "at most 0.1, lower is better"; a bound of 1e-6 is written as 0."""
    low, high = number.low, number.high
    if low is not None and high is not None and abs(low) > 1e-5:
        return f"{low:g} to {high:g}"
    least = "" if low is None else f"at least {low:g}" if abs(low) > 1e-5 else "above 0"
    most = (
        "" if high is None else f"at most {high:g}" if abs(high) > 1e-5 or not high else "below 0"
    )
    words = ", ".join(part for part in (least, most) if part)
    way = {-1: ", lower is better", 1: ", higher is better"}.get(number.better, "")
    return words if short else words + way


def findings(result: Result) -> list[str]:
    """Returns the sentences of the headline.

    The first is about R^c as the layer reads the tokens, through LayerNorm. Then come the other
    frames and eps, the lasso, and MSSA's direction.
    """
    claims: Any = result.table("claims")
    where = f"{result.meta['model'] or 'a model'} on "
    where += result.counted_samples()
    layers = result.meta["n_layers"]
    words = {
        name: rows["verdict"].value_counts().to_dict() for name, rows in claims.groupby("claim")
    }
    said: list[str] = []
    if words["compresses"].get(NOT_APPLICABLE, 0) < layers:
        said += [*_as_read(result), _in_settings(result)]
    if words["descends"].get(NOT_APPLICABLE, 0) < layers:
        rows = main_rows(result, "cells")
        rows = rows[rows["number"] == "descends"]
        more = ((rows["verdict"] == KEPT) & (rows["excess"] < 0)).sum()
        said.append(
            f"the lasso falls in {_of(int((rows['value'] < 0).sum()), layers)}, but in "
            f"{_of(int(more), layers)} is it shown to fall more than with random dictionaries"
        )
    if words["gradient"].get(NOT_APPLICABLE, 0) < layers:
        steps = words["gradient"].get(KEPT, 0)
        said.append(f"MSSA is a gradient step in {_of(steps, layers)}")
    if not said:
        return [f"No claim of the papers applies to the layers of {where}."]
    said = [f"in {where}, {said[0]}", *said[1:]]
    return [f"{words[0].upper()}{words[1:]}." for words in (in_its_terms(result, s) for s in said)]


def _of(count: int, layers: int) -> str:
    """Returns a number of layers in words, such as "no layer" or "4 of 6 layers"."""
    return f"{count} of {layers} layers" if count else "no layer"


def change(rows: pd.DataFrame) -> int | None:
    """Returns whether a number is shown to be nearer to its bounds than with random weights.

    rows: the number's cells in one layer; of several frames, "read" counts. Random weights are
    those of untrained twins, and the network's own in random order: a difference from both must be
    shown. 1 is nearer, -1 farther, 0 neither, None unknown.
    """
    read = rows[rows["frame"] == "read"]
    row: Any = (read if len(read) else rows).iloc[0]
    number, value = NUMBERS[row["number"]], row["value"]
    ways = []
    for kind, shown in (
        ("untrained", row["difference_low"] > 0 or row["difference_high"] < 0),
        ("shuffled", value < row["shuffled_low"] or value > row["shuffled_high"]),
    ):
        if not np.isnan(row[kind]):
            nearer = _distance(number, row[kind]) - _distance(number, value)
            ways.append(int(shown) * int(np.sign(nearer)))
    if not ways or np.isnan(row["difference_low"]):
        return None
    return ways[0] if len(set(ways)) == 1 else 0


def _distance(number: Number, value: float) -> float:
    """Returns how far a value is from its bounds; the better of one-sided bounds counts on."""
    if number.better:
        return -number.better * value
    low, high = number.bounds
    return max(low - value, value - high, 0.0)


def layer_words(layers: list[int]) -> str:
    """Returns layers in words, such as "layer 1" or "layers 0 to 3, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(parts)}"


def in_its_terms(result: Result, text: str) -> str:
    """Returns a text about MSSA and R^c with the names of the model's attention and objective."""
    facts: Any = FAMILIES.get(result.meta["config"]["family"], {})
    kind = KINDS.get(facts.get("attention"), KINDS["mssa"])
    return text.replace("MSSA", kind.name).replace("R^c", kind.objective)


def _in_settings(result: Result) -> str:
    """Returns in how many layers R^c falls in every setting, and in how many in some alone."""
    cells: Any = result.table("cells")
    cells = cells[cells["number"] == "compresses"]
    layers = [own for _, own in cells.groupby("layer")]
    every = sum(bool((own["high"] < 0).all()) for own in layers)
    mixed = sum(bool((own["high"] < 0).any() and (own["low"] > 0).any()) for own in layers)
    setting = "normalisation and eps" if result.meta["settings"]["grid"] else "normalisation"
    return (
        f"in {_of(every, len(layers))} does R^c fall under every {setting}; it falls under some "
        f"and rises under others in {_of(mixed, len(layers))}"
    )


def _as_read(result: Result) -> list[str]:
    """Returns how far attention lowers R^c in the frame "read", where, and how far nulls do."""
    rows = main_rows(result, "cells")
    rows = rows[(rows["number"] == "compresses") & (rows["frame"] == "read")]
    layers, eps = result.meta["n_layers"], result.meta["settings"]["eps"]
    start = f"read through LayerNorm at eps {eps:g}, attention"
    nulls = "shuffled updates and random output maps do"
    compared = rows["gain"].notna().any()
    end = "" if compared else " (compared with no null)"
    falls: Any = rows[rows["high"] < 0].sort_values("value", ascending=False)
    if falls.empty:
        span = low_to_high(100 * rows["value"], "{:+.2g} %".format)
        return [f"{start} is shown to lower R^c in no layer{end}: {span}"]
    ends = [f"{-100 * row.value:.2g} % (layer {row.layer})" for row in falls.itertuples()]
    size = " to ".join(dict.fromkeys((ends[0], ends[-1])))
    said = [f"{start} lowers R^c in {_of(len(falls), layers)}, by {size}{end}"]
    more: Any = falls[falls["verdict"] == KEPT]
    if not compared:
        return said
    if more.empty:
        return [*said, f"in no layer is it shown to lower R^c more than {nulls}"]
    points = low_to_high(-100 * more[["excess", "gain"]].max(axis=1))
    where = layer_words(sorted(more["layer"]))
    said.append(f"in {where} it lowers R^c by {points} points more than {nulls}")
    shuffled, untrained = (
        low_to_high(100 * more[kind], "{:+.2g}".format) for kind in ("shuffled", "untrained")
    )
    if shuffled and untrained:
        both = [layer for layer, cells in more.groupby("layer") if change(cells) == 1]
        less = layer_words(both) if both else "no layer"
        said.append(
            f"networks of its shuffled weights change R^c there by {shuffled} %, untrained ones "
            f"by {untrained} %; this one is shown to lower it more than both in {less}"
        )
    return said
