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

STORED = Path(__file__).parent / "data" / "claims.csv"
DOCUMENTS = (
    elsewhere.CRATE, elsewhere.SEGMENTATION, elsewhere.SRR, elsewhere.JOMA, elsewhere.SELECTION,
    elsewhere.AOT, elsewhere.OTHERS,
)  # fmt: skip
HEAD = ("claim, and where it is made", "ours (95 %)", "baseline", "answer", "rule, and measured by")
MATTER = (  # questions that most readers come with -> the rules that answer them
    ("Do tokens get compressed along the layers?", "embedded.rate_falls"),
    ("Does attention compress them?", "embedded.stream"),
    ("Is attention the gradient step that it was derived as?", "embedded.gradient"),
    ("Does a head write as it reads?", "embedded.output_map"),
    ("Does the sparse step do its job?", "embedded.lasso"),
    ("Do codes get sparser?", "embedded.sparser"),
    ("Do heads keep to subspaces of their own?", "embedded.incoherent"),
    ("Do attention maps segment objects?", "embedded.segments"),
    ("Do they so more than those of a ViT?", "embedded.segments_vit"),
    ("Is a CRATE as accurate as a ViT?", "embedded.vit"),
)
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
    rule = rules.rules()[row["rule"]]
    ours = number(row["ours"])
    if not math.isnan(row["low"]):
        ours += f" ({number(row['low'])} to {number(row['high'])})"
    baseline = f"{number(row['baseline'])}, {row['baseline_is']}"
    cells = (row["claim"], row["published"], ours, f"{row['n']} {rule.unit}", baseline)
    return (*cells, rule.words(), answered(row))


def cells_of(row: Row) -> tuple[str, ...]:
    text, published, ours, n, baseline, rule, answer = lab_cells(row)
    said = f"{row['where']}{f': {published}' if published else ''}"
    by = f"[{row['lab']}](labs/{row['lab']}.md)"
    return _five(text, said, answer, ours, n, baseline, rule, by)


def other_cells(each: elsewhere.Elsewhere) -> tuple[str, ...]:
    """Returns the cells of a claim that a command measured."""
    row, rule = each.row, rules.rules()[each.row["rule"]]
    n = f"{rule.n}; {rule.unit}"
    told = (each.ours, n, each.baseline, rule.words(), each.by)
    return _five(row["claim"], row["where"], row["answer"], *told)


def _five(
    text: str, where: str, answer: str, ours: str, n: str, baseline: str, rule: str, by: str
) -> tuple[str, ...]:
    return f"{text}<br>*{where}*", f"{ours}<br>*{n}*", baseline, answer, f"{rule}<br>*{by}*"


def that_matter(others: Mapping[str, Sequence[elsewhere.Elsewhere]]) -> str:
    """Returns the table of the questions that most readers come with."""
    found = {one.row["rule"]: one for each in others.values() for one in each}
    rows = [
        (question, found[rule].ours, found[rule].baseline, found[rule].row["answer"])
        for question, rule in MATTER
    ]
    return in_markdown(("question", "found (95 %)", "baseline", "answer"), rows)


def section(
    document: str, rows: Sequence[Row], others: Sequence[elsewhere.Elsewhere]
) -> tuple[list[str], Counter]:
    """Returns the lines of a document, and how often each answer is given."""
    own = [row for row in rows if row["lab"] in elsewhere.LABS.get(document, ())]
    cells = [*map(other_cells, others), *map(cells_of, own)]
    lines = [f"## {document}", ""] + ([in_markdown(HEAD, cells)] if cells else [])
    sizes: dict[str, dict[str, None]] = {}  # by lab, each size once
    for row in own:
        sizes.setdefault(f"{row['lab']} ({row['form']} form)", {})[row["size"]] = None
    if sizes:
        listed = (f"{lab}: {' / '.join(each)}" for lab, each in sizes.items())
        lines += ["", f"Sizes. {'; '.join(listed)}."]
    if document in elsewhere.CANNOT:
        lines += [""] * bool(cells) + ["Cannot be run here or on a CRATE:", ""]
        lines += [f"* {claim}: {why}." for claim, why in elsewhere.CANNOT[document]]
    return [*lines, ""], Counter(each[3] for each in cells)


def page(rows: Sequence[Row]) -> str:
    """Returns the page as Markdown; rows: as `stored` returns them."""
    body, found, others = [], Counter(), elsewhere.measured()
    for document in DOCUMENTS:
        lines, answers = section(document, rows, others.get(document, ()))
        body, found = body + lines, found + answers
    head = [
        "# What the papers claim, and what came out here",
        "",
        f"Of {sum(found.values())} claims {found['supported']} are supported at the size at which "
        f"they were run, {found['not supported']} are not, {found['depends']} depend on a frame, a "
        f"layer or a setting, and {found['undecided']} are undecided: an interval holds both "
        "answers, there are too few units, or a baseline is not tuned.",
        "",
        "## Ten that matter",
        "",
        that_matter(others),
        "",
    ]
    tail = [
        "## How the rules were made",
        "",
        "The rule of every row was written down apart from its result, in "
        "`demos/labs/data/rules.csv`: what the paper says and where, or that it is ours; the "
        "statistic and the bar that its interval must pass, and where the bar comes from; the unit "
        "and the number of the units; the baseline; the form. Answers are computed from stored "
        "intervals (`demos/labs/data/claims.csv`) by that file, whose SHA-256 is "
        f"`{rules.digest()}`. The file is younger than the first results, so a bar is 0, comes "
        "from the paper or from rounding, lies midway between the claim and its baseline, or is "
        "the size of a baseline's own error or an even chance; two are ours, a hundredth and a "
        "share of .99 in aot_denoising, where bars from .001 to .1 and from .5 to .999 give the "
        "same answers. A rule without such a bar was dropped.",
    ]
    return "\n".join([*head, *body, *tail]).rstrip() + "\n"


def with_table(text: str, rows: Sequence[Row]) -> str:
    """Returns the text of a lab's page with its table of claims written anew."""
    head = ("claim", "published", "ours (95 %)", "n, unit", "baseline", "rule", "answer")
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
