"""The audit of one layer on one batch: the number of each claim, sample by sample."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import (
    coding_rate,
    completeness_defect,
    dictionary_rate_change,
    lasso_kkt_residual,
    lasso_objective,
    lasso_solution,
    neumann_gradient,
    neumann_invalid,
    orthonormality_defect,
    subspace_coding_rate,
    subspace_coding_rate_gradient,
    zero_fraction,
)
from crate_interp.models.block import CrateBlock
from crate_interp.models.step import Lasso
from crate_interp.probes.shared import dictionary, subspaces

POINTS = ("hook_resid_pre", "hook_resid_mid", "ln2.hook_normalized", "mlp.hook_post")
Numbers = dict[str, Tensor]
_NEED_U = (
    "compresses",
    "gradient",
    "step",
    "neumann",
    "neumann_direction",
    "orthonormal",
    "complete",
)
_NEED_LASSO = ("descends", "share", "converged", "kkt", "threshold", "rate_kept")


def of_attention(block: CrateBlock, acts: dict[str, Tensor], eps: float) -> Numbers:
    """Returns the numbers of the attention step, `[batch]` each; none if the layer has no U."""
    u = subspaces(block)
    if u is None:
        return {}
    before, after = acts["hook_resid_pre"].double(), acts["hook_resid_mid"].double()
    u = u.detach().double()
    rates = [subspace_coding_rate(z, u, eps).sum(dim=-1) for z in (before, after)]
    update = after - before
    exact, series = subspace_coding_rate_gradient(before, u, eps), neumann_gradient(before, u, eps)
    alpha = u.shape[-1] / (before.shape[1] * eps**2)
    wide = u.transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    curvature = 9 * alpha / 4 * float(torch.linalg.matrix_norm(wide, ord=2)) ** 2
    size, steepness = _norm(update), _norm(exact)
    return {
        "compresses": _over(rates[1] - rates[0], rates[0]),
        "gradient": _over(-_dot(update, exact), size * steepness),
        "step": _over(-_dot(update, exact), steepness**2) * curvature,
        "neumann": neumann_invalid(before, u, eps).mean(dim=-1),
        "neumann_direction": _over(-_dot(update, series), size * _norm(series)),
        "rate_before": rates[0],
        "rate_after": rates[1],
        "update_over_gradient": _over(size, steepness),
        "update_over_neumann": _over(size, _norm(series)),
    }


def of_sparse_step(lasso: Lasso, acts: dict[str, Tensor], eps: float, tokens: int) -> Numbers:
    """Returns the numbers of the sparse step, `[batch]` each.

    The lasso is solved for `tokens` evenly spaced tokens of each sample.
    """
    mid, y, code = (acts[point] for point in POINTS[1:])
    places = _evenly(y.shape[1], tokens, y.device)
    some, reached, start = y[:, places], code[:, places], lasso.start(y[:, places])
    solution = lasso_solution(some, lasso.d, lasso.lambd, tol=3e-4, max_steps=2000)
    values = [_objective(z, some, lasso) for z in (start, reached, solution)]
    residuals = [
        lasso_kkt_residual(z, some, lasso.d, lasso.lambd).double().sum(dim=-1)
        for z in (start, reached, solution)
    ]
    lengths = torch.maximum(_norm(reached.double()), _norm(solution.double()))
    zeros, free, bare = (
        zero_fraction(z).double().mean(dim=-1)
        for z in (code, lasso.run(y, torch.zeros_like(lasso.lambd)), lasso.run(mid, lasso.lambd))
    )
    at_start = _objective(lasso.start(y), y, lasso)
    numbers = {
        "descends": _over(_objective(code, y, lasso) - at_start, at_start),
        "share": _share(*values),
        "converged": _over(_norm(reached.double() - solution.double()), lengths),
        "kkt": _over(residuals[1], residuals[0]),
        "threshold": _over(zeros - free, zeros),
        "zeros": zeros,
        "zeros_without_threshold": free,
        "zeros_without_norm": bare,
        "unsolved": _over(residuals[2], residuals[0]),
    }
    if lasso.d.shape[0] == lasso.d.shape[1]:
        rate = coding_rate(code, eps).double()
        numbers["rate_kept"] = _over(dictionary_rate_change(code, lasso.d, eps).double(), rate)
    return numbers


def of_weights(block: CrateBlock) -> dict[str, float]:
    """Returns the numbers of a layer's weights, without those of claims that do not apply."""
    u, d = subspaces(block), dictionary(block)
    numbers: dict[str, float] = {}
    if u is not None:
        numbers["orthonormal"] = float(orthonormality_defect(u.detach().double()).mean())
        numbers["complete"] = float(completeness_defect(u.detach().double()))
    if d is not None and d.shape[0] == d.shape[1]:
        numbers["dictionary"] = float(orthonormality_defect(d.detach().double()))
    return numbers


def why_not(block: CrateBlock) -> dict[str, str]:
    """Returns why claims do not apply to a layer, claim by claim; those that apply are missing."""
    reasons: dict[str, str] = {}
    lasso, d = block.mlp.lasso(), dictionary(block)
    if subspaces(block) is None:
        reason = "queries, keys and values are three codes: the layer has no subspaces U"
        reasons |= dict.fromkeys(_NEED_U, reason)
    if isinstance(lasso, str):
        reasons |= dict.fromkeys(_NEED_LASSO, lasso)
    if d is None or d.shape[0] != d.shape[1]:
        reason = (
            "there is no dictionary"
            if d is None
            else "the dictionary is overcomplete: D^T D cannot be I"
        )
        reasons |= {name: reason for name in ("dictionary", "rate_kept") if name not in reasons}
    return reasons


def _objective(z: Tensor, y: Tensor, lasso: Lasso) -> Float[Tensor, "batch"]:
    d, lambd = lasso.d.double(), lasso.lambd.double()
    return lasso_objective(z.double(), y.double(), d, lambd).sum(dim=-1)


def _share(start: Tensor, reached: Tensor, solution: Tensor) -> Float[Tensor, "batch"]:
    """Returns the share of the way down that was covered.

    If there was nothing to gain it is 1, or 0 if the objective rose.
    """
    gain, most = start - reached, start - solution
    nothing = most <= 1e-9 * start.abs()
    return torch.where(nothing, (gain >= 0).double(), gain / most.where(~nothing, 1.0))


def _evenly(count: int, wanted: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, min(count, wanted), device=device).round().long()


def _norm(x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch"]:
    return torch.linalg.vector_norm(x, dim=(1, 2))


def _dot(x: Tensor, y: Tensor) -> Float[Tensor, "batch"]:
    return (x * y).sum(dim=(1, 2))


def _over(x: Float[Tensor, "batch"], y: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    """Returns x / y, and 0 if both are 0."""
    return torch.where((x == 0) & (y == 0), 0.0, x / y)
