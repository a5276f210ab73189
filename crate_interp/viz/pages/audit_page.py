"""The page of an audit: the finding, a verdict for each claim and layer, and all numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits import claim_summary
from crate_interp.audits import result as audit_result
from crate_interp.audits.claims import BESIDE, CLAIMS, LIMITS, NULLS, NUMBERS, Claim
from crate_interp.audits.result import (
    AuditResult,
    Card,
)
from crate_interp.core.files import write_text
from crate_interp.probes.layer_reading import FRAMES
from crate_interp.results.statistic import low_to_high
from crate_interp.viz.pages.chart import Interval, Line, chart, intervals
from crate_interp.viz.pages.page import page_of, render, sources

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
        words = f"{result.text()}\n\n{claim_summary.legend(result)}\n"
        write_text(stage / "audit.txt", words)
        write_text(stage / "audit.html", _page(result))
    return Path(out) / "audit.html"


def _page(result: AuditResult) -> str:
    cards, (first, *others) = audit_result.cards(result), claim_summary.findings(result)
    counted = audit_result.counted_verdicts(cards)
    ceilings: Any = result.table("nulls").query("of == 'ceiling'")["n"]
    reasons = {
        (f"{NUMBERS[name].title}, not applicable", reason): None
        for layer in result.meta["reasons"]
        for name, reason in layer.items()
    }
    return page_of(
        result,
        "audit.html",
        "does each layer do its job?",
        finding=[first, " ".join(others), counted, *audit_result.against_random(cards)],
        layers=range(result.meta["n_layers"]),
        strips=audit_result.strip(result, cards),
        changes=audit_result.CHANGES.values(),
        cards=[(card, _numbers(card)) for card in cards],
        marks=audit_result.marks(),
        groups=_groups(result),
        frames={name: frame.sides for name, frame in FRAMES.items()},
        few=int(ceilings.min()) if len(ceilings) else int(result.meta["n_samples"]),
        tokens=claim_summary.tokens_of(result),
        nulls={name: null.says for name, null in NULLS.items()} | LIMITS,
        tables=[_nulls(result), _beside(result), _heads(result)],
        sources=[*sources(result.meta), *reasons],
    )


def _numbers(card: Card) -> list[dict[str, Any]]:
    """Returns the formula, the bounds and a drawing of the intervals of each number of a card."""
    numbers = []
    for name, rows in card.numbers.items():
        number, bounds = NUMBERS[name], claim_summary.bounds_of(NUMBERS[name])
        drawn = [
            Interval(row.frame or "value", row.value, row.low, row.high, row.untrained)
            for row in rows.itertuples()
        ]
        shown = ", ".join(f"{one.label} {one.value:.3g}" for one in drawn)
        alt = f"{number.title}: {shown or 'not measured'}; {bounds}"
        svg = render("intervals.svg", **intervals(drawn, number.low, number.high, alt))
        tokens = next(iter(rows["tokens"]), "")
        numbers.append({"number": number, "bounds": bounds, "svg": svg, "tokens": tokens})
    return numbers


def _groups(result: AuditResult) -> list[dict[str, Any]]:
    """Returns the groups of claims, with a chart of each number and a table of each claim."""
    cells, main = result.table(), claim_summary.main_rows(result, "cells")
    groups: dict[str, dict[str, Any]] = {}
    for name, claim in CLAIMS.items():
        new = {"id": f"group-{len(groups)}", "heading": claim.group, "panels": [], "tables": []}
        group = groups.setdefault(claim.group, new)
        group["panels"] += [_panel(claim, number, main) for number in claim.numbers]
        applies = cells["verdict"] != claim_summary.NOT_APPLICABLE
        rows: Any = cells[(cells["claim"] == name) & applies]
        header = ["", "layer", *(_WORDS.get(column, column) for column in _SHOWN)]
        lines = [_row(row) for row in rows.to_dict("records")]
        group["tables"].append({"title": claim.title, "header": header, "rows": lines})
    return list(groups.values())


def _panel(claim: Claim, name: str, main: Any) -> dict[str, Any]:
    """Returns a number's chart by layer, trained and untrained, with its bounds.

    A line is the mean over the frames, and its band goes from the lowest to the highest frame.
    """
    number, rows = NUMBERS[name], main[main["number"] == name]
    by_layer = rows.groupby("layer")[["value", "untrained"]].agg(["mean", "min", "max"])
    by_layer = by_layer[by_layer["value", "mean"].notna()]
    bounds = [round(bound, 5) + 0.0 for bound in (number.low, number.high) if bound is not None]
    lines = [Line("chance", np.full(len(by_layer), bound)) for bound in bounds]  # 1e-6 is 0
    lines += [Line("untrained", *by_layer["untrained"].to_numpy(float).T)]
    lines += [Line("trained", *by_layer["value"].to_numpy(float).T)]
    alt = f"{number.title} by layer: {low_to_high(rows['value']) or 'not measured'}"
    layers = by_layer.index.to_numpy(float)
    svg = render("chart.svg", **chart(layers, lines, alt)) if len(layers) else ""
    title = claim.title if len(claim.numbers) == 1 else f"{claim.title}: {number.title}"
    way = claim_summary.bounds_of(number)
    return {"title": title, "way": way, "svg": svg, "number": number, "claim": claim}


def _row(row: dict[str, Any]) -> list[str]:
    place = [NUMBERS[row["number"]].title, row["frame"]]
    place += [] if pd.isna(row["eps"]) else [f"eps {row['eps']:g}"]
    place += [word for word in (row["basis"], row["tokens"]) if word in ("orthonormal", "patches")]
    place += [f"{row['tokens']} tokens"] if " of " in row["tokens"] else []  # such as "4 of 50"
    words = ", ".join(word for word in place if word)
    return [words, str(row["layer"]), *(_cell(row, name) for name in _SHOWN)]


def _cell(row: dict[str, Any], name: str) -> str:
    if name == "verdict":
        return row["verdict"] + (", by construction" if row["by_construction"] else "")
    text, start = _number(row[name]), _INTERVALS.get(name)
    if text and start is not None and row[f"{start}low"] < row[f"{start}high"]:
        text += f" ({_number(row[f'{start}low'])} to {_number(row[f'{start}high'])})"
    return text


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.2g}"


def _nulls(result: AuditResult) -> dict[str, Any]:
    """Returns a table of the nulls, the ceilings and the papers' operators at the main eps."""
    rows = [
        [row.of, NUMBERS[row.number].title, row.frame, row.tokens, str(row.layer)]
        + [_number(row.value), _number(row.error), str(row.n)]
        for row in claim_summary.main_rows(result, "nulls").itertuples()
    ]
    header = ["", "number", "frame", "tokens", "layer", "mean", "standard error", "samples"]
    heading = "Nulls, ceilings and the papers' own operators"
    return {"heading": heading, "header": header, "rows": rows}


def _beside(result: AuditResult) -> dict[str, Any]:
    """Returns a table of the numbers that no claim judges, at the main eps, with their meanings."""
    layers = claim_summary.main_rows(result, "layers")
    meanings = {name: words for name, words in BESIDE.items() if name in layers}
    rows = [
        [str(int(row["layer"])), row["frame"], row["tokens"]]
        + [_number(row[name]) for name in meanings]
        for row in layers.to_dict("records")
    ]
    meanings = {name.replace("_", " "): words for name, words in meanings.items()}
    header = ["layer", "frame", "tokens", *meanings]
    heading = "Numbers besides the claims"
    return {"heading": heading, "header": header, "rows": rows, "meanings": meanings}


def _heads(result: AuditResult) -> dict[str, Any]:
    table: Any = result.table("heads")
    rows = [
        [str(row.layer), str(row.head), _number(row.cosine), _number(row.null), _number(row.spread)]
        for row in table.itertuples()
    ]
    header = ["layer", "head", "cosine of W_O and U^T", "with other heads", "sd of random matrices"]
    return {"heading": "The output map of each head", "header": header, "rows": rows}
