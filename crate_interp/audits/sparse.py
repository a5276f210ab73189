"""The audit of one layer's sparse step: its numbers, those of random dictionaries, and its limits.

It also measures whether the step keeps the rate R, and whether D Z has the same R as the code Z.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.audits.frames import Norm, over, single_of
from crate_interp.audits.objectives import PerSample, SparseCode, Stream, rates_of_codes
from crate_interp.audits.setting import Cells
from crate_interp.measures import lasso_objective, zero_fraction
from crate_interp.measures.lasso import lasso_solutions_at
from crate_interp.models.layers.sparse_steps import Lasso
from crate_interp.probes.layer_reading import FRAMES

DRAWS = 8  # number of random dictionaries
TOKENS = 32  # on how many tokens of each sample, drawn anew, random dictionaries are measured
SCALES = tuple(2.0**power for power in range(-2, 3))  # scales of D that the construction tries
# step sizes that `best_steps` tries, in units of eta, by the number of steps
SIZES = {
    1: (0.0, *(2 ** (power / 4) for power in range(-16, 17))),
    2: (0.0, *(2.0**power for power in range(-4, 5))),
}
_ALL = ("", 0.0, "", "all")  # the setting of numbers without frame and eps, on all tokens
_SOLVED = {"tol": 3e-4, "max_steps": 2000}


def of_sparse_step(lasso: Lasso, mid: Stream, y: Stream, code: SparseCode) -> Cells:
    """Returns the sparse step's numbers on all tokens.

    `of_solution` returns the numbers that need the lasso's solution.
    """
    own, x = _single(lasso, y)
    nothing = torch.zeros_like(lasso.lambd)
    # what causes the zeros in the code
    zeros, free, bare = (
        zero_fraction(z).double().mean(dim=-1)
        for z in (code, *lasso.run(y, nothing), *lasso.run(mid, lasso.lambd))
    )
    causes = {"threshold": over(zeros - free, zeros), "zeros": zeros}
    causes |= {"zeros_without_threshold": free, "zeros_without_norm": bare}
    return {("layer", *_ALL): measured(own, x, code.to(x)) | causes}


def of_random(
    lasso: Lasso, y: Stream, random: Sequence[Tensor], places: Int[Tensor, "batch tokens"] | None
) -> Cells:
    """Returns the numbers of random dictionaries, on the tokens at `places`; None: on all."""
    own, x = _single(lasso, y)
    if places is not None:
        x = torch.take_along_dim(x, places[..., None].to(x.device), dim=1)
    # one dictionary at a time, so that memory holds the codes of one
    draws = [_with_dictionary(own, x, d.to(x)) for d in random]
    null = {name: torch.stack([draw[name] for draw in draws]).mean(dim=0) for name in draws[0]}
    cells: Cells = {(f"random D {draw}", *_ALL): found for draw, found in enumerate(draws)}
    return cells | {("random D", *_ALL): null}


def of_solution(
    lasso: Lasso, y: Stream, code: SparseCode, tokens: int, largest: float, limited: bool
) -> tuple[Cells, PerSample | None]:
    """Returns the numbers that compare the code with the lasso's solution, on some tokens.

    largest: |D|_2^2. If limited, the numbers of the ceiling, of the lasso's solution and of the
    construction too, and the best scale of D for each sample. The ceiling is the code of
    `best_steps`. The construction is the step with D at the best scale: of the scales in SCALES,
    the one at which the step covers the largest share of the way from its start to the solution, on
    some tokens. Each number is measured on the tokens of the layer's own number.
    """
    places, setting = _part(y, tokens)
    own, some = _as(torch.float64, lasso), y[:, places].double()
    scales = SCALES if limited else (1.0,)
    solutions = lasso_solutions_at(some, own.d, own.lambd, scales, largest, **_SOLVED)
    solution = solutions[scales.index(1.0)]
    layer = beside_solution(own, some, code[:, places].double(), solution)
    cells: Cells = {("layer", *setting): layer}
    if not limited:
        return cells, None
    best, found = _at_best_scale(own, some, solutions)
    single, x = _single(lasso, y)
    scaled = [
        _with_dictionary(single, one[None], single.d * scale)
        for one, scale in zip(x, best, strict=True)
    ]
    whole = {name: torch.cat([part[name] for part in scaled]) for name in scaled[0]}
    cells |= {
        ("ceiling", *_ALL): measured(single, x, best_steps(single, x)),
        ("ceiling", *setting): beside_solution(own, some, best_steps(own, some), solution),
        ("lasso solution", *setting): measured(own, some, solution),
        ("construction", *_ALL): whole,
        ("construction", *setting): found,
    }
    return cells, best


def _part(y: Tensor, tokens: int) -> tuple[Tensor, tuple[str, float, str, str]]:
    """Returns the positions of evenly spaced tokens, and their setting, such as "4 of 50"."""
    count, parts = y.shape[1], min(y.shape[1], tokens)
    # the middles of equal parts; without the first token, such as CLS, if each has 2 tokens or more
    places = ((torch.arange(parts, device=y.device) + 0.5) * count / parts).long()
    return places, (*_ALL[:3], f"{parts} of {count}")


def measured(lasso: Lasso, y: Stream, code: SparseCode) -> dict[str, PerSample]:
    """Returns the numbers of a code that do not need the lasso's solution."""
    at_start, first, _ = _at(lasso.start(y), y, lasso)
    reached, last, decoded = _at(code, y, lasso)
    length = _norm(y)
    best = over((decoded * y).sum(dim=(1, 2)), _norm(decoded) * length)
    return {
        "descends": over(reached - at_start, at_start),
        "kkt": over(last, first),
        "reconstruction": over(_norm(y - decoded), length),
        "best_scaled": (1 - best.square()).clamp_min(0).sqrt(),
    }


def beside_solution(
    lasso: Lasso, y: Stream, code: SparseCode, solution: SparseCode
) -> dict[str, PerSample]:
    """Returns the numbers of a code that need the lasso's solution."""
    (at_start, first, _), (reached, *_), (least, left, _) = (
        _at(z, y, lasso) for z in (lasso.start(y), code, solution)
    )
    gain, most = at_start - reached, at_start - least
    nothing = most <= 1e-9 * at_start.abs()
    return {
        # if no descent was possible, 1, or 0 if the objective rose
        "share": torch.where(nothing, (gain >= 0).double(), gain / most.where(~nothing, 1.0)),
        "converged": over(_norm(code - solution), torch.maximum(_norm(code), _norm(solution))),
        "unsolved": over(left, first),
    }


def _at(z: SparseCode, y: Stream, lasso: Lasso) -> tuple[PerSample, PerSample, Stream]:
    """Returns the objective and the KKT residual of a code, summed over tokens, and D z.

    They are `lasso_objective` and `lasso_kkt_residual`, but share the product D z.
    """
    decoded = z @ lasso.d.mT
    error = decoded - y
    squares, sizes = error.square().sum(dim=(1, 2)), (lasso.lambd * z.abs()).sum(dim=(1, 2))
    objective = 0.5 * squares.double() + sizes.double()
    moved = z - torch.relu(z - error @ lasso.d - lasso.lambd)
    return objective, torch.linalg.vector_norm(moved, dim=-1).sum(dim=-1).double(), decoded


def _with_dictionary(lasso: Lasso, y: Tensor, d: Tensor) -> dict[str, Tensor]:
    """Returns the numbers of the same step with another dictionary."""
    other = replace(lasso, d=d)
    code, free = other.run(y, other.lambd, torch.zeros_like(other.lambd))
    # which share of the zeros disappears if lambda is 0
    zeros = [zero_fraction(z).mean(dim=-1) for z in (code, free)]
    return measured(other, y, code) | {"threshold": over(zeros[0] - zeros[1], zeros[0])}


def best_steps(lasso: Lasso, y: Stream) -> SparseCode:
    """Returns the code with the least objective that the layer's number of steps can reach.

    Each step may have any size among eta times SIZES, the same size for all tokens of a sample.
    """
    sizes = [lasso.eta * size for size in SIZES[1 if lasso.count == 1 else 2]]
    first = y if lasso.warm else lasso.start(y)
    codes, least = lasso.run(y, lasso.lambd)[0], torch.full((len(y),), torch.inf, dtype=y.dtype)
    least = least.to(y.device)

    def look(code: Tensor, depth: int) -> None:
        nonlocal codes, least
        if not depth:
            value = lasso_objective(code, y, lasso.d, lasso.lambd).sum(dim=-1)
            lower = value < least
            codes = torch.where(lower[:, None, None], code, codes)
            least = torch.where(lower, value, least)
            return
        gradient = (code @ lasso.d.mT - y) @ lasso.d + lasso.lambd
        for size in sizes:
            look(torch.relu(code - size * gradient), depth - 1)

    look(first, lasso.count)
    return codes


def _at_best_scale(
    lasso: Lasso, y: Stream, solutions: Sequence[Tensor]
) -> tuple[PerSample, dict[str, PerSample]]:
    """Returns the best scale of D, and how near the step gets to the solution at that scale.

    solutions: the solutions of the lasso at each of SCALES.
    """
    scaled = [replace(lasso, d=lasso.d * scale) for scale in SCALES]
    every = [
        beside_solution(one, y, one.run(y, one.lambd)[0], solution)
        for one, solution in zip(scaled, solutions, strict=True)
    ]
    best = torch.stack([numbers["share"] for numbers in every]).argmax(dim=0)
    samples = torch.arange(len(y), device=y.device)
    found = {
        name: torch.stack([numbers[name] for numbers in every])[best, samples] for name in every[0]
    }
    return y.new_tensor(SCALES)[best], found


def of_rates(
    lasso: Lasso, norm: Norm, y: Stream, code: Stream, eps: Sequence[float], scales: Any = 1.0
) -> Cells:
    """Returns the relative change of R from the input y to the code Z, and from Z to D Z.

    In the frame "read", Z and D Z pass through the LayerNorm that y has already passed. scales: of
    D, a number or `[batch, 1, 1]`.
    """
    own, after = _single(lasso, code)
    decoded = after @ own.d.T * scales
    found = {name: _rates(z, norm, eps) for name, z in (("z", after), ("dz", decoded))}
    found["y"] = _rates(y.to(after), None, eps)
    cells: Cells = {}
    for frame in FRAMES:
        read, kept, back = (found[name][frame] for name in ("y", "z", "dz"))
        numbers = {"rate_kept": over(kept - read, read), "decoded": over(back - kept, kept)}
        for index, value in enumerate(eps):
            key = ("layer", frame, value, "", "all")
            cells[key] = {name: number[:, index] for name, number in numbers.items()}
    return cells


def rates_at_scale(
    lasso: Lasso, scales: PerSample, norm: Norm, y: Stream, eps: Sequence[float]
) -> Cells:
    """Returns the numbers of `of_rates` for a step whose D is scaled, sample by sample."""
    steps = [replace(lasso, d=lasso.d * scale) for scale in scales.tolist()]
    codes = [step.run(one[None], step.lambd)[0] for step, one in zip(steps, y, strict=True)]
    return of_rates(lasso, norm, y, torch.cat(codes), eps, scales[:, None, None].to(y))


def _rates(z: Stream, norm: Norm | None, eps: Sequence[float]) -> dict[str, Tensor]:
    """Returns R `[batch, eps]` in each frame; without a norm, "read" equals "stream"."""
    pos, width = z.shape[1:]
    alpha = width / (pos * torch.tensor(eps, dtype=torch.float64, device=z.device).square())
    square = z.square().sum(dim=(1, 2)).double()
    scale = pos * width / square.where(square > 0, 1.0)
    alphas = alpha.expand(len(z), -1)
    both = rates_of_codes(z[:, None], torch.cat([alphas, alpha * scale[:, None]], dim=1))
    stream, unit = both[:, : len(eps)], both[:, len(eps) :]
    read = stream if norm is None else rates_of_codes(norm.applied(z).to(z)[:, None], alphas)
    return {"stream": stream, "unit": unit, "read": read}


def _as(dtype: torch.dtype, lasso: Lasso) -> Lasso:
    return replace(lasso, d=lasso.d.to(dtype), lambd=lasso.lambd.to(dtype))


def _single(lasso: Lasso, y: Tensor) -> tuple[Lasso, Tensor]:
    """Returns a lasso and inputs in the dtype of the inputs, or in float32 if that is wider.

    It is enough where no solution is involved: sums of many terms are compared, and their relative
    differences are far larger than what float32 rounds.
    """
    dtype = single_of(y.dtype)
    return _as(dtype, lasso), y.to(dtype)


def _norm(x: Float[Tensor, "batch pos width"]) -> PerSample:
    return torch.linalg.vector_norm(x, dim=(1, 2))
