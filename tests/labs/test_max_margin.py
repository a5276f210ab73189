"""The attention SVM: its conditions, the gradient, and turns of the space."""

import numpy as np
import pytest
import torch
from max_margin import cosine, loss_of, margins, problem, slope_of, svm
from scipy.optimize import minimize


def drawn(samples, seed=0):
    return problem(samples, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_the_svm_keeps_its_conditions(samples):
    x, v, labels = drawn(samples)
    a = margins(x, (labels[:, None] * (x @ v)).argmax(dim=-1)).numpy()
    assert a.shape == (samples * 5, 64)
    p = svm(a)
    reached = a @ p
    assert reached.min() > 1 - 1e-9
    weights = np.linalg.lstsq(a.T, p, rcond=None)[0]
    np.testing.assert_allclose(a.T @ weights, p, atol=1e-9)  # p is made of the constraints
    assert weights.min() > -1e-9 and np.abs(weights * (reached - 1)).max() < 1e-9
    rule = {"type": "ineq", "fun": lambda q: a @ q - 1}
    slow = minimize(lambda q: q @ q, p + 0.1, jac=lambda q: 2 * q, constraints=[rule], tol=1e-12)
    np.testing.assert_allclose(slow.x, p, atol=1e-5)


def test_the_slope_is_that_of_autograd_where_nothing_cancels():
    x, v, labels = drawn(5)
    p = torch.randn(64, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    (wanted,) = torch.autograd.grad(loss_of(p, x, v, labels), [p])
    torch.testing.assert_close(slope_of(p.detach(), x, v, labels), wanted)


def test_the_slope_far_out():
    """Of two tokens it is exact: s (1 - s) times the difference of their values."""
    x, v = torch.eye(2).double()[None], torch.tensor([1.0, 0.0]).double()
    p = torch.tensor([90.0, 0.0]).double()
    got = slope_of(p, x, v, torch.ones(1).double())
    size = torch.sigmoid(torch.tensor(-1.0).double()) * torch.exp(torch.tensor(-90.0).double())
    torch.testing.assert_close(got, torch.stack([-size, size]), rtol=1e-9, atol=0)


def test_a_turn_of_the_space_turns_the_solution():
    x, v, labels = drawn(3)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).double())
    turned = x @ turn.Q.T
    chosen = torch.tensor([4, 0, 2])
    one, other = svm(margins(x, chosen).numpy()), svm(margins(turned, chosen).numpy())
    np.testing.assert_allclose(turn.Q.numpy() @ one, other, atol=1e-9)
    got = slope_of(turn.Q @ x[0, 0], turned, turn.Q @ v, labels)
    torch.testing.assert_close(got, turn.Q @ slope_of(x[0, 0], x, v, labels))
    assert cosine(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5)
