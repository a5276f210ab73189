"""The audit: a layer that keeps every claim, defects that break theirs, and random networks."""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm
from crate_interp.audits.claims import NUMBERS
from crate_interp.audits.result import answers_by_layer
from crate_interp.probes.layer_reading import FRAMES
from selection import few_of

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import planted
from planted_defects import DEFECTS, _turned

EVERY, NORMED, STREAM, NONE = tuple(FRAMES), ("read", "unit"), ("stream",), ("",)
LAW = ("compresses", "gradient", "step", "neumann_direction")
# The threshold of the control shrinks its codes, and with them R: D at its best scale does too.
BY_CONSTRUCTION = {("rate_kept", frame) for frame in ("stream", "unit")}


def cells(frames, *numbers):
    return {(number, frame) for number in numbers for frame in frames}


ALONG = cells(EVERY, "gradient", "neumann_direction"), cells(EVERY, "compresses", "step")
# What each defect of demos/planted_defects.py breaks in the audit, written before it was run; then
# what depends on the sample, or is within its bounds but no better than its null.
BREAKS = {
    "uphill": (cells(EVERY, *LAW), set()),
    "too long": (cells(EVERY, "step") | cells(NORMED, "compresses"), set()),
    "shuffled": (
        cells(EVERY, "compresses", "gradient", "neumann_direction"),
        cells(EVERY, "step") | cells(NONE, "threshold"),
    ),
    "next sample": ALONG,
    "mean update": ALONG,
    "nothing": (cells(EVERY, *LAW), set()),
    "grows": (cells(STREAM, *LAW), set()),
    "against": (cells(NORMED, *LAW), set()),
    "shrinks": (cells(NORMED, *LAW), set()),
    "crossed": (
        cells(NORMED, "compresses", "gradient", "neumann_direction") | cells(NONE, "output_map"),
        cells(NORMED, "step"),
    ),
    "turned": (set(), set()),
    "bases too long": (cells(NONE, "orthonormal", "complete"), set()),
    "one subspace": (
        cells(NORMED, *LAW)
        | cells(NONE, "complete", "complete_scaled", "incoherent", "output_map"),
        cells(STREAM, *LAW) | cells(NONE, "threshold"),
    ),
    "dictionary too long": (cells(NONE, "dictionary") | cells(STREAM, "decoded"), set()),
    # a random dictionary that long lowers its lasso more than D = I does
    "short step": (
        cells(NONE, "descends", "converged", "kkt", "threshold"),
        cells(EVERY, "rate_kept"),
    ),
    "tiny step": (
        cells(NONE, "descends", "share", "converged", "kkt"),
        cells(EVERY, "rate_kept") | cells(NONE, "threshold"),
    ),
    "zeros by sign": (
        cells(NONE, "threshold", "reconstruction"),
        cells(EVERY, "rate_kept", "decoded"),
    ),
    "code too large": (
        cells(NONE, "descends", "share", "converged", "kkt", "reconstruction"),
        cells(EVERY, "rate_kept", "decoded"),
    ),
}
QUICK = ("uphill",)


def audited(control, **more):
    with control.working():
        options = dict(eps=planted.EPS, untrained=0, progress=False) | more
        return ci.audit(control.model, control.images, **options)


@cache
def ideal():
    return audited(planted.ideal())


def judged(result):
    table = result.table()
    every = table["number"].map(lambda name: NUMBERS[name].every_eps)
    table = table[every | table["eps"].isna() | (table["eps"] == planted.EPS)]
    return {key: set(rows["verdict"]) for key, rows in table.groupby(["number", "frame"])}


def test_the_theory_is_kept_in_every_cell(monkeypatch):
    result = ideal()
    missed = {cell for cell, words in judged(result).items() if words != {"kept"}}
    # the code of layer 0 fills the stream of layer 1: one eigenvalue of 15 is above 1 at eps 4
    assert missed == BY_CONSTRUCTION | {("neumann", "unit")}
    claims = result.claims()
    assert set(claims["verdict"]) == {"kept", "by construction"}
    named = claims[claims["verdict"] == "by construction"]
    assert set(named["claim"]) == {"rate_kept", "neumann"}
    assert named["reason"].str.startswith("an ideal layer misses the bound too").all()
    table = result.table().assign(value=-0.3, null=-0.2, gain=0.1)  # the gain decides
    tables = {"cells": table, "claims": claims}
    monkeypatch.setattr(type(result), "table", lambda _, name: tables[name])
    job = answers_by_layer(result).iloc[0]
    assert (job["value"], job["rival"], job["chance"]) == ("-30%", "random output maps", "-40%")


@pytest.mark.parametrize("name", few_of(BREAKS, QUICK))
def test_a_defect_breaks_what_was_written(name):
    control = planted.ideal(n_layers=1)
    DEFECTS[name].change(control)
    broken, unsure = BREAKS[name]
    found = judged(audited(control))
    for cell, words in found.items():
        if cell in broken:
            assert words <= {"broken", "undecided"} and "broken" in words, (cell, words)
        elif cell not in unsure | BY_CONSTRUCTION:
            assert words == {"kept"}, (cell, words)


def test_every_defect_of_the_control_is_written_down():
    assert set(BREAKS) == set(DEFECTS)


@cache
def of_random_networks(count):
    """The cells of random networks that have a null, in the settings where they have to hold."""
    parts = []
    for seed in range(count):
        model = make("crate", n_layers=1 if count < 20 else 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ci.HookedCrate(model.cfg).eval()
        images = torch.randn(9, 3, 6, 20, generator=torch.Generator().manual_seed(seed))
        table = ci.audit(model, images, untrained=0, progress=False).table()
        parts.append(table[table["number"].map(lambda name: bool(NUMBERS[name].null))])
    return pd.concat(parts)


def better(table, low, high):
    sign = table["number"].map(lambda name: NUMBERS[name].better)
    return np.where(sign < 0, table[high] < 0, table[low] > 0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_random_networks_have_no_gain(count):
    table = of_random_networks(count)
    beyond = better(table, "excess_low", "excess_high") & better(table, "gain_low", "gain_high")
    assert beyond.mean() <= 0.05
    # beyond shuffled updates alone more of them are: averages are smooth
    over = table[table["number"] == "compresses"]
    assert better(over, "excess_low", "excess_high").mean() > 0.05


def test_what_is_not_compared_is_not_kept():
    """Beyond the first samples there are no random weights to be better than."""
    control = planted.ideal(n_layers=1, n=20)
    samples = ci.data.open_data(control.images, control.model.preprocess)
    control.images = ci.data.part(samples, 17, 20)
    for options in (dict(), dict(grid=False)):
        table = audited(control, **options).table()
        rows = table[table["number"].map(lambda name: bool(NUMBERS[name].null))]
        assert "kept" not in set(rows["verdict"])


def test_activations_that_are_not_finite_are_named():
    model = make("crate", n_layers=2)
    images = torch.randn(5, 3, 6, 20)
    spoil = [("blocks.1.hook_resid_pre", lambda z, hook: z * float("inf"))]
    with model.hooks(spoil), pytest.raises(ValueError, match="of layer 1 holds NaN or Inf"):
        ci.audit(model, images, untrained=0, progress=False)


SIZES = {
    "tost": dict(d_model=28, image_size=8, patch_size=2, stem="linear"),
    "tost-ista": dict(image_size=(6, 20), patch_size=(2, 5), stem="linear"),
    "cbt": dict(image_size=(10, 10), patch_size=(2, 2), stem="linear"),
    "aot": {},
}
# Claims of which one number misses a bound, and an ideal layer on these tokens misses it too.
# random output maps scatter so far at eps 1 that one group of eight of them does not tell
OPEN = {"aot": {("compresses", "read")}}
MISSED = {("rate_kept", "stream"), ("rate_kept", "unit"), ("neumann", "unit")}


def settled(result):
    return {cell: words for cell, words in judged(result).items() if words != {"not applicable"}}


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("tost-ista", 1),
        *(
            pytest.param(family, layers, marks=pytest.mark.slow)
            for family, layers in (("tost-ista", 2), ("cbt", 2), ("aot", 2))
        ),
    ],
)
def test_a_member_built_by_hand_keeps_every_claim(family, layers):
    result = audited(planted.ideal(n_layers=layers, family=family, n=8 * layers))
    found, unclear = settled(result), OPEN.get(family, set())
    assert all(found[cell] <= {"kept", "undecided"} for cell in unclear)
    missed = {cell for cell, words in found.items() if words != {"kept"}}
    assert missed <= MISSED | unclear
    claims = result.claims()
    claims = claims[claims["verdict"] != "not applicable"]
    others = set(claims[claims["verdict"] != "kept"]["verdict"])
    assert others <= {"by construction"} | ({"undecided"} if unclear else set())
    assert {"compresses", "gradient", "output_map"} <= set(claims["claim"])
    assert ("neumann" in set(claims["claim"])) == (family != "tost-ista")
    assert ("descends" in set(claims["claim"])) == (family != "aot")


def test_a_head_of_token_statistics_steps_along_its_gradient():
    """By construction, at eps = sqrt(K p), as attention reads tokens of one length."""
    control = planted.ideal(n_layers=1, family="tost-ista", n=3)
    table = audited(control, eps=(planted.HEADS * planted.P) ** 0.5, grid=False).table()
    rows = table[(table["number"] == "gradient") & (table["frame"] == "read")]
    assert rows["value"].item() == pytest.approx(1, abs=1e-5)


def read_elsewhere(control):
    """Reads with random subspaces, and goes on writing into the planted ones."""
    with torch.no_grad():
        for block in control.model.blocks:
            u = _turned(block.attn.U.detach().clone())
            block.attn.u_proj.weight.copy_(u.transpose(1, 2).flatten(0, 1))


BOUND = ("compresses", "gradient", "step")  # the claims of TSSA's update: it has no series
# What breaks, written before it was run, and what depends on the sample.
FAMILY_BREAKS = {
    ("tost-ista", "uphill"): (cells(EVERY, *BOUND), set()),
    ("tost-ista", "read elsewhere"): (
        cells(EVERY, "compresses", "gradient") | cells(NONE, "output_map"),
        cells(EVERY, "step"),
    ),
    ("cbt", "uphill"): (cells(EVERY, *LAW), set()),
    # as if heads were crossed: the stream still shrinks, so that the rate of the stream falls
    ("cbt", "read elsewhere"): BREAKS["crossed"],
    ("aot", "uphill"): (cells(EVERY, *LAW), set()),
    ("aot", "shuffled"): BREAKS["shuffled"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "defect"), FAMILY_BREAKS)
def test_a_defect_of_a_member_breaks_what_was_written(family, defect):
    control = planted.ideal(n_layers=1, family=family)
    (read_elsewhere if defect == "read elsewhere" else DEFECTS[defect].change)(control)
    broken, unsure = FAMILY_BREAKS[family, defect]
    found = settled(audited(control))
    assert broken - {("threshold", "")} <= set(found)
    for cell, words in found.items():
        if cell in broken:
            assert words <= {"broken", "undecided"} and "broken" in words, (cell, words)
        elif cell not in unsure | BY_CONSTRUCTION:
            assert words == {"kept"}, (cell, words)


@cache
def random_members(count):
    """The cells of random members that have a null, where the claims have to hold."""
    parts = []
    for family in (*SIZES, "tost-lm"):
        for seed in range(count):
            draw = torch.Generator().manual_seed(seed)
            model: ci.HookedCrate | ci.HookedCrateLM
            if family == "tost-lm":
                model = make_lm(family, n_layers=1)
                data = torch.randint(0, 47, (9, 13), generator=draw)
            else:
                model = make(family, n_layers=1, **SIZES[family])
                data = torch.randn(9, 3, *model.cfg.image_size, generator=draw)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = type(model)(model.cfg).eval()
            table = ci.audit(model, data, untrained=0, progress=False).table()
            has_null = table["number"].map(lambda name: bool(NUMBERS[name].null))
            parts.append(
                table[has_null & (table["verdict"] != "not applicable")].assign(family=family)
            )
    return pd.concat(parts)


@pytest.mark.slow
def test_random_members_have_no_gain():
    """At most 5 % of their cells are beyond their null and random weights.

    Attention alone writes with the U that it reads with, whatever U is. So its update follows the
    Neumann form beyond the series more than one with a random output map does, and does not count.
    """
    table = random_members(4)
    tied = (table["family"] == "aot") & (table["number"] == "neumann_direction")
    beyond = better(table, "excess_low", "excess_high") & better(table, "gain_low", "gain_high")
    words = f"{int(beyond[~tied].sum())} of {int((~tied).sum())} cells of random members"
    sys.stdout.write(
        f"{words}; {int(beyond[tied].sum())} of {int(tied.sum())} along Neumann in AoT"
    )
    assert (~tied).sum() > 500 and beyond[~tied].mean() <= 0.05, words
    assert np.isfinite(table["value"]).all()
