"""Audits of the family by loops and autograd; on which samples, draws and precision nulls hang."""

import numpy as np
import pandas as pd
import pytest
import torch

import audit_reference as slow
import crate_interp as ci
from audit_reference import drawn, number, same, sparse_numbers, steps_of
from conftest import make
from crate_interp.audits import layer as layers
from crate_interp.audits import run, sparse
from crate_interp.audits.claims import NULLS
from crate_interp.audits.objectives import KINDS
from crate_interp.models.layers.block import ATTENTIONS
from selection import few
from test_audit import audited as audited_planted
from test_audit import planted

EPS, N = 0.7, 3
SQUARE = dict(image_size=(10, 10), patch_size=(2, 2), d_model=29, d_head=5, stem="linear")
SETTING = dict(eps=EPS, untrained=0, progress=False)


def images(dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(N, 3, 10, 10, generator=draw, dtype=dtype)


def audited(family):
    model = make(family, **SQUARE, n_layers=1).double()
    _, cache = model.run_with_cache(images())
    return model, cache, ci.audit(model, images(), **SETTING)


@pytest.fixture(scope="module")
def tssa():
    return audited("tost-ista")


@pytest.fixture(scope="module")
def cbsa():
    return audited("cbt")


def sides(model, cache, sample):
    z, mid = (cache[f"blocks.0.hook_resid_{name}"][sample] for name in ("pre", "mid"))
    block = model.blocks[0]
    return z, mid, block.attn.U.detach(), block.ln1


def maps_of(model, cache, sample):
    """What makes the representatives of one sample, by hand: their pooling plus the step's A."""
    attn = model.blocks[0].attn
    pos = cache["blocks.0.hook_resid_pre"].shape[1]
    side, pooled = int((pos - 1) ** 0.5), torch.zeros(64, pos, dtype=torch.float64)
    for cell in range(64):
        ends = [(place * side // 8, -(-(place + 1) * side // 8)) for place in divmod(cell, 8)]
        inside = [row * side + column for row in range(*ends[0]) for column in range(*ends[1])]
        pooled[cell, inside] = 1 / len(inside)
    return pooled + attn.step_rep.detach() * cache["blocks.0.attn.hook_contract"][sample]


def compared(found, sample, wanted, names, eps):
    result = found[2]
    for frame, numbers in wanted.items():
        for name in names:
            own = number(result, "layer", name, frame, eps, layer=0)[sample]
            np.testing.assert_allclose(own, float(numbers[name]), rtol=1e-8, atol=1e-11)


NAMES = ("compresses", "rate_before", "rate_after", "gradient", "step")


@pytest.mark.parametrize("eps", [EPS, pytest.param(100.0, marks=pytest.mark.slow)])
def test_token_statistics_by_autograd_and_loops(tssa, eps):
    model, cache, _ = tssa
    z, mid, u, norm = sides(model, cache, 2)
    pi = cache["blocks.0.attn.hook_pi"][2]
    most = u.shape[0] * u.shape[2] / len(z) * float(pi.max())
    wanted = slow.attention(z, mid, u, norm, eps, rate=slow.bound(pi), most=most)
    compared(tssa, 2, wanted, NAMES, eps)


@pytest.mark.parametrize("eps", [EPS, pytest.param(100.0, marks=pytest.mark.slow)])
def test_representatives_by_autograd_and_loops(cbsa, eps):
    model, cache, _ = cbsa
    z, mid, u, norm = sides(model, cache, 2)
    maps = maps_of(model, cache, 2)
    longest = max(float(torch.linalg.matrix_norm(one, 2)) ** 2 for one in maps)
    most = u.shape[2] / 64 * longest
    wanted = slow.attention(z, mid, u, norm, eps, rate=slow.contracted(maps), most=most)
    compared(cbsa, 2, wanted, NAMES, eps)


def test_every_attention_with_subspaces_has_an_objective():
    assert set(KINDS) == set(ATTENTIONS) - {"self"}


def with_gains(result, gains):
    """The verdict on R^c, read, if random output maps lower it by so much less than the layer."""
    numbers = result.table("numbers").copy()
    keys = ["sample", "layer", "frame", "eps", "basis", "tokens"]
    own = numbers[numbers["of"] == "layer"].set_index(keys)["compresses"]
    for draw, gain in enumerate(gains):
        rows = numbers["of"] == f"random map {draw}"
        index = pd.MultiIndex.from_frame(numbers.loc[rows, keys])
        numbers.loc[rows, "compresses"] = own.reindex(index).to_numpy() + gain
    found = ci.AuditResult({**result.stored, "numbers": numbers}, result.meta).table()
    rows = found[(found["number"] == "compresses") & (found["eps"] == planted.EPS)]
    return set(rows["verdict"])


def test_what_hangs_on_the_draws_is_undecided():
    """All draws together show a gain, and so do three groups of eight; the fourth does not."""
    result = audited_planted(planted.ideal(n_layers=1), grid=False)
    gains = np.full(32, 0.1) + 0.001 * np.arange(32)
    spread = gains.copy()
    spread[::4] += [-0.15, 0.15] * 4
    for sign, word in ((1, "kept"), (-1, "broken")):
        assert with_gains(result, sign * gains) == {word}
        assert with_gains(result, sign * spread) == {"undecided"}


def test_random_dictionaries_are_measured_on_tokens_drawn_anew_for_each_sample(monkeypatch):
    monkeypatch.setattr(sparse, "TOKENS", 5)
    model = make("crate", d_head=5, n_layers=2).double()
    images = torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1)).double()
    result = ci.audit(model, images, untrained=0, progress=False)
    places = layers._drawn_tokens(range(3), 13, 0)
    assert len({tuple(each) for each in places.tolist()}) == 3
    cache = model.run_with_cache(images)[1]
    lasso, y = model.blocks[1].mlp.lasso(), cache["blocks.1.ln2.hook_normalized"]
    d = drawn(lasso.d, "random D", 3).numpy()
    for sample in range(3):
        some = y[sample, places[sample]].numpy()
        code = steps_of(lasso, some, d, [lasso.eta] * lasso.count)
        wanted = sparse_numbers(some, code, d, lasso)["descends"]
        same(number(result, "random D 3", "descends", "", 0.0, "", "all")[sample], wanted, sample)


def test_nulls_grid_and_limits_are_measured_on_the_first_samples(monkeypatch):
    model = make("crate", d_head=5, n_layers=1).double()
    images = torch.randn(7, 3, 6, 20, generator=torch.Generator().manual_seed(1)).double()
    keys = ["sample", "layer", "of", "frame", "eps", "basis", "tokens"]

    def table(**options):
        result = ci.audit(model, images, untrained=0, progress=False, **options)
        return result.table("numbers").set_index(keys)

    every, plain = table(), table(grid=False)
    plain = plain[plain.index.get_level_values("of") == "layer"]
    monkeypatch.setattr(run, "SAMPLES", 3)
    monkeypatch.setattr(run, "LIMITED", 2)
    for batch_size in (2, 7):
        some = table(batch_size=batch_size)
        first, rest = (
            some[(some.index.get_level_values("sample") < 3) == is_first]
            for is_first in (True, False)
        )
        pd.testing.assert_frame_equal(rest, plain.loc[3:].reindex(columns=rest.columns), rtol=1e-9)
        wanted = every.loc[first.index]
        pd.testing.assert_frame_equal(first, wanted.reindex(columns=first.columns), rtol=1e-9)
        limited = first.xs("construction", level="of").index.get_level_values("sample")
        assert set(limited) == {0, 1}
        assert set(first.xs("shuffled", level="of").index.get_level_values("sample")) == {0, 1, 2}


@pytest.mark.parametrize("family", few(["crate", "tost-ista", "cbt"]))
def test_nulls_in_float32_are_those_in_float64(family):
    square = dict(image_size=(10, 10), patch_size=(2, 2), d_model=29, d_head=5, stem="linear")
    model = make(family, **square, n_layers=2)
    images = torch.randn(3, 3, 10, 10, generator=torch.Generator().manual_seed(1))
    keys = ["sample", "layer", "of", "frame", "eps", "basis", "tokens"]
    single, double = (
        ci.audit(each, x, untrained=0, progress=False).table("numbers").set_index(keys)
        for each, x in (
            (model, images),
            (make(family, **square, n_layers=2).double(), images.double()),
        )
    )
    nulls = {*NULLS} - {"random map"} - ({"random D"} if family == "cbt" else set())
    assert set(double.index.get_level_values("of")) >= nulls
    # the draws themselves are the same; directions are cosines, the others relative differences
    np.testing.assert_allclose(single, double.loc[single.index], rtol=2e-3, atol=2e-4)
