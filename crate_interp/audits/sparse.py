"""The audit of one layer's sparse step: its numbers, those of random dictionaries, and its limits.

It also measures whether the step keeps the rate R, and whether D Z has the same R as the code Z.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.audits.attention import Cells
from crate_interp.audits.descent import rates_of_codes
from crate_interp.audits.frames import Norm, over
from crate_interp.measures import lasso_kkt_residual, lasso_objective, lasso_solution, zero_fraction
from crate_interp.measures.lasso import lasso_solutions_at
from crate_interp.models.layers.sparse_steps import Lasso
from crate_interp.probes.layer_reading import FRAMES

DRAWS = 8  # number of random dictionaries
SCALES = tuple(2.0**power for power in range(-2, 3))  # scales of D that the construction tries
# step sizes that `best_steps` tries, in units of eta, by the number of steps
SIZES = {
    1: (0.0, *(2 ** (power / 4) for power in range(-16, 17))),
    2: (0.0, *(2.0**power for power in range(-4, 5))),
}
_PLAIN = ("", 0.0, "", "some")  # the setting of numbers without frame and eps
_SOLVED = {"tol": 3e-4, "max_steps": 2000}


def of_sparse_step(
    lasso: Lasso,
    mid: Float[Tensor, "batch pos d_model"],
    y: Float[Tensor, "batch pos d_model"],
    code: Float[Tensor, "batch pos d_mlp"],
    tokens: int,
    random: Sequence[Tensor] = (),
) -> Cells:
    """Returns the sparse step's numbers on evenly spaced tokens, with its own and with random D."""
    places = evenly(y.shape[1], tokens, y.device)
    some, own = y[:, places].double(), _double(lasso)
    solution = lasso_solution(some, own.d, own.lambd, **_SOLVED)
    numbers = measured(own, some, code[:, places].double(), solution)
    numbers |= _zeros(lasso, mid[:, places], y[:, places], code, code[:, places])
    cells: Cells = {("layer", *_PLAIN): numbers}
    if random:
        draws = [_with_dictionary(own, some, d) for d in random]
        cells |= {(f"random D {draw}", *_PLAIN): found for draw, found in enumerate(draws)}
        null = {name: torch.stack([draw[name] for draw in draws]).mean(dim=0) for name in draws[0]}
        cells["random D", *_PLAIN] = null
    return cells


def measured(
    lasso: Lasso,
    y: Float[Tensor, "batch pos d_model"],
    code: Float[Tensor, "batch pos d_mlp"],
    solution: Float[Tensor, "batch pos d_mlp"] | None = None,
) -> dict[str, Tensor]:
    """Returns the numbers of a code, `[batch]` each.

    share, converged and unsolved are measured only if the lasso's solution is given.
    """
    start = lasso.start(y)
    at_start, reached = (_objective(z, y, lasso) for z in (start, code))
    residuals = [_residual(z, y, lasso) for z in (start, code)]
    decoded = code @ lasso.d.mT
    length = _norm(y)
    best = over((decoded * y).sum(dim=(1, 2)), _norm(decoded) * length)
    numbers = {
        "descends": over(reached - at_start, at_start),
        "kkt": over(residuals[1], residuals[0]),
        "reconstruction": over(_norm(y - decoded), length),
        "best_scaled": (1 - best.square()).clamp_min(0).sqrt(),
    }
    if solution is not None:
        lengths = torch.maximum(_norm(code), _norm(solution))
        numbers |= {
            "share": _share(at_start, reached, _objective(solution, y, lasso)),
            "converged": over(_norm(code - solution), lengths),
            "unsolved": over(_residual(solution, y, lasso), residuals[0]),
        }
    return numbers


def _zeros(
    lasso: Lasso, mid: Tensor, y: Tensor, code: Tensor, some: Tensor
) -> dict[str, Float[Tensor, "batch"]]:
    """Returns numbers on what causes the zeros in the code.

    "zeros" is measured on all tokens (code), the other numbers on the tokens of mid, y and some.
    """
    nothing = torch.zeros_like(lasso.lambd)
    own, free, bare = (
        zero_fraction(z).double().mean(dim=-1)
        for z in (some, lasso.run(y, nothing), lasso.run(mid, lasso.lambd))
    )
    return {
        "threshold": over(own - free, own),
        "zeros": zero_fraction(code).double().mean(dim=-1),
        "zeros_without_threshold": free,
        "zeros_without_norm": bare,
    }


def _with_dictionary(
    lasso: Lasso, y: Tensor, d: Tensor, solution: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the numbers of the same step with another dictionary."""
    other = replace(lasso, d=d.double())
    code, free = (other.run(y, lambd) for lambd in (other.lambd, torch.zeros_like(other.lambd)))
    # which share of the zeros disappears if lambda is 0
    zeros = [zero_fraction(z).mean(dim=-1) for z in (code, free)]
    threshold = over(zeros[0] - zeros[1], zeros[0])
    return measured(other, y, code, solution) | {"threshold": threshold}


def limits(
    lasso: Lasso, y: Float[Tensor, "batch pos d_model"], tokens: int
) -> tuple[Cells, Float[Tensor, "batch"]]:
    """Returns the numbers of the ceiling, of the lasso's solution and of the construction.

    The ceiling is the code of `best_steps`. The construction is the step with D at the best scale
    for each sample. Of the scales in SCALES, the best is the one at which the step covers the
    largest share of the way from its start to the solution. The best scales are returned too.
    """
    own = _double(lasso)
    some = y[:, evenly(y.shape[1], tokens, y.device)].double()
    solutions = lasso_solutions_at(some, own.d, own.lambd, SCALES, **_SOLVED)
    solution = solutions[SCALES.index(1.0)]
    numbers = [measured(own, some, code, solution) for code in (best_steps(own, some), solution)]
    scales, found = _at_best_scale(own, some, solutions)
    cells: Cells = {
        ("ceiling", *_PLAIN): numbers[0],
        ("lasso solution", *_PLAIN): numbers[1],
        ("construction", *_PLAIN): found,
    }
    return cells, scales


def best_steps(
    lasso: Lasso, y: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos d_mlp"]:
    """Returns the code with the least objective that the layer's number of steps can reach.

    Each step may have any size among eta times SIZES, the same size for all tokens of a sample.
    """
    sizes = [lasso.eta * size for size in SIZES[1 if lasso.count == 1 else 2]]
    first = y if lasso.warm else lasso.start(y)
    codes, least = lasso.run(y, lasso.lambd), torch.full((len(y),), torch.inf, dtype=y.dtype)
    least = least.to(y.device)

    def look(code: Tensor, left: int) -> None:
        nonlocal codes, least
        if not left:
            value = _objective(code, y, lasso)
            lower = value < least
            codes = torch.where(lower[:, None, None], code, codes)
            least = torch.where(lower, value, least)
            return
        gradient = (code @ lasso.d.mT - y) @ lasso.d + lasso.lambd
        for size in sizes:
            look(torch.relu(code - size * gradient), left - 1)

    look(first, lasso.count)
    return codes


def _at_best_scale(
    lasso: Lasso, y: Float[Tensor, "batch pos d_model"], solutions: Sequence[Tensor]
) -> tuple[Float[Tensor, "batch"], dict[str, Float[Tensor, "batch"]]]:
    """Returns the best scale of D, and the step's numbers at that scale, sample by sample.

    solutions: the solutions of the lasso at each of SCALES.
    """
    every = [
        _with_dictionary(lasso, y, lasso.d * scale, solution)
        for scale, solution in zip(SCALES, solutions, strict=True)
    ]
    best = torch.stack([numbers["share"] for numbers in every]).argmax(dim=0)
    samples = torch.arange(len(y), device=y.device)
    found = {
        name: torch.stack([numbers[name] for numbers in every])[best, samples] for name in every[0]
    }
    return y.new_tensor(SCALES)[best], found


def of_rates(
    d: Float[Tensor, "d_model d_model"],
    norm: Norm,
    y: Float[Tensor, "batch pos d_model"],
    code: Float[Tensor, "batch pos d_model"],
    eps: Sequence[float],
) -> Cells:
    """Returns the relative change of R from the input y to the code Z, and from Z to D Z.

    In the frame "read", Z and D Z pass through the LayerNorm that y has already passed.
    """
    wide, after = y.double(), code.double()
    decoded = after @ d.double().T
    found = {name: _rates(z, norm, eps) for name, z in (("z", after), ("dz", decoded))}
    found["y"] = _rates(wide, None, eps)
    cells: Cells = {}
    for frame in FRAMES:
        read, kept, back = (found[name][frame] for name in ("y", "z", "dz"))
        numbers = {"rate_kept": over(kept - read, read), "decoded": over(back - kept, kept)}
        for index, value in enumerate(eps):
            key = ("layer", frame, value, "", "all")
            cells[key] = {name: number[:, index] for name, number in numbers.items()}
    return cells


def rates_at_scale(
    lasso: Lasso,
    scales: Float[Tensor, "batch"],
    norm: Norm,
    y: Float[Tensor, "batch pos d_model"],
    eps: Sequence[float],
) -> Cells:
    """Returns the numbers of `of_rates` for a step whose D is scaled, sample by sample."""
    parts: list[Cells] = []
    for scale, one in zip(scales.tolist(), y, strict=True):
        other = replace(lasso, d=lasso.d * scale)
        code = other.run(one[None], other.lambd)
        parts.append(of_rates(other.d, norm, one[None], code, eps))
    return {
        key: {name: torch.cat([part[key][name] for part in parts]) for name in parts[0][key]}
        for key in parts[0]
    }


def _rates(
    z: Float[Tensor, "batch pos d_model"], norm: Norm | None, eps: Sequence[float]
) -> dict[str, Tensor]:
    """Returns R `[batch, eps]` in each frame; without a norm, "read" equals "stream"."""
    pos, width = z.shape[1:]
    alpha = width / (pos * torch.tensor(eps, dtype=z.dtype, device=z.device).square())
    square = z.square().sum(dim=(1, 2))
    scale = pos * width / square.where(square > 0, 1.0)
    both = torch.cat([alpha.expand(len(z), -1), alpha * scale[:, None]], dim=1)
    stream = rates_of_codes(z[:, None], both)
    found = {"stream": stream[:, : len(eps)], "unit": stream[:, len(eps) :]}
    if norm is None:
        return found | {"read": found["stream"]}
    return found | {"read": rates_of_codes(norm.applied(z)[:, None], alpha.expand(len(z), -1))}


def evenly(count: int, wanted: int, device: Any) -> Tensor:
    """Returns the positions of `wanted` evenly spaced tokens: the middles of equal parts.

    The first token, such as CLS, is left out if each part has at least 2 tokens.
    """
    parts = min(count, wanted)
    return ((torch.arange(parts, device=device) + 0.5) * count / parts).long()


def _double(lasso: Lasso) -> Lasso:
    return replace(lasso, d=lasso.d.double(), lambd=lasso.lambd.double())


def _objective(z: Tensor, y: Tensor, lasso: Lasso) -> Float[Tensor, "batch"]:
    return lasso_objective(z, y, lasso.d, lasso.lambd).sum(dim=-1)


def _residual(z: Tensor, y: Tensor, lasso: Lasso) -> Float[Tensor, "batch"]:
    return lasso_kkt_residual(z, y, lasso.d, lasso.lambd).sum(dim=-1)


def _share(start: Tensor, reached: Tensor, solution: Tensor) -> Float[Tensor, "batch"]:
    """Returns the share of the possible descent that was achieved.

    If no descent was possible, the share is 1, or 0 if the objective rose.
    """
    gain, most = start - reached, start - solution
    nothing = most <= 1e-9 * start.abs()
    return torch.where(nothing, (gain >= 0).double(), gain / most.where(~nothing, 1.0))


def _norm(x: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch"]:
    return torch.linalg.vector_norm(x, dim=(1, 2))
