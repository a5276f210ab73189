"""The page of an audit: layers against claims, each cell a number, an interval and a verdict."""

from pathlib import Path
from typing import Any

import pandas as pd

from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.audits.result import AuditResult
from crate_interp.files import write_text
from crate_interp.viz.page import model_name, render, sources

_GROUPS = (
    ("Attention", ("compresses", "gradient", "step", "neumann", "neumann_direction")),
    ("The sparse step", ("descends", "share", "converged", "kkt", "threshold", "rate_kept")),
    ("What the derivation assumes of the weights", ("orthonormal", "complete", "dictionary")),
)
_VERDICTS = ("kept", "broken", "undecided", "not applicable")


def audit_page(result: AuditResult, out: str | Path) -> Path:
    """Writes audit.html, audit.txt and the result (AuditResult.save) into a folder.

    Returns the path of the page.
    """
    out = result.save(out)
    verdicts = result.table()["verdict"].tolist()
    page = render(
        "audit.html",
        title=f"{model_name(result.meta)}: does each layer do its job?",
        meta=result.meta,
        counts={word: verdicts.count(word) for word in _VERDICTS},
        groups=_groups(result),
        numbers=_numbers(result),
        sources=sources(result.meta) + _reasons(result),
    )
    write_text(out / "audit.txt", result.text() + "\n")
    write_text(out / "audit.html", page)
    return out / "audit.html"


def _groups(result: AuditResult) -> list[dict[str, Any]]:
    """Returns the claims of each table of the page, and the cells of its rows, one row a layer."""
    records = result.table().to_dict("records")
    cells = {(row["layer"], row["claim"]): row for row in records}
    layers = range(result.meta["n_layers"])
    return [
        {
            "heading": heading,
            "claims": [CLAIMS[name] for name in names],
            "rows": [[cells[layer, name] for name in names] for layer in layers],
        }
        for heading, names in _GROUPS
    ]


def _numbers(result: AuditResult) -> dict[str, list[Any]]:
    """Returns the table of the numbers beside the claims, and what each of them means."""
    layers = result.layers()
    shown = [name for name in NUMBERS if name in layers]
    heads = [name.replace("_", " ") for name in shown]
    rows = [
        [str(int(row["layer"])), *(f"{row[name]:.4g}" for name in shown)]
        for row in layers.to_dict("records")
        if shown
    ]
    meanings = [(head, NUMBERS[name]) for head, name in zip(heads, shown, strict=True)]
    return {"header": ["layer", *heads], "rows": rows, "meanings": meanings}


def _reasons(result: AuditResult) -> list[tuple[str, str]]:
    """Returns each claim that is not applicable, with the reasons."""
    reasons = pd.DataFrame(result.meta["reasons"]).fillna("").drop_duplicates()
    return [
        (f"{claim}, not applicable", reason)
        for claim in reasons
        for reason in dict.fromkeys(reasons[claim])
        if reason
    ]
