"""The least rate that a step of a length can reach: closed forms, a slow form, invariances."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import audit_reference as slow
from crate_interp.measures import least_rate, subspace_coding_rate


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rate(values):
    return 0.5 * torch.log1p(values.square()).sum(dim=-1)


def least(values, distance):
    values = torch.as_tensor(values, dtype=torch.float64)
    return least_rate(values, torch.as_tensor(distance, dtype=torch.float64))


def test_closed_forms():
    values = torch.tensor([3.0, 0.5, 20.0], dtype=torch.float64)
    assert least(values, 0.0) == pytest.approx(float(rate(values)), rel=1e-14)
    assert least(values, float(values.norm())) == 0.0  # everything can be taken away
    assert least(torch.zeros(7), 3.0) == 0.0
    # where the rate is a parabola, shrinking all values alike is best
    small = 1e-4 * values
    wanted = float(rate(small * 0.75))
    assert least(small, 0.25 * float(small.norm())) == pytest.approx(wanted, rel=1e-6)


def test_one_value_among_many_equal_ones():
    """Where values are large, a few go all the way and the others stay."""
    values = torch.full((17,), 100.0)
    found = float(least(values, 100.0 * 3**0.5))
    assert found == pytest.approx(14 * float(rate(torch.tensor([100.0]))), rel=0.02)


@given(st.lists(st.floats(0.0, 60.0), min_size=1, max_size=5), st.floats(0.01, 0.95))
def test_it_is_the_dual_of_the_slow_form(values, share):
    x = np.array(values) + 0.01
    distance = share * float(np.linalg.norm(x))
    assert float(least(x, distance)) == pytest.approx(slow.least_rate(x, distance), abs=1e-9)


def test_weights_of_values():
    x, distance = torch.tensor([3.0, 1.0, 1.0, 0.2]).double(), torch.tensor(1.25).double()
    half = torch.full((4,), 0.5).double()
    torch.testing.assert_close(least_rate(x, distance, half), least(x, 1.25) / 2)
    # moving a value without weight gains nothing
    weights = torch.tensor([0.3, 0.0, 0.9, 0.5]).double()
    found, few = least_rate(x, distance, weights), [0, 2, 3]
    torch.testing.assert_close(found, least_rate(x[few], distance, weights[few]))
    wanted = slow.least_rate(x[few].numpy(), 1.25, weights[few].numpy())
    assert float(found) == pytest.approx(wanted, abs=1e-9)


@given(st.integers(0, 1000), st.floats(0.0, 2.0))
def test_no_step_of_that_length_goes_below(seed, share):
    """A gradient step, shrinking and a random step on random codes."""
    z, u = normal(11, 13, seed=seed), normal(3, 13, 5, seed=seed + 1)
    alpha = 5 / (11 * 0.7**2)
    values = torch.cat([torch.linalg.svdvals(z @ uk) for uk in u])
    whole = torch.linalg.matrix_norm(sum(uk @ uk.T for uk in u), 2)
    length = share * z.norm()
    bound = float(least(alpha**0.5 * values, (alpha * whole) ** 0.5 * length))
    leaf = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(subspace_coding_rate(leaf, u, 0.7).sum(), leaf)
    for step in (-gradient, -z, normal(11, 13, seed=seed + 2)):
        moved = z + step * (length / step.norm())
        assert float(subspace_coding_rate(moved, u, 0.7).sum()) >= bound - 1e-9


@pytest.mark.slow
@given(st.integers(0, 1000))
def test_order_batches_and_lengths(seed):
    values, distance = normal(2, 3, 17, seed=seed).abs() * 5, normal(2, 3, seed=seed + 1).abs()
    found = least(values, distance)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(least(values[..., order], distance), found, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(least(values[1, 2], distance[1, 2]), found[1, 2])
    assert (least(values, 2 * distance) <= found + 1e-9).all()
    assert (found <= rate(values) + 1e-12).all() and (found >= 0).all()
