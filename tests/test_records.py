"""One record for each statistic and each claim: what is added to it alone, every page shows."""

from pathlib import Path

import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.audits import claims
from crate_interp.probes import built_in, sparsity_probe
from crate_interp.results.statistic import Statistic
from crate_interp.sweeps.layer_curves import legend, numbers, summary
from crate_interp.viz.pages.report_page import report_page

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


def test_four_facts_are_a_statistic_whose_title_is_its_name(images, tmp_path):
    facts = {"my_own_number": ("units", 0.0, None, "The mean of the stream.")}

    def measure(block, acts):
        return {"my_own_number": acts["hook_resid_mid"].mean(dim=(1, 2))}

    mine = ci.Probe("mine", ("hook_resid_mid",), measure, facts)
    assert mine.records["my_own_number"].facts == facts["my_own_number"]
    result = ci.sweep(make(), images, probes=mine, progress=False, controls=0)
    assert result.meta["statistics"] == {"mine.my_own_number": list(facts["my_own_number"])}
    assert "titles" not in result.meta
    record = built_in.statistic(result.meta, "mine.my_own_number")
    assert (record.title, record.direction) == ("My own number", "")
    assert built_in.heading(result.meta, "mine") == "Mine"
    assert "My own number" in report_page(result, [], tmp_path).read_text(encoding="utf-8")
