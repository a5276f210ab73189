"""The lab on attention alone: its layer against the printed formula, its rules on known ratios."""

import aot_denoising
import pytest
import torch
from aot_denoising import ETA, HEADS, RATE, STACKS, TAU, P


@pytest.fixture(scope="module")
def u():
    return aot_denoising.bases(0)


def test_planted_tokens_have_their_signal_and_noise(u):
    z = aot_denoising.planted(u, 501, 0.1, seed=1)
    own = torch.stack([z[k] @ u[k] for k in range(HEADS)])
    other = torch.stack([z[k] @ u[k - 1] for k in range(HEADS)])
    assert own.std().item() == pytest.approx(1, rel=0.02)
    assert other.std().item() == pytest.approx(0.1, rel=0.02)
    slow = [
        (z[k] @ u[k] @ u[k].T).norm() / (z[k] - z[k] @ u[k] @ u[k].T).norm() for k in range(HEADS)
    ]
    wanted = torch.stack(slow).log().mean().exp().item()
    assert aot_denoising.signal_to_noise(z, u) == pytest.approx(wanted)
    assert aot_denoising.signal_to_noise(7 * z, u) == pytest.approx(wanted)


@pytest.mark.parametrize("stack", STACKS)
def test_a_layer_is_the_printed_formula(u, stack):
    z = aot_denoising.planted(u, 5, 0.3, seed=2)
    read = z.flatten(0, 1).T  # tokens as columns
    scale = 1.0
    if stack == "softmax of LN(Z)":
        read = (read - read.mean(dim=0)) / (read.var(dim=0, unbiased=False) + 1e-5).sqrt()
        scale = P**-0.5
    moved = torch.zeros_like(read)
    for base in u:
        weights = (scale * read.T @ base @ base.T @ read).softmax(dim=0)
        if stack.startswith("thresholded"):
            weights = TAU * (weights >= TAU).double()
        moved += base @ base.T @ read @ weights
    wanted = z + ETA * moved.T.reshape(z.shape)
    if stack == "thresholded, one length":
        wanted = wanted * z.norm() / wanted.norm()
    torch.testing.assert_close(aot_denoising.next_layer(z, u, stack), wanted)


def test_one_layer_has_the_rate_of_the_theorem_and_none_in_random_subspaces(u):
    z = aot_denoising.planted(u, 7, 0.01, seed=3)
    before = aot_denoising.signal_to_noise(z, u)
    for stack in STACKS[:2]:
        after = aot_denoising.signal_to_noise(aot_denoising.next_layer(z, u, stack), u)
        assert after / before == pytest.approx(RATE, rel=1e-12)
        turned = aot_denoising.next_layer(z, aot_denoising.bases(1), stack)
        assert aot_denoising.signal_to_noise(turned, u) < before
