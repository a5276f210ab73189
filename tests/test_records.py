"""One record for each statistic and claim, which every page shows; the page of the measures."""

import re
from pathlib import Path

import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.audits import claims
from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.probes import sparsity_probe
from crate_interp.results.statistic import Statistic
from crate_interp.sweeps.layer_curves import legend, numbers, summary
from crate_interp.viz.report_pages import report_page

DOCS = Path(__file__).parent.parent / "demos" / "docs"
LARGEST = Statistic(
    "Largest entry of the code",
    "higher is spikier",
    "units of the code",
    0.0,
    None,
    "The largest entry of a token's code, mean over tokens.",
    column="largest",
)
MOSTLY_ZERO = claims._sparse_step(
    title="Most of the code is zero",
    short="mostly zeros",
    says="The code of the sparse step is sparse.",
    where="a paper of ours, eq. 1",
    numbers={"zeros": claims.Number("zeros in the code", "share of zeros", low=0.25)},
)


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 6, 20, generator=torch.Generator().manual_seed(2))


def reference(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import generated

    return generated


def add_largest(monkeypatch):
    """What a newcomer writes into crate_interp/probes/sparsity_probe.py, and nothing else."""
    measure = sparsity_probe._measure

    def with_largest(block, acts, tokens):
        largest = acts["mlp.hook_post"].amax(dim=-1).mean(dim=-1)
        return measure(block, acts, tokens) | {"largest": largest}

    monkeypatch.setitem(sparsity_probe._STATISTICS, "largest", LARGEST)
    monkeypatch.setattr(sparsity_probe, "_measure", with_largest)


def add_claim(monkeypatch, name, claim):
    """What a newcomer writes into crate_interp/audits/claims.py: the rest follows on import."""
    monkeypatch.setitem(claims.CLAIMS, name, claim)
    for number, record in claim.numbers.items():
        monkeypatch.setitem(claims.NUMBERS, number, record)
        monkeypatch.setitem(claims.CLAIM_OF, number, name)


def test_a_new_statistic_needs_its_record_alone(images, tmp_path, monkeypatch):
    add_largest(monkeypatch)
    model, name = make(), "sparsity.largest"
    few = dict(probes="sparsity", progress=False, controls=0)
    result, twin = ci.sweep(model, images, **few), ci.sweep(make(seed=7), images, **few)
    page = report_page(result, [twin], tmp_path).read_text(encoding="utf-8")
    for words in (LARGEST.title, LARGEST.direction, LARGEST.unit, name):
        assert words in page
    figure = ci.viz.layers(result, name)
    assert figure.axes[0].get_title() == LARGEST.title
    assert "higher is spikier" in figure.axes[0].get_ylabel().replace("\n", " ")
    header, rows = summary(result, [])  # what the commands print
    assert "largest" in header and all(row[header.index("largest")] for row in rows[:-1])
    assert f"largest: {name}, units of the code. {LARGEST.how}" in legend(result)
    assert "largest" in (tmp_path / "summary.txt").read_text()
    assert [LARGEST.title, LARGEST.unit] in [row[:2] for row in numbers(result, [])[1]]
    line = next(line for line in reference(monkeypatch).statistics().splitlines() if name in line)
    assert f"{LARGEST.title}. {LARGEST.how}" in line and "0 or more" in line


@pytest.mark.slow
def test_a_new_claim_needs_its_record_alone(images, tmp_path, monkeypatch):
    add_claim(monkeypatch, "mostly_zero", MOSTLY_ZERO)
    result = ci.audit(make(n_layers=2), images, untrained=1, grid=False, progress=False)
    rows = result.claims().query("claim == 'mostly_zero'")
    assert len(rows) == 2 and set(rows["verdict"]) <= {"kept", "broken", "undecided"}
    page = ci.viz.audit_page(result, tmp_path).read_text(encoding="utf-8")
    for words in (MOSTLY_ZERO.title, MOSTLY_ZERO.says, MOSTLY_ZERO.where, "at least 0.25"):
        assert words in page
    assert page.count('popovertarget="mostly_zero-0"') == 2  # its sign, and the button that closes
    assert "mostly zeros" in result.text()  # what the command prints
    assert "mostly zeros (mostly_zero): The code" in (tmp_path / "audit.txt").read_text()
    row = next(row for row in reference(monkeypatch).claims().splitlines() if "mostly_zero" in row)
    assert MOSTLY_ZERO.says in row and "zeros" in row


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


def test_statistics_and_claims_are_told_on_the_pages_that_are_made_of_their_records():
    pages = Path(__file__).parent.parent / "demos" / "docs" / "pages" / "reference"
    statistics = [f"{p.name}.{own}" for p in ci.probes.resolve(None) for own in p.statistics]
    for name, records in {"statistics": statistics, "audit": [*CLAIMS, *NUMBERS]}.items():
        assert f"pages/reference/{name}.md)" in PAGE
        text = (pages / f"{name}.md").read_text(encoding="utf-8")
        assert all(f"`{record}`" in text for record in records)
