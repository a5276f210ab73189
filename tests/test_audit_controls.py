"""The audit of the family: members built by hand, their defects, and random members."""

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
from test_audit import BREAKS, BY_CONSTRUCTION, EVERY, LAW, NONE, audited, better, cells
from test_audit import judged as of_settings

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import planted
from planted_defects import DEFECTS, _turned

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


def judged(result):
    return {
        cell: words for cell, words in of_settings(result).items() if words != {"not applicable"}
    }


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
    found, unclear = judged(result), OPEN.get(family, set())
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
    found = judged(audited(control))
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
                model, data = (
                    make_lm(family, n_layers=1),
                    torch.randint(0, 47, (9, 13), generator=draw),
                )
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
