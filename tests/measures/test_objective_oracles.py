"""The sparse rate reduction and its regulariser: closed forms with known values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from crate_interp.measures import rate_reduction
from crate_interp.measures.objective import layer_objectives, sparse_rate_reduction
from crate_interp.measures.sparsity import l0_norm, l1_norm
from tensors import close, draw, orthonormal


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
    close(sparse_rate_reduction(z, u, 0.3, 0.1), 0.1 * counts - rate_reduction(z, u, 0.3), 1e-12)
    close(sparse_rate_reduction(z * 0, u, 0.3, 0.1), torch.zeros(2))
    close(sparse_rate_reduction(z, u, 1e7, 0.1), 0.1 * counts)
    whole = orthonormal(33, 7, 7)[None]
    close(sparse_rate_reduction(z, whole, 0.3, 0.1), 0.1 * counts)
    close(sparse_rate_reduction(z, whole, 0.3, 0.1, normalise=True), 0.1 * counts / (7 * 13))
    close(sparse_rate_reduction(z, whole, 0.3, 0.1, penalty=l1_norm), 0.1 * z.sum(dim=(1, 2)))


def test_layers_add_up():
    layers, bases = layers_and_bases(34)
    z = draw(37, 2, 13, 7)
    mu = layer_objectives(layers, bases, z, 0.3, 0.1)
    assert mu.shape == (3, 2)
    codes = list(chain(layers, z))
    for got, code, u in zip(mu, codes, bases, strict=True):
        close(got, sparse_rate_reduction(code, u, 0.3, 0.1), 1e-12)
    tail = layer_objectives(layers[1:], bases[1:], codes[0], 0.3, 0.1)
    close(torch.cat([layer_objectives(layers[:1], bases[:1], z, 0.3, 0.1), tail]), mu, 1e-12)


@pytest.mark.parametrize("penalty", [l0_norm, l1_norm])
def test_each_term_moves_its_own_layer_only(penalty):
    layers, bases = layers_and_bases(38)
    z = draw(41, 13, 7).requires_grad_()
    mu = layer_objectives(layers, bases, z, 0.3, 0.1, penalty=penalty)
    weights = [layer[0].weight for layer in layers]
    for i, term in enumerate(mu):
        found = torch.autograd.grad(term, [*weights, z], retain_graph=True, allow_unused=True)
        sizes = [0.0 if g is None else g.abs().max().item() for g in found]
        assert [size > 0 for size in sizes] == [i == j for j in range(3)] + [False]
        alone = sparse_rate_reduction(
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
        mu = layer_objectives(layers[:1], bases[:1], z, 0.3, lambd, penalty=penalty)
        return torch.autograd.grad(mu.sum(), weight)[0], mu

    (without, low), (with_count, high) = slope(0.0, l0_norm), slope(7.0, l0_norm)
    assert torch.equal(with_count, without) and without.abs().max() > 0
    close(high - low, 7.0 * (layers[0](z) != 0).sum().item())
    assert not torch.equal(slope(7.0, l1_norm)[0], without)


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
                loss = loss + gamma * layer_objectives(layers, bases, z, 0.3, 0.1).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return [loss.detach(), *(value.detach() for value in model.parameters())]

    plain, zero, some = trained(None), trained(0.0), trained(0.001)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, some, strict=True))
