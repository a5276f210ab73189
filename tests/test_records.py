"""One record for each statistic and each claim: what is added to it alone, every page shows."""

from dataclasses import replace
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


@pytest.mark.slow
def test_an_audit_from_before_a_claim_has_a_page_without_it(images, tmp_path, monkeypatch):
    result = ci.audit(make(n_layers=2), images, untrained=0, grid=False, progress=False)
    result.save(tmp_path)
    later = replace(MOSTLY_ZERO, numbers={"measured_later": MOSTLY_ZERO.numbers["zeros"]})
    add_claim(monkeypatch, "later", later)
    page = ci.viz.audit_page(ci.AuditResult.load(tmp_path), tmp_path / "page").read_text()
    assert "Attention lowers R" in page and MOSTLY_ZERO.title not in page


def test_a_statistic_or_a_claim_without_a_title_cannot_be_made():
    with pytest.raises(ValueError, match="give a title, a direction, a unit"):
        Statistic("", "", "", None, None, "How to read it.")
    with pytest.raises(TypeError, match="title"):
        claims.Claim(  # type: ignore[call-arg]
            short="x", says="x", where="x", group="x", needs=(), numbers={}
        )


def test_every_built_in_statistic_has_a_title_and_a_direction_of_its_own():
    for name in ci.probes.available():
        records = ci.probes.resolve(name)[0].records.values()
        titles = [record.title for record in records]
        assert len(set(titles)) == len(titles) and all(record.direction for record in records)
        assert not any("_" in title.replace("W_in", "").replace("W_out", "") for title in titles)


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


@pytest.mark.slow
def test_a_record_of_ones_own_travels_with_the_result(images, tmp_path):
    def measure(block, acts):
        return {"size": acts["hook_resid_mid"].mean(dim=(1, 2))}

    mine = ci.Probe(
        "mine", ("hook_resid_mid",), measure, {"size": LARGEST}, heading="What I look for"
    )
    renamed = ci.probes.sparsity(tokens=[0], name="first_token")
    ci.sweep(make(), images, probes=[mine, renamed], progress=False, controls=0).save(tmp_path)
    result = ci.SweepResult.load(tmp_path)
    assert built_in.statistic(result.meta, "mine.size") == LARGEST
    assert built_in.statistic(result.meta, "first_token.l1").title == "Sum of the code's entries"
    assert built_in.heading(result.meta, "mine") == "What I look for"
    assert built_in.heading(result.meta, "first_token") == ci.probes.sparsity().heading
    header, _ = summary(result, [])
    own = [record.column for record in renamed.records.values() if record.column]
    assert header == ["layer", "largest", *own] and "zeros" in own
    page = report_page(result, [], tmp_path / "page").read_text(encoding="utf-8")
    assert "What I look for" in page and LARGEST.title in page


def test_a_stranger_cannot_put_something_else_in_place_of_a_title(images, tmp_path):
    result = ci.sweep(make(), images, probes="sparsity", progress=False, controls=0)
    for titles in ({"sparsity.l1": ["", "", ""]}, {"sparsity.l1": [3, "", ""]}, ["sparsity.l1"]):
        folder = ci.SweepResult(result.stored, result.meta | {"titles": titles}).save(
            tmp_path / str(len(list(tmp_path.iterdir())))
        )
        with pytest.raises(ValueError, match="not a saved SweepResult|titles is .* not of type"):
            ci.SweepResult.load(folder)
