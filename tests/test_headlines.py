"""What comparisons and audits lead with: what exceeds noise, of planted numbers."""

import numpy as np
import pandas as pd
import pytest

import crate_interp as ci
from comparing import made, numbers
from crate_interp.audits.claims import CLAIMS
from crate_interp.audits.result import _on
from crate_interp.stats.bootstrap import studentised
from crate_interp.stats.verdicts import within
from test_audit import ideal

N, LAYERS = 41, 3
R = "compression.rate_pre"


def test_the_headline_names_the_largest_that_hold():
    values = numbers(0, N, LAYERS)
    noise = 1 + 1e-4 * numbers(1, N, LAYERS)  # equal differences would have no spread
    scale, small = noise * np.array([0.0, 1.0, 3.0]), values - 0.1 * noise * np.array([1.0, 0, 0])
    a = made({R: values + scale, "z.big": 1000 + values}, name="CRATE")
    words = ci.compare(a, made({R: values, "z.big": 1000 + small}, name="ViT")).headline()
    assert words.startswith("CRATE against ViT: 3 of 3 differences hold (by chance at most 0.15). ")
    mean, other = (values + scale)[:, 2].mean(), values[:, 2].mean()
    size = f"{mean - other:+.3g}"
    most = f"{R}: {size} ({size} to {size}) in layer 2, {mean:.4g} against {other:.4g} nats"
    assert words.endswith(f"The largest: {most}.")


def seeds(*which, shift=0.0, count=20):
    """Networks whose layers differ from seed to seed by far more than their samples vary."""
    found = []
    for seed in which:
        random = np.random.default_rng(seed)
        values = {f"a.s{k}": random.normal(size=(N, 1)) / 9 + random.normal(size=LAYERS)
                  for k in range(count)}  # fmt: skip
        values["a.s1"] += shift
        found.append(made(values, name=f"seed {seed}"))
    return found


def test_two_untrained_networks_are_no_finding_though_they_differ():
    twins = seeds(*range(5))
    result = ci.compare(*seeds(8), *seeds(9), untrained=(twins, twins))
    table = result.table()
    assert table["holds"].sum() > 50  # of 60: about these two networks alone it is true
    assert "no evidence of a difference" in result.headline()
    assert "largest" not in result.headline()
    assert "+" not in result.text().replace(" +", "") and "ooo" in result.text()
    # beside it: what the first two untrained networks differ in, compared in the same way
    alike = ci.compare(twins[0], twins[1]).table()
    np.testing.assert_allclose(table["untrained_p"], alike["p"])
    assert f"differ in {alike['holds'].sum()}." in result.headline()


def test_what_exceeds_the_spread_of_untrained_networks_leads():
    twins = seeds(*range(5), count=3)
    result = ci.compare(
        *seeds(8, shift=99.0, count=3), *seeds(9, count=3), untrained=(twins, twins)
    )
    lead, most = result.headline().split(" The largest: ")
    assert lead.startswith("seed 8 against seed 9: 3 of 9 differences exceed")
    assert f"; {result.table()['holds'].sum()} hold between" in lead
    assert result.table()["holds"].sum() > 3 and most.startswith("a.s1: +")
    page = result._repr_html_()
    assert page.index(">s1<") < page.index(">s0<")


def test_a_result_without_untrained_networks_says_that_seeds_are_unknown():
    alone = ci.compare(*seeds(8), *seeds(9))
    assert "Other seeds of these two networks may differ." in alone.caution()
    assert alone.table()["untrained_p"].isna().all()
    groups = ci.compare(seeds(*range(5)), seeds(*range(5, 10)))
    assert "no evidence" in groups.headline() and "seeds" not in groups.caution()
    older = ci.Comparison(
        alone.stored | {"differences": alone.table().drop(columns="untrained_p")}, alone.meta
    )
    assert older.headline() == alone.headline()


@pytest.mark.slow
def test_the_headline_counts_the_layers_in_which_attention_lowers_the_rate():
    result = ideal()
    words = "Attention lowers R^c under every scaling in"
    assert result.headline().startswith(f"{words} 2 of 2 layers of")
    read = "As the layers read the tokens it falls in"
    assert f"{read} 2, and in 2 by more than with shuffled updates" in result.headline()
    # planted: it rises in layer 1 as read, and then every null falls by all of R^c
    numbers = result.table("numbers")
    rises = (numbers["layer"] == 1) & (numbers["frame"] == "read") & (numbers["of"] == "layer")
    risen = numbers.assign(compresses=numbers["compresses"] * (1 - 2 * rises))
    said = ci.AuditResult(result.stored | {"numbers": risen}, result.meta).headline()
    assert f"{words} 1 of 2 layers" in said and f"{read} 1, and in 1 by more" in said
    below = -numbers["compresses"].abs().where(numbers["of"] == "layer", 1.0)
    stored = result.stored | {"numbers": numbers.assign(compresses=below)}
    said = ci.AuditResult(stored, result.meta).headline()
    assert f"{words} no layer of 2" in said and f"{read} 2, and in 0 by more" in said


def test_a_number_that_never_varies_is_decided_by_its_signs_alone():
    """Resamples of equal values show nothing: a sign test needs 6 of them, and p is never 0."""
    for value, sign in ((0.7, 1), (1.0, 1), (0.5 - 1e-12, 1), (0.4, -1), (1.01, -1)):
        for n in (1, 5, 6, 13):
            same = np.full((1, n), value)
            found = within(same, (0.5, 1.0), studentised(same.T), np.array([n]))
            right, wrong = (found.kept, found.broken)[::sign]
            assert right[0] == pytest.approx(2 * 0.5**n) and wrong[0] == 2


def test_where_an_interval_crosses_the_bound_a_claim_says_neither_way():
    rows = pd.DataFrame({"eps": [0.1, 1.0, 10.0], "value": [-0.2, -0.1, 0.1]})
    rows = rows.assign(low=[-0.3, -0.2, 0.05], high=[-0.1, 0.05, 0.2])
    rows = rows.assign(frame="read", basis="stored", tokens="all", number="compresses")
    said = _on(rows, CLAIMS["compresses"])
    assert said == "read: falls (eps 0.1), undecided (eps 1), rises (eps 10)"
    one = rows.assign(low=np.nan, high=np.nan)  # a single sample has no interval
    assert _on(one, CLAIMS["compresses"]).startswith("read: falls (eps 0.1, 1)")
