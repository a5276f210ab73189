"""The positive control: its tokens, its score, the layer built for it, and the layer's defects."""

import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch

import reference

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import planted as demo
from planted_defects import DEFECTS

from crate_interp.measures import principal_angles

V = demo.subspaces(17, 5, 3)


@pytest.fixture(scope="module")
def ideal():
    return demo.ideal(n=7)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the tokens


def test_clean_tokens_lie_in_their_subspace():
    noisy, clean, subspace = demo.mixture(199, 37, V, 2, 0.3, seed=1)
    inside = torch.einsum("nqd,nqdp->nqp", clean, V[subspace])
    torch.testing.assert_close(inside.norm(dim=-1), clean.norm(dim=-1))
    assert {len(each.unique()) for each in subspace} == {2}
    share = torch.bincount(subspace.flatten()) / subspace.numel()
    assert (share - 1 / 5).abs().max() < 0.05
    assert abs(float(inside.var()) - 1) < 0.05
    assert abs(float((noisy - clean).var()) - 0.09) < 0.003


def test_the_model_gets_the_tokens(ideal):
    model = ideal.model
    tokens, _, _ = demo.mixture(7, 36, ideal.v, demo.USED, demo.SIGMA, seed=1)
    _, cache = model.run_with_cache(ideal.images)
    wanted = tokens - tokens.mean(dim=-1, keepdim=True)
    wanted = demo.SIZE * wanted / wanted.std(dim=-1, correction=0, keepdim=True)
    torch.testing.assert_close(cache["resid_pre", 0][:, 1:].double(), wanted, rtol=1e-3, atol=1e-4)


# ---- the score


def test_the_overlap_sees_spans_and_not_their_order_or_their_bases():
    mixed = V @ normal(5, 3, 3)
    assert demo.matched_overlap(mixed[[3, 0, 4, 2, 1]], V) == pytest.approx(1)


def test_the_matching_is_the_best_of_all():
    u = normal(5, 17, 3, seed=2)
    best = max(
        sum(float(principal_angles(u[i], V[j]).cos().square().mean()) for i, j in enumerate(order))
        for order in permutations(range(5))
    )
    assert demo.matched_overlap(u, V) == pytest.approx(best / 5)


# ---- the layer


def test_the_update_is_mssa_less_a_share_of_the_stream(ideal):
    with ideal.working():
        _, cache = ideal.model.run_with_cache(ideal.images)
    for layer, block in enumerate(ideal.model.blocks):
        z = cache["resid_pre", layer][3].double()
        centred = z - z.mean(dim=-1, keepdim=True)
        y = centred / centred.square().mean(dim=-1, keepdim=True).sqrt()
        wanted = -demo.SHRINK * centred
        for u in block.attn.U.double():
            code = y @ u
            pattern = (code @ code.T / 3**0.5).softmax(dim=-1)
            wanted += demo.WRITE * demo.SIZE * pattern @ code @ u.T
        update = (cache["resid_mid", layer] - cache["resid_pre", layer])[3].double()
        torch.testing.assert_close(update, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("eps", [*demo.ALL_EPS, demo.EPS])
def test_the_ideal_compresses_in_every_frame(ideal, layer, eps):
    for frame, found in demo.compression(ideal, eps, layer).items():
        assert found["change"] < -1e-6 and found["excess"] < -1e-6, (frame, found)
        assert found["cosine"] >= 0.49 and found["step_low"] > 0, (frame, found)


def test_numbers_of_a_frame_by_another_way(ideal):
    with ideal.working():
        _, cache = ideal.model.run_with_cache(ideal.images)
    u = ideal.model.blocks[0].attn.U.detach().double()
    z, mid = (cache[name, 0].double() for name in ("resid_pre", "resid_mid"))

    def read(x):
        x = x - x.mean(dim=-1, keepdim=True)
        return x / x.square().mean(dim=-1, keepdim=True).sqrt()

    def unit(x):
        return x * (37 * 15) ** 0.5 / x.square().sum(dim=(1, 2), keepdim=True).sqrt()

    for frame, made in (("stream", lambda x: x), ("read", read), ("unit", unit)):
        found = demo.compression(ideal, 1.3)[frame]
        rates = torch.tensor(
            [
                [reference.subspace_coding_rate(each.numpy(), u.numpy(), 1.3).sum() for each in x]
                for x in (made(z), made(mid))
            ]
        )
        assert found["change"] == pytest.approx(
            float(((rates[1] - rates[0]) / rates[0]).max()), rel=1e-4
        )
        start = made(z).clone().requires_grad_()
        codes = torch.einsum("bnd,kdp->bknp", made(start), u)
        gram = torch.eye(3).double() + 3 / (37 * 1.3**2) * codes.mT @ codes
        (0.5 * torch.logdet(gram)).sum().backward()  # through the frame, so along it
        slope, moved = start.grad, made(mid) - made(z)
        inner = -(slope * moved).sum(dim=(1, 2))
        along = demo.along_frame(frame, made(z), moved)
        lengths = along.norm(dim=(1, 2)) * slope.norm(dim=(1, 2))
        assert found["cosine"] == pytest.approx(float((inner / lengths).min()), rel=1e-4)
        step = inner / slope.square().sum(dim=(1, 2)) * 9 / 4 * 3 / (37 * 1.3**2)
        assert found["step_high"] == pytest.approx(float(step.max()), rel=1e-4)


# ---- the defects


def cells(claims):
    return {(claim, frame) for claim, frames in claims.items() for frame in frames}


@pytest.mark.parametrize("name", ["", *DEFECTS])
def test_a_defect_breaks_its_claims_and_no_other(name):
    planted = demo.ideal(n_layers=1)
    wanted, unsure, lost = set(), set(), False
    if name:
        defect = DEFECTS[name]
        defect.change(planted)
        wanted, unsure = cells(defect.breaks), cells(defect.unsure)
        lost = "overlap" in defect.breaks
    found = set()
    for frame, numbers in demo.compression(planted, demo.EPS).items():
        kept = {
            "compresses": numbers["change"] < -1e-6,
            "excess": numbers["excess"] < -1e-6,
            "gradient": numbers["cosine"] >= 0.5,
            "step": numbers["step_low"] > 1e-6 and numbers["step_high"] < 2,
        }
        found |= {(claim, frame) for claim, word in kept.items() if not word}
    assert not wanted & unsure and found - unsure == wanted
    u = planted.model.blocks[0].attn.U.double()
    assert (demo.matched_overlap(u, planted.v) < 0.5) == lost


# ---- training
