"""What comparisons and audits lead with: what exceeds noise, of planted numbers."""

import numpy as np
import pandas as pd
import pytest

import crate_interp as ci
from comparing import made, numbers
from crate_interp.audits.claim_summary import _in_frames
from crate_interp.audits.claims import CLAIMS, Number
from crate_interp.audits.verdicts import Measured, _within
from crate_interp.stats.bootstrap import studentised
from test_audit import ideal, planted

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
def test_the_headline_says_how_far_attention_lowers_the_rate_as_read():
    result, bounds = ideal(), []
    rows = result.table().query("number == 'compresses' and frame == 'read' and tokens == 'all'")
    rows = rows[(rows["eps"] == planted.EPS) & (rows["basis"] == "stored")]
    falls = sorted((-100 * row.value, row.layer) for row in rows.itertuples())
    size = " to ".join(f"{fall:.2g} % (layer {layer})" for fall, layer in falls)
    start = f"read through LayerNorm at eps {planted.EPS:g}, attention "
    points = 100 * np.minimum(-rows["excess"], -rows["gain"])
    ends = dict.fromkeys(f"{one:.2g}" for one in (points.min(), points.max()))
    nulls = "more than shuffled updates and random output maps do"
    end = f"by {' to '.join(ends)} points {nulls}"
    said = f"{start}lowers R^c in 2 of 2 layers, by {size}. In layers 0, 1 it lowers R^c {end}."
    assert f" images, {said}" in result.headline()
    # planted: it rises in layer 1, and then in both, as read alone
    numbers = result.table("numbers")
    numbers = numbers[numbers["eps"].isin([0.0, planted.EPS]) & (numbers["frame"] != "unit")]
    numbers = numbers[(numbers["basis"] != "orthonormal") & (numbers["tokens"] == "all")]
    for layer in (1, 0):
        rises = (numbers["layer"] == layer) & (numbers["frame"] == "read")
        rises &= numbers["of"] == "layer"
        numbers = numbers.assign(compresses=numbers["compresses"] * (1 - 2 * rises))
        bounds.append(ci.AuditResult(result.stored | {"numbers": numbers}, result.meta).headline())
    fall = next(fall for fall, layer in falls if layer == 0)
    said = f"{start}lowers R^c in 1 of 2 layers, by {fall:.2g} % (layer 0). In layer 0 it lowers "
    assert f"{said}R^c {end.split(' to ')[0]}" in bounds[0]
    every = "R^c fall under every normalisation and eps; it falls under some and rises under others"
    assert f"In 1 of 2 layers does {every} in 1 of 2 layers." in bounds[0]
    # planted: every null falls by all of R^c; then the falls are there, and none beyond a null
    below = -numbers["compresses"].abs().where(numbers["of"] == "layer", 1.0)
    stored = result.stored | {"numbers": numbers.assign(compresses=below)}
    beaten = ci.AuditResult(stored, result.meta).headline()
    assert f"In no layer is it shown to lower R^c {nulls}. In 2 of 2 layers does R^c" in beaten
    span = " to ".join(f"{fall:+.2g} %" for fall, _ in falls)
    assert f"{start}is shown to lower R^c in no layer: {span}. In no layer" in bounds[1]


def test_a_number_that_never_varies_is_decided_by_its_signs_alone():
    """Resamples of equal values show nothing: a sign test needs 6 of them, and p is never 0."""
    number = Number("", "", low=0.5, high=1.0)
    tables = {name: pd.DataFrame() for name in ci.SweepResult.STORED}
    result = ci.SweepResult(tables, {"n_samples": 13, "unit": "images", "data": []})
    for value, sign in ((0.7, 1), (1.0, 1), (0.5 - 1e-12, 1), (0.4, -1), (1.01, -1)):
        for n in (1, 5, 6, 13):
            same = pd.DataFrame(np.full((1, n), value))
            measured = Measured("", number, same, {}, {}, {}, result)
            found = _within(measured, studentised(same.to_numpy().T))
            right, wrong = (found.kept, found.broken)[::sign]
            assert right[0] == pytest.approx(2 * 0.5**n) and wrong[0] == 2


def test_where_an_interval_crosses_the_bound_a_claim_says_neither_way():
    rows = pd.DataFrame({"eps": [0.1, 1.0, 10.0], "value": [-0.2, -0.1, 0.1]})
    rows = rows.assign(low=[-0.3, -0.2, 0.05], high=[-0.1, 0.05, 0.2])
    rows = rows.assign(frame="read", basis="stored", tokens="all")
    said = _in_frames(rows, CLAIMS["compresses"], "compresses")
    assert said == "read: falls (eps 0.1), undecided (eps 1), rises (eps 10)"
    one = rows.assign(low=np.nan, high=np.nan)  # a single sample has no interval
    assert _in_frames(one, CLAIMS["compresses"], "compresses").startswith(
        "read: falls (eps 0.1, 1)"
    )
