"""The page of an audit: the finding, claims by layers, and every number behind a cell."""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from crate_interp.audits.claims import BESIDE, CLAIMS, FRAMES, LIMITS, NULLS, NUMBERS, Number
from crate_interp.audits.result import AuditResult
from crate_interp.audits.summary import MARKS, NOT_APPLICABLE, main_cells
from crate_interp.files import write_text
from crate_interp.viz.page import model_name, render, sources

_SHOWN = (
    "value", "null", "excess", "untrained", "gain", "ceiling", "share", "construction", "verdict",
)  # fmt: skip
_WORDS = {
    "gain": "over random weights",
    "construction": "an ideal layer",
    "ceiling": "best possible",
}
_INTERVALS = {"value": "", "excess": "excess_", "gain": "gain_"}


def audit_page(result: AuditResult, out: str | Path) -> Path:
    """Writes audit.html, audit.txt and the result (AuditResult.save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        write_text(stage / "audit.txt", result.text() + "\n")
        write_text(stage / "audit.html", _page(result))
    return Path(out) / "audit.html"


def _page(result: AuditResult) -> str:
    return render(
        "audit.html",
        title=f"{model_name(result.meta)}: does each layer do its job?",
        finding=result.headline(),
        caution=result.caution(),
        meta=result.meta,
        groups=_groups(result),
        marks={word: mark for word, mark in MARKS.items() if mark},
        frames=FRAMES,
        nulls=NULLS | LIMITS,
        tables=[_nulls(result), _beside(result), _heads(result)],
        sources=sources(result.meta) + _reasons(result),
    )


def _groups(result: AuditResult) -> list[dict[str, Any]]:
    """Returns the claims of each group with a cell for each layer."""
    words = {(row["claim"], row["layer"]): row for row in result.claims().to_dict("records")}
    cells, main = result.table(), main_cells(result)
    found: dict[str, dict[str, Any]] = {}
    for name, claim in CLAIMS.items():
        group = found.setdefault(claim.group, {"heading": claim.group, "claims": []})
        layers = [
            _cell(
                words[name, layer],
                cells[(cells["claim"] == name) & (cells["layer"] == layer)],
                main[(main["number"] == claim.parts[0]) & (main["layer"] == layer)],
            )
            for layer in range(result.meta["n_layers"])
        ]
        numbers = [(NUMBERS[part], _bounds(NUMBERS[part])) for part in claim.parts]
        group["claims"].append({"claim": claim, "numbers": numbers, "layers": layers})
    return list(found.values())


def _cell(word: dict[str, Any], rows: Any, main: Any) -> dict[str, Any]:
    """Returns what a cell shows: the mark, the first number, its share, and the rows behind it."""
    applies = word["verdict"] != NOT_APPLICABLE
    share = main["share"].mean() if len(main) else math.nan
    other = (main["untrained"] / main["value"] * main["share"]).mean() if len(main) else math.nan
    return {
        "layer": word["layer"],
        "verdict": word["verdict"],
        "mark": MARKS[word["verdict"]],
        "on": word["on"],
        "reason": word["reason"],
        "value": _ends(main["value"]) if applies else "",
        "untrained": _ends(main["untrained"]) if applies else "",
        "tint": _tint(share),
        "other": _tint(other),
        "header": ["", *(_WORDS.get(name, name) for name in _SHOWN)],
        "rows": [_row(row) for row in rows.to_dict("records")] if applies else [],
    }


def _ends(values: Any) -> str:
    """Returns the lowest and the highest of a number over frames."""
    known = values.dropna().astype(float)
    ends = [f"{end:.2g}" for end in (known.min(), known.max())] if len(known) else [""]
    return " to ".join(dict.fromkeys(ends))


def _tint(share: float) -> float:
    return 0.0 if math.isnan(share) else round(max(-1.0, min(1.0, share)), 2)


def _row(row: dict[str, Any]) -> list[str]:
    place = [NUMBERS[row["number"]].title, row["frame"]]
    place += [] if pd.isna(row["eps"]) else [f"eps {row['eps']:g}"]
    place += [word for word in (row["basis"], row["tokens"]) if word in ("orthonormal", "patches")]
    return [", ".join(word for word in place if word), *(_shown(row, name) for name in _SHOWN)]


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


def _bounds(facts: Number) -> str:
    """Returns words such as "at most 0.1, lower is better"."""
    if facts.high is None:
        return f"at least {facts.low:g}, higher is better"
    if facts.low is None:
        return f"at most {facts.high:g}, lower is better"
    return f"between {facts.low:g} and {facts.high:g}"


def _nulls(result: AuditResult) -> dict[str, Any]:
    """Returns the nulls, ceilings and operators at the asked eps, means over layers apart."""
    table: Any = result.table("nulls")
    eps = result.meta["settings"]["eps"]
    at = table["eps"].isna() | (table["eps"] == eps)
    at &= (table["basis"] != "orthonormal") & (table["tokens"] != "patches")
    rows = [
        [row.of, NUMBERS[row.number].title, row.frame, str(row.layer), _number(row.value)]
        + [_number(row.error), str(row.n)]
        for row in table[at].itertuples()
    ]
    header = ["", "number", "frame", "layer", "mean", "standard error", "samples"]
    heading = "Nulls, ceilings and the papers' own operators"
    return {"heading": heading, "header": header, "rows": rows, "meanings": []}


def _beside(result: AuditResult) -> dict[str, Any]:
    """Returns the numbers beside the claims at the asked eps, and what each of them means."""
    layers: Any = result.layers()
    layers = layers[layers["eps"].isin([0.0, result.meta["settings"]["eps"]])]
    layers = layers[(layers["basis"] != "orthonormal") & (layers["tokens"] != "patches")]
    shown = [name for name in BESIDE if name in layers]
    rows = [
        [str(int(row["layer"])), row["frame"], *(_number(row[name]) for name in shown)]
        for row in layers.to_dict("records")
    ]
    header = ["layer", "frame", *(name.replace("_", " ") for name in shown)]
    meanings = [(name.replace("_", " "), BESIDE[name]) for name in shown]
    return {
        "heading": "Numbers beside the claims",
        "header": header,
        "rows": rows,
        "meanings": meanings,
    }


def _heads(result: AuditResult) -> dict[str, Any]:
    table: Any = result.table("heads")
    rows = [
        [str(row.layer), str(row.head), _number(row.cosine), _number(row.null), _number(row.spread)]
        for row in table.itertuples()
    ]
    header = ["layer", "head", "cosine of W_O and U^T", "with other heads", "sd of random matrices"]
    return {
        "heading": "The output map of each head",
        "header": header,
        "rows": rows,
        "meanings": [],
    }


def _reasons(result: AuditResult) -> list[tuple[str, str]]:
    """Returns each number that is not applicable, with the reasons."""
    found: dict[tuple[str, str], None] = {}
    for reasons in result.meta["reasons"]:
        for name, reason in reasons.items():
            found[f"{NUMBERS[name].title}, not applicable", reason] = None
    return list(found)
