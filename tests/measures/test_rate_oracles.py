"""Coding rates and their derivatives: closed forms with known values."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import crate_interp.measures as m
import reference
from crate_interp.measures import rates as module
from tensors import close, complete, draw, orthonormal

seeds = st.integers(0, 2**31)


def blocks(u, per_class, energy):
    """Tokens of class k in subspace k alone, C_k^T C_k = energy I; and their labels."""
    frames = [
        math.sqrt(energy) * orthonormal(50 + k, per_class, u.shape[2]) @ u[k].T
        for k in range(len(u))
    ]
    return torch.cat(frames), torch.arange(len(u)).repeat_interleave(per_class)


def test_a_token_costs_what_the_rate_falls_without_it():
    z, u = draw(1, 3, 13, 7), draw(2, 5, 7, 3)
    costs, codes = m.token_rates(z, 0.3), torch.einsum("bpd,hdk->bhpk", z, u)
    for token in (0, 11):
        without = z.clone()
        without[:, token] = 0
        close(costs[:, token], m.coding_rate(z, 0.3) - m.coding_rate(without, 0.3), 1e-10)
        change = m.subspace_coding_rate(z, u, 0.3) - m.subspace_coding_rate(without, u, 0.3)
        close(m.token_rates(codes, 0.3)[..., token], change, 1e-10)
    turn = torch.linalg.qr(draw(3, 7, 7))[0]
    close(m.token_rates(z @ turn, 0.3), costs, 1e-10)
    close(m.token_rates(z.float(), 0.3).double(), costs, 1e-5)
    for scale in (1e4, 1e8):  # no digit of what is left of a token beside the others is lost
        wide, without = draw(4, 8, 16) * scale, draw(4, 8, 16) * scale
        without[3] = 0
        close(
            m.token_rates(wide, 0.1)[3],
            m.coding_rate(wide, 0.1) - m.coding_rate(without, 0.1),
            1e-9,
        )
    z[1, 4, 2], z[2, 6] = math.nan, 0
    costs = m.token_rates(z, 0.3)
    assert costs.isnan().all(dim=1).tolist() == [False, True, False] and costs[2, 6] == 0
    with pytest.raises(ValueError, match="eps=0"):
        m.token_rates(z, 0.0)


# rates


def test_orthogonal_blocks_in_all_three_rates():
    heads, p, n, energy, eps = 3, 5, 11, 4.0, 0.3
    d, pos, u = heads * p, heads * n, complete(0, heads, p)
    z, labels = blocks(u, n, energy)
    close(m.coding_rate(z, eps), d / 2 * math.log(1 + d * energy / (pos * eps**2)), 1e-12)
    close(
        m.subspace_coding_rate(z, u, eps).sum(),
        d / 2 * math.log(1 + p * energy / (pos * eps**2)),
        1e-12,
    )
    wanted = p / 2 * math.log(1 + d * energy / (n * eps**2))
    close(m.mcr2_coding_rate(z, labels, eps), wanted, 1e-12)
    close(m.mcr2_coding_rate(z, F.one_hot(labels).double(), eps), wanted, 1e-12)
    # four classes without tokens
    close(m.mcr2_coding_rate(z, F.one_hot(labels, 7).double(), eps), wanted, 1e-12)


def test_only_the_class_form_sees_which_token_lies_where():
    u = complete(2, 3, 5)
    z, labels = blocks(u, 11, 4.0)
    frame = 2 * orthonormal(3, 33, 15)  # the same Z^T Z = 4 I, and no token in any subspace
    close(m.coding_rate(frame, 0.3), m.coding_rate(z, 0.3), 1e-12)
    close(m.subspace_coding_rate(frame, u, 0.3), m.subspace_coding_rate(z, u, 0.3), 1e-12)
    assert m.mcr2_coding_rate(frame, labels, 0.3) > 1.5 * m.mcr2_coding_rate(z, labels, 0.3)


def test_small_eps_leaves_a_constant_and_the_correlation_between_subspaces():
    """Fischer: sum_k logdet(U_k^T C U_k) >= logdet C.

    They are equal where C has no blocks between subspaces.
    """
    heads, p, eps = 3, 5, 1e-7
    u = complete(4, heads, p)
    mixed = draw(5, 23, 15) @ draw(6, 15, 15)
    apart = (
        orthonormal(7, 23, 15)
        @ torch.block_diag(*(draw(8 + k, p, p) for k in range(heads)))
        @ torch.cat([*u.mT])
    )
    for z, strict in ((mixed, True), (apart, False)):
        c = z.T @ z
        bracket = (
            0.5 * (torch.linalg.slogdet(u.mT @ c @ u)[1].sum() - torch.linalg.slogdet(c)[1]).item()
        )
        assert bracket > 1 if strict else abs(bracket) < 1e-9
        close(m.rate_reduction(z, u, eps), 15 / 2 * math.log(heads) - bracket, 1e-9)


@given(seeds)
def test_with_the_whole_space_as_width_the_subspaces_cost_more(seed):
    heads, p, eps = 3, 5, 0.4
    u, scaled = complete(seed, heads, p), eps * math.sqrt(p / (heads * p))  # p / eps'^2 = d / eps^2
    z = draw(seed + 1, 13, 15)
    assert m.subspace_coding_rate(z, u, scaled).sum() >= m.coding_rate(z, eps) - 1e-10
    z, _ = blocks(u, 11, 2.0)
    close(m.subspace_coding_rate(z, u, scaled).sum(), m.coding_rate(z, eps))


def test_rank_one_and_duplicates():
    z = draw(11, 1, 7)
    wanted = 0.5 * math.log(1 + 7 * z.square().sum().item() / 0.25)
    close(m.coding_rate(z.repeat(13, 1), 0.5), wanted, 1e-12)
    weights = draw(12, 13, 1)
    wanted = 0.5 * math.log(
        1 + 7 * (weights.square().sum() * z.square().sum()).item() / (13 * 0.25)
    )
    close(m.coding_rate(weights @ z, 0.5), wanted, 1e-12)


def test_many_gaussian_tokens():
    # to first order R - limit is d / (2 (eps^2 + d)) tr(C - I), a mean of N d squares: standard
    # deviation below
    n, d, eps = 100_003, 7, 0.5
    spread = 0.5 / (1 + eps**2 / d) * math.sqrt(2 * d / n)
    wanted = d / 2 * math.log(1 + d / eps**2)
    assert m.coding_rate(draw(13, n, d), eps).item() == pytest.approx(wanted, abs=5 * spread)


@given(seeds)
def test_a_linear_map_moves_the_rate_between_its_singular_values(seed):
    z, d = draw(seed, 13, 7), draw(seed + 1, 7, 7)
    s = torch.linalg.svdvals(d)
    rate = m.coding_rate(z @ d.T, 0.3)
    assert m.coding_rate(s[-1] * z, 0.3) - 1e-10 <= rate <= m.coding_rate(s[0] * z, 0.3) + 1e-10
    close(m.dictionary_rate_change(z, d, 0.3), rate - m.coding_rate(z, 0.3))
    close(m.dictionary_rate_change(z, orthonormal(seed, 7, 7), 0.3), 0.0)
    tall = orthonormal(seed, 11, 7)  # the same Gram, but of 11 features: eps is eps sqrt(7 / 11)
    close(
        m.dictionary_rate_change(z, tall, 0.3),
        m.coding_rate(z, 0.3 * math.sqrt(7 / 11)) - m.coding_rate(z, 0.3),
    )


@pytest.mark.parametrize(
    "d, heads, least, most",
    [
        (384, 6, 26.3, 886.1),
        (576, 12, 50.9, 1329.2),
        (768, 12, 52.6, 1772.2),
        (1024, 16, 70.1, 2362.9),
    ],
)
def test_the_published_curves_lie_between(d, heads, least, most):
    p = d // heads
    # rank one in each head
    lowest = m.official_coding_rate(torch.ones(heads, 197, p, dtype=torch.float64)).sum()
    # a tight frame
    highest = m.official_coding_rate(torch.eye(p, dtype=torch.float64).repeat(heads, 3, 1)).sum()
    close(lowest, heads / 2 * math.log(1 + p / 0.01), 1e-12)
    close(highest, d / 2 * math.log(101), 1e-12)
    assert (round(lowest.item(), 1), round(highest.item(), 1)) == (least, most)


def test_bits_and_nats():
    z = draw(14, 13, 7)
    close(m.coding_length(z, 0.3) * math.log(2) / m.coding_rate(z, 0.3), 13.0 + 7.0, 1e-14)
    close(
        m.coding_length(z[:1], 0.3),
        8 * 0.5 * math.log2(1 + 7 * z[0].square().sum().item() / 0.09),
        1e-12,
    )


def test_a_spectrum_has_the_rates():
    z, u = draw(15, 13, 15), draw(16, 3, 15, 5)
    whole, parts = m.spectrum(z), m.subspace_spectrum(z, u)
    assert whole.shape == (13,) and parts.shape == (3, 5)  # the smaller of tokens and width
    close(whole, torch.linalg.eigvalsh(z @ z.T).flip(0))
    close(m.rate_of_spectrum(whole, 13, 15, 0.3), m.coding_rate(z, 0.3), 1e-12)
    for i, eps in enumerate(grid := [0.1, 0.3, 2.0]):
        close(
            m.rate_of_spectrum(parts, 13, 5, grid)[:, i], m.subspace_coding_rate(z, u, eps), 1e-12
        )
    close(
        m.rate_of_spectrum(torch.tensor([3.0, 1.0]).double(), 2, 2, 1.0), 0.5 * math.log(8), 1e-15
    )


# derivatives


@pytest.mark.parametrize("shape", [(13, 7), (5, 11), (1, 7)])
def test_gradients_are_those_of_autograd_and_of_differences(shape):
    z, u, eps = draw(17, *shape).requires_grad_(), draw(18, 3, shape[1], 2), 0.3
    rates = (lambda z: m.coding_rate(z, eps), lambda z: m.subspace_coding_rate(z, u, eps).sum())
    forms = (
        lambda z: m.coding_rate_gradient(z, eps),
        lambda z: m.subspace_coding_rate_gradient(z, u, eps),
    )
    along = draw(19, *shape)
    for rate, form in zip(rates, forms, strict=True):
        close(form(z.detach()), torch.autograd.grad(rate(z), z)[0], 1e-9)
        with torch.no_grad():  # central differences: error O(h^2), and rounding 1e-16 / h
            slope = (rate(z + 1e-5 * along) - rate(z - 1e-5 * along)) / 2e-5
        close(slope, (form(z.detach()) * along).sum(), 1e-8)


@pytest.mark.parametrize("n, d", [(5, 3), (3, 5)])
def test_gradcheck_on_either_gram(n, d):
    z, u = draw(22, n, d).requires_grad_(), draw(23, 2, d, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: m.coding_rate(z, 0.5), z)
    assert torch.autograd.gradgradcheck(lambda z: m.coding_rate(z, 0.5), z)
    assert torch.autograd.gradcheck(lambda z, u: m.subspace_coding_rate(z, u, 0.5), (z, u))
    assert torch.autograd.gradcheck(lambda z, u: m.rate_reduction(z, u, 0.5), (z, u))


def hessian_product(z, eps, along):
    """The published form: a D M - a^2 Z M (Z^T D + D^T Z) M, M = (I + a Z^T Z)^-1.

    Tokens are columns there.
    """
    columns, step, a = z.T, along.T, z.shape[1] / (len(z) * eps**2)
    inverse = torch.linalg.inv(torch.eye(len(z), dtype=z.dtype) + a * columns.T @ columns)
    return (
        a * step @ inverse
        - a**2 * columns @ inverse @ (columns.T @ step + step.T @ columns) @ inverse
    ).T


@pytest.mark.parametrize("n, d", [(13, 7), (5, 11)])
def test_hessian_times_a_vector(n, d):
    z, along, eps = draw(24, n, d).requires_grad_(), draw(25, n, d), 0.7
    (slope,) = torch.autograd.grad(m.coding_rate(z, eps), z, create_graph=True)
    (twice,) = torch.autograd.grad((slope * along).sum(), z)
    close(hessian_product(z.detach(), eps, along), twice, 1e-9)
    with torch.no_grad():
        ahead, behind = (m.coding_rate_gradient(z + h * along, eps) for h in (1e-5, -1e-5))
    close((ahead - behind) / 2e-5, twice, 1e-8)


@pytest.mark.parametrize("n, d, rank", [(13, 7, 7), (5, 11, 5), (13, 11, 3)])
def test_euler(n, d, rank):
    z = draw(26, n, rank) @ draw(27, rank, d)
    inner = (z * m.coding_rate_gradient(z, 0.3)).sum()
    x = d / (n * 0.09) * m.spectrum(z)
    close(inner, (x / (1 + x)).sum())
    assert inner < rank
    close((z * m.coding_rate_gradient(z, 1e-6)).sum(), float(rank), 1e-8)  # the bound, at small eps


def test_neumann_gradient_on_one_singular_value():
    # C = s Q with Q^T Q = I: a C - a^2 C C^T C = a (1 - x) C and a C (I + a C^T C)^-1 = a / (1 + x)
    # C, x = a s^2
    u, a = orthonormal(28, 11, 3)[None], 3 / (13 * 0.25)
    for x in (0.25, 1.0, 4.0):
        z = math.sqrt(x / a) * orthonormal(29, 13, 3) @ u[0].T
        close(m.neumann_gradient(z, u, 0.5), a * (1 - x) * z, 1e-12)
        close(m.subspace_coding_rate_gradient(z, u, 0.5), a / (1 + x) * z, 1e-12)
    z = (
        orthonormal(29, 13, 3)
        @ torch.diag(torch.tensor([0.5, 2.0, 3.0]).double().div(a).sqrt())
        @ u[0].T
    )
    close(m.neumann_invalid(z, u, 0.5), 2 / 3, 1e-12)
    close(m.neumann_invalid(draw(30, 2, 13, 11) * 1e-3, u, 0.5), torch.zeros(2, 1))


epsilons = st.sampled_from([0.05, 0.1, 0.5, 2.0])


def test_limits_of_epsilon():
    z = draw(7, 17, 5)
    eigenvalues = torch.linalg.eigvalsh(z.T @ z)
    small = 5 * math.log(1 / 1e-6) + 0.5 * torch.log(5 * eigenvalues / 17).sum().item()
    assert m.coding_rate(z, 1e-6).item() == pytest.approx(small, rel=1e-9)
    large = 5 * z.square().sum().item() / (2 * 17 * 1e6**2)
    # 1e-12 on top of 1: what float64 can hold
    assert m.coding_rate(z, 1e6).item() == pytest.approx(large, rel=1e-3)


def test_the_official_rate_is_that_of_tokens_of_length_one():
    codes = draw(8, 3, 23, 5)
    unit = codes / codes.norm(dim=-1, keepdim=True)
    close(m.official_coding_rate(codes), m.coding_rate(unit, 0.1), 1e-12)


def test_both_sides_of_the_float32_guard(monkeypatch):
    calls = []
    real = module._half_logdet64
    monkeypatch.setattr(
        module, "_half_logdet64", lambda x, *rest: calls.append(len(x)) or real(x, *rest)
    )
    well, ill = draw(11, 7, 29).float() * 0.02, (draw(12, 7, 29) + 30).float()
    m.coding_rate(well, 0.1)
    assert calls == []
    both = m.coding_rate(torch.stack([well, ill, well]), 0.1)
    assert calls == [1]  # the one sample, not its neighbours
    for z, got in zip((well, ill, well), both, strict=True):
        assert got.item() == pytest.approx(reference.coding_rate(z.numpy(), 0.1), rel=2e-6)


@given(seeds, epsilons)
def test_bounds(seed, eps):
    heads, p = 3, 4
    z, u = draw(seed, 9, heads * p), complete(seed + 1, heads, p)
    rate = m.coding_rate(z, eps)
    assert rate > 0 and m.coding_rate(2 * z, eps) > rate > m.coding_rate(z, 2 * eps)
    assert m.rate_reduction(z, u, eps) <= heads * p / 2 * math.log(heads) + 1e-9
