"""Surgery: slopes against differences, tables by hand, controls, and what is refused."""

import numpy as np
import pytest
import torch
from scipy import stats

import crate_interp as ci
from conftest import BATCH, make, make_lm, refuses
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


@pytest.mark.slow
def test_added_is_the_slope_without_the_fading_of_the_own(measured):
    """The own update fades alike under every step of attention."""
    table = measured[3].table("samples")
    table["fading"] = table["slope"] - table["added"]
    wide = table.pivot(index=["sample", "layer"], columns="replacement", values="fading")
    for name in ("neumann", "plus", "minus"):
        np.testing.assert_allclose(wide[name], wide["gradient"], rtol=1e-9, atol=1e-12)
    wide = table.pivot(index=["sample", "layer"], columns="replacement", values="added")
    np.testing.assert_allclose(wide["plus"], -wide["minus"], rtol=1e-9, atol=1e-12)


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


def test_another_seed_turns_the_random_steps_alone(images):
    options = dict(labels=[3, 7], mixes=(), replacements=["plus", 2], **QUIET)
    one, other = (ci.surgery(make(), images, seed=seed, **options) for seed in (0, 1))
    assert other.table("samples").equals(one.table("samples"))
    assert not other.table("random").equals(one.table("random"))
    assert len(one.table("mixes")) == 0 and "1 " not in one.headline()[:3]


def test_names_of_classes_are_labels(images):
    model = make(labels=[f"kind {k}" for k in range(11)])
    options = dict(replacements=["plus"], mixes=(), **QUIET)
    numbers = ci.surgery(model, images, labels=[3, 7], **options)
    names = ci.surgery(model, images, labels=["kind 3", "kind 7"], **options)
    assert names.table().equals(numbers.table())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "given, match",
    [
        (dict(replacements=["gradeint"]), "replacement='gradeint' is none of .*Did you mean grad"),
        (dict(replacements=[0]), "give a whole number of at least 1"),
        (dict(replacements="plus"), "give a list such as"),
        (dict(replacements=[]), "give a list such as"),
        (dict(replacements=[2.5]), "is none of gradient"),
        (dict(mixes=(0.1, 1.5)), "mix=1.5: give a number from 0"),
        (dict(mixes=0.5), "mixes=0.5: give a list of numbers"),
        (dict(mixes=(float("nan"),)), "mix=nan"),
        (dict(directions=1), "directions=1: give a whole number of at least 2"),
        (dict(eps=0), "eps=0: give a finite number above 0"),
        (dict(seed=-1), "seed=-1"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(limit=0), "limit=0"),
        (dict(labels=None), "labels are missing"),
        (dict(labels=[3]), "there are 1 labels for 2 samples"),
        (dict(labels=[3, 11]), "the label 11 of sample .* is not one class of the model: give"),
        (dict(labels=[3, -1]), "the label -1"),
        (dict(labels=[3, None]), "labels are missing"),
        (dict(labels=[3, True]), "the label True"),
        (dict(labels=[3, "cat"]), "the label 'cat'"),
    ],
)
def test_what_surgery_refuses(images, given, match):
    with pytest.raises(ValueError, match=match):
        ci.surgery(make(), images, **{"labels": [3, 7], "progress": False} | given)


def test_models_that_have_no_such_step(images):
    plain, lm = make_lm("gpt-baseline"), make_lm("nanochat-crate")
    tokens = inputs_of(plain, BATCH)
    refuses("layer 0 cannot take 'gradient'", lambda: ci.surgery(plain, tokens, progress=False))
    with pytest.raises(ValueError, match="layer 0 cannot take '2 steps': some learned thresholds"):
        with ci.surgeries.replaced(lm, sparse=2):
            raise AssertionError
    fit = ci.surgery(lm, tokens, mixes=(), progress=False)  # what does not fit is left out
    assert fit.meta["settings"]["replacements"] == ["gradient", "neumann", "plus", "minus"]
    with pytest.raises(ValueError, match="scored on its next tokens: give no labels"):
        ci.surgery(lm, tokens, labels=[1, 2], progress=False)


def test_models_without_answers(images):
    size = dict(d_model=30, n_layers=2, n_heads=5, image_size=(6, 20), patch_size=(2, 5))
    text = dict(d_embed=8, text_d_model=12, text_n_layers=1, text_n_heads=2, n_ctx=5, d_vocab=11)
    mae = ci.HookedCrateMAE(ci.CrateConfig(family="crate-mae", decoder_n_heads=5, **size)).eval()
    clip = ci.HookedCrateCLIP(ci.CrateConfig(family="clipa", **size, **text)).eval()
    for model in (mae, clip.visual):
        with pytest.raises(ValueError, match="has no logits, which surgery needs"):
            ci.surgery(model, images, labels=[1, 2], progress=False)
        with torch.no_grad(), ci.surgeries.replaced(model, attention="gradient", sparse=2):
            model.full_forward(images)
    refuses("a CLIP is two models", lambda: ci.surgery(clip, images, progress=False))


def test_a_step_that_is_not_finite_is_named(images):
    model = make()
    model.blocks[1].mlp.D.data *= 1e8
    with pytest.raises(ValueError, match="'9 steps' in layer 1, samples 0 to 1 is not finite"):
        ci.surgery(model, images, labels=[3, 7], replacements=[9], progress=False)
