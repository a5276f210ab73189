"""The page of an audit: the finding, claims by layers, and every number behind a cell."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claim_summary import (
    BY_CONSTRUCTION,
    DEPENDS,
    MARKS,
    NOT_APPLICABLE,
    bounds_of,
    is_judged,
    legend,
    main_cells,
)
from crate_interp.audits.claims import (
    BESIDE,
    CLAIM_OF,
    CLAIMS,
    FRAMES,
    LIMITS,
    NULLS,
    NUMBERS,
    Claim,
)
from crate_interp.audits.result import AuditResult
from crate_interp.audits.verdicts import BROKEN, KEPT, UNDECIDED
from crate_interp.core.files import write_text
from crate_interp.viz.pages.chart import Line, chart
from crate_interp.viz.pages.interval_chart import Interval, intervals
from crate_interp.viz.pages.page import model_name, render, sources
from crate_interp.viz.pages.report_findings import Row, Sign
from crate_interp.viz.pages.statistic_titles import CLAIMS as TITLES

_SHOWN = (
    "value", "null", "excess", "untrained", "gain", "ceiling", "share", "construction", "verdict",
)  # fmt: skip
_WORDS = {
    "excess": "over its null",
    "gain": "over a random D or W_O in its place",
    "construction": "an ideal layer",
    "ceiling": "best possible",
    "share": "of the best",
}
_KINDS = {KEPT: "good", BROKEN: "bad"}
_COUNTED = {
    BY_CONSTRUCTION: "by construction: an ideal layer misses the bound too",
    DEPENDS: "depend on the setting",
    UNDECIDED: "undecided",
}
_MEANINGS = {DEPENDS: "depends on the setting", BY_CONSTRUCTION: _COUNTED[BY_CONSTRUCTION]}
_INTERVALS = {"value": "", "excess": "excess_", "gain": "gain_"}


@dataclass(frozen=True)
class Card:
    """A claim in a layer: the verdict, why, and each number drawn against its bounds.

    same: whether the untrained networks' means lie on the same side of every bound; None if there
    are none.
    """

    id: str
    title: str
    claim: Claim
    layer: int
    verdict: str
    mark: str
    words: str
    same: bool | None
    parts: list[dict[str, Any]]


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
    cards = _cards(result)
    groups = _groups(result)
    return render(
        "audit.html",
        title=f"{model_name(result.meta)}: does each layer do its job?",
        finding=[_counts(cards), result.headline()],
        caution=result.caution(),
        meta=result.meta,
        layers=_layers(result),
        strip=[_strip_row(result, name, cards) for name in CLAIMS],
        cards=cards,
        marks=[
            (_sign(mark), _MEANINGS.get(word, word), _KINDS.get(word, ""))
            for word, mark in MARKS.items()
        ],
        groups=groups,
        named=[(group["id"], group["heading"]) for group in groups],
        frames=FRAMES,
        few=_few(result),
        nulls=NULLS | LIMITS,
        tables=[_nulls(result), _beside(result), _heads(result)],
        sources=sources(result.meta) + _reasons(result),
    )


def _layers(result: AuditResult) -> range:
    return range(result.meta["n_layers"])


def _few(result: AuditResult) -> int:
    """Returns on how many samples the ceilings were measured."""
    counts: Any = result.table("nulls").query("of == 'ceiling'")["n"]
    return int(counts.min()) if len(counts) else int(result.meta["n_samples"])


def _sign(mark: str) -> str:
    return {"-": "\N{MINUS SIGN}", "": "."}.get(mark, mark)


def _counts(cards: list[Card]) -> str:
    """Returns how many verdicts there are of each kind, and how often untrained does the same."""
    words = [card.verdict for card in cards if card.verdict != NOT_APPLICABLE]
    if not words:
        return "No claim applies."
    claims = len({card.title for card in cards if card.verdict != NOT_APPLICABLE})
    text = f"{words.count(KEPT)} of {len(words)} verdicts (on {claims} claims) are kept, "
    text += f"{words.count(BROKEN)} broken"
    text += "".join(
        f"; {words.count(word)} {what}" for word, what in _COUNTED.items() if word in words
    )
    text += "."
    known = [card.same for card in cards if card.same is not None]
    return text + (f" Untrained networks do the same in {sum(known)}." if known else "")


def _cards(result: AuditResult) -> list[Card]:
    """Returns what the signs of the map open, claim by claim and layer by layer."""
    place = ["claim", "layer"]
    cells, main = result.table(), main_cells(result)
    judged = cells[is_judged(cells, result.meta["settings"]["eps"])]
    by_place = [dict(iter(table.groupby(place))) for table in (judged, main)]
    rows: list[Any] = list(result.claims().itertuples(index=False))
    words = {(row.claim, row.layer): row for row in rows}
    nothing = main.iloc[:0]
    return [
        _card(words[place], *(found.get(place, nothing) for found in by_place))
        for place in ((name, layer) for name in CLAIMS for layer in _layers(result))
    ]


def _card(word: Any, judged: Any, main: Any) -> Card:
    claim, applies = CLAIMS[word.claim], word.verdict != NOT_APPLICABLE
    parts = claim.parts if applies else ()
    return Card(
        id=f"{word.claim}-{word.layer}",
        title=TITLES[word.claim],
        claim=claim,
        layer=word.layer,
        verdict=word.verdict,
        mark=_sign(MARKS[word.verdict]),
        words=". ".join(text for text in (word.on, word.reason) if text),
        same=_same(judged) if applies else None,
        parts=[_part(part, main[main["number"] == part]) for part in parts],
    )


def _same(rows: Any) -> bool | None:
    """Tells whether the untrained mean is on the same side of its bounds as the value, always.

    None if there is no untrained network.
    """
    pairs = zip(rows["number"], rows["value"], rows["untrained"], strict=True)
    known = [pair for pair in pairs if not pd.isna(pair[1]) and not pd.isna(pair[2])]
    same = [_inside(name, value) == _inside(name, other) for name, value, other in known]
    return all(same) if same else None


def _inside(name: str, value: float) -> bool:
    low, high = NUMBERS[name].bounds
    return low <= value <= high


def _part(name: str, rows: Any) -> dict[str, Any]:
    """Returns a number of a card: its formula, its bounds, and its intervals drawn."""
    facts = NUMBERS[name]
    drawn = [
        Interval(row.frame or "value", row.value, row.low, row.high, row.untrained)
        for row in rows.itertuples()
    ]
    shown = ", ".join(f"{one.label} {one.value:.3g}" for one in drawn)
    alt = f"{facts.title}: {shown or 'not measured'}; {bounds_of(facts)}"
    return {
        "title": facts.title,
        "formula": facts.number,
        "bounds": bounds_of(facts),
        "svg": render("intervals.svg", **intervals(drawn, facts.low, facts.high, alt)),
    }


def _strip_row(result: AuditResult, name: str, cards: list[Card]) -> Row:
    """Returns a row of the map: a sign for each layer, the bound, and both networks' numbers."""
    claim, main = CLAIMS[name], main_cells(result)
    main = main[(main["number"] == claim.parts[0]) & (main["verdict"] != NOT_APPLICABLE)]
    signs = [
        Sign(
            card.mark,
            f"{card.title}, layer {card.layer}: {card.verdict}"
            + (", untrained the same" if card.same else ""),
            _KINDS.get(card.verdict, ""),
            bool(card.same),
            card.id,
        )
        for card in cards
        if card.claim is claim
    ]
    words = [bounds_of(NUMBERS[claim.parts[0]], short=True), _ends(main["value"])]
    return Row(TITLES[name], signs, [*words, _ends(main["untrained"])])


def _groups(result: AuditResult) -> list[dict[str, Any]]:
    """Returns the claims of each group with a chart of each number, and every row behind it."""
    cells, main = result.table(), main_cells(result)
    found: dict[str, dict[str, Any]] = {}
    for name, claim in CLAIMS.items():
        new = {"id": f"group-{len(found)}", "heading": claim.group, "panels": [], "tables": []}
        group = found.setdefault(claim.group, new)
        group["panels"] += [_panel(claim, part, main) for part in claim.parts]
        rows: Any = cells[(cells["claim"] == name) & (cells["verdict"] != NOT_APPLICABLE)]
        header = ["", "layer", *(_WORDS.get(column, column) for column in _SHOWN)]
        lines = [_row(row) for row in rows.to_dict("records")]
        group["tables"].append({"title": TITLES[name], "header": header, "rows": lines})
    return list(found.values())


def _panel(claim: Claim, part: str, main: Any) -> dict[str, Any]:
    """Returns the chart of a number by layer: the frames as a band, untrained, and the bounds."""
    facts, rows = NUMBERS[part], main[main["number"] == part]
    by_layer = rows.groupby("layer")[["value", "untrained"]].agg(["mean", "min", "max"])
    by_layer = by_layer[by_layer["value", "mean"].notna()]
    lines = [
        Line("chance", np.full(len(by_layer), round(bound, 5) + 0.0))  # one of 1e-6 stands for 0
        for bound in (facts.low, facts.high)
        if bound is not None
    ]
    for kind, column in (("untrained", "untrained"), ("trained", "value")):
        ends = by_layer[column].to_numpy(float).T
        lines.append(Line(kind, *ends))
    alt = f"{facts.title} by layer: {_ends(rows['value']) or 'not measured'}"
    layers = by_layer.index.to_numpy(float)
    svg = render("chart.svg", **chart(layers, lines, alt)) if len(layers) else ""
    words = TITLES[CLAIM_OF[part]]
    return {
        "title": words if len(claim.parts) == 1 else f"{words}: {facts.title}",
        "way": bounds_of(facts),
        "svg": svg,
        "formula": facts.number,
        "says": claim.says,
        "where": claim.where,
    }


def _ends(values: Any) -> str:
    """Returns the lowest and the highest of a number over layers and frames."""
    known = values.dropna().astype(float)
    ends = [f"{end:.2g}" for end in (known.min(), known.max())] if len(known) else [""]
    return " to ".join(dict.fromkeys(ends))


def _row(row: dict[str, Any]) -> list[str]:
    place = [NUMBERS[row["number"]].title, row["frame"]]
    place += [] if pd.isna(row["eps"]) else [f"eps {row['eps']:g}"]
    place += [word for word in (row["basis"], row["tokens"]) if word in ("orthonormal", "patches")]
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
