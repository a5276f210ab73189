"""Sparsity, subspaces, attention, ranks, denoising: closed forms with known values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import crate_interp as ci
import crate_interp.measures as m
from tensors import close, complete, draw, orthonormal

seeds = st.integers(0, 2**31)


def axes(heads, p):
    """The coordinate axes, p to a head: a complete cover without rounding."""
    return (
        torch.eye(heads * p, dtype=torch.float64)
        .unflatten(1, (heads, p))
        .permute(1, 0, 2)
        .contiguous()
    )


# sparsity


def test_one_entry_equal_entries_and_none():
    n = 11
    one = 3 * torch.eye(n, dtype=torch.float64)
    equal = 2 * torch.ones(1, n).double()
    none = torch.zeros(1, n).double()
    for measure, of_one, of_equal, of_none in (
        (m.hoyer, 1.0, 0.0, 1.0),
        (m.gini, 1 - 1 / n, 0.0, 1 - 1 / n),
        (m.l0_norm, 1.0, float(n), 0.0),
        (m.mean_magnitude, 3 / n, 2.0, 0.0),
        (m.l1_l2_ratio, 1.0, math.sqrt(n), 0.0),
        (m.support_for_energy, 1.0, 10.0, 0.0),  # nine of eleven equal squares hold 82 %, ten 91 %
    ):
        for z, wanted in ((one, of_one), (equal, of_equal), (none, of_none)):
            close(measure(z).double(), wanted, 1e-12)


def test_sparsity_by_hand():
    z = torch.tensor([[0.0, -1.0, 2.0, 3.0]], dtype=torch.float64)
    close(m.gini(z), (-3 * 0 - 1 * 1 + 1 * 2 + 3 * 3) / (4 * 6), 1e-14)
    close(m.mean_magnitude(z), 1.5, 1e-14)
    close(m.l1_l2_ratio(z), 6 / math.sqrt(14), 1e-14)
    # 9, 13, 14 of 14
    assert [m.support_for_energy(z, energy).item() for energy in (0.6, 0.65, 0.9, 0.93)] == [
        1,
        2,
        2,
        3,
    ]
    assert m.firing_rate(torch.cat([z, -z, 0 * z])).tolist() == pytest.approx(
        [0, 2 / 3, 2 / 3, 2 / 3]
    )
    assert m.firing_rate(torch.cat([z, -z, 0 * z]), tol=2.0).tolist() == pytest.approx(
        [0, 0, 0, 2 / 3]
    )


# subspaces


@pytest.mark.parametrize("theta", [0.0, 1e-9, 1e-4, 0.3, 1.0, math.pi / 2 - 1e-9, math.pi / 2])
def test_principal_angle_of_two_lines_and_of_planes(theta):
    c, s = torch.tensor([math.cos(theta), math.sin(theta)], dtype=torch.float64)
    turn, (e1, e2, e3, e4) = orthonormal(0, 5, 5), torch.eye(5, 4, dtype=torch.float64).T

    def angles(u, v, wanted, atol=1e-15):
        got = m.principal_angles(torch.stack(u, dim=1), torch.stack(v, dim=1))
        assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=atol)

    angles([e1], [c * e1 + s * e2], [theta])
    angles([e1, e2], [c * e1 + s * e3, c * e2 + s * e4], [theta, theta])
    angles([e1, e2], [c * e2 + s * e3, e1, e4], [0.0, theta])
    angles([c * e2 + s * e3, e1, e4], [e1, e2], [0.0, theta])
    u, v = torch.stack([e1, e2], dim=1), torch.stack([c * e1 + s * e3, c * e2 + s * e4], dim=1)
    # the bases and the frame do not matter
    mixed = (turn @ u @ draw(1, 2, 2), turn @ v @ draw(2, 2, 2))
    angles(list(mixed[0].T), list(mixed[1].T), [theta, theta], atol=3e-15)


def test_random_subspaces_overlap_p_over_d():
    u, d, p = draw(3, 2003, 2, 23, 5), 23, 5
    overlap = m.subspace_overlap(u[:, 0], u[:, 1])
    error = overlap.std().item() / math.sqrt(len(overlap))
    assert error < 0.002 and overlap.mean().item() == pytest.approx(p / d, abs=4 * error)


def test_coherence_by_hand():
    c, s = math.cos(0.4), math.sin(0.4)
    d = torch.tensor([[2.0, 3 * c, 0.0, 0.0], [0.0, -3 * s, 5.0, 0.0]], dtype=torch.float64)
    wanted = [[1.0, c, 0.0, 0.0], [c, 1.0, s, 0.0], [0.0, s, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    close(m.column_cosines(d), torch.tensor(wanted, dtype=torch.float64), 1e-12)
    close(m.mutual_coherence(d), c, 1e-12)
    close(m.incoherence(complete(4, 3, 5)), 0.0)
    repeated = complete(4, 3, 5)[[0, 1, 0]] @ (draw(5, 3, 5, 5) + 3 * torch.eye(5))
    close(m.incoherence(repeated), 1.0)
    close(m.condition_number(torch.diag(torch.tensor([4.0, 0.5, 2.0])).double()), 8.0, 1e-12)
    close(
        m.condition_number(orthonormal(6, 13, 7) @ torch.diag(torch.logspace(0, 3, 7).double()).T),
        1000.0,
        1e-5,
    )
    assert m.condition_number(torch.diag(torch.tensor([1.0, 0.0])).double()).item() == math.inf


def test_tokens_in_one_subspace():
    u = axes(3, 5)
    z = torch.cat([draw(9, 1, 7, 5), torch.zeros(1, 7, 10, dtype=torch.float64)], dim=2)
    close(m.projection_energy(z, u), torch.tensor([1.0, 0.0, 0.0]).double(), 1e-14)
    close(m.membership_entropy(z, u), 0.0, 1e-15)
    assert m.subspace_snr(z, u).tolist() == [[math.inf, 0.0, 0.0]]
    u = complete(10, 3, 5)  # the same up to rounding
    z = draw(11, 7, 5) @ u[1].T
    close(m.projection_energy(z, u), torch.tensor([0.0, 1.0, 0.0]).double())
    close(m.membership_entropy(z, u), 0.0)
    assert m.subspace_snr(z, u)[1] > 1e12
    equal = sum(draw(12 + k, 1, 5) / draw(12 + k, 1, 5).norm() @ u[k].T for k in range(3))
    close(m.membership_entropy(equal, u), math.log(3))
    close(m.subspace_snr(equal, u), math.sqrt(1 / 2))
    skewed = (
        math.sqrt(2) * draw(13, 1, 5) / draw(13, 1, 5).norm() @ u[0].T
        + draw(14, 1, 5) / draw(14, 1, 5).norm() @ u[1].T
    )
    close(m.membership_entropy(skewed, u), 2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3))
    close(m.subspace_snr(skewed, u)[:2], torch.tensor([2.0, 0.5]).double().sqrt())


def test_the_real_initialisation():
    """U^T U about I / 3 and D^T D about 2 I, entry by entry, in every layer.

    A sum of d squares of U(-b, b) has mean d b^2 / 3 and variance 4 d b^4 / 45, b^2 = 1 / d (U) and
    6 / d (D); a sum of d products of two has variance d (b^2 / 3)^2. 500 thousand entries: six
    standard deviations for each.
    """
    d = 503
    cfg = ci.CrateConfig(
        family="crate", d_model=d, n_layers=2, n_heads=1, image_size=32, n_classes=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ci.HookedCrate(cfg)
    eye = torch.eye(d, dtype=torch.float64)
    for block in model.blocks:
        for basis, c, b2 in ((block.attn.U[0], 1 / 3, 1 / d), (block.mlp.D, 2.0, 6 / d)):
            defect = basis.detach().double().mT @ basis.detach().double() - c * eye
            diagonal, rest = defect.diagonal(), defect - defect.diagonal().diag()
            assert diagonal.abs().max() < 6 * math.sqrt(4 * d * b2**2 / 45)
            assert diagonal.mean().abs() < 5 * math.sqrt(4 * b2**2 / 45)
            assert rest.abs().max() < 6 * math.sqrt(d) * b2 / 3


# attention


def test_attention_entropies():
    n = 35
    uniform, one = torch.full((1, n), 1 / n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    for measure, tol in ((m.attention_entropy, 1e-12), (m.official_attention_entropy, n * 1e-8)):
        close(measure(uniform), math.log(n), tol)
        close(measure(one), 0.0, tol)
    close(m.official_attention_entropy(uniform), -math.log(1 / n + 1e-8), 1e-13)
    close(m.official_attention_entropy(one), -math.log(1 + 1e-8), 1e-16)  # below zero
    causal = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    wanted = sum(math.log(i) for i in range(1, n + 1)) / n
    assert round(wanted, 3) == 2.632
    assert m.causal_uniform_entropy(n) == pytest.approx(wanted, rel=1e-14)
    assert m.causal_uniform_entropy(1) == 0
    close(m.attention_entropy(causal).mean(), wanted, 1e-13)


@given(seeds, st.floats(0.05, 5.0))
def test_the_bias_and_the_temperature(seed, temperature):
    logits, n = draw(seed, 2, 3, 17), 17
    pattern = (logits / temperature).softmax(dim=-1)
    # rows with zeros
    pattern = torch.cat([pattern, torch.eye(17, dtype=torch.float64)[:3].expand(2, 3, 17)], dim=1)
    bias = m.attention_entropy(pattern) - m.official_attention_entropy(pattern)
    assert (bias >= -1e-15).all() and (bias <= n * 1e-8 + 1e-15).all()
    sharper = (1.1 * logits / temperature).softmax(dim=-1)
    for measure in (m.attention_entropy, m.official_attention_entropy):
        before, after = measure(pattern)[:, :3], measure(sharper)
        # one key with all but 1e-9 of the attention is as sharp as doubles tell
        assert ((after < before) | (before < 1e-6)).all() and (after <= before + 1e-15).all()


def test_mass_cover():
    # powers of two: no ties by rounding
    uniform = torch.full((1, 128), 1 / 128, dtype=torch.float64)
    assert [m.mass_cover(uniform, mass).item() for mass in (1 / 256, 1 / 2, 65 / 128, 1.0)] == [
        1,
        64,
        65,
        128,
    ]
    assert m.mass_cover(torch.full((1, 100), 0.01, dtype=torch.float64), 0.6).item() in (60, 61)
    peaky = torch.cat([torch.full((1, 90), 0.2 / 90), torch.full((1, 10), 0.08)], dim=1).double()
    assert m.mass_cover(peaky, 0.6).item() == 8
    assert m.mass_cover(7 * peaky, 0.6).item() == 8  # of the row's own sum
    assert m.mass_cover(torch.eye(7, dtype=torch.float64), 0.9).tolist() == [1] * 7


# ranks


def test_ranks_in_closed_form():
    n = 7
    for rank in (m.stable_rank, m.effective_rank):
        close(rank(draw(21, 11, 1) @ draw(22, 1, n)), 1.0)
        close(rank(orthonormal(23, 11, n)), float(n))
        close(rank(torch.zeros(5, n, dtype=torch.float64)), 0.0)
        for w in (draw(24, 11, n), draw(24, 11, 3) @ draw(25, 3, n), draw(24, n, 11)):
            assert 1 < rank(w) <= torch.linalg.matrix_rank(w) + 1e-12
            close(rank(1e5 * w), rank(w))
            close(rank(w.mT), rank(w))
    w = (
        orthonormal(26, 5, 3)
        @ torch.diag(torch.tensor([2.0, 1.0, 1.0])).double()
        @ orthonormal(27, n, 3).T
    )
    close(m.stable_rank(w), 6 / 4)
    close(m.effective_rank(w), 2 * math.sqrt(2))  # (1/2, 1/4, 1/4): entropy 1.5 ln 2


# denoising


def log_density(x, u, sigma):
    """Of the equal mixture of N(0, U_k U_k^T + sigma^2 I), up to a constant."""
    covariance = u @ u.mT + sigma**2 * torch.eye(u.shape[1], dtype=u.dtype)
    square = (x[:, None] * torch.linalg.solve(covariance, x.mT).permute(2, 0, 1)).sum(dim=-1)
    return torch.logsumexp(-square / 2 - torch.linalg.slogdet(covariance)[1] / 2, dim=-1)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 1.0, 5.0])
def test_tweedie(sigma):
    u = torch.stack([orthonormal(29 + k, 11, 3) for k in range(5)])  # not orthogonal to one another
    x = draw(34, 7, 11).requires_grad_()
    (score,) = torch.autograd.grad(log_density(x, u, sigma).sum(), x)
    x = x.detach()
    close(m.posterior_mean(x, u, sigma), x + sigma**2 * score)
    close(m.posterior_mean(x[None], u, sigma), m.posterior_mean(x, u, sigma)[None], 1e-12)
    # the printed form is the exact one of a larger sigma, without its (1 + sigma^2)^-1
    stretched = sigma * math.sqrt(1 + sigma**2)
    close(m.paper_posterior_mean(x, u, stretched), (1 + sigma**2) * m.posterior_mean(x, u, sigma))


def test_no_noise_projects_on_the_nearest_subspace():
    u, x = torch.stack([orthonormal(35 + k, 11, 3) for k in range(5)]), draw(40, 7, 11)
    projections = x @ (u @ u.mT)  # [head, pos, d]
    nearest = (x - projections).norm(dim=-1).argmin(dim=0)
    assert len(nearest.unique()) > 1
    wanted = projections[nearest, torch.arange(7)]
    close(m.posterior_mean(x, u, 1e-6), wanted)
    close(m.paper_posterior_mean(x, u, 1e-6), wanted)


def test_one_subspace_shrinks():
    u, x = orthonormal(41, 11, 3)[None], draw(42, 7, 11)
    for sigma in (0.1, 0.3, 2.0):
        close(m.posterior_mean(x, u, sigma), x @ u[0] @ u[0].T / (1 + sigma**2))
        close(m.paper_posterior_mean(x, u, sigma), x @ u[0] @ u[0].T)
    error = (
        m.paper_posterior_mean(x, u, 0.3) - m.posterior_mean(x, u, 0.3)
    ).norm() / m.posterior_mean(x, u, 0.3).norm()
    close(error, 0.09)


def test_worked_by_hand():
    z = torch.tensor([[0.0, 3.0, 0.0, -4.0], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert m.zero_fraction(z).tolist() == [0.5, 1.0, 0.0]
    assert m.zero_fraction(z, tol=3.0).tolist() == [0.75, 1.0, 1.0]
    assert m.l1_norm(z).tolist() == [7.0, 0.0, 8.0]
    # (sqrt 4 - 7/5) / (sqrt 4 - 1) = 0.6; all zero is 1 by definition; equal entries 0
    assert_close(m.hoyer(z), torch.tensor([0.6, 1.0, 0.0]))
    assert m.hoyer(torch.tensor([[0.0, 0.0, 5.0]])).item() == pytest.approx(1)
