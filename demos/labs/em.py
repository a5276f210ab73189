"""Mixtures of low-rank Gaussians with a noise floor, fitted by expectation maximisation.

Component k is N(0, Q_k S_k Q_k^T + t_k (I - Q_k Q_k^T)): Q_k `[d, p]` orthonormal, S_k a full
covariance inside the subspace, t_k the variance of each direction outside. Both have a floor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
