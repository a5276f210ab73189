"""Mixtures of Gaussians on subspaces: density, score, tokens drawn from them, and their fit.

They are fitted by expectation maximisation: component k is
N(0, Q_k S_k Q_k^T + t_k (I - Q_k Q_k^T)), with Q_k `[d, p]` orthonormal, S_k a full covariance
inside the subspace, t_k the variance of each direction outside. Both have a floor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def log_density(x: Tensor, u: Tensor, sigma: float) -> Tensor:
    """Returns log q(x) of the equal mixture of N(0, U_k U_k^T + sigma^2 I), in nats.

    x `[..., d]`, u `[head, d, p]` with orthonormal columns -> `[...]`. The covariance has the
    eigenvalue 1 + s^2 p times and s^2 otherwise, so that
    `x^T C_k^{-1} x = (|x|^2 - |U_k^T x|^2 / (1 + s^2)) / s^2`. arXiv 2306.01129, eq. 4 with noise.
    """
    heads, d, p = u.shape
    wide = sigma**2 + 1
    energy = torch.einsum("...d,kdp->...kp", x, u).square().sum(dim=-1)  # [..., head]
    total = x.square().sum(dim=-1, keepdim=True)
    inside = -0.5 * (total - energy / wide) / sigma**2
    volume = 0.5 * (p * math.log(wide) + (d - p) * math.log(sigma**2) + d * math.log(2 * math.pi))
    return inside.logsumexp(dim=-1) - math.log(heads) - volume


def tweedie(x: Tensor, u: Tensor, sigma: float) -> Tensor:
    """Returns `x + sigma^2 grad log q(x)`, the gradient by automatic differentiation.

    x, u as in `log_density` -> like x. By Tweedie's formula it is E[z | x].
    """
    x = x.detach().requires_grad_()
    (score,) = torch.autograd.grad(log_density(x, u, sigma).sum(), x)
    return (x + sigma**2 * score).detach()


def draw_tokens(n: int, u: Tensor, sigma: float, seed: int) -> tuple[Tensor, Tensor]:
    """Returns n noisy tokens of the mixture and the clean ones, `[n, d]` each."""
    heads, d, p = u.shape
    random = torch.Generator().manual_seed(seed)
    subspace = torch.randint(heads, (n,), generator=random)
    a = torch.randn(n, p, generator=random, dtype=u.dtype)
    clean = torch.einsum("ndp,np->nd", u[subspace], a)
    return clean + sigma * torch.randn(n, d, generator=random, dtype=u.dtype), clean


def random_bases(heads: int, d: int, p: int, seed: int) -> Tensor:
    """Returns orthonormal bases of independent random subspaces, float64 `[head, d, p]`."""
    random = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(heads, d, p, generator=random, dtype=torch.float64))[0]


def rotation(d: int, seed: int) -> Tensor:
    """Returns a random orthogonal matrix `[d, d]`, float64."""
    return random_bases(1, d, d, seed)[0]


@dataclass(frozen=True)
class Mixture:
    """A fitted mixture: q `[k, d, p]`, s `[k, p, p]`, t `[k]`, log_weights `[k]`."""

    q: Tensor
    s: Tensor
    t: Tensor
    log_weights: Tensor


def log_likelihoods(x: Tensor, m: Mixture) -> Tensor:
    """Returns log(w_k N(x; 0, C_k)) in nats, `[n, k]`, for tokens x `[n, d]`."""
    _, d, p = m.q.shape
    codes = torch.einsum("nd,kdp->knp", x, m.q)
    factor = torch.linalg.cholesky(m.s)
    white = torch.linalg.solve_triangular(factor, codes.mT, upper=False)  # [k, p, n]
    outside = (x.square().sum(dim=-1) - codes.square().sum(dim=-1)).clamp(min=0)  # [k, n]
    volume = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1) + (d - p) * m.t.log()
    distance = white.square().sum(dim=-2) + outside / m.t[:, None]
    constant = d * math.log(2 * math.pi)
    return (m.log_weights[:, None] - 0.5 * (distance + volume[:, None] + constant)).T


def log_likelihood(x: Tensor, m: Mixture) -> Tensor:
    """Returns log q(x) in nats, `[n]`."""
    return log_likelihoods(x, m).logsumexp(dim=-1)


def maximise(x: Tensor, shares: Tensor, q: Tensor, floor: float, free: bool) -> Mixture:
    """Returns the mixture of the largest likelihood given each token's shares `[n, k]`.

    free: the subspaces are fitted too, as the first p directions of each component's covariance
    (a mixture of probabilistic principal components); else they stay q. `floor` is added to every
    variance, of S_k and t_k alike: the covariances are regularised by floor times I.
    """
    _, d, p = q.shape
    weight = shares.sum(dim=0).clamp(min=1e-9)  # [k]
    second = torch.einsum("nk,nd,ne->kde", shares / weight, x, x)
    if free:
        q = torch.linalg.eigh(second)[1][..., -p:]
    inside = q.mT @ second @ q
    total, within = (m.diagonal(dim1=-2, dim2=-1).sum(dim=-1) for m in (second, inside))
    t = (total - within).clamp(min=0) / max(1, d - p) + floor
    return Mixture(q, inside + floor * torch.eye(p).to(x), t, (weight / len(x)).log())


def fit(x: Tensor, q: Tensor, floor: float, free: bool, rounds: int) -> Mixture:
    """Returns the mixture after `rounds` of expectation maximising, started at the subspaces q.

    The first shares go to the subspace that holds most of a token's energy.
    """
    energy = torch.einsum("nd,kdp->nkp", x, q).square().sum(dim=-1)
    shares = torch.nn.functional.one_hot(energy.argmax(dim=1), len(q)).to(x)
    for _ in range(rounds):
        mixture = maximise(x, shares, q, floor, free)
        shares, q = log_likelihoods(x, mixture).softmax(dim=1), mixture.q
    return maximise(x, shares, q, floor, free)
