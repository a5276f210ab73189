"""Writes the page of all claims, from the results of the labs and from elsewhere.py.

    python demos/labs/claims_page.py --labs runs/labs --out demos/docs/pages/claims.md

--labs: the folder that `make labs` writes, with a folder for each lab.
"""

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import elsewhere
from lab import LabResult

from crate_interp.core.files import write_text
from crate_interp.core.safe_text import in_markdown

DOCUMENTS = (
    elsewhere.CRATE, elsewhere.SEGMENTATION, elsewhere.SRR, elsewhere.JOMA, elsewhere.SELECTION,
    elsewhere.OTHERS,
)  # fmt: skip
HEAD = ("claim", "where", "published", "ours (95 %)", "baseline", "answer", "by")


def number(value: float) -> str:
    return f"{value:.4g}"


def lab_row(row: Mapping[str, Any], lab: str) -> tuple[str, ...]:
    """Returns the cells of a claim that a lab measured."""
    ours = number(row["ours"])
    if not math.isnan(row["low"]):
        ours += f" ({number(row['low'])} to {number(row['high'])})"
    baseline = ""
    if not math.isnan(row["baseline"]):
        baseline = f"{number(row['baseline'])}, {row['baseline_is']}"
    cells = (row["claim"], row["where"], row["published"], ours, baseline, row["answer"])
    return (*cells, f"[{lab}](labs/{lab}.md)")


def other_row(row: elsewhere.Elsewhere) -> tuple[str, ...]:
    """Returns the cells of a claim that a command measured."""
    return row.claim, row.where, "", row.ours, "", row.answer, row.by


def section(document: str, labs: Path, found: Counter) -> list[str]:
    """Returns the lines of a document, and counts its answers."""
    cells, sizes = [], []
    for row in elsewhere.MEASURED.get(document, ()):
        cells.append(other_row(row))
        found[row.answer.split(" (")[0]] += 1
    for lab in elsewhere.LABS.get(document, ()):
        result = LabResult.load(labs / lab)
        rows: Any = result.table().to_dict("records")
        cells += [lab_row(row, lab) for row in rows]
        found.update(row["answer"] for row in rows)
        sizes.append(f"{lab} ({result.meta['form']} form): {rows[0]['size']}")
    lines = [f"## {document}", "", in_markdown(HEAD, cells)] if cells else [f"## {document}"]
    if sizes:
        lines += ["", "Sizes. " + "; ".join(sizes) + "."]
    if document in elsewhere.CANNOT:
        lines += ["", "Cannot be run here or on a CRATE:", ""]
        lines += [f"* {claim}: {why}." for claim, why in elsewhere.CANNOT[document]]
    return [*lines, ""]


def page(labs: Path) -> str:
    """Returns the page as Markdown.

    Raises ValueError if the result of a lab is missing.
    """
    found: Counter = Counter()
    body = [line for document in DOCUMENTS for line in section(document, labs, found)]
    total = sum(found.values())
    head = [
        "# What the documents claim, and what came out here",
        "",
        f"Of {total} claims {found['supported']} are supported at the size at which they were run, "
        f"{found['not supported']} are not, {found['depends']} depend on a setting or on too "
        f"little data, and {found['undecided']} cannot be decided here. Each row has its baseline; "
        "its page says by which rule it was answered.",
        "",
    ]
    return "\n".join([*head, *body]).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--labs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    write_text(given.out, page(given.labs))
    print(f"page: {given.out}")
