"""The reference page of the measures agrees with docstrings, probes and the audit's table."""

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
    return [row for title in titles[:-2] for row in rows(title)]


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


def test_the_statistics_are_those_of_the_probes():
    wanted = {}
    for probe in ci.probes.resolve(None):
        for name, (unit, low, high, how) in probe.statistics.items():
            if name not in probe.counts:
                bounds = (
                    "any"
                    if low is None
                    else f"{low:g} to {'' if high is None else f'{high:g}'}".strip()
                )
                wanted[f"`{probe.name}.{name}`"] = [unit or "-", bounds, how]
    assert {row[0]: row[1:] for row in rows("## Statistics of the default probes")} == wanted


def test_the_claims_are_those_of_the_audit():
    found = {row[1].strip("`"): row for row in rows("## Claims of the audit")}
    assert found.keys() == NUMBERS.keys()
    for claim, facts in CLAIMS.items():
        for name in facts.parts:
            first, _, number, bounds, says = found[name]
            assert first == f"`{claim}`" and number == NUMBERS[name].number
            assert says == f"{facts.says} ({facts.where})"
            for bound in (NUMBERS[name].low, NUMBERS[name].high):
                assert bound is None or f"{bound:g}" in bounds
