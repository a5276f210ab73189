"""The page of an audit: the finding, a verdict for each claim and layer, and all numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claim_summary import (
    NOT_APPLICABLE,
    bounds_of,
    findings,
    legend,
    main_rows,
    tokens_of,
)
from crate_interp.audits.claims import BESIDE, CLAIMS, LIMITS, NULLS, NUMBERS, Claim
from crate_interp.audits.result import (
    CHANGES,
    AuditResult,
    Card,
    against_random,
    cards,
    counted_verdicts,
    marks,
    strip,
)
from crate_interp.core.files import write_text
from crate_interp.probes.layer_reading import FRAMES
from crate_interp.results.result import model_name
from crate_interp.results.verdict_strip import low_to_high
from crate_interp.viz.pages.chart import Interval, Line, chart, intervals
from crate_interp.viz.pages.page import render, sources

_SHOWN = (
    "value", "null", "excess", "untrained", "gain", "ceiling", "share", "construction", "verdict",
)  # fmt: skip
_WORDS = {
    "excess": "over its null",
    "gain": "over a random D or W_O in its place",
    "construction": "an ideal layer",
    "share": "of its ceiling",
}
_INTERVALS = {"value": "", "excess": "excess_", "gain": "gain_"}


def audit_page(result: AuditResult, out: str | Path) -> Path:
    """Writes audit.html, audit.txt and the result (AuditResult.save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        words = f"{result.text()}\n\n{legend(result)}\n"
        write_text(stage / "audit.txt", words)
        write_text(stage / "audit.html", _page(result))
    return Path(out) / "audit.html"


def _page(result: AuditResult) -> str:
    found, said = cards(result), findings(result)
    return render(
        "audit.html",
        title=f"{model_name(result.meta)}: does each layer do its job?",
        finding=[said[0], " ".join(said[1:]), counted_verdicts(found), *against_random(found)],
        caution=result.caution(),
        meta=result.meta,
        layers=range(result.meta["n_layers"]),
        strips=strip(result, found),
        changes=CHANGES.values(),
        cards=[(card, _numbers(card)) for card in found],
        marks=marks(),
        groups=_groups(result),
        frames={name: frame.sides for name, frame in FRAMES.items()},
        few=_few(result),
        tokens=tokens_of(result),
        nulls={name: null.says for name, null in NULLS.items()} | LIMITS,
        tables=[_nulls(result), _beside(result), _heads(result)],
        sources=sources(result.meta) + _reasons(result),
    )


def _few(result: AuditResult) -> int:
    """Returns the number of samples on which the ceilings were measured."""
    counts: Any = result.table("nulls").query("of == 'ceiling'")["n"]
    return int(counts.min()) if len(counts) else int(result.meta["n_samples"])


def _numbers(card: Card) -> list[dict[str, Any]]:
    """Returns the formula, the bounds and a drawing of the intervals of each number of a card."""
    found = []
    for name, rows in card.numbers.items():
        number = NUMBERS[name]
        drawn = [
            Interval(row.frame or "value", row.value, row.low, row.high, row.untrained)
            for row in rows.itertuples()
        ]
        shown = ", ".join(f"{one.label} {one.value:.3g}" for one in drawn)
        alt = f"{number.title}: {shown or 'not measured'}; {bounds_of(number)}"
        svg = render("intervals.svg", **intervals(drawn, number.low, number.high, alt))
        about = {"title": number.title, "formula": number.formula, "bounds": bounds_of(number)}
        found.append(about | {"svg": svg, "tokens": next(iter(rows["tokens"]), "")})
    return found


def _groups(result: AuditResult) -> list[dict[str, Any]]:
    """Returns the groups of claims, with a chart of each number and a table of each claim."""
    cells, main = result.table(), main_rows(result, "cells")
    found: dict[str, dict[str, Any]] = {}
    for name, claim in CLAIMS.items():
        new = {"id": f"group-{len(found)}", "heading": claim.group, "panels": [], "tables": []}
        group = found.setdefault(claim.group, new)
        group["panels"] += [_panel(claim, number, main) for number in claim.numbers]
        rows: Any = cells[(cells["claim"] == name) & (cells["verdict"] != NOT_APPLICABLE)]
        header = ["", "layer", *(_WORDS.get(column, column) for column in _SHOWN)]
        lines = [_row(row) for row in rows.to_dict("records")]
        group["tables"].append({"title": claim.title, "header": header, "rows": lines})
    return list(found.values())


def _panel(claim: Claim, name: str, main: Any) -> dict[str, Any]:
    """Returns a number's chart by layer, trained and untrained, with its bounds.

    A line is the mean over the frames, and its band goes from the lowest to the highest frame.
    """
    number, rows = NUMBERS[name], main[main["number"] == name]
    by_layer = rows.groupby("layer")[["value", "untrained"]].agg(["mean", "min", "max"])
    by_layer = by_layer[by_layer["value", "mean"].notna()]
    lines = [
        Line("chance", np.full(len(by_layer), round(bound, 5) + 0.0))  # draws a bound of 1e-6 at 0
        for bound in (number.low, number.high)
        if bound is not None
    ]
    for kind, column in (("untrained", "untrained"), ("trained", "value")):
        ends = by_layer[column].to_numpy(float).T
        lines.append(Line(kind, *ends))
    alt = f"{number.title} by layer: {low_to_high(rows['value']) or 'not measured'}"
    layers = by_layer.index.to_numpy(float)
    svg = render("chart.svg", **chart(layers, lines, alt)) if len(layers) else ""
    return {
        "title": claim.title if len(claim.numbers) == 1 else f"{claim.title}: {number.title}",
        "way": bounds_of(number),
        "svg": svg,
        "formula": number.formula,
        "says": claim.says,
        "where": claim.where,
    }


def _row(row: dict[str, Any]) -> list[str]:
    place = [NUMBERS[row["number"]].title, row["frame"]]
    place += [] if pd.isna(row["eps"]) else [f"eps {row['eps']:g}"]
    place += [word for word in (row["basis"], row["tokens"]) if word in ("orthonormal", "patches")]
    place += [f"{row['tokens']} tokens"] if " of " in row["tokens"] else []  # such as "4 of 50"
    words = ", ".join(word for word in place if word)
    return [words, str(row["layer"]), *(_shown(row, name) for name in _SHOWN)]


def _shown(row: dict[str, Any], name: str) -> str:
    if name == "verdict":
        return row["verdict"] + (", by construction" if row["by_construction"] else "")
    text = _number(row[name])
    ends = (
        [row[f"{_INTERVALS[name]}{end}"] for end in ("low", "high")] if name in _INTERVALS else []
    )
    if text and ends and ends[0] < ends[1]:
        text += f" ({_number(ends[0])} to {_number(ends[1])})"
    return text


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.2g}"


def _nulls(result: AuditResult) -> dict[str, Any]:
    """Returns a table of the nulls, the ceilings and the papers' operators at the main eps."""
    rows = [
        [row.of, NUMBERS[row.number].title, row.frame, row.tokens, str(row.layer)]
        + [_number(row.value), _number(row.error), str(row.n)]
        for row in main_rows(result, "nulls").itertuples()
    ]
    header = ["", "number", "frame", "tokens", "layer", "mean", "standard error", "samples"]
    heading = "Nulls, ceilings and the papers' own operators"
    return {"heading": heading, "header": header, "rows": rows, "meanings": []}


def _beside(result: AuditResult) -> dict[str, Any]:
    """Returns a table of the numbers that no claim judges, at the main eps, with their meanings."""
    layers = main_rows(result, "layers")
    shown = [name for name in BESIDE if name in layers]
    rows = [
        [str(int(row["layer"])), row["frame"], row["tokens"]]
        + [_number(row[name]) for name in shown]
        for row in layers.to_dict("records")
    ]
    header = ["layer", "frame", "tokens", *(name.replace("_", " ") for name in shown)]
    meanings = [(name.replace("_", " "), BESIDE[name]) for name in shown]
    heading = "Numbers besides the claims"
    return {"heading": heading, "header": header, "rows": rows, "meanings": meanings}


def _heads(result: AuditResult) -> dict[str, Any]:
    table: Any = result.table("heads")
    rows = [
        [str(row.layer), str(row.head), _number(row.cosine), _number(row.null), _number(row.spread)]
        for row in table.itertuples()
    ]
    header = ["layer", "head", "cosine of W_O and U^T", "with other heads", "sd of random matrices"]
    heading = "The output map of each head"
    return {"heading": heading, "header": header, "rows": rows, "meanings": []}


def _reasons(result: AuditResult) -> list[tuple[str, str]]:
    """Returns each number that is not applicable, with the reasons."""
    found: dict[tuple[str, str], None] = {}
    for reasons in result.meta["reasons"]:
        for name, reason in reasons.items():
            found[f"{NUMBERS[name].title}, not applicable", reason] = None
    return list(found)
