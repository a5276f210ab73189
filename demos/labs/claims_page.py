"""Writes the page of all claims, from stored results of the labs and from elsewhere.py.

    python demos/labs/claims_page.py                    # from data/claims.csv
    python demos/labs/claims_page.py --labs runs/labs   # takes in the labs that lie there first

--labs: the folder that `make labs` writes, with a folder for each lab. Of it those results are
taken whose form is that of the rules (data/rules.csv); the others are named and left. The tables of
the labs' own pages are written too.
"""

import argparse
import csv
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import elsewhere
import rules
from lab import CLAIMS, LabResult
from tqdm.auto import tqdm

from crate_interp.core.files import write_text
from crate_interp.core.safe_text import in_markdown

DATA = Path(__file__).parent / "data"
STORED, FRAME = DATA / "claims.csv", DATA / "claims_page.md"
HEAD = ("claim, and where it is made", "answer", "ours (95 %)", "baseline", "rule, and measured by")
TABLES = {  # what a rule is about -> the heading of its claims
    "white box": "Claims about white-box transformers",
    "other": "Claims of these documents that are not about white-box transformers",
}
SHOWN: dict[str, str] = dict(
    zip(rules.ANSWERS, ("yes", "no", "depends", "can't tell"), strict=True)
)
COUNTED = {"white box": "about white-box transformers", "other": "about other models"}
MATTER = tuple(elsewhere.LISTED["matter"].items())  # questions of readers, and their rules
NUMBERS = ("ours", "low", "high", "baseline")
Row = Mapping[str, Any]


def number(value: float) -> str:
    return f"{value:.4g}"


def stored() -> list[dict[str, Any]]:
    """Returns the rows of data/claims.csv: lab, form, and the columns of `lab.CLAIMS`."""
    with STORED.open(newline="", encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    return [row | {name: float(row[name]) for name in NUMBERS} for row in rows]


def answered(row: Row) -> str:
    """Returns the answer that the rule of a stored row gives to its cases."""
    return rules.answer(rules.rules()[row["rule"]], json.loads(row["cases"]))


def taken_in(labs: Path) -> None:
    """Puts the results of a folder in the place of those that are stored."""
    rows, found = stored() if STORED.exists() else [], []
    for name in tqdm([name for names in elsewhere.LABS.values() for name in names], desc="labs"):
        if not (labs / name / "meta.json").exists():
            continue
        result = LabResult.load(labs / name)
        form, table = result.meta["form"], result.table()
        wanted = {rule.form for rule in rules.rules().values() if rule.lab == name}
        if {form} != wanted:
            print(f"{name}: {form} form, the rules are of the {' and '.join(wanted)} form; left")
            continue
        found += [{"lab": name, "form": form, **row} for row in table.to_dict("records")]
    new = {row["lab"] for row in found}
    place = [name for names in elsewhere.LABS.values() for name in names].index
    rows = sorted(
        [row for row in rows if row["lab"] not in new] + found, key=lambda r: place(r["lab"])
    )
    lines: list[Sequence] = [("lab", "form", *CLAIMS)]
    for row in rows:
        row |= {name: number(float(row[name])) for name in NUMBERS}
        lines.append([row[name] for name in lines[0]])
    with STORED.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def lab_cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a claim that a lab measured, without those of where and by."""
    rule, cases = rules.rules()[row["rule"]], json.loads(row["cases"])
    ours, words = number(row["ours"]), rule.words()
    shown = (ours, ours)
    if not math.isnan(row["low"]):
        shown = (number(row["low"]), number(row["high"]))
        ours += f" ({shown[0]} to {shown[1]})"
    if [tuple(map(number, ends)) for ends in cases.values()] != [shown]:
        words += f" ({rules.asked(rule, cases)})"
    baseline = f"{number(row['baseline'])}, {row['baseline_is']}"
    measured = (ours, rule.units(row["n"]), baseline, words)
    return (row["claim"], SHOWN[answered(row)], row["published"], *measured)


def cells_of(row: Row) -> tuple[str, ...]:
    text, answer, published, ours, n, baseline, rule = lab_cells(row)
    said = f"{row['where']}{f': {published}' if published else ''}"
    by = f"[{row['lab']}](labs/{row['lab']}.md)"
    return _five(text, said, answer, ours, n, baseline, rule, by)


def other_cells(each: elsewhere.Elsewhere) -> tuple[str, ...]:
    """Returns the cells of a claim that a command measured."""
    row, rule = each.row, rules.rules()[each.row["rule"]]
    told = (each.ours, rule.units(rule.n), each.baseline, rule.words(), each.by)
    return _five(row["claim"], row["where"], SHOWN[row["answer"]], *told)


def _five(
    text: str, where: str, answer: str, ours: str, n: str, baseline: str, rule: str, by: str
) -> tuple[str, ...]:
    return f"{text}<br>*{where}*", answer, f"{ours}<br>*{n}*", baseline, f"{rule}<br>*{by}*"


def that_matter(others: Mapping[str, Sequence[elsewhere.Elsewhere]]) -> str:
    """Returns the table of the questions that most readers come with."""
    found = {one.row["rule"]: other_cells(one) for each in others.values() for one in each}
    rows = [(question, found[rule][1], number) for question, (rule, number) in MATTER]
    return in_markdown(("question", "answer", "found, and its 95 % interval"), rows)


def section(document: str, rows: Sequence[Row], others: Sequence[elsewhere.Elsewhere]) -> list[str]:
    """Returns the lines of a document's claims; none if it has none."""
    cells = [*map(other_cells, others), *map(cells_of, rows)]
    if not cells:
        return []
    sizes: dict[str, dict[str, None]] = {}  # by lab, each size once
    for row in rows:
        sizes.setdefault(f"{row['lab']} ({row['form']} form)", {})[row["size"]] = None
    words = "; ".join(f"{lab}: {' / '.join(each)}" for lab, each in sizes.items())
    told = Counter(each[1] for each in cells)
    counts = ", ".join(f"{told[answer]} {answer}" for answer in SHOWN.values() if told[answer])
    summary = f"<summary>{document}: {counts}</summary>"
    lines = ['<details class="claims" markdown="1">', summary, "", in_markdown(HEAD, cells), ""]
    return [*lines, *([f"Sizes. {words}.", ""] if words else []), "</details>", ""]


def lead(every: Sequence[Row]) -> tuple[str, str]:
    """Returns how often each answer is given, by subject and by who makes the claim, in a table."""
    found = Counter(
        (rules.rules()[row["rule"]].about, row["where"].startswith("ours"), row["answer"])
        for row in every
    )
    lines = []
    for subject, words in COUNTED.items():
        for ours, whose in ((False, "claims of the papers"), (True, "questions of ours")):
            each = [found[subject, ours, answer] for answer in rules.ANSWERS]
            lines.append((f"{whose}, {words}", *map(str, each), str(sum(each))))
    white = {answer: found["white box", False, answer] + found["white box", True, answer]
             for answer in rules.ANSWERS}  # fmt: skip
    other = found.total() - sum(white.values())
    words = (
        f"Of {sum(white.values())} claims about white-box transformers {white[rules.SUPPORTED]} "
        f"hold at the size at which they were run, {white[rules.REFUTED]} do not, and "
        f"{white[rules.DEPENDS]} depend on the scaling, the layer or a setting. For "
        f"{white[rules.UNDECIDED]} we can't tell: an interval holds both answers, there are too "
        f"few units, or a baseline is not tuned. Another {other} claims of the same documents are "
        "about other models."
    )
    return words, in_markdown(("", *SHOWN.values(), "all"), lines)


def page(rows: Sequence[Row]) -> str:
    """Returns the page as Markdown; rows: as `stored` returns them."""
    others, body = elsewhere.measured(), []
    every = [*rows, *(one.row for each in others.values() for one in each)]
    for subject, heading in TABLES.items():
        body += [f"## {heading}", ""]
        for document, labs in elsewhere.LABS.items():
            own = [r for r in rows if r["lab"] in labs
                   and rules.rules()[r["rule"]].about == subject]  # fmt: skip
            beside = [one for one in others.get(document, ())
                      if rules.rules()[one.row["rule"]].about == subject]  # fmt: skip
            body += section(document, own, beside)
    cannot = [
        f"* {document['name']}: {what}: {why}."
        for document in elsewhere.LISTED["document"] for what, why in document.get("cannot", ())
    ]  # fmt: skip
    words, counts = lead(every)
    return FRAME.read_text(encoding="utf-8").format(
        digest=rules.digest(), lead=words, counts=counts, matter=that_matter(others),
        tables="\n".join(body), cannot="\n".join(cannot),
    )  # fmt: skip


def with_table(text: str, rows: Sequence[Row]) -> str:
    """Returns the text of a lab's page with its table of claims written anew."""
    head = ("claim", "answer", "published", "ours (95 %)", "n, unit", "baseline", "rule")
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("| claim"))
    last = next(
        (at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines)
    )
    new = in_markdown(head, [lab_cells(row) for row in rows]).splitlines()
    return "\n".join(lines[:first] + new + lines[last:]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--labs", type=Path)
    given = parser.parse_args()
    if given.labs:
        taken_in(given.labs)
    kept = stored()
    write_text(elsewhere.PAGES / "claims.md", page(kept))
    for lab in {row["lab"] for row in kept}:
        own = elsewhere.PAGES / "labs" / f"{lab}.md"
        write_text(own, with_table(own.read_text(), [row for row in kept if row["lab"] == lab]))
    print(f"rules: {rules.digest()}\npage: {elsewhere.PAGES / 'claims.md'}")
