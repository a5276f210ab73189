"""The audit's page, its command, and figures of several results."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.audits.result import change
from crate_interp.stats.verdicts import SHOWN
from crate_interp.viz.figures.by_layer import PUBLISHED
from texts import Page


@pytest.fixture(scope="module")
def images():
    return torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_the_page_has_a_cell_for_every_claim(images, tmp_path):
    result = ci.audit(make("crate-alpha"), images, untrained=2, progress=False)
    path = ci.viz.audit_page(result, tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    signs = [a for tag, a in page.tags if tag == "button" and "aria-label" in a]
    signs = [a for a in signs if a["aria-label"] != "close"]
    assert len(signs) == 3 * len(CLAIMS)
    cards = {a["id"] for _, a in page.tags if "popover" in a}
    assert {a["popovertarget"] for a in signs} == cards and len(cards) == len(signs)
    words = " ".join(" ".join(page.words).split())
    for verdict, count in result.claims()["verdict"].value_counts().items():
        said = SHOWN[verdict].answer or verdict
        shown = [a for a in signs if re.search(rf": {re.escape(said)}(, |$)", a["title"])]
        assert len(shown) == count, verdict
    for claim in CLAIMS.values():
        # a letter below the line is a text of its own
        says = re.sub(r"_(\w)", r" \1", claim.says.split("^")[0])
        assert says[:30] in words and claim.where in words
    assert result.headline().split("R^c")[0] in words and "lower is better" in words
    assert "untrained" in words and "overcomplete" in words
    assert "fewer than 32 samples may be too narrow: this result has 3 images." in words
    assert not any(tag == "script" for tag, _ in page.tags)
    assert not [a for _, a in page.tags if str(a.get("href", "")).startswith("http") or "src" in a]
    again = ci.AuditResult.load(tmp_path)
    assert again.table().equals(result.table()) and again.claims().equals(result.claims())
    table, _, words = (tmp_path / "audit.txt").read_text().partition("\n\n")
    assert table == result.text()
    for name, claim in CLAIMS.items():
        assert f"{claim.short} ({name}): {claim.says}" in words
        assert all(f"\n  {part}: {NUMBERS[part].formula}; " in words for part in claim.numbers)


def test_a_change_is_shown_only_if_both_kinds_of_random_networks_agree():
    """Planted numbers of the first claim, for which lower is better."""
    known = dict(number="compresses", frame="read", value=-0.3, untrained=-0.1, shuffled=-0.2)
    known |= dict(difference_low=-0.25, difference_high=-0.15)
    known |= dict(shuffled_low=-0.25, shuffled_high=-0.1)

    def found(**over):
        return change(pd.DataFrame([known | over]))

    assert found() == 1
    farther = dict(value=0.3, difference_low=0.3, difference_high=0.5)
    assert found(**farther) == -1
    assert found(shuffled=-0.35, shuffled_low=-0.4, shuffled_high=-0.32) == 0  # they disagree
    assert found(difference_high=0.05) == 0 and found(shuffled_low=-0.31) == 0
    assert found(difference_low=np.nan) is None


# ---- figures of several results


def test_several_results_in_one_figure(images):
    results = [
        ci.sweep(make(seed=seed), images, probes="sparsity", progress=False) for seed in range(3)
    ]
    figure = ci.viz.layers(results, "sparsity.hoyer", labels=["a", "b", "c"])
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    for name, result in zip("abc", results, strict=True):
        table = result.layers()
        wanted = table[table["statistic"] == "hoyer"]["mean"].to_numpy()
        np.testing.assert_allclose(lines[name], wanted)
    same = ci.viz.layers(results, "sparsity.hoyer").axes[0]
    assert len({line.get_label() for line in same.lines}) == 3  # of one name: numbered
    for match, call in (
        ("there is no result to draw", lambda: ci.viz.layers([], "sparsity.hoyer")),
        (
            "got 1 labels for 3 results",
            lambda: ci.viz.layers(results, "sparsity.hoyer", labels=["a"]),
        ),
        ("has no statistic", lambda: ci.viz.layers(results, "sparsity.hoier")),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_the_published_curve_stands_beside_a_crate_s_only(images):
    small = ci.sweep(make(), images, probes="sparsity", progress=False)
    assert not [
        line
        for line in ci.viz.layers(small, "sparsity.zero_fraction").axes[0].lines
        if "figure" in line.get_label()
    ]
    cfg = ci.CrateConfig(
        family="crate", d_model=576, n_layers=12, n_heads=12, image_size=32, patch_size=16
    )
    torch.manual_seed(0)
    large = ci.HookedCrate(cfg).eval()
    result = ci.sweep(
        large,
        torch.randn(2, 3, 32, 32),
        probes=["sparsity", "compression"],
        progress=False,
        controls=0,
    )
    for name, spread in (
        ("sparsity.zero_fraction", "± 0.01"),
        ("compression.official_rate", "± 3"),
    ):
        lines = {line.get_label(): line for line in ci.viz.layers(result, name).axes[0].lines}
        (published,) = [
            line
            for label, line in lines.items()
            if "read off a figure" in label and spread in label
        ]
        np.testing.assert_allclose(published.get_ydata(), PUBLISHED[name][0])
    assert len(ci.viz.layers(result, "sparsity.hoyer").axes[0].lines) == 1


def test_accuracy_over_compression(images):
    model = make()
    many = torch.randn(40, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    probed = ci.linear_probe(model, many, labels=[0, 1] * 20, progress=False)
    swept = ci.sweep(model, many, probes="compression", progress=False)
    figure = ci.viz.beside(probed, "linear.accuracy", swept, "compression.subspace_rate_mid")
    upper, lower = figure.axes
    assert {"permuted labels", "the commonest class"} <= {line.get_label() for line in upper.lines}
    assert lower.get_ylabel().startswith("nats")
    table = swept.layers()
    wanted = table[table["statistic"] == "subspace_rate_mid"]["mean"].to_numpy()
    np.testing.assert_allclose(lower.lines[0].get_ydata(), wanted)
