"""The group-sparse task: its start, its data, and a rotation of v*."""

import math

import group_sparse
import pytest
import torch
from group_sparse import forward, logistic, positions, samples


def test_it_starts_at_chance():
    direction = torch.tensor([0.6, 0.8], dtype=torch.float64)
    h, labels = samples(13, direction, 5, torch.Generator().manual_seed(0))
    f, pattern = forward(h, torch.zeros(7).double(), torch.zeros(7, 7).double())
    torch.testing.assert_close(pattern, torch.full((13, 5, 5), 0.2, dtype=torch.float64))
    assert (f == 0).all() and logistic(f, labels).item() == pytest.approx(math.log(2))
    assert torch.equal(labels, torch.sign(h[:, group_sparse.CHOSEN, :2] @ direction))


def test_positions_are_orthogonal():
    p = positions(7)
    torch.testing.assert_close(p @ p.T, 4 * torch.eye(7, dtype=torch.float64))  # (D + 1) / 2


def test_attention_is_the_sum_over_queries():
    generator = torch.Generator().manual_seed(1)
    h, v, w = (torch.randn(*shape, generator=generator).double() for shape in
               ((3, 5, 7), (7,), (7, 7)))  # fmt: skip
    f, _ = forward(h, v, w)
    by_hand = [sum(v @ one.T @ torch.softmax(one @ w @ token, dim=0) for token in one) for one in h]
    torch.testing.assert_close(f, torch.stack(by_hand))


def test_a_turn_of_the_variables_changes_nothing():
    generator = torch.Generator().manual_seed(2)
    h, v, w = (torch.randn(*shape, generator=generator).double() for shape in
               ((3, 5, 8), (8,), (8, 8)))  # fmt: skip
    turn = torch.eye(8, dtype=torch.float64)
    turn[:3, :3] = torch.linalg.qr(torch.randn(3, 3, generator=generator).double()).Q
    torch.testing.assert_close(
        forward(h @ turn.T, turn @ v, turn @ w @ turn.T)[0], forward(h, v, w)[0]
    )
