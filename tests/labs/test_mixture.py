"""The lab on mixtures: likelihoods against scipy, and a control whose answer is known."""

import mixture
import mixtures
import pytest
import torch

K, D, P = 3, 11, 2


@pytest.fixture
def u():
    return mixtures.random_bases(K, D, P, seed=0)


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
