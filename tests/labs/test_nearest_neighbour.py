"""The nearest neighbour in context: its start, its loss, and turns of the sphere."""

import math

import pytest
import torch
from nearest_neighbour import attention, in_form, loss_of, nearest, shifted, sphere, start


def drawn(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return sphere(13, n, d, generator=generator), sphere(13, d, generator=generator)


@pytest.mark.parametrize("n", [1, 5, 7])
def test_it_starts_at_even_attention(n):
    points, queries = drawn(n, 3)
    s = attention(points, queries, start(3, sigma=60.0))
    torch.testing.assert_close(s[:, :n], torch.full((13, n), 1 / n, dtype=torch.float64))
    wanted = 0.5 * (1 - 1 / n)  # and nothing with one point
    assert loss_of(s, nearest(points, queries)).item() == pytest.approx(wanted, abs=1e-12)


def test_the_loss_is_that_of_labels_drawn_apart():
    points, queries = drawn(5, 3)
    w = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).double()
    s, best = attention(points, queries, w)[:, :5], nearest(points, queries)
    labels = torch.tensor([[1 if k >> j & 1 else -1 for j in range(5)] for k in range(32)]).double()
    error = torch.einsum("bn,kn->bk", s, labels) - labels.T[best]
    exact = 0.5 * error.square().mean()
    torch.testing.assert_close(loss_of(attention(points, queries, w), best), exact)


def test_a_turn_of_the_sphere_changes_nothing():
    points, queries = drawn(7, 3)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2))).Q.double()
    w = start(3)
    w[:3, :3] = 2.5 * torch.eye(3)
    torch.testing.assert_close(
        attention(points @ turn.T, queries @ turn.T, w), attention(points, queries, w)
    )
    assert torch.equal(nearest(points @ turn.T, queries @ turn.T), nearest(points, queries))


def test_the_form_of_w():
    w = start(3)
    w[:3, :3] = 2.0 * torch.eye(3)
    assert in_form(w) == (2.0, 10.0, 0.0)
    w[0, 1] = math.sqrt(3 * 4 + 100)
    assert in_form(w)[2] == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("gap", [0.05, 0.4])
def test_a_shift_has_its_gap(gap):
    points, queries = shifted(gap, torch.Generator().manual_seed(0), n=5)
    products = torch.einsum("bnd,bd->bn", points, queries).sort(dim=1, descending=True).values
    torch.testing.assert_close(products[:, 0] - products[:, 1], torch.full((4000,), gap).double())
    torch.testing.assert_close(points.norm(dim=-1), torch.ones(4000, 5).double())
    assert (queries[:, 0] >= 0).all()
    # the attention of the form, in closed form, without the query's own token
    w = start(4, sigma=80.0)
    w[:4, :4] = 3.0 * torch.eye(4)
    s = attention(points, queries, w)[:, :5].amax(dim=1)
    wanted = 1 / (1 + 4 * math.exp(-3.0 * gap))
    torch.testing.assert_close(s, torch.full((4000,), wanted).double())
