"""Coding rates: closed forms, bounds, and the float32 guard."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from crate_interp.measures import (
    coding_rate,
    official_coding_rate,
    rate_reduction,
    subspace_coding_rate,
)
from crate_interp.measures import rates as module
from tensors import complete, draw, orthonormal

seeds = st.integers(0, 2**31)
epsilons = st.sampled_from([0.05, 0.1, 0.5, 2.0])


def test_closed_form_one_token_and_zero():
    z = torch.tensor([[3.0, 4.0, 0.0]], dtype=torch.float64)  # |z|^2 = 25, d = 3, N = 1
    assert coding_rate(z, 0.5).item() == pytest.approx(0.5 * math.log(1 + 3 * 25 / 0.25), rel=1e-12)
    assert coding_rate(torch.zeros(5, 7), 0.1).item() == 0


def test_any_tight_frame_has_the_same_rates():
    # Z^T Z = c I: which token sits in which subspace does not show
    u, n = complete(1, 3, 5), 23
    frames = [torch.linalg.qr(draw(seed, n, 15))[0] * 2 for seed in (2, 3)]
    a, b = (
        torch.stack([coding_rate(z, 0.1), subspace_coding_rate(z, u, 0.1).sum()]) for z in frames
    )
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_one_complete_head_has_the_rate_of_the_whole():
    z, u = draw(4, 11, 7), orthonormal(5, 7, 7)[None]
    torch.testing.assert_close(
        subspace_coding_rate(z, u, 0.1)[0], coding_rate(z, 0.1), rtol=1e-12, atol=0
    )
    assert abs(rate_reduction(z, u, 0.1).item()) < 1e-10


def test_limits_of_epsilon():
    z = draw(7, 17, 5)
    eigenvalues = torch.linalg.eigvalsh(z.T @ z)
    small = 5 * math.log(1 / 1e-6) + 0.5 * torch.log(5 * eigenvalues / 17).sum().item()
    assert coding_rate(z, 1e-6).item() == pytest.approx(small, rel=1e-9)
    large = 5 * z.square().sum().item() / (2 * 17 * 1e6**2)
    # 1e-12 on top of 1: what float64 can hold
    assert coding_rate(z, 1e6).item() == pytest.approx(large, rel=1e-3)


def test_official_extremes_and_equivalence():
    p, n = 5, 23
    one = torch.ones(2, n, p, dtype=torch.float64)  # rank one per head: 1/2 ln(1 + p / 0.01)
    torch.testing.assert_close(
        official_coding_rate(one), torch.full((2,), 0.5 * math.log(1 + p / 0.01)).double()
    )
    frame = torch.eye(p, dtype=torch.float64).repeat(4, 1)  # tight: p/2 ln(1 + 1/0.01)
    assert official_coding_rate(frame[None]).item() == pytest.approx(
        p / 2 * math.log(101), rel=1e-12
    )
    codes = draw(8, 3, n, p)
    unit = codes / codes.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(
        official_coding_rate(codes), coding_rate(unit, 0.1), rtol=1e-12, atol=0
    )
    scale = draw(9, 3, n, 1).abs() + 0.1
    torch.testing.assert_close(
        official_coding_rate(codes * scale), official_coding_rate(codes), rtol=1e-10, atol=0
    )


def test_both_sides_of_the_float32_guard(monkeypatch):
    calls = []
    real = module._half_logdet64
    monkeypatch.setattr(
        module, "_half_logdet64", lambda x, *rest: calls.append(len(x)) or real(x, *rest)
    )
    well, ill = draw(11, 7, 29).float() * 0.02, (draw(12, 7, 29) + 30).float()
    coding_rate(well, 0.1)
    assert calls == []
    both = coding_rate(torch.stack([well, ill, well]), 0.1)
    assert calls == [1]  # the one sample, not its neighbours
    for z, got in zip((well, ill, well), both, strict=True):
        assert got.item() == pytest.approx(reference.coding_rate(z.numpy(), 0.1), rel=2e-6)


def test_without_the_guard_float32_is_wrong(monkeypatch):
    z = (draw(13, 97, 101) * 0.01 + 30).float()
    exact = reference.coding_rate(z.numpy(), 0.1)
    assert coding_rate(z, 0.1).item() == pytest.approx(exact, rel=1e-6)
    monkeypatch.setattr(module, "FLOAT32_LIMIT", math.inf)
    rate, failed = module._cholesky_rate(z[None, None], 101 / (97 * 0.01), math.inf)
    assert bool(failed) or abs(rate.item() - exact) > 1e-3 * exact


@given(seeds, epsilons)
def test_bounds(seed, eps):
    heads, p = 3, 4
    z, u = draw(seed, 9, heads * p), complete(seed + 1, heads, p)
    rate = coding_rate(z, eps)
    assert rate > 0 and coding_rate(2 * z, eps) > rate > coding_rate(z, 2 * eps)
    assert rate_reduction(z, u, eps) <= heads * p / 2 * math.log(heads) + 1e-9


@given(seeds)
def test_official_invariances(seed):
    codes = draw(seed, 2, 11, 3)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    got = official_coding_rate(codes)
    for other in (codes[:, order], codes @ orthonormal(seed + 1, 3, 3), codes * 7, -codes):
        torch.testing.assert_close(official_coding_rate(other), got, rtol=1e-9, atol=1e-9)
    assert (got <= 3 / 2 * math.log(101) + 1e-9).all() and (got >= 0.5 * math.log(301) - 1e-9).all()


def test_leading_axes_are_batch_axes():
    z, u = draw(14, 2, 3, 13, 6), draw(15, 5, 6, 7)
    whole, heads = coding_rate(z, 0.1), subspace_coding_rate(z, u, 0.1)
    assert whole.shape == (2, 3) and heads.shape == (2, 3, 5)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(whole[i, j], coding_rate(z[i, j], 0.1), rtol=1e-12, atol=0)
            torch.testing.assert_close(
                heads[i, j], subspace_coding_rate(z[i, j], u, 0.1), rtol=1e-12, atol=0
            )


def test_not_finite():
    z = draw(19, 3, 7, 5)
    for bad in (math.nan, math.inf):
        z[1, 2, 3] = bad
        for tensor in (z, z.float()):
            got = coding_rate(tensor, 0.1)
            assert got.isnan().tolist() == [False, True, False]
