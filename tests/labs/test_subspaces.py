"""The labs on subspaces: denoising, mixtures, attention alone; against closed forms and scipy."""

import aot_denoising
import denoising
import mixture
import mixtures
import pytest
import torch
from aot_denoising import ETA, HEADS, RATE, STACKS, TAU

import crate_interp as ci
from crate_interp.measures import posterior_mean

K, D, P = 3, 11, 2


@pytest.fixture
def u():
    return mixtures.random_bases(K, D, P, seed=0)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 2.0])
def test_tweedies_formula_is_the_posterior_mean(u, sigma):
    x, _ = mixtures.draw_tokens(17, u, sigma, seed=1)
    torch.testing.assert_close(mixtures.tweedie(x, u, sigma), posterior_mean(x, u, sigma))


def test_the_density_is_that_of_scipys_mixture(u):
    from scipy.stats import multivariate_normal

    x, _ = mixtures.draw_tokens(7, u, 0.4, seed=1)
    parts = [multivariate_normal(cov=base @ base.T + 0.16 * torch.eye(D)) for base in u]
    slow = sum(torch.from_numpy(part.pdf(x.numpy())) for part in parts) / K
    torch.testing.assert_close(mixtures.log_density(x, u, 0.4).exp(), slow)


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


def fitted(x, u, **options):
    return mixtures.fit(x, u, **(dict(floor=0.01, free=False, rounds=5) | options))


def test_the_likelihood_is_scipys(u):
    from scipy.stats import multivariate_normal

    x, _ = mixtures.draw_tokens(101, u, 0.3, seed=1)
    m = fitted(x, u)
    slow = torch.zeros(len(x), dtype=x.dtype)
    for q, s, t, weight in zip(m.q, m.s, m.t, m.log_weights.exp(), strict=True):
        cov = q @ s @ q.T + t * (torch.eye(D) - q @ q.T)
        slow = slow + weight * torch.from_numpy(multivariate_normal(cov=cov).pdf(x.numpy()))
    torch.testing.assert_close(mixtures.log_likelihood(x, m), slow.log())
    assert m.log_weights.exp().sum() == pytest.approx(1)


def test_one_component_that_fills_the_space_is_the_gaussian_of_the_sample(u):
    x, _ = mixtures.draw_tokens(101, u, 0.3, seed=1)
    m = fitted(x, torch.eye(D, dtype=x.dtype)[None], floor=0.1, rounds=1)
    torch.testing.assert_close(m.s[0], x.T @ x / 101 + 0.1 * torch.eye(D))


def test_the_likelihood_does_not_fall_by_rounds(u):
    """Without a floor, no round lowers it, with the subspaces kept or fitted."""
    x, _ = mixtures.draw_tokens(211, u, 0.3, seed=1)
    start = mixtures.random_bases(K, D, P, seed=5)
    for free in (False, True):
        total = [
            mixtures.log_likelihood(x, fitted(x, start, floor=0.0, free=free, rounds=r)).sum()
            for r in range(7)
        ]
        assert all(
            later >= earlier - 1e-9 for earlier, later in zip(total, total[1:], strict=False)
        )


def test_planted_tokens_are_best_described_by_their_own_subspaces(u):
    x, _ = mixtures.draw_tokens(14 * 101, u, 0.1, seed=1)
    found = mixture.likelihoods(x.unflatten(0, (14, 101)), u, seed=3)
    means = {kind: float(values.mean()) for kind, values in found.items()}
    assert all(len(values) == 7 for values in found.values())
    assert means["own subspaces"] > means["one Gaussian"] + 3
    assert means["one Gaussian"] > means["random subspaces"]
    assert means["own subspaces"] > means["fitted subspaces"] - 0.05


def test_of_random_subspaces_the_best_draw_counts(u):
    x, _ = mixtures.draw_tokens(8 * 101, u, 0.3, seed=1)
    y = x.unflatten(0, (8, 101))
    one, best = (mixture.likelihoods(y, u, 2, draws)["random subspaces"].mean() for draws in (1, 5))
    planted = mixture.likelihoods(y, mixtures.random_bases(K, D, P, 2 * mixture.DRAWS + 3), 0)
    assert best >= one and best >= planted["own subspaces"].mean()


def test_the_mean_cosine_with_the_others():
    z = torch.randn(5, 7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = torch.nn.functional.cosine_similarity(z[:, :, None], z[:, None], dim=-1)
    slow = torch.stack([pairs[:, i, [j for j in range(7) if j != i]].mean(-1) for i in range(7)], 1)
    torch.testing.assert_close(mixture.pairwise_cosine(z), slow)
    assert mixture.spreads(z.expand(5, 7, 11))["rank of CLS"].shape == (1,)


@pytest.fixture(scope="module")
def bases():
    return aot_denoising.bases(0)


def test_planted_tokens_have_their_signal_and_noise(bases):
    z = aot_denoising.planted(bases, 501, 0.1, seed=1)
    own = torch.stack([z[k] @ bases[k] for k in range(HEADS)])
    other = torch.stack([z[k] @ bases[k - 1] for k in range(HEADS)])
    assert own.std().item() == pytest.approx(1, rel=0.02)
    assert other.std().item() == pytest.approx(0.1, rel=0.02)
    inside = [z[k] @ base @ base.T for k, base in enumerate(bases)]
    slow = [own.norm() / (z[k] - own).norm() for k, own in enumerate(inside)]
    wanted = torch.stack(slow).log().mean().exp().item()
    assert aot_denoising.signal_to_noise(z, bases) == pytest.approx(wanted)
    assert aot_denoising.signal_to_noise(7 * z, bases) == pytest.approx(wanted)


@pytest.mark.parametrize("stack", STACKS)
def test_a_layer_is_the_printed_formula(bases, stack):
    z = aot_denoising.planted(bases, 5, 0.3, seed=2)
    read = z.flatten(0, 1).T  # tokens as columns
    scale = 1.0
    if stack == "softmax of LN(Z)":
        read = (read - read.mean(dim=0)) / (read.var(dim=0, unbiased=False) + 1e-5).sqrt()
        scale = aot_denoising.P**-0.5
    moved = torch.zeros_like(read)
    for base in bases:
        weights = (scale * read.T @ base @ base.T @ read).softmax(dim=0)
        if stack.startswith("thresholded"):
            weights = TAU * (weights >= TAU).double()
        moved += base @ base.T @ read @ weights
    wanted = z + ETA * moved.T.reshape(z.shape)
    if stack == "thresholded, one length":
        wanted = wanted * z.norm() / wanted.norm()
    torch.testing.assert_close(aot_denoising.next_layer(z, bases, stack), wanted)


def test_one_layer_has_the_rate_of_the_theorem_and_none_in_random_subspaces(bases):
    z = aot_denoising.planted(bases, 7, 0.01, seed=3)
    before = aot_denoising.signal_to_noise(z, bases)
    for stack in STACKS[:2]:
        after = aot_denoising.signal_to_noise(aot_denoising.next_layer(z, bases, stack), bases)
        assert after / before == pytest.approx(RATE, rel=1e-12)
        turned = aot_denoising.next_layer(z, aot_denoising.bases(1), stack)
        assert aot_denoising.signal_to_noise(turned, bases) < before
