"""Coding rates: closed forms, a second implementation, invariances, and the float32 guard."""

import math

import numpy as np
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

seeds = st.integers(0, 2**31)
epsilons = st.sampled_from([0.05, 0.1, 0.5, 2.0])


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def orthogonal(seed, d):
    return torch.linalg.qr(draw(seed, d, d))[0]


def subspaces(seed, heads, p):
    """Complete orthonormal U [head, heads * p, p]."""
    return orthogonal(seed, heads * p).unflatten(1, (heads, p)).permute(1, 0, 2)


def test_closed_form_orthogonal_blocks():
    # C_k C_k^T = E I_p in every subspace: R = d/2 ln(1 + d E / (N eps^2)), R^c = d/2 ln(1 + p E /
    # (N eps^2))
    heads, p, energy, eps = 3, 5, 4.0, 0.3
    d = n = heads * p
    u = subspaces(0, heads, p)
    z = math.sqrt(energy) * torch.cat(list(u), dim=1).T  # row i lies in one subspace, at length 2
    assert coding_rate(z, eps).item() == pytest.approx(
        d / 2 * math.log(1 + d * energy / (n * eps**2)), rel=1e-12
    )
    rc = subspace_coding_rate(z, u, eps).sum().item()
    assert rc == pytest.approx(d / 2 * math.log(1 + p * energy / (n * eps**2)), rel=1e-12)


def test_closed_form_one_token_and_zero():
    z = torch.tensor([[3.0, 4.0, 0.0]], dtype=torch.float64)  # |z|^2 = 25, d = 3, N = 1
    assert coding_rate(z, 0.5).item() == pytest.approx(0.5 * math.log(1 + 3 * 25 / 0.25), rel=1e-12)
    assert coding_rate(torch.zeros(5, 7), 0.1).item() == 0


def test_any_tight_frame_has_the_same_rates():
    # Z^T Z = c I: which token sits in which subspace does not show
    u, n = subspaces(1, 3, 5), 23
    frames = [torch.linalg.qr(draw(seed, n, 15))[0] * 2 for seed in (2, 3)]
    a, b = (
        torch.stack([coding_rate(z, 0.1), subspace_coding_rate(z, u, 0.1).sum()]) for z in frames
    )
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_one_complete_head_has_the_rate_of_the_whole():
    z, u = draw(4, 11, 7), orthogonal(5, 7)[None]
    torch.testing.assert_close(
        subspace_coding_rate(z, u, 0.1)[0], coding_rate(z, 0.1), rtol=1e-12, atol=0
    )
    assert abs(rate_reduction(z, u, 0.1).item()) < 1e-10


def test_wide_and_tall_forms_agree():
    # N < d takes the N x N Gram, N > d the d x d one; zero-padding features d -> 2d is eps -> eps /
    # sqrt 2
    z = draw(6, 13, 7)
    padded = torch.cat([z, torch.zeros(13, 7, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(
        coding_rate(padded, 0.2), coding_rate(z, 0.2 / math.sqrt(2)), rtol=1e-12, atol=0
    )


def test_limits_of_epsilon():
    z = draw(7, 17, 5)
    eigenvalues = torch.linalg.eigvalsh(z.T @ z)
    small = 5 * math.log(1 / 1e-6) + 0.5 * torch.log(5 * eigenvalues / 17).sum().item()
    assert coding_rate(z, 1e-6).item() == pytest.approx(small, rel=1e-9)
    large = 5 * z.square().sum().item() / (2 * 17 * 1e6**2)
    assert coding_rate(z, 1e6).item() == pytest.approx(
        large, rel=1e-3
    )  # 1e-12 on top of 1: what float64 can hold


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


def test_a_zero_token_adds_nothing():
    z = draw(10, 11, 5)
    with_zero = torch.cat([z, torch.zeros(1, 5, dtype=torch.float64)])
    # N counts it: N -> N + 1 is eps -> eps sqrt((N + 1) / N)
    torch.testing.assert_close(
        coding_rate(with_zero, 0.1), coding_rate(z, 0.1 * math.sqrt(12 / 11)), rtol=1e-12, atol=0
    )
    assert torch.isfinite(official_coding_rate(with_zero[None])).all()
    expected = reference.official_coding_rate(with_zero[None].numpy())
    assert official_coding_rate(with_zero[None]).item() == pytest.approx(expected[0], rel=1e-12)


CASES = {
    "random": lambda s: draw(s, 17, 11),
    "wide": lambda s: draw(s, 7, 29),
    "low rank": lambda s: draw(s, 17, 3) @ draw(s + 1, 3, 11),
    "badly scaled": lambda s: draw(s, 17, 11) * torch.logspace(-4, 4, 11, dtype=torch.float64),
    "off centre": lambda s: draw(s, 17, 29) + 30,
    "repeated": lambda s: draw(s, 5, 11).repeat_interleave(3, dim=0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype, rel", [(torch.float64, 1e-12), (torch.float32, 5e-5)])
def test_against_singular_values(case, dtype, rel):
    for seed in range(0, 40, 2):
        z = CASES[case](seed).to(dtype)
        u = draw(seed + 100, 3, z.shape[1], 5, dtype=dtype)
        got = coding_rate(z, 0.1)
        assert got.dtype == dtype
        assert got.item() == pytest.approx(reference.coding_rate(z.numpy(), 0.1), rel=rel)
        wanted = reference.subspace_coding_rate(z.numpy(), u.numpy(), 0.1)
        np.testing.assert_allclose(subspace_coding_rate(z, u, 0.1).numpy(), wanted, rtol=rel)
        codes = torch.einsum("nd,hdp->hnp", z, u)
        np.testing.assert_allclose(
            official_coding_rate(codes).numpy(),
            reference.official_coding_rate(codes.numpy()),
            rtol=rel,
        )


def test_both_sides_of_the_float32_guard(monkeypatch):
    calls = []
    real = module._half_logdet64
    monkeypatch.setattr(
        module, "_half_logdet64", lambda x, *rest: calls.append(len(x)) or real(x, *rest)
    )
    well, ill = draw(11, 7, 29, dtype=torch.float32) * 0.02, (draw(12, 7, 29) + 30).float()
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
def test_invariances(seed, eps):
    z, u = draw(seed, 13, 6), draw(seed + 1, 2, 6, 3)
    rate, rc = coding_rate(z, eps), subspace_coding_rate(z, u, eps)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(seed))
    rotation, mix = orthogonal(seed + 2, 6), orthogonal(seed + 3, 13)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)  # noqa: E731
    close(coding_rate(z[order], eps), rate)
    close(coding_rate(mix @ z, eps), rate)
    close(coding_rate(z @ rotation, eps), rate)
    close(subspace_coding_rate(z @ rotation, rotation.T @ u, eps), rc)
    close(subspace_coding_rate(z, u @ orthogonal(seed + 4, 3), eps), rc)
    close(coding_rate(z.repeat(2, 1), eps), rate)
    close(coding_rate(torch.cat([z, torch.zeros_like(z)]), eps), coding_rate(z, eps * math.sqrt(2)))
    close(coding_rate(3 * z, eps), coding_rate(z, eps / 3))
    close(rate_reduction(z, u, eps), rate - rc.sum())


@given(seeds, epsilons)
def test_bounds(seed, eps):
    heads, p = 3, 4
    z, u = draw(seed, 9, heads * p), subspaces(seed + 1, heads, p)
    rate = coding_rate(z, eps)
    assert rate > 0 and coding_rate(2 * z, eps) > rate > coding_rate(z, 2 * eps)
    assert rate_reduction(z, u, eps) <= heads * p / 2 * math.log(heads) + 1e-9


@given(seeds)
def test_official_invariances(seed):
    codes = draw(seed, 2, 11, 3)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    got = official_coding_rate(codes)
    for other in (codes[:, order], codes @ orthogonal(seed + 1, 3), codes * 7, -codes):
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


def test_gradients():
    z = draw(16, 7, 5).requires_grad_()
    u = draw(17, 2, 5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: coding_rate(z, 0.3), z)
    assert torch.autograd.gradcheck(lambda z, u: subspace_coding_rate(z, u, 0.3), (z, u))
    assert torch.autograd.gradcheck(lambda z, u: rate_reduction(z, u, 0.3), (z, u))
    ill = (draw(18, 7, 29) + 30).float().requires_grad_()
    coding_rate(torch.stack([ill, ill * 0]), 0.1).sum().backward()
    assert ill.grad.isfinite().all()


def test_not_finite_and_bad_arguments():
    z = draw(19, 3, 7, 5)
    for bad in (math.nan, math.inf):
        z[1, 2, 3] = bad
        for tensor in (z, z.float()):
            got = coding_rate(tensor, 0.1)
            assert got.isnan().tolist() == [False, True, False]
    for eps in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="give a number above 0"):
            coding_rate(z, eps)
    with pytest.raises(ValueError, match="eps_squared=0.0: give a number above 0"):
        official_coding_rate(z, 0.0)
    with pytest.raises(ValueError, match=r"there are no tokens to measure: .* \[0, 5\]"):
        coding_rate(z[:, :0], 0.1)
