"""The audit of TSSA, CBSA and of attention alone: each by its own objective, another way."""

import numpy as np
import pytest
import torch

import audit_reference as slow
import crate_interp as ci
from conftest import make, make_lm
from crate_interp.audits.layer import why_not
from crate_interp.audits.objectives import KINDS
from crate_interp.measures import contracted_rate, variational_rate
from crate_interp.models.layers.block import ATTENTIONS

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


def number(result, of, name, frame, eps=EPS, tokens="all"):
    table = result.table("numbers")
    at = (table["of"] == of) & (table["frame"] == frame) & (table["eps"] == eps)
    at &= (table["basis"] == "stored") & (table["tokens"] == tokens)
    return table[at].sort_values("sample")[name].to_numpy()


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
            own = number(result, "layer", name, frame, eps)[sample]
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


def test_the_rates_are_those_of_the_measures(tssa, cbsa):
    """As attention reads the stream: the codes, with their bias, are those of the forward."""
    model, cache, result = tssa
    codes = cache["blocks.0.attn.hook_u"].transpose(1, 2)
    wanted = variational_rate(codes, cache["blocks.0.attn.hook_pi"], EPS).sum(dim=-1)
    np.testing.assert_allclose(number(result, "layer", "rate_before", "read"), wanted, rtol=1e-9)
    model, cache, result = cbsa
    codes = cache["blocks.0.attn.hook_u"].transpose(1, 2)
    maps = torch.stack([maps_of(model, cache, sample) for sample in range(N)])
    rep = cache["blocks.0.attn.hook_rep_post"].transpose(1, 2)
    torch.testing.assert_close(maps @ codes, rep)
    wanted = contracted_rate(codes, maps, EPS).sum(dim=-1)
    np.testing.assert_allclose(number(result, "layer", "rate_before", "read"), wanted, rtol=1e-9)


@pytest.mark.slow
def test_without_cls_the_others_of_the_sample_remain(tssa, cbsa):
    goals = (
        slow.bound(tssa[1]["blocks.0.attn.hook_pi"][1][:, 1:]),
        slow.contracted(maps_of(cbsa[0], cbsa[1], 1)[..., 1:]),
    )
    for found, goal in zip((tssa, cbsa), goals, strict=True):
        z, mid, u, norm = sides(*found[:2], 1)
        wanted = slow.attention(z[1:], mid[1:], u, norm, EPS, rate=goal)
        for frame, numbers in wanted.items():
            own = number(found[2], "layer", "compresses", frame, tokens="patches")[1]
            np.testing.assert_allclose(own, float(numbers["compresses"]), rtol=1e-8)


@pytest.mark.slow
def test_the_operators_are_the_layers_own(tssa, cbsa):
    """With W_O = U_k^T, and a step_x of 1, the layer's update is what "+U" makes."""
    for model, _, _ in (tssa, cbsa):
        attn = model.blocks[0].attn
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            attn.out_proj.weight.copy_(attn.u_proj.weight.T)
            attn.out_proj.bias.zero_()
            if hasattr(attn, "step_x"):
                attn.step_x.fill_(1.0)
        result = ci.audit(model, images(), **SETTING)
        model.load_state_dict(kept)
        for frame in ("stream", "read", "unit"):
            own, same = (number(result, of, "compresses", frame) for of in ("layer", "+U"))
            np.testing.assert_allclose(own, same, rtol=1e-9)


def test_nothing_goes_below_the_ceiling(tssa, cbsa):
    for _, _, result in (tssa, cbsa):
        for eps in (0.01, EPS, 100.0):
            for of in ("layer", "shuffled"):
                reached = number(result, of, "compresses", "stream", eps)
                assert (number(result, "ceiling", "compresses", "stream", eps) <= reached).all()
        for of in ("gradient step", "+U", "-U"):
            reached = number(result, of, "compresses", "stream")
            assert (number(result, "ceiling", "compresses", "stream") <= reached).all()


# ---- what applies


STEP = {"descends", "share", "converged", "kkt", "threshold", "reconstruction", "rate_kept"}


def test_every_attention_with_subspaces_has_an_objective():
    assert set(KINDS) == set(ATTENTIONS) - {"self"}


def test_what_a_member_lacks_is_not_applicable():
    series = {"neumann", "neumann_direction"}
    tost = why_not(make("tost", **SQUARE, n_layers=1).blocks[0])
    assert series | STEP <= set(tost) and "compresses" not in tost and "orthonormal" not in tost
    ista = why_not(make("tost-ista", **SQUARE, n_layers=1).blocks[0])
    assert set(ista) == series
    assert not why_not(make("cbt", **SQUARE, n_layers=1).blocks[0])
    aot = why_not(make("aot", n_layers=1).blocks[0])
    assert STEP <= set(aot) and not series & set(aot)
    assert all(reason and not reason.endswith(".") for reason in (tost | aot).values())


@pytest.mark.parametrize(
    "name", ["tost", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tost-lm", "aot"))]
)
def test_every_member_is_audited_in_its_own_words(name):
    if name == "tost-lm":
        model, data = make_lm(name, n_layers=1), torch.arange(39).view(3, 13)
    else:
        model, data = make(name, **SQUARE, n_layers=1), images(torch.float32)
    result = ci.audit(model, data, grid=name == "aot", **SETTING)
    table, words = result.table(), result.headline()
    rows = table[table["number"].isin(["compresses", "gradient", "step"])]
    assert np.isfinite(rows["value"]).all() and len(rows)
    assert ("patches" in set(rows["tokens"])) == (name == "aot")
    if name != "aot":
        assert "lowers the variational bound of R^c under every scaling" in words
    none = table[table["verdict"] == "not applicable"]
    assert none["reason"].ne("").all() and none["value"].isna().all()
    assert not set(none["number"]) & set(table[table["value"].notna()]["number"])
