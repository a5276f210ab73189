"""The page of an audit: layers against claims, each cell a number, an interval and a word."""

import html
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.audits.result import AuditResult
from crate_interp.files import write_text
from crate_interp.viz.page import facts, page, sources, table, text

_GROUPS = (
    ("Attention", ("compresses", "gradient", "step", "neumann", "neumann_direction")),
    ("The sparse step", ("descends", "share", "converged", "kkt", "threshold", "rate_kept")),
    ("What the derivation assumes of the weights", ("orthonormal", "complete", "dictionary")),
)
_STYLE = """<style>
.kept { color: light-dark(#0b6b3a, #6fd39b); } .broken { color: light-dark(#a3271b, #ff9a8d); }
.undecided { color: light-dark(#555, #bbb); } .none { opacity: .8; } td b { display: block; } td small { display: block; opacity: .75; }
</style>"""


def audit_page(result: AuditResult, out: str | Path) -> Path:
    """Writes audit.html, the audit's tables (AuditResult.save) and audit.txt into `out`, and returns the path of the page."""
    out = result.save(out)
    title = f"{result.meta['model'] or result.meta['config']['family'] + ' model'}: does each layer do its job?"
    body = [
        _STYLE,
        f"<h1>{text(title)}</h1>",
        f"<p>{text(_opening(result))}</p>",
        *_tables(result),
        *_numbers(result),
    ]
    body += ["<h2>Where the numbers come from</h2>", facts(_closing(result))]
    write_text(out / "audit.txt", result.text() + "\n")
    write_text(out / "audit.html", page(title, body))
    return out / "audit.html"


def _opening(result: AuditResult) -> str:
    meta, words = result.meta, result.table()["verdict"].value_counts()
    counts = ", ".join(
        f"{words.get(word, 0)} {word}" for word in ("kept", "broken", "undecided", "not applicable")
    )
    beside = (
        f" Below it, small: the same network with random weights ({meta['untrained_seeds']} seed{'s' * (meta['untrained_seeds'] > 1)})."
        if meta["untrained_seeds"]
        else ""
    )
    settings = meta["settings"]
    return (
        f"{meta['n_samples']:,} {meta['unit']}, {meta['n_layers']} layers: {counts}. Each cell is a mean over {meta['unit']} with "
        "its 95 % bootstrap interval. Kept: the whole interval lies within the claim's bounds. Broken: none of it does. "
        f"Undecided: a bound lies inside it.{beside} The bounds are the same for every model. Rates with eps = {settings['eps']:g}, "
        f"of the stream as it is, all tokens, U as stored; the lasso is solved for {settings['lasso_tokens']} tokens of each sample."
    )


def _tables(result: AuditResult) -> list[str]:
    cells = result.table().set_index(["layer", "claim"])
    parts: list[str] = []
    for heading, claims in _GROUPS:
        head = "".join(f'<th scope="col">{text(CLAIMS[claim].title)}</th>' for claim in claims)
        rows = "".join(
            f'<tr><th scope="row">{layer}</th>'
            + "".join(_cell(cells.loc[(layer, claim)]) for claim in claims)
            + "</tr>"
            for layer in range(result.meta["n_layers"])
        )
        header = f'<thead><tr><th scope="col">layer</th>{head}</tr></thead>'
        parts.append(
            f'<h2>{text(heading)}</h2><div class="wide"><table>{header}<tbody>{rows}</tbody></table></div>'
        )
        parts.append(facts([(CLAIMS[claim].title, _sentence(claim)) for claim in claims]))
    return parts


def _cell(row: Any) -> str:
    if row.verdict == "not applicable":
        return f'<td class="none" title="{html.escape(row.reason, quote=True)}">not applicable</td>'
    interval = (
        ""
        if np.isnan(row.low) or row.low == row.high
        else f"<small>{row.low:.3g} to {row.high:.3g}</small>"
    )
    word = row.untrained_verdict
    beside = f'<small class="{word}">untrained {row.untrained:.3g}, {word}</small>' if word else ""
    return f'<td class="{row.verdict}">{row.value:.3g}{interval}<b>{row.verdict}</b>{beside}</td>'


def _sentence(claim: str) -> str:
    facts_ = CLAIMS[claim]
    low, high = facts_.low, facts_.high
    bounds = (
        f"at least {low:g}"
        if high is None
        else f"at most {high:g}"
        if low is None
        else f"{low:g} to {high:g}"
    )
    return f"{facts_.says} ({facts_.where}) Measured: {facts_.number}. Kept: {bounds}."


def _numbers(result: AuditResult) -> list[str]:
    layers = result.layers()
    shown = [name for name in NUMBERS if name in layers]
    if not shown:
        return []
    rows = [
        [str(int(row["layer"])), *(f"{row[name]:.4g}" for name in shown)]
        for row in layers.to_dict("records")
    ]
    heads = [name.replace("_", " ") for name in shown]
    said = facts([(head, NUMBERS[name]) for head, name in zip(heads, shown, strict=True)])
    return ["<h2>Numbers beside the claims</h2>", table(["layer", *heads], rows), said]


def _closing(result: AuditResult) -> list[tuple[str, str]]:
    reasons = pd.DataFrame(result.meta["reasons"]).fillna("").drop_duplicates()
    said = [
        (f"{claim}, not applicable", reason)
        for claim in reasons
        for reason in dict.fromkeys(reasons[claim])
        if reason
    ]
    return sources(result.meta) + said
