"""Negative controls of the probes: the same samples where there is nothing to find."""

import numpy as np
import pandas as pd
import pytest
import torch

import crate_interp as ci
import reference
from conftest import make
from crate_interp.data.samples import part
from crate_interp.questions.batches import samples_of
from crate_interp.sweeps.control_tables import an_eighth, controls_table, controls_text
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


def test_what_is_no_number_of_controls(images):
    for match, given in (
        ("controls=True: give a whole number of at least 0", True),
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
