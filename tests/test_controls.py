"""Negative controls of the probes: the same samples where there is nothing to find."""

import numpy as np
import pandas as pd
import pytest
import torch

import crate_interp as ci
import reference
from conftest import make
from crate_interp.data.samples import part
from crate_interp.sweeps.control_tables import by_rate, controls_table, controls_text
from crate_interp.sweeps.controls import an_eighth
from crate_interp.sweeps.runs.batches import samples_of
from probing import sweep, values


@pytest.fixture(scope="module")
def images():
    return torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def controlled(images):
    return sweep(make(), images)


def test_controls_stand_beside_the_model_on_the_same_samples(controlled, images):
    table = controlled.controls()
    assert set(table["control"]) == {
        "random weights",
        "random subspaces",
        "permuted heads",
        "tight frame",
    }
    own = values(controlled, "compression.subspace_rate_mid", 1)
    for control, of in (("random weights", own), ("tight frame", own[:1])):
        here = table[table["control"] == control]
        assert (here["n"] == len(of)).all()  # all of 5, and an eighth of them
        row = here.query("statistic == 'subspace_rate_mid' and layer == 1").iloc[0]
        assert row["model_mean"] == pytest.approx(of.mean())
    for control, gone in (
        ("random subspaces", "rate_pre"),
        ("tight frame", "l1"),
        ("permuted heads", "rate_pre"),
    ):
        assert gone not in set(table[table["control"] == control]["statistic"])


@pytest.mark.slow
def test_controls_see_as_many_samples_as_were_asked_for(images):
    """In batches of two and one, or in parts that are merged, as in one batch."""
    model = make()
    whole = ci.sweep(model, images, controls=3, progress=False)
    some = sweep(model, images, controls=3)
    data = samples_of(model, images)
    ranges = ((0, 2), (2, 4), (4, 5))
    parts = [sweep(model, part(data, *numbers), controls=3) for numbers in ranges]
    assert [len(one.controls()) > 0 for one in parts] == [True, True, False]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    for other in (some, merged):
        pd.testing.assert_frame_equal(other.controls(), whole.controls(), rtol=1e-5)
    assert set(whole.controls()["n"]) == {1, 3} and whole.meta["controls"] == 3
    assert "the first 3 images (random weights; the other controls on 1 of" in controls_text(some)
    header, rows = controls_table(some, "compression.subspace_rate_mid")
    assert header[:4] == ["layer", "model, 3 images", "random weights", "model, 1 image"]
    table = some.controls().query("statistic == 'subspace_rate_mid' and layer == 1")
    shown = [f"{value:.4g}" for value in table.sort_values("n")["model_mean"].iloc[[-1, 0]]]
    assert [rows[1][1], rows[1][3]] == shown
    first = sweep(model, images[:3])  # 32 of three are three
    pd.testing.assert_frame_equal(first.controls(), whole.controls(), rtol=1e-5)
    none = sweep(model, images, controls=0)
    assert not len(none.controls()) and none.meta["controls"] == 0


@pytest.mark.slow
def test_controls_within_a_layer_see_an_eighth_of_the_samples():
    """Sample 0 and sample 5, in whichever batches they are."""
    images = torch.randn(11, 3, 6, 20, generator=torch.Generator().manual_seed(2))
    model = make()
    result = ci.sweep(model, images, controls=11, progress=False, batch_size=3)
    within = result.controls().query("control != 'random weights'")
    assert (within["n"] == 2).all()
    row = within.query("statistic == 'rate_mid' and layer == 2").iloc[0]
    wanted = values(result, "compression.rate_mid", 2)[[0, 5]].mean()
    assert row["model_mean"] == pytest.approx(wanted)
    assert "the first 11 images (random weights; the other controls on 2 of" in controls_text(
        result
    )
    # permuted heads and tight frames draw nothing
    both = [ci.sweep(model, images[[0, 5]][[n]], controls=1, progress=False) for n in (0, 1)]
    alone = [one.controls().query("control in ('permuted heads', 'tight frame')") for one in both]
    within = within.query("control != 'random subspaces'")
    mean = (alone[0]["control_mean"] + alone[1]["control_mean"]) / 2
    np.testing.assert_allclose(within["control_mean"], mean, rtol=1e-5)
    lower = sum(one["model_mean"] < one["control_mean"] for one in alone)
    np.testing.assert_array_equal(within["lower"], lower)
    assert within["lower"].isin([0, 1, 2]).all() and within["lower"].nunique() > 1


@pytest.mark.parametrize("period", range(2, 13))
def test_they_see_each_of_some_classes_that_come_in_turn(period):
    """A fixed step would see one class of 2, 4 or 8 alone. An even share is 8 samples a class."""
    many = [start + place for start in range(0, 64 * period, 32) for place in an_eighth(start, 32)]
    counts = np.bincount([number % period for number in many], minlength=period)
    assert 3 <= counts.min() and counts.max() <= 13
    assert len(many) == pytest.approx(8 * period, abs=2)


def test_each_sample_has_random_subspaces_of_its_own(images):
    """Of one picture six times over; the same ones again in another batch."""
    six = images[:1].repeat(6, 1, 1, 1)
    one, other = (ci.sweep(make(), six, batch_size=n, progress=False) for n in (6, 2))
    pd.testing.assert_frame_equal(one.controls(), other.controls(), rtol=1e-5)
    table = one.controls().query("control == 'random subspaces' and layer == 1")
    first = sweep(make(), six[:1]).controls().query("control == 'random subspaces' and layer == 1")
    assert (table["n"] == 2).all() and len(table) == len(first)
    assert (table["control_mean"].to_numpy() != first["control_mean"].to_numpy()).all()


def test_results_that_were_saved_without_the_count_still_merge(images):
    data, model = samples_of(make(), images), make()
    old, new = (sweep(model, part(data, *ends), controls=5) for ends in ((0, 2), (2, 5)))
    old = ci.SweepResult(
        {**old.stored, "controls": old.stored["controls"].drop(columns="lower")}, old.meta
    )
    both = old.merge(new)
    assert "lower" not in both.controls() and set(both.controls()["n"]) == {1, 5}
    shown = [controls_table(one, "compression.subspace_rate_mid")[1][0][2] for one in (both, new)]
    assert ["/" in cell for cell in shown] == [False, True]


def test_what_is_no_number_of_controls(images):
    for match, given in (
        ("controls=True is not a number of samples. Give controls=32 ", True),
        ("controls=False is not a number of samples. Give controls=0 ", False),
        ("controls=-1: give a whole number of at least 0", -1),
    ):
        with pytest.raises(ValueError, match=match):
            sweep(make(), images, controls=given)


def test_a_tight_frame_has_the_rate_of_its_energy(images):
    """13 tokens of width 31: R = 13/2 ln(1 + d c / (N eps^2)), c = |Z|^2 / 13.

    The spectrum is flat, with 13 directions.
    """
    model = make()
    table = sweep(model, images[:1]).controls()
    _, cache = model.run_with_cache(images[:1])
    energy = cache["resid_pre", 2].double().square().sum(dim=(1, 2)) / 13
    wanted = 6.5 * torch.log1p(31 * energy / (13 * 0.01)).mean()
    row = table.query("control == 'tight frame' and statistic == 'rate_pre' and layer == 2").iloc[0]
    assert row["control_mean"] == pytest.approx(float(wanted), rel=1e-5)
    assert row["control_mean"] > row["model_mean"]  # nothing of this energy costs more


def test_random_subspaces_keep_the_singular_values(controlled):
    table = controlled.controls()
    energy = table.query("control == 'random subspaces' and statistic == 'energy_head'")
    assert energy["control_mean"].to_numpy() == pytest.approx(7 / 31, abs=0.05)  # chance is p / d
    assert set(table[table["control"] == "random subspaces"]["statistic"]) >= {
        "official_rate",
        "subspace_rate_mid",
    }


def test_permuted_heads_are_written_by_the_map_of_the_head_before(images):
    model = make()
    table = sweep(model, images[:1]).controls()
    _, cache = model.run_with_cache(images[:1])
    block = model.blocks[0]
    written = (
        sum(cache["z", 0][:, :, k] @ block.attn.W_O[(k - 1) % 5] for k in range(5)) + block.attn.b_O
    )
    z = (cache["resid_pre", 0] + written).detach().numpy()
    row = table.query(
        "control == 'permuted heads' and statistic == 'rate_mid' and layer == 0"
    ).iloc[0]
    assert row["control_mean"] == pytest.approx(
        np.mean([reference.coding_rate(one, 0.1) for one in z]), rel=1e-5
    )


def test_random_weights_are_the_official_initialisation(images):
    model = make()
    table = sweep(model, images[:2]).controls()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random = ci.HookedCrate(model.cfg).eval()
    wanted = values(sweep(random, images[:2], "compression"), "compression.official_rate", 2).mean()
    row = table.query(
        "control == 'random weights' and statistic == 'official_rate' and layer == 2"
    ).iloc[0]
    assert row["control_mean"] == pytest.approx(wanted, rel=1e-6)


def test_a_users_probe_may_read_any_part_of_a_layer(images):
    """Also under a control, which replaces the layer: its norm, its output map, its switches."""

    def measure(block, acts):
        weight = (
            block.ln1.weight.sum() + block.attn.W_O.sum() + block.attn.U.sum() + block.mlp.D.sum()
        )
        return {"sum": acts["hook_resid_mid"].sum(dim=(1, 2)) + weight * block.residual}

    words = {"sum": ("", None, None, "A sum.")}
    table = sweep(
        make("crate-alpha"), images, ci.Probe("own", ("hook_resid_mid",), measure, words)
    ).controls()
    assert set(table["control"]) == {
        "random weights",
        "random subspaces",
        "permuted heads",
        "tight frame",
    }


def test_advice_ends_where_all_samples_were_controlled(images):
    few = sweep(make(), images, controls=3)
    assert "`--controls 5` raises this number to 1." in controls_text(few)
    every = controls_text(sweep(make(), images, controls=256))
    assert "For more samples, measure more images." in every and "--controls" not in every


def test_random_subspaces_are_counted_by_each_rate(controlled):
    """R^c is better where it is lower, R - R^c where it is higher."""
    table = controlled.controls().query("control == 'random subspaces' and probe == 'compression'")
    n = int(table["n"].max())
    lower = {name: rows["lower"].tolist() for name, rows in table.groupby("statistic")}
    rate, reduction = lower["subspace_rate_mid"], [n - x for x in lower["reduction_mid"]]
    words = [", ".join(map(str, counts)) for counts in (rate, reduction, lower["official_rate"])]
    assert by_rate(controlled).startswith(
        "Samples in which the model is better than random subspaces, layer by layer: "
        f"by R^c in {words[0]} of {n}; by R - R^c in "
        f"{words[1]} of {n}; by the authors' R^c in {words[2]} of {n}. "
    )


def test_controls_survive_saving(controlled, tmp_path):
    again = ci.SweepResult.load(controlled.save(tmp_path))
    assert again.controls().equals(controlled.controls()) and len(again.controls())
