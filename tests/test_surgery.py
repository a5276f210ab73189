"""Surgery: slopes against differences, tables by hand, controls, and what is refused."""

import numpy as np
import pytest
import torch
from scipy import stats

import crate_interp as ci
from conftest import make
from crate_interp.stats.intervals import mean_interval, paired_shares
from crate_interp.surgeries.run import random_slopes, random_turns
from crate_interp.surgeries.steps import any_step, replacement_hooks
from operated import MODELS, N, inputs_of, labels_of
from selection import few

QUIET = dict(batch_size=3, progress=False)
LAYER, EPS = 1, 0.7
STEPS = ["gradient", "neumann", "plus", "minus", 3]


@pytest.fixture(scope="module", params=few(MODELS, 2))
def model(request):
    return MODELS[request.param]().double()


def loss_at(model, step, layers, mix, inputs, labels):
    with torch.no_grad():
        logits = model.run_with_hooks(
            inputs, fwd_hooks=replacement_hooks(model, [step], layers, mix, EPS)
        )
    if labels is None:
        log = logits[:, :-1].log_softmax(-1)
        return -log.gather(-1, inputs[:, 1:, None])[..., 0].mean(dim=1)
    return -logits.log_softmax(-1)[range(len(inputs)), labels]


@pytest.fixture(scope="module")
def measured(model):
    inputs, labels = inputs_of(model), labels_of(model)
    options = dict(mixes=(1.0,), directions=3, eps=EPS, labels=labels, replacements=STEPS)
    return model, inputs, labels, ci.surgery(model, inputs, **options, **QUIET)


def test_slopes_are_those_of_finite_differences(measured):
    model, inputs, labels, result = measured
    table, h = result.table("samples"), 1e-6
    for what in STEPS:
        step = any_step(what)
        for layer, layers in ((LAYER, [LAYER]), (-1, range(3))):
            losses = [loss_at(model, step, layers, t, inputs, labels) for t in (-h, h)]
            wanted = ((losses[1] - losses[0]) / (2 * h)).numpy()
            mine = table[(table["replacement"] == step.name) & (table["layer"] == layer)]
            np.testing.assert_allclose(
                mine["slope"], wanted, rtol=1e-6, atol=1e-6 * abs(wanted).max()
            )


def test_the_slope_towards_the_solution(images):
    model, labels, h = make().double(), [3, 7], 1e-6
    options = dict(labels=labels, replacements=["solution"], mixes=(), **QUIET)
    table = ci.surgery(model, images.double(), **options).table("samples")
    step = any_step("solution")
    low, high = (loss_at(model, step, [1], t, images.double(), labels) for t in (-h, h))
    np.testing.assert_allclose(table.query("layer == 1")["slope"], (high - low) / (2 * h), 1e-6)


def test_answers_at_each_mix(measured):
    model, inputs, labels, result = measured
    answers, own = result.table("answers"), result.table("unchanged")
    base = loss_at(model, any_step("plus"), [], 0.0, inputs, labels).numpy()
    np.testing.assert_allclose(own["loss"], base, rtol=1e-12)
    for what, layer, layers, mix in (("gradient", 2, [2], 1.0), (3, -1, range(3), 1.0)):
        name = any_step(what).name
        rows = answers[
            (answers["replacement"] == name) & (answers["layer"] == layer) & (answers["mix"] == mix)
        ]
        wanted = loss_at(model, any_step(what), layers, mix, inputs, labels).numpy()
        np.testing.assert_allclose(rows["loss"], wanted, rtol=1e-9)
        table = result.table("mixes").set_index(["replacement", "layer", "mix"])
        row = table.loc[name, layer, mix]
        assert row["loss"] == pytest.approx(wanted.mean(), rel=1e-9)
        assert row["loss_change"] == pytest.approx((wanted - base).mean(), rel=1e-9)
        assert row["loss_low"] <= row["loss_change"] <= row["loss_high"]
        assert row["accuracy"] == pytest.approx(rows["right"].mean())
        flips = (rows["right"].to_numpy() - own["right"].to_numpy())[:, None]
        images = result.meta["unit"] == "images"  # which have one answer, and a text has many
        (low,), (high,) = paired_shares(flips).ends if images else mean_interval(flips)
        assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx(
            (low, high), nan_ok=True
        )
        assert row["change"] == pytest.approx(rows["change"].mean()) and row["change"] > 0


def test_random_turns_by_hand():
    generator = torch.Generator().manual_seed(0)
    gradient, change = torch.randn(2, 5, 3, 7, generator=generator, dtype=torch.float64)
    order, signs = random_turns(any_step("plus"), 2, 7, 11, seed=4)
    got = random_slopes(gradient, change, (order, signs))
    for direction in range(11):
        assert sorted(order[direction].tolist()) == list(range(7))
        turned = signs[direction] * change[..., order[direction]]
        assert torch.allclose(turned.norm(dim=-1), change.norm(dim=-1))  # token by token
        assert got[direction] == pytest.approx(float((gradient * turned).sum()), rel=1e-12)
    assert torch.equal(random_turns(any_step("minus"), 2, 7, 11, seed=4)[0], order)
    for other in (("plus", 3, 4), ("plus", 2, 5), (3, 2, 4)):
        again = random_turns(any_step(other[0]), other[1], 7, 11, seed=other[2])
        assert not torch.equal(again[0], order)


def test_the_table_by_hand(measured):
    result = measured[3]
    row = result.table().set_index(["replacement", "layer"]).loc["minus", 2]
    values = result.table("samples").query("replacement == 'minus' and layer == 2")["slope"]
    assert row["slope"] == pytest.approx(values.mean()) and row["n"] == N
    low, high = mean_interval(values.to_numpy()[:, None])
    assert (row["slope_low"], row["slope_high"]) == pytest.approx((low[0], high[0]))
    assert row["slope_low"] <= row["slope"] <= row["slope_high"]
    random = result.table("random").query("replacement == 'minus' and layer == 2")
    means = (random["slope"] / random["n"]).to_numpy()
    low, high = stats.t.interval(0.95, 2, means.mean(), means.std(ddof=1) * np.sqrt(4 / 3))
    assert (row["random_low"], row["random_high"]) == pytest.approx((low, high))
    assert len(means) == 3 and row["falls"] == (row["slope_high"] < 0)
    assert row["better"] == (row["falls"] and row["slope"] < low)
    order = result.table()[["replacement", "layer"]].iloc[:8].to_numpy().tolist()
    assert order == [[name, k] for name in ("gradient", "neumann") for k in (0, 1, 2, -1)]
    together = result.table("samples").query("replacement == 'minus' and layer == -1")["slope"]
    each = result.table("samples").query("replacement == 'minus' and layer >= 0")
    np.testing.assert_allclose(together, each.groupby("sample")["slope"].sum(), rtol=1e-12)


@pytest.mark.slow
def test_a_step_towards_the_answers_is_found():
    """Positive control: labels to which the step moves logits most. Negative: its own answers."""
    model = ci.load("crate-tiny-fashion")
    images = model.preprocess(ci.data.embedded("fashion")["image"][:32])
    with torch.no_grad():
        own = model(images)
        with ci.surgeries.replaced(model, attention="minus"):
            moved = model(images) - own
    for labels, found in ((moved.argmax(-1), True), (own.argmax(-1), False)):
        result = ci.surgery(
            model,
            images,
            labels=labels.tolist(),
            replacements=["minus"],
            mixes=(0.1,),
            progress=False,
        )
        row = result.table().query("layer == -1").iloc[0]
        assert row["falls"] == row["better"] == found
        assert (result.table("mixes").query("layer == -1").iloc[0]["loss_high"] < 0) == found
