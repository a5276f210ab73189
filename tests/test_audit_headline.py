"""What the headline of an audit says of planted numbers, and how numbers without spread count."""

import numpy as np
import pandas as pd
import pytest

import crate_interp as ci
from crate_interp.audits.claim_summary import _in_frames
from crate_interp.audits.claims import CLAIMS, Number
from crate_interp.audits.verdicts import Measured, _within
from crate_interp.stats.bootstrap import studentised
from test_audit import ideal, planted


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
