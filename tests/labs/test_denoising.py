"""The lab on denoising: its formulas against closed forms, its measures against known answers."""

import denoising
import mixtures
import pytest
import torch

import crate_interp as ci
from crate_interp.measures import posterior_mean

HEADS, D, P = 3, 11, 2


@pytest.fixture
def u():
    return mixtures.random_bases(HEADS, D, P, seed=0)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 2.0])
def test_tweedies_formula_is_the_posterior_mean(u, sigma):
    x, _ = mixtures.draw_tokens(17, u, sigma, seed=1)
    torch.testing.assert_close(mixtures.tweedie(x, u, sigma), posterior_mean(x, u, sigma))


def test_the_density_is_that_of_scipys_mixture(u):
    from scipy.stats import multivariate_normal

    x, _ = mixtures.draw_tokens(7, u, 0.4, seed=1)
    parts = [multivariate_normal(cov=base @ base.T + 0.16 * torch.eye(D)) for base in u]
    slow = sum(torch.from_numpy(part.pdf(x.numpy())) for part in parts) / HEADS
    torch.testing.assert_close(mixtures.log_density(x, u, 0.4).exp(), slow)


def test_limits_of_the_posterior_mean(u):
    """sigma to 0: the projection on the nearest subspace; one subspace: U U^T x / (1 + s^2)."""
    x, clean = mixtures.draw_tokens(13, u, 1e-4, seed=1)
    torch.testing.assert_close(posterior_mean(x, u, 1e-4), clean, atol=1e-3, rtol=0)
    one = u[:1]
    torch.testing.assert_close(posterior_mean(x, one, 0.7), x @ one[0] @ one[0].T / (1 + 0.7**2))


def test_a_layer_that_is_the_posterior_mean_has_cosine_one(u):
    _, clean = mixtures.draw_tokens(5 * 13, u, 0.3, seed=2)
    read = clean.unflatten(0, (5, 13))
    c = (P / read.square().sum(-1).mean()).sqrt()
    found = denoising.steps_of(
        read, lambda y: posterior_mean(c * y, u, 0.3) / c - y, u, 0.3, seed=0
    )
    for quantity in ("cosine", "cosine across the token"):
        torch.testing.assert_close(found[quantity], torch.ones_like(found[quantity]))
    assert found["noise removed"].min() > 0.3
    assert found["noise removed across the token"].min() > 0.3
    idle = denoising.steps_of(read, torch.neg, u, 0.3, seed=0)
    assert idle["noise removed across the token"].max() < 1e-6


def test_a_turned_layer_steps_as_the_layer_does_in_a_turned_space():
    """Its posterior mean turns with it, so that both cosines stay on turned tokens."""
    block = ci.HookedCrate(
        ci.CrateConfig(family="crate", d_model=12, n_layers=1, n_heads=3, n_classes=2, image_size=8,
                       patch_size=4)
    ).blocks[0]  # fmt: skip
    y = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    found = list(denoising.variants(block, 1))
    assert [who for who, *_ in found[:3]] == ["trained", "turned/0", "turned subspaces/0"]
    assert len(found) == 1 + 2 * denoising.TURNS
    (_, own, u), rest = found[0], found[1::2]
    for t, (_, step, turned) in enumerate(rest):
        turn = mixtures.rotation(12, denoising.TURNS + t).float()
        with torch.no_grad():
            torch.testing.assert_close(step(y @ turn.T), own(y) @ turn.T)
            torch.testing.assert_close(
                posterior_mean(y @ turn.T, turned, 0.3), posterior_mean(y, u, 0.3) @ turn.T
            )
