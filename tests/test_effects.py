"""Effects of atoms: first order against finite differences, ablations against runs, logits."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

import crate_interp as ci
from atlases import MODELS, ready
from conftest import LAYERS, make
from crate_interp.circuits.atlases.atom_logits import COLUMNS, named
from crate_interp.data import Samples, part
from crate_interp.questions.answers import loss_on
from crate_interp.stats.intervals import mean_interval
from selection import few


def without(model, data, layer, atom, wanted):
    """Returns the loss of each sample in a run with one atom at 0; None: with all of them."""
    point = f"blocks.{layer}.mlp.hook_post"
    hooks = [] if atom is None else [(point, ci.hooks.edit.zero(atoms=atom))]
    with torch.no_grad():
        logits = model.run_with_hooks(data, fwd_hooks=hooks)
    return by_hand(logits, data, wanted)


def scaled(model, data, layer, atom, factor):
    """Returns the logits of a run in which the code of one atom is multiplied."""
    scale = torch.ones(model.cfg.d_mlp, dtype=torch.float64)
    scale[atom] = factor
    point = f"blocks.{layer}.mlp.hook_post"
    with torch.no_grad():
        return model.run_with_hooks(data, fwd_hooks=[(point, lambda z, hook: z * scale)])


def by_hand(logits, data, wanted):
    if logits.ndim == 2:
        return -logits.log_softmax(dim=-1)[torch.arange(len(data)), wanted]
    chance = logits[:, :-1].log_softmax(dim=-1).gather(2, data[:, 1:, None])
    return -chance[..., 0].mean(dim=1)


@pytest.mark.parametrize("name", few(MODELS, 2))
def test_effects_against_finite_differences_and_a_run_without_the_atom(name):
    model, data = ready(name)
    model = model.double()
    data = data.double() if data.is_floating_point() else data
    found = ci.atlas(model, data, ablate=2, batch_size=2, progress=False)
    logits, cache = model.run_with_cache(data)
    wanted = logits.argmax(dim=-1)  # the data has no labels: the model's own answers
    before = by_hand(logits, data, wanted)
    assert found.table("effects")["loss"].iloc[0] == pytest.approx(before.sum().item(), rel=1e-6)
    tried = found.table("ablations")
    assert sorted(set(tried["sample"])) == [0, 2]
    per_layer = tried.drop_duplicates(["layer", "atom"]).groupby("layer").size()
    assert set(per_layer) == {6}
    on = int((cache["post", 1] > 0).flatten(0, 1).sum(0).argmax())
    for layer, atom in [
        (1, on),
        *tried[["layer", "atom"]].drop_duplicates().to_numpy().tolist()[::13],
    ]:
        h, moved = 1e-6, []
        for sign in (1, -1):
            moved.append(by_hand(scaled(model, data, layer, atom, 1 - sign * h), data, wanted))
        slope = (moved[0] - moved[1]) / (2 * h)
        row = found.row(layer, atom)
        assert row["first_order"] == pytest.approx(slope.mean().item(), rel=1e-4, abs=1e-7)
        half = 2.7764451051977987 * slope.std().item() / 5**0.5  # Student's t, 4 degrees
        assert row["first_order_high"] - row["first_order"] == pytest.approx(half, rel=1e-4)
        own = tried[(tried["layer"] == layer) & (tried["atom"] == atom)]
        if len(own):
            exact = (without(model, data, layer, atom, wanted) - before)[[0, 2]]
            assert own["ablation"].tolist() == pytest.approx(exact.tolist(), rel=1e-6, abs=1e-9)
            assert own["first_order"].tolist() == pytest.approx(
                slope[[0, 2]].tolist(), rel=1e-4, abs=1e-7
            )
            # one atom of a layer was chosen on the first sample, and has the number of the second
            judged = exact[2 - int(row["ablated"]) :]
            assert row["ablation"] == pytest.approx(judged.mean().item(), rel=1e-6, abs=1e-9)
            if len(judged) == 2:
                assert row["ablation_low"] <= row["ablation"] <= row["ablation_high"]


def test_other_samples_choose_the_atoms():
    model, data = ready("crate-alpha")
    found = ci.atlas(model, data, ablate=2, progress=False)
    others = ci.atlas(model, data[[1, 3, 4]], ablate=0, progress=False).table("effects")
    tried = found.table("ablations")
    for layer in range(LAYERS):
        own = others[others["layer"] == layer]
        best = own.sort_values("squares", ascending=False)["atom"].head(6)
        assert set(tried.loc[tried["layer"] == layer, "atom"]) == set(best)
    one = ci.atlas(model, data[:1], ablate=9, progress=False)  # no other sample could choose
    assert not one.table()["ablated"].any() and "(too few samples for an interval" in one.headline()
    best = one.table("effects").loc[lambda rows: rows["squares"].idxmax()].astype(int)
    assert f"To first order, atom {best['atom']} of layer {best['layer']} ch" in one.headline()


def test_the_headline_names_the_atom_that_other_samples_chose():
    """Planted: an effect that is three times as large in the samples that choose the atom."""
    model, data = ready("crate")
    found = ci.atlas(model, data, ablate=0, progress=False)
    noise = np.random.default_rng(3).normal(size=(26, 2))
    rows = []
    for place, (layer, atom) in enumerate([(0, 3), (0, 7), (1, 3), (1, 8)]):
        effects = noise[:, 1] + [0.0, 4.0, -2.0, 1.0][place]
        effects[::2] *= [9.0, 3.0, 1.0, 1.0][place]  # the samples with even numbers choose
        first = np.where(place < 2, 1, -1) * effects + 0.1 * noise[:, 0]
        rows += [(n, layer, atom, *both) for n, both in enumerate(zip(first, effects, strict=True))]
    tried = pd.DataFrame(rows, columns=["sample", "layer", "atom", "first_order", "ablation"])
    planted = ci.circuits.Atlas(found.stored | {"ablations": tried}, found.meta)
    judges = tried.query("layer == 0 and atom == 7 and sample % 2 == 1")["ablation"].to_numpy()
    low, high = (float(end[0]) for end in mean_interval(judges[:, None]))
    words = "Set to 0 everywhere, atom 7 of layer 0 changes the loss most: by "
    words += f"{judges.mean():+.2g} nats (95 % interval {low:+.2g} to {high:+.2g}, 13 images)."
    assert words in planted.headline() and words in planted.largest()
    assert "atom 3 of layer 1 changes the loss most" in planted.largest(1)


def test_agreement_is_the_rank_correlation_of_both_effects():
    model, data = ready("crate")
    found = ci.atlas(model, data, ablate=2, progress=False)
    for row in found.table("agreement").itertuples():
        table = found.table("ablations").query(f"layer == {row.layer}")
        means = table.groupby("atom")[["first_order", "ablation"]].mean()
        wanted = spearmanr(means["first_order"], means["ablation"]).statistic
        assert row.rank_correlation == pytest.approx(wanted)
        assert (row.atoms, row.samples) == (6, 2)


@pytest.mark.parametrize("name", ["crate", "crate-lm"])
def test_logits_to_first_order_where_steps_re_code_the_stream(name):
    model, data = ready(name)
    model = model.double()
    data = data.double() if data.is_floating_point() else data
    found = ci.atlas(model, data, ablate=2, progress=False)
    table, few = found.table("logits"), data[[0, 2]]
    with torch.no_grad():
        answers = model(few).argmax(dim=-1).flatten().bincount(minlength=model.W_U.shape[1])
    followed = table["logit"].unique()
    if name == "crate":
        assert followed.tolist() == list(range(11))
    else:  # 8 of 47 tokens: those that are answered most
        assert len(followed) == 8 and answers[followed].sum() == answers.topk(8).values.sum()
    for layer, atom in [(0, 4), (2, 7)]:
        h, moved = 1e-4, []
        for sign in (1, -1):
            out = scaled(model, few, layer, atom, 1 + sign * h)
            out = out - out.mean(dim=-1, keepdim=True)
            moved.append(out if out.ndim == 2 else out.mean(dim=1))
        slopes = ((moved[0] - moved[1]) / (2 * h))[:, followed]
        own = table[(table["layer"] == layer) & (table["atom"] == atom)]
        assert own["total"].tolist() == pytest.approx(slopes.sum(0).tolist(), rel=1e-3, abs=1e-3)
        squares = slopes.square().sum(0).tolist()
        assert own["squares"].tolist() == pytest.approx(squares, rel=1e-2, abs=1e-3)


def test_a_logit_is_named_only_if_its_interval_leaves_out_0():
    rows = [  # layer, atom, logit, name, n, total, squares
        (0, 0, 0, "up", 4, 4.0, 4.04),
        (0, 0, 1, "more", 4, 8.0, 16.04),
        (0, 0, 2, "unclear", 4, 40.0, 1600.0),
        (0, 0, 3, "down", 4, -4.0, 4.04),
        (1, 0, 0, "up", 4, 0.0, 0.0),
        (1, 0, 1, "more", 1, 5.0, 25.0),
    ]
    found = named(pd.DataFrame(rows, columns=COLUMNS))
    assert found["raises"].tolist() == ["'more' +2 ± 0.2, 'up' +1 ± 0.2", ""]
    assert found["lowers"].tolist() == ["'down' -1 ± 0.2", ""]


@pytest.mark.parametrize("name", ["crate-alpha", "nanochat-crate"])
def test_logits_of_the_direct_path_where_the_stream_is_a_sum(name):
    model, data = ready(name)
    found = ci.atlas(model, data, ablate=2, progress=False)
    assert not len(found.table("logits"))
    names = getattr(model.cfg, "labels", None) or [str(token) for token in range(47)]
    for layer, atom in [(0, 4), (LAYERS - 1, 7)]:
        direction = model.blocks[layer].mlp.W_out[atom]
        gain = 1.0
        for later in getattr(model, "resid_lambdas", torch.ones(LAYERS))[layer + 1 :]:
            gain = gain * later
        weight = getattr(model.ln_final, "weight", None)
        moved = direction if weight is None else weight * (direction - direction.mean())
        moved = gain * (moved @ model.W_U)
        moved = moved - moved.mean()
        row = found.row(layer, atom)
        said = re.findall(r"'([^']*)' ([+-][\d.e-]+)", row["raises"])
        assert len(said) == 3 and said[0][0] == names[int(moved.argmax())]
        assert float(said[0][1]) == pytest.approx(moved.max().item(), rel=0.06)
        assert row["lowers"].startswith(f"'{names[int(moved.argmin())]}' -")


def test_where_the_step_re_codes_the_stream_weights_say_nothing_of_logits():
    model, data = ready("crate")
    found = ci.atlas(model, data, ablate=0, progress=False).table()
    assert (found["raises"] == "").all() and (found["lowers"] == "").all()
    measured = ci.atlas(model, data, ablate=2, progress=False)
    of_layers = measured.table("logits").pivot(
        index=["atom", "logit"], columns="layer", values="total"
    )
    assert (of_layers[0] - of_layers[1]).abs().max() > 1e-3  # the unembedding's row would be alike


@pytest.mark.parametrize(
    "labels, names, known, kind",
    [
        ([0, 10, 3, 4, 5], None, None, "labels"),
        (["b", "a", "b", "c", "k"], None, "abcdefghijk", "labels"),
        ([1, 0, 1, 2, 10], "abcdefghijk", "kjihgfedcba", "labels"),
        ([1, 0, 1, 0, 1], "ab", "abcdefghijk", "labels"),
        ([1, 0, 1, 0, 1], "ab", None, "answers"),  # two classes, the model has 11
        ([1, 0, 1, 0, 1], "xy", "abcdefghijk", "answers"),
        (["x", "y", "x", "y", "x"], None, "abcdefghijk", "answers"),
        ([0, 11, 3, 4, 5], None, None, "answers"),
        ([0, None, 3, 4, 5], None, None, "answers"),
        ([0.5, 1.0, 3, 4, 5], None, None, "answers"),
    ],
)
def test_labels_are_used_where_they_are_classes_of_the_model(labels, names, known, kind):
    model, data = make("crate", labels=list(known) if known else None), ready("crate")[1]
    samples = Samples(5, labels, "x", lambda start, stop: data[start:stop])
    samples = dataclasses.replace(samples, names=tuple(names) if names else None)
    loss = loss_on(model, samples)
    assert loss.kind == kind
    logits = model(data)
    if kind == "answers":
        assert torch.equal(loss.wanted(logits, data, range(5)), logits.argmax(dim=-1))
        return
    words = labels if known is None else [names[one] for one in labels] if names else labels
    classes = [one if known is None else known.index(one) for one in words]
    assert loss.wanted(logits, data, range(5)).tolist() == classes
    later = loss_on(model, part(samples, 2, 5))
    assert later.wanted(logits[3:], data[3:], [3, 4]).tolist() == classes[3:]
    found = ci.atlas(model, samples, ablate=2, progress=False)
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(classes), reduction="sum")
    assert found.table("effects")["loss"].iloc[0] == pytest.approx(wanted.item(), rel=1e-5)
    assert found.meta["loss"] == kind


def test_logits_that_are_all_unclear_have_no_names():
    rows = [(0, 2, 5, "five", 4, 40.0, 1600.0), (0, 3, 5, "five", 1, 5.0, 25.0)]
    found = named(pd.DataFrame(rows, columns=COLUMNS))
    assert found[["raises", "lowers"]].to_numpy().tolist() == [["", ""], ["", ""]]
