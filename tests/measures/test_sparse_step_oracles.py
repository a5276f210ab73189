"""The sparse step and the objective: closed forms with known values."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import crate_interp as ci
import crate_interp.measures as m
from crate_interp.models.layers.sparse_steps import ISTA
from layers import ista
from tensors import close, draw, orthonormal

seeds = st.integers(0, 2**31)
POS = 17


def test_ista_with_an_orthonormal_dictionary():
    y, d, tall, lambd = draw(26, POS, 7), orthonormal(27, 7, 7), orthonormal(28, 7, 5), 0.2
    close(ista(d, eta=1.0, lambd=lambd)(y), (y @ d - lambd).relu())
    for basis in (d, tall):
        fixed = (y @ basis - lambd).relu()
        anywhere = draw(29, POS, basis.shape[1])
        close(m.ista_step(anywhere, y, basis, 1.0, lambd), fixed)
        for eta in (0.1, 1.0, 1.7):
            close(m.ista_step(fixed, y, basis, eta, lambd), fixed)
        close(m.lasso_solution(y, basis, lambd), fixed, 1e-6)
        close(m.lasso_kkt_residual(fixed, y, basis, lambd), 0.0)
        assert (m.lasso_kkt_residual(anywhere, y, basis, lambd) > 0.01).all()


def test_ista_at_its_limits():
    y, d = draw(30, POS, 7), draw(31, 7, 7) / 3
    eye = torch.eye(7, dtype=torch.float64)
    for eta, lambd in ((0.1, 0.1), (0.3, 2.0)):
        close(ista(eye, eta=eta, lambd=lambd)(y), (y - eta * lambd).relu(), 1e-12)
        close(m.ista_step(y, y, eye, eta, lambd), (y - eta * lambd).relu(), 1e-12)
        close(ista(d, eta=eta, lambd=lambd)(y), m.ista_step(y, y, d, eta, lambd), 1e-12)
        assert (ista(d, eta=eta, lambd=lambd)(y) >= 0).all()
        assert (m.ista_step(y, y, d, eta, lambd) >= 0).all()
    for code in (ista(d, lambd=1e9)(y), m.ista_step(y, y, d, 0.1, 1e9)):
        assert code.abs().max() == 0
    for code in (ista(d, eta=0.0)(y), m.ista_step(y, draw(32, POS, 7), d, 0.0, 0.1)):
        assert torch.equal(code, y.relu())


def test_share_of_a_gaussian_that_survives():
    # quantiles of N(0, 1) instead of draws: the count is right to one entry
    n = 100_003
    y = torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n)[None]
    wanted = 0.5 * (1 - math.erf(0.01 / math.sqrt(2)))
    assert wanted == pytest.approx(0.4960, abs=2e-5)
    eye = torch.eye(1, dtype=torch.float64)
    share = m.l0_norm(ista(eye, eta=0.1, lambd=0.1)(y.T).T) / n
    assert share.item() == pytest.approx(wanted, abs=1.5 / n)


@given(seeds, st.sampled_from([0.0, 0.1, 1.0]))
def test_the_objective_falls_from_the_first_iterate_on(seed, lambd):
    y, d = draw(seed, POS, 7), draw(seed + 1, 7, 11)
    eta = 1 / torch.linalg.matrix_norm(d, 2).item() ** 2
    z = m.ista_step(draw(seed + 2, POS, 11), y, d, eta, lambd)
    for _ in range(13):
        after = m.ista_step(z, y, d, eta, lambd)
        assert (
            m.lasso_objective(after, y, d, lambd) <= m.lasso_objective(z, y, d, lambd) + 1e-12
        ).all()
        z = after
    least = m.lasso_objective(m.lasso_solution(y, d, lambd), y, d, lambd)
    assert (m.lasso_objective(z, y, d, lambd) >= least - 1e-6).all()


def test_the_warm_start_may_lie_below_and_a_long_step_climbs():
    y, eye = -torch.ones(POS, 7, dtype=torch.float64), torch.eye(7, dtype=torch.float64)
    first = m.ista_step(y, y, eye, 0.1, 0.1)
    close(m.lasso_objective(first, y, eye, 0.1), 3.5)  # the code is 0: |y|^2 / 2
    assert (m.lasso_objective(y, y, eye, 0.1) < 3.5).all()  # infeasible: negative entries
    # eta = 3 with D = I: z - 3 (z - y) = 5 for y = 3
    z = 2 * torch.ones(POS, 7, dtype=torch.float64)
    assert (
        m.lasso_objective(m.ista_step(z, 3 + 0 * z, eye, 3.0, 0.0), 3 + 0 * z, eye, 0.0) > 7 / 2
    ).all()


def test_the_initial_dictionary_bears_the_published_step():
    # the largest eigenvalue of D^T D for entries of variance 2/d: 8, less 1.2 % +- 1.3 % at d = 509
    # (Tracy-Widom)
    d = 509
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = ISTA(
            ci.CrateConfig(family="crate", d_model=d, n_layers=1, n_heads=1, image_size=32)
        ).double()
    basis = layer.D.detach()
    norm = torch.linalg.matrix_norm(basis, 2).item() ** 2
    assert norm == pytest.approx(8, rel=0.05) and layer.eta <= 1 / norm
    y = draw(33, POS, d)
    z = layer(y[None])[0].detach()
    close(z, m.ista_step(y, y, basis, 0.1, 0.1))
    values = [m.lasso_objective(z, y, basis, 0.1)]
    for _ in range(20):
        z = m.ista_step(z, y, basis, layer.eta, layer.lambd)
        values.append(m.lasso_objective(z, y, basis, 0.1))
    assert (torch.stack(values).diff(dim=0) < 0).all()


def test_lasso_in_closed_form():
    y = draw(34, POS, 7)
    atom = draw(35, 7, 1)
    wanted = (
        (y @ atom - 0.2).relu()
    ) / atom.square().sum()  # one atom: max(0, d.y - lambd) / |d|^2
    # orthogonal atoms, a weight for each
    apart = orthonormal(36, 7, 5) * torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0])
    weights = torch.tensor([0.0, 0.1, 0.2, 0.5, 1e6]).double()
    each = (y @ apart - weights).relu() / apart.square().sum(dim=0)
    for code, d, lambd in ((wanted, atom, 0.2), (each, apart, weights)):
        close(m.lasso_kkt_residual(code, y, d, lambd), 0.0)
        close(m.lasso_solution(y, d, lambd), code, 1e-5)
        assert (m.lasso_kkt_residual(code + 0.1, y, d, lambd) > 1e-3).all()
        cost = 0.5 * (y - code @ d.T).square().sum(dim=-1) + (lambd * code).sum(dim=-1)
        close(m.lasso_objective(code, y, d, lambd), cost, 1e-12)
    d = draw(37, 7, 11)
    limit = (y @ d).max().item()  # no atom earns its price: the code is zero
    assert m.lasso_solution(y, d, 1.001 * limit).abs().max() == 0
    close(m.lasso_kkt_residual(torch.zeros(POS, 11).double(), y, d, 1.001 * limit), 0.0)
    assert m.lasso_kkt_residual(torch.zeros(POS, 11).double(), y, d, 0.9 * limit).max() > 0


def layers_and_bases(seed):
    """Three small non-negative layers of width 7 and a basis of three lines for each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(7, 7), nn.ReLU()).double() for _ in range(3)]
    return layers, [draw(seed + k, 3, 7, 2) for k in range(3)]


def chain(layers, z):
    for layer in layers:
        z = layer(z)
        yield z


def test_objective_at_its_limits():
    z, u = draw(31, 2, 13, 7).relu(), draw(32, 3, 7, 2)
    counts = (z != 0).sum(dim=(1, 2)).double()
    wanted = 0.1 * counts - m.rate_reduction(z, u, 0.3)
    close(m.sparse_rate_reduction(z, u, 0.3, 0.1), wanted, 1e-12)
    close(m.sparse_rate_reduction(z * 0, u, 0.3, 0.1), torch.zeros(2))
    close(m.sparse_rate_reduction(z, u, 1e7, 0.1), 0.1 * counts)
    whole = orthonormal(33, 7, 7)[None]
    close(m.sparse_rate_reduction(z, whole, 0.3, 0.1), 0.1 * counts)
    close(m.sparse_rate_reduction(z, whole, 0.3, 0.1, normalise=True), 0.1 * counts / (7 * 13))
    close(m.sparse_rate_reduction(z, whole, 0.3, 0.1, penalty=m.l1_norm), 0.1 * z.sum(dim=(1, 2)))


@pytest.mark.parametrize("penalty", [m.l0_norm, m.l1_norm])
def test_each_term_moves_its_own_layer_only(penalty):
    layers, bases = layers_and_bases(38)
    z = draw(41, 13, 7).requires_grad_()
    mu = m.layer_objectives(layers, bases, z, 0.3, 0.1, penalty=penalty)
    weights = [layer[0].weight for layer in layers]
    for i, term in enumerate(mu):
        found = torch.autograd.grad(term, [*weights, z], retain_graph=True, allow_unused=True)
        sizes = [0.0 if g is None else g.abs().max().item() for g in found]
        assert [size > 0 for size in sizes] == [i == j for j in range(3)] + [False]
        alone = m.sparse_rate_reduction(
            layers[i](list(chain(layers[:i], z))[-1].detach() if i else z),
            bases[i],
            0.3,
            0.1,
            penalty,
        )
        close(found[i], torch.autograd.grad(alone, weights[i])[0], 1e-12)


def test_counting_entries_has_no_gradient():
    layers, bases = layers_and_bases(42)
    z, weight = draw(45, 13, 7), layers[0][0].weight

    def slope(lambd, penalty):
        mu = m.layer_objectives(layers[:1], bases[:1], z, 0.3, lambd, penalty=penalty)
        return torch.autograd.grad(mu.sum(), weight)[0], mu

    (without, low), (with_count, high) = slope(0.0, m.l0_norm), slope(7.0, m.l0_norm)
    assert torch.equal(with_count, without) and without.abs().max() > 0
    close(high - low, 7.0 * (layers[0](z) != 0).sum().item())
    assert not torch.equal(slope(7.0, m.l1_norm)[0], without)


def test_no_weight_on_the_regulariser_is_cross_entropy_bit_for_bit():
    labels = torch.arange(13) % 7

    def trained(gamma):
        layers, bases = layers_and_bases(46)
        with torch.no_grad():
            layers[1][0].bias.fill_(-30.0)  # a layer of dead features: its term must not bring NaN
        model, z = nn.Sequential(*layers), draw(49, 13, 7)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = F.cross_entropy(model(z), labels)
            if gamma is not None:
                loss = loss + gamma * m.layer_objectives(layers, bases, z, 0.3, 0.1).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return [loss.detach(), *(value.detach() for value in model.parameters())]

    plain, zero, some = trained(None), trained(0.0), trained(0.001)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, some, strict=True))
