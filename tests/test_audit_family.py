"""The audit of TSSA, CBSA and of attention alone: each by its own objective, another way."""

import numpy as np
import pytest
import torch

import audit_reference as slow
import crate_interp as ci
from conftest import make
from crate_interp.audits.objectives import KINDS
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


def test_every_attention_with_subspaces_has_an_objective():
    assert set(KINDS) == set(ATTENTIONS) - {"self"}
