"""The walk on a circle: its model against autograd, its data, and what the theorems say of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_walk import (
    EPS,
    M,
    balanced,
    direction_distance,
    grouped,
    transition,
    walks,
    zero,
)


def explicit(data, states, tokens, steps):
    """V and attention by autograd on V and the whole of W, with the positions as vectors."""
    i = torch.arange(1, tokens + 1, dtype=torch.float64)
    positions = torch.sin(i * torch.arange(1, M + 1)[:, None] * torch.pi / (M + 1))  # [M, N]
    x = torch.zeros(len(data.states), states, tokens, dtype=torch.float64)
    x[:, :, :-1] = torch.eye(states, dtype=torch.float64)[data.states].mT
    both = torch.cat([x, positions.expand(len(x), -1, -1)], dim=1)  # [n, state + M, N]
    v = torch.zeros(states, states, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(states + M, states + M, dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        scores = (both.mT @ w @ both[:, :, -1:])[..., 0]
        pattern = torch.softmax(scores, dim=-1)
        f = (x @ pattern[..., None])[..., 0] @ v.T
        f = f.gather(1, torch.as_tensor(data.following)[:, None])[:, 0]
        loss = -(torch.as_tensor(data.weights) * (f + EPS).log()).sum()
        gradients = torch.autograd.grad(loss, [v, w])
        with torch.no_grad():
            v -= gradients[0]
            w -= gradients[1]
    scores = (both.mT @ w @ both[:, :, -1:])[..., 0]
    return v.detach().numpy(), torch.softmax(scores, dim=-1).detach().numpy()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_model_is_the_whole_one(steps):
    data, model = walks(0.7, 5, 11, 13, 0), zero(5, 11)
    for _ in range(steps):
        model.step(data, 1.0)
    v, pattern = explicit(data, 5, 11, steps)
    np.testing.assert_allclose(model.v, v, rtol=1e-7)
    np.testing.assert_allclose(model.attention(data.states), pattern, atol=1e-7)


@given(st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(3, 7), st.integers(0, 99))
def test_walks_go_one_step_at_a_time(p, states, seed):
    data = walks(p, states, 13, 17, seed)
    whole = np.concatenate([data.states, data.following[:, None]], axis=1)
    moves = np.diff(whole, axis=1) % states
    assert whole.shape == (17, 13) and np.isin(moves, [1, states - 1]).all()
    assert p not in (0, 1) or (moves == (1 if p else states - 1)).all()
    few = grouped(data)
    assert few.weights.sum() == pytest.approx(1) and len(few.states) <= 17


def test_grouped_trains_alike():
    data, one, other = walks(0.5, 3, 5, 97, 1), zero(3, 5), zero(3, 5)
    few = grouped(data)
    assert len(few.states) <= 48  # 3 starts and 4 moves
    for _ in range(3):
        one.step(data, 1.0)
        other.step(few, 1.0)
    np.testing.assert_allclose(one.v, other.v, rtol=1e-9)


def test_balanced_walks_have_the_exact_shares():
    data = balanced(0.8, 5, 11, 3, 0)
    joint = np.zeros((5, 5))
    np.add.at(joint, (data.states[:, -1], data.following), data.weights)
    np.testing.assert_allclose(joint, transition(0.8, 5) / 5, atol=1e-12)
    np.testing.assert_allclose(transition(0.8, 5)[0], [0, 0.8, 0, 0, 0.2], atol=1e-12)


def test_with_attention_on_the_last_state_a_step_is_elementwise():
    data = balanced(0.8, 5, 11, 3, 0)
    model = zero(5, 11)
    model.c[-2], model.v[:] = 60.0, 0.3  # the last state
    wanted = 0.3 + transition(0.8, 5).T / 5 / (0.3 + EPS)
    model.step(data, 1.0)
    np.testing.assert_allclose(model.v, wanted, rtol=1e-9)


@pytest.mark.parametrize("p", [0, 1])
def test_a_certain_walk_stays_at_chance(p):
    data = grouped(walks(p, 6, 97, 1000, 3))
    model = zero(6, 97)
    for _ in range(60):
        model.step(data, 1.0)
    assert len(data.states) == 6
    assert np.ptp(model.v, axis=1).max() < 1e-12 < model.v.min()
    assert np.ptp(model.attention(data.states)[:, :-1]) < 1e-12
    right = model.predict(data.states).argmax(axis=1) == data.following
    assert right @ data.weights == pytest.approx(data.weights.max())


def test_a_random_walk_is_learned():
    data, fresh, model = walks(0.5, 6, 97, 1000, 0), walks(0.5, 6, 97, 1000, 1000), zero(6, 97)
    assert (model.predict(fresh.states) == 0).all()
    for _ in range(50):
        model.step(data, 1.0)
    accuracy = (model.predict(fresh.states).argmax(axis=1) == fresh.following).mean()
    assert abs(accuracy - 0.5) < 4 * 0.5 / 1000**0.5
    assert model.attention(fresh.states)[:, -2].mean() > 0.999
    distance = direction_distance(model.v, transition(0.5, 6).T)
    assert distance == pytest.approx(0.183, abs=5e-4)
