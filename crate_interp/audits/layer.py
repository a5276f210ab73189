"""The audit of one layer on one batch: each claim's number, sample by sample."""

from dataclasses import dataclass
from typing import Any

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

POINTS = ("hook_resid_pre", "hook_resid_mid", "ln2.hook_normalized", "mlp.hook_post")
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class SparseStep:
    """A sparse step as proximal gradient steps on a lasso: `count` of size eta, from zero or from its own input."""

    d: Float[Tensor, "d_model d_mlp"]
    eta: float
    lambd: Tensor  # [] or [d_mlp]
    warm: bool
    count: int

    def start(self, y: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch pos d_mlp"]:
        """Where it starts: its input made feasible (the problem forbids negative codes), or zero."""
        return torch.relu(y) if self.warm else y.new_zeros(*y.shape[:-1], self.d.shape[1])

    def run(
        self, y: Float[Tensor, "*batch pos d_model"], lambd: Tensor
    ) -> Float[Tensor, "*batch pos d_mlp"]:
        """The step with another penalty; with its own it is the layer's."""
        code = y if self.warm else self.start(y)
        for _ in range(self.count):
            code = torch.relu(
                code - self.eta * ((code @ self.d.mT - y) @ self.d) - self.eta * lambd
            )
        return code


def sparse_step(mlp: Any) -> SparseStep | str:
    """The lasso a sparse step works on, or why it works on none."""
    kind = type(mlp).__name__
    if kind == "ThresholdODL":
        if bool((mlp.threshold < 0).any()):
            return "some learned thresholds are negative: no penalty has them"
        return SparseStep(mlp.D.detach(), 1.0, mlp.threshold.detach(), warm=False, count=1)
    if kind in ("ISTA", "OvercompleteODL"):
        lambd = mlp.D.new_tensor(mlp.lambd)
        warm = kind == "ISTA"
        return SparseStep(mlp.D.detach(), mlp.eta, lambd, warm=warm, count=1 if warm else 2)
    return "the layer has an MLP, no dictionary"


def of_attention(block: Any, acts: dict[str, Tensor], eps: float) -> Numbers:
    """Numbers of the attention step `[batch]`; empty where the layer has no U."""
    u = getattr(block.attn, "U", None)
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


def of_sparse_step(step: SparseStep, acts: dict[str, Tensor], eps: float, tokens: int) -> Numbers:
    """Numbers of the sparse step `[batch]`; the lasso is solved for `tokens` evenly spaced tokens of each sample."""
    mid, y, code = (acts[point] for point in POINTS[1:])
    places = _evenly(y.shape[1], tokens, y.device)
    some, found, start = y[:, places], code[:, places], step.start(y[:, places])
    solution = lasso_solution(some, step.d, step.lambd, tol=3e-4, max_steps=2000)
    values = [_objective(z, some, step) for z in (start, found, solution)]
    residuals = [
        lasso_kkt_residual(z, some, step.d, step.lambd).double().sum(dim=-1)
        for z in (start, found, solution)
    ]
    lengths = torch.maximum(_norm(found.double()), _norm(solution.double()))
    zeros, free, bare = (
        zero_fraction(z).double().mean(dim=-1)
        for z in (code, step.run(y, torch.zeros_like(step.lambd)), step.run(mid, step.lambd))
    )
    whole = _objective(step.start(y), y, step)
    numbers = {
        "descends": _over(_objective(code, y, step) - whole, whole),
        "share": _share(*values),
        "converged": _over(_norm(found.double() - solution.double()), lengths),
        "kkt": _over(residuals[1], residuals[0]),
        "threshold": _over(zeros - free, zeros),
        "zeros": zeros,
        "zeros_without_threshold": free,
        "zeros_without_norm": bare,
        "unsolved": _over(residuals[2], residuals[0]),
    }
    if step.d.shape[0] == step.d.shape[1]:
        rate = coding_rate(code, eps).double()
        numbers["rate_kept"] = _over(dictionary_rate_change(code, step.d, eps).double(), rate)
    return numbers


def of_weights(block: Any) -> dict[str, float]:
    """Numbers of a layer's weights; a claim that does not apply is missing."""
    u, d = getattr(block.attn, "U", None), getattr(block.mlp, "D", None)
    numbers: dict[str, float] = {}
    if u is not None:
        numbers["orthonormal"] = float(orthonormality_defect(u.detach().double()).mean())
        numbers["complete"] = float(completeness_defect(u.detach().double()))
    if d is not None and d.shape[0] == d.shape[1]:
        numbers["dictionary"] = float(orthonormality_defect(d.detach().double()))
    return numbers


def why_not(block: Any) -> dict[str, str]:
    """Which claims do not apply to a layer, and why."""
    reasons: dict[str, str] = {}
    step = sparse_step(block.mlp)
    if getattr(block.attn, "U", None) is None:
        said = "queries, keys and values are three codes: the layer has no subspaces U"
        attention = (
            "compresses",
            "gradient",
            "step",
            "neumann",
            "neumann_direction",
            "orthonormal",
            "complete",
        )
        reasons |= dict.fromkeys(attention, said)
    if isinstance(step, str):
        sparse = ("descends", "share", "converged", "kkt", "threshold", "rate_kept")
        reasons |= dict.fromkeys(sparse, step)
    d = getattr(block.mlp, "D", None)
    if d is None or d.shape[0] != d.shape[1]:
        said = (
            "there is no dictionary"
            if d is None
            else "the dictionary is overcomplete: D^T D cannot be I"
        )
        reasons |= {name: said for name in ("dictionary", "rate_kept") if name not in reasons}
    return reasons


def _objective(z: Tensor, y: Tensor, step: SparseStep) -> Float[Tensor, "batch"]:
    return lasso_objective(z.double(), y.double(), step.d.double(), step.lambd.double()).sum(dim=-1)


def _share(start: Tensor, found: Tensor, solution: Tensor) -> Float[Tensor, "batch"]:
    """How far down it went; where there was nothing to gain, 1 unless it rose."""
    gain, most = start - found, start - solution
    nothing = most <= 1e-9 * start.abs()
    return torch.where(nothing, (gain >= 0).double(), gain / most.where(~nothing, 1.0))


def _evenly(count: int, wanted: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, min(count, wanted), device=device).round().long()


def _norm(x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch"]:
    return torch.linalg.vector_norm(x, dim=(1, 2))


def _dot(x: Tensor, y: Tensor) -> Float[Tensor, "batch"]:
    return (x * y).sum(dim=(1, 2))


def _over(x: Float[Tensor, "batch"], y: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    """x / y, 0 where both are 0: nothing of nothing."""
    return torch.where((x == 0) & (y == 0), 0.0, x / y)
