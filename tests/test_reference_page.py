"""The reference page of the measures agrees with docstrings, and links to the others."""

import re
from pathlib import Path

import crate_interp as ci
from crate_interp.audits.claims import CLAIMS, NUMBERS

PAGE = (Path(ci.__file__).parent / "measures" / "README.md").read_text(encoding="utf-8")


def rows(heading):
    """The cells of the tables under a heading, up to `heading`s that follow it."""
    part = PAGE.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    ]


def plain(text):
    return " ".join(text.split()).replace("`", "")


def measures():
    titles = re.findall(r"^(## .*)$", PAGE, flags=re.MULTILINE)
    return [row for title in titles[:-1] for row in rows(title)]


def test_every_measure_has_a_line_that_its_docstring_says():
    lines = measures()
    assert sorted(row[0].strip("`") for row in lines) == sorted(ci.measures.__all__)
    for name, formula, span, unit, lacks in lines:
        doc = plain(getattr(ci.measures, name.strip("`")).__doc__)
        assert plain(formula) in doc, name
        assert plain(span) in doc, name
        assert unit == "-" or unit in doc, name
        assert len(lacks) > 10, name


def test_every_measure_has_a_full_docstring():
    for name in ci.measures.__all__:
        first, _, rest = getattr(ci.measures, name).__doc__.partition("\n\n")
        assert first.split()[0].endswith("s") and len(plain(first)) > 10, name
        assert "Raises ValueError" in plain(rest), name


def test_statistics_and_claims_are_told_on_the_pages_that_are_made_of_their_records():
    pages = Path(__file__).parent.parent / "demos" / "docs" / "pages" / "reference"
    statistics = [f"{p.name}.{own}" for p in ci.probes.resolve(None) for own in p.statistics]
    for name, records in {"statistics": statistics, "audit": [*CLAIMS, *NUMBERS]}.items():
        assert f"pages/reference/{name}.md)" in PAGE
        text = (pages / f"{name}.md").read_text(encoding="utf-8")
        assert all(f"`{record}`" in text for record in records)
