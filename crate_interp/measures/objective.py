"""The objective that a CRATE layer is meant to improve, and how far a step can lower R^c."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import rates, sparsity
from crate_interp.measures.checks import Bases, Tokens, in_full_precision

__all__ = ["layer_objectives", "least_rate", "sparse_rate_reduction"]

_ROUNDS = 48  # rounds of the search for the multiplier; each halves its range
_RANGE = 70.0  # range of the multiplier's logarithm
Penalty = Callable[[Tensor], Tensor]  # [..., pos, d_model] -> [..., pos]


def sparse_rate_reduction(
    z: Tokens,
    u: Bases,
    eps: float,
    lambd: float,
    penalty: Penalty = sparsity.l0_norm,
    normalise: bool = False,
) -> Float[Tensor, "*batch"]:
    """Returns the negated objective of a layer: lower is better.

    `lambd |Z|_0 + R^c(Z | U; eps) - R(Z; eps)`.

    Args:
        z: `[..., pos, d_model]`.
        u: `[head, d_model, d_head]`.
        eps: The precision, above 0.
        lambd: The weight of the sparsity term.
        penalty: `l0_norm`, a count whose gradient is zero everywhere, or another function to `[...,
            pos]` such as `l1_norm`. The penalty is summed over tokens and, with `normalise`,
            divided by the number of entries of z. The papers do not say whether their count is a
            fraction, which eps they used, or whether they trained with the count or with a
            surrogate; 2411.17182 has lambd = 0.1 and measures without LayerNorm.
        normalise: Whether the penalty is a share of the entries.

    Returns:
        `[...]` in nats, either sign; 0 for Z = 0. arXiv 2411.17182 eq. 11 (its summand), arXiv
        2306.01129 eq. 1 (negated).

    Raises:
        ValueError: As `coding_rate` does.
    """
    rate, per_head = rates.coding_rate(z, eps), rates.subspace_coding_rate(z, u, eps)
    size = penalty(z).sum(dim=-1)
    if normalise:
        size = size / (z.shape[-1] * z.shape[-2])
    return lambd * size + per_head.sum(dim=-1) - rate


def layer_objectives(
    layers: Sequence[Callable[[Tensor], Tensor]],
    bases: Sequence[Tensor],
    z: Tokens,
    eps: float,
    lambd: float,
    penalty: Penalty = sparsity.l0_norm,
    normalise: bool = False,
) -> Float[Tensor, "layer *batch"]:
    """Returns the `sparse_rate_reduction` of each layer's output, with detached layer inputs.

    `mu_l = mu(f_l(sg(Z^{l-1})) | U_l)`, where sg detaches the output of the layer before.

    arXiv 2411.17182 eq. 14 adds gamma = 0.001 times the sum of all mu_l, or times mu_l of the last
    layer, to the cross-entropy. The gradient of mu_l reaches only layer l, and the default penalty
    adds nothing to it.

    Args:
        layers: Callables z -> z, such as `model.blocks`.
        bases: The U of each layer, `[head, d_model, d_head]`.
        z: The input of the first layer, `[..., pos, d_model]`.
        eps: The precision, above 0.
        lambd: The weight of the sparsity term.
        penalty: `l0_norm` or another function to `[..., pos]`.
        normalise: Whether the penalty is a share of the entries.

    Returns:
        `[layer, ...]` in nats.

    Raises:
        ValueError: If there are no layers, or if the numbers of bases and layers differ.
    """
    if not len(layers) or len(layers) != len(bases):
        raise ValueError(f"{len(layers)} layers and {len(bases)} bases: give one basis a layer.")
    terms: list[Tensor] = []
    for layer, u in zip(layers, bases, strict=True):
        z = layer(z.detach())
        terms.append(sparse_rate_reduction(z, u, eps, lambd, penalty, normalise))
    return torch.stack(terms)


@in_full_precision
@torch.no_grad()
def least_rate(
    values: Float[Tensor, "*batch number"],
    distance: Float[Tensor, "*batch"],
    weights: Float[Tensor, "*batch number"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Returns a rate that no step of a given length can go below.

    `max_nu sum_i min_t [w_i / 2 log(1 + t^2) + nu (x_i - t)^2] - nu distance^2`.

    After any step of that length R^c is at least this rate. Singular values move by at most the
    length of the matrix's change (Mirsky 1960). The formula is a Lagrange dual, so it is at most
    the least rate that such moves can reach (weak duality). Each inner minimum is a root of a
    cubic. Computed in float64.

    Args:
        values: The singular values x_i of all U_k^T Z, times sqrt(p / (N eps^2)), `[..., number]`.
        distance: `[...]`, >= 0: how far the values may move, `sqrt(p / (N eps^2) |sum U_k
            U_k^T|_2)` times the Frobenius length of the step.
        weights: w_i >= 0, None if all are 1.

    Returns:
        `[...]` in nats per token, between 0 and the rate before the step.

    Raises:
        ValueError: If a value or a distance is negative.
    """
    if bool((values < 0).any()) or bool((distance < 0).any()):
        raise ValueError("values or distance holds a negative number: give lengths >= 0.")
    x, budget = values.double(), distance.double().square()
    w = torch.ones_like(x) if weights is None else weights.double()
    size = x.square().sum(dim=-1)
    free = budget >= size  # all values can reach zero
    moves = budget > 1e-30 * size  # a smaller budget changes no digit of a value
    low_budget = budget.where(moves & ~free, 1.0)
    high = (w.square().sum(dim=-1) / 16 / low_budget).sqrt().log()
    low = high - _RANGE
    for _ in range(_ROUNDS):
        middle = (high + low) / 2
        moved = _moved(x, _kappa(middle, w))
        far = (x - moved).square().sum(dim=-1) > low_budget
        low, high = torch.where(far, middle, low), torch.where(far, high, middle)
    best = torch.maximum(*(_dual(x, w, nu, low_budget) for nu in (low, high)))
    before = 0.5 * (w * torch.log1p(x.square())).sum(dim=-1)
    best = torch.where(moves, best, before).masked_fill(free, 0.0).clamp_min(0.0)
    return best.masked_fill(~x.isfinite().all(dim=-1), torch.nan).to(values.dtype)


def _kappa(log_nu: Float[Tensor, "*batch"], w: Float[Tensor, "*batch number"]) -> Tensor:
    return 0.5 * w * (-log_nu).exp()[..., None]


def _dual(
    x: Float[Tensor, "*batch number"], w: Tensor, log_nu: Tensor, budget: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    moved = _moved(x, _kappa(log_nu, w))
    nu = log_nu.exp()
    least = 0.5 * w * torch.log1p(moved.square()) + nu[..., None] * (x - moved).square()
    return least.sum(dim=-1) - nu * budget


def _moved(
    x: Float[Tensor, "*batch number"], kappa: Float[Tensor, "*batch number"]
) -> Float[Tensor, "*batch number"]:
    """Returns the t >= 0 that minimises `1/2 log(1 + t^2) + (x - t)^2 / (2 kappa)`.

    Its derivative is zero at the roots of t^3 - x t^2 + (1 + kappa) t - x. There is one real root,
    or there are three; then the outer two are minima.
    """
    third = x / 3
    p, half_q = 1 + kappa - x * third, x * (kappa - 2) / 6 - third**3
    under = half_q.square() + (p / 3) ** 3
    one = under > 0
    large = half_q.abs() + under.clamp_min(0).sqrt()
    cube = torch.copysign(large.pow(1 / 3), -half_q)
    single = third + cube - p / (3 * cube.where(cube != 0, 1.0))
    radius = (-p / 3).clamp_min(0).sqrt()
    angle = torch.acos((-half_q / (radius**3).where(radius > 0, 1.0)).clamp(-1, 1)) / 3
    ends = (third + 2 * radius * torch.cos(angle + turn) for turn in (0.0, 2 * math.pi / 3))
    first, last = (_polished(torch.where(one, single, end), x, kappa) for end in ends)
    values = [torch.log1p(t * t) + (x - t).square() / kappa for t in (first, last)]
    return torch.where(values[0] <= values[1], first, last)


def _polished(t: Tensor, x: Tensor, kappa: Tensor) -> Tensor:
    """Returns a root after one Newton step, kept within [0, x]."""
    slope = 3 * t * t - 2 * x * t + 1 + kappa
    step = (t * (t * (t - x) + 1 + kappa) - x) / slope.where(slope.abs() > 1e-9, torch.inf)
    return torch.minimum((t - step).clamp_min(0.0), x)
