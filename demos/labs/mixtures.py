"""Mixtures of Gaussians on subspaces: their density, their score, tokens drawn from them."""

import math

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
