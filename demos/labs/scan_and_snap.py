"""Does attention scan for the tokens that tell the answer, and then snap?

    python demos/labs/scan_and_snap.py [--quick | --full] --out DIR

Scan and Snap (arXiv 2305.16380), in the slides as background: a decoder Y that learns fast and one
row of attention scores z that learn slowly, on sequences whose context has distinct tokens, each of
one answer, and common tokens, of all. Claimed: scores of distinct tokens rise and those of common
ones fall; among the distinct tokens of an answer the more frequent wins, and the log of its
advantage is 4 (f_l^2 - f_l'^2) B(t) for one B(t) of the answer, f being the start; B(t) is about
ln(C0 + 2K (eta_Z / eta_Y) ln^2(M eta_Y t / K)), so that the growth slows down after
t0 = 2K ln(M) / eta_Y.

Our reading, on the population and without noise: K answers of equal probability; the input of the
decoder for answer n is f = c exp(z) / |c exp(z)|, with c the frequencies of tokens given n; the
loss is the cross-entropy of softmax(f Y); gradient descent from Y = 0, z = 0. Answers have their
own scores, as if each had a query of its own. The baseline gives the decoder permuted answers.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from scan_and_snap_drawing import draw
from torch import Tensor
from tqdm.auto import tqdm

ANSWERS, DISTINCT, COMMON = 5, 4, 6
RATE_Y, RATE_Z, ITERATIONS, EVERY = 1.0, 0.05, 6000, 30
SEEDS = {"quick": 3, "full": 12}
SIZE = f"{ANSWERS} answers, {DISTINCT} distinct tokens each, {COMMON} common (sizes are not given)"
TOKENS = ANSWERS * DISTINCT + COMMON

HEADLINE = (
    "Scores of distinct tokens end at {claims[0][ours]:+.2f} and of common ones at "
    "{claims[1][ours]:+.2f} (permuted answers {claims[0][baseline]:+.2f}, "
    "{claims[1][baseline]:+.2f}); one B(t) leaves {left:.2%} of who wins unexplained, and the "
    "published form of B(t) {claims[2][ours]:.1e} of its variance (a rival "
    "{claims[2][baseline]:.1e})."
)


def frequencies(generator: torch.Generator) -> Tensor:
    """Returns how often each token is in the context of each answer, [answer, token].

    Tokens n DISTINCT to (n + 1) DISTINCT - 1 are those of answer n; the last COMMON are of all.
    """
    found = torch.zeros(ANSWERS, TOKENS, dtype=torch.float64)
    for answer in range(ANSWERS):
        own = slice(answer * DISTINCT, (answer + 1) * DISTINCT)
        drawn = torch.rand(DISTINCT + COMMON, generator=generator, dtype=torch.float64) + 0.2
        found[answer, own], found[answer, -COMMON:] = drawn[:DISTINCT], drawn[DISTINCT:]
    return found / found.sum(dim=-1, keepdim=True)


def inputs(counts: Tensor, z: Tensor) -> Tensor:
    """Returns f = c exp(z) / |c exp(z)|, [answer, token]."""
    weighed = counts * torch.exp(z)
    return weighed / weighed.norm(dim=-1, keepdim=True)


def loss_of(counts: Tensor, z: Tensor, y: Tensor, answers: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(inputs(counts, z) @ y, answers)


def trained(seed: int, permuted: bool) -> list[list]:
    """Returns rows along a training; permuted: the answers are shuffled at each step."""
    generator = torch.Generator().manual_seed(seed)
    counts, answers = frequencies(generator), torch.arange(ANSWERS)
    begun = inputs(counts, torch.zeros_like(counts))
    z = torch.zeros(ANSWERS, TOKENS, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(TOKENS, ANSWERS, dtype=torch.float64, requires_grad=True)
    rows, setting = [], "permuted" if permuted else "trained"
    for at in range(ITERATIONS + 1):
        if at % EVERY == 0:
            found = measured(z.detach(), begun)
            rows += [[name, setting, seed, at, value] for name, value in found.items()]
        asked = torch.randperm(ANSWERS, generator=generator) if permuted else answers
        slopes = torch.autograd.grad(loss_of(counts, z, y, asked), [z, y])
        with torch.no_grad():
            z -= RATE_Z * ANSWERS * slopes[0]  # the loss is a mean over answers
            y -= RATE_Y * ANSWERS * slopes[1]
    return rows


def measured(z: Tensor, begun: Tensor) -> dict[str, float]:
    """Returns mean scores of distinct and common tokens, and how far one B explains advantages.

    For each answer, B is the slope of 2 (z_l - z_l') over 4 (f_l^2 - f_l'^2) through 0, over all
    pairs of its distinct tokens, and the error is the share of their squares that it leaves. The
    advantage is that of the squared weights, as in the paper.
    """
    distinct, common, growths, errors = [], [], [], []
    for answer in range(ANSWERS):
        own = slice(answer * DISTINCT, (answer + 1) * DISTINCT)
        distinct.append(z[answer, own].mean().item())
        common.append(z[answer, -COMMON:].mean().item())
        at, f = z[answer, own], begun[answer, own] ** 2
        pairs = torch.triu_indices(DISTINCT, DISTINCT, 1)
        gained = 2 * (at[pairs[0]] - at[pairs[1]])
        apart = 4 * (f[pairs[0]] - f[pairs[1]])
        b = float(gained @ apart / (apart @ apart))
        growths.append(b)
        left = (gained - b * apart).square().sum() / gained.square().sum().clamp_min(1e-300)
        errors.append(float(left))
    found = {"distinct": np.mean(distinct), "common": np.mean(common), "growth": np.mean(growths)}
    return {name: float(value) for name, value in found.items()} | {"error": float(np.mean(errors))}


def series(rows: list[list], name: str, setting: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = [(r[3], r[4]) for r in rows if r[:3] == [name, setting, seed]]
    at, values = zip(*chosen, strict=True)
    return np.array(at, dtype=float), np.array(values)


def published(t: np.ndarray, c0: float) -> np.ndarray:
    """Returns ln(C0 + 2K (eta_Z / eta_Y) ln^2(M eta_Y t / K)) of iterations t > 0."""
    inner = np.log(np.maximum(TOKENS * RATE_Y * t / ANSWERS, 1.0))
    return np.log(c0 + 2 * ANSWERS * (RATE_Z / RATE_Y) * inner**2)


def shifted_log(t: np.ndarray, c0: float) -> np.ndarray:
    """Returns ln(t - t[0] + c0), which is ln(t + C0) with any C0 for which it is defined."""
    return np.log(t - t[0] + c0)


def power(t: np.ndarray, c0: float) -> np.ndarray:
    """Returns t^-c0: a line in it is a power of t, which nears a limit."""
    return t**-c0


# what the published form is compared with, by seed with the better one; each has three constants
RIVALS = (shifted_log, power)


def misfit(t: np.ndarray, b: np.ndarray, form: Callable = published) -> float:
    """Returns the share of the variance of B after t0 that a form of growth leaves.

    C0, a scale and an offset are fitted: the form is an order of growth, without constants.
    """
    from scipy.optimize import minimize_scalar

    late = t > snap_time()
    left = lambda c: left_by(form(t[late], math.exp(c)), b[late])  # noqa: E731
    best: Any = minimize_scalar(left, bounds=(-5.0, 8.0), method="bounded")
    return float(best.fun)


def left_by(form: np.ndarray, b: np.ndarray) -> float:
    """Returns the share of the variance of b that a straight line in `form` leaves."""
    return float(1 - np.corrcoef(form, b)[0, 1] ** 2)


def snap_time() -> float:
    return 2 * ANSWERS * math.log(TOKENS) / RATE_Y


def against(rule: str, values: list[float], rivals: list[float], why: str) -> dict:
    """Returns the claim about values by seed beside those of a rival, paired by seed.

    A score must also rise, or fall, by itself.
    """
    cases = {"difference": mean_and_interval(np.subtract(values, rivals))[1]}
    if rule in ("distinct", "common"):
        cases["score"] = mean_and_interval(values)[1]
    return claim(
        f"scan_and_snap.{rule}", values, cases=cases, n=len(values), size=SIZE,
        baseline=float(np.mean(rivals)), why=why,
    )  # fmt: skip


def claims_of(rows: list[list], seeds: range) -> list[dict]:
    """Returns the claims about the end of the trainings, and about the curve B(t)."""
    last = lambda name, kind: [series(rows, name, kind, seed)[1][-1] for seed in seeds]  # noqa: E731
    found = [
        against(name, last(of, "trained"), last(of, "permuted"), "Both start alike.")
        for name, of in (("distinct", "distinct"), ("common", "common"))
    ]
    curves = [series(rows, "growth", "trained", seed) for seed in seeds]
    fits = [misfit(*curve) for curve in curves]
    rivals = [min(misfit(*curve, form) for form in RIVALS) for curve in curves]
    found.append(against("form", fits, rivals, "Each has three constants."))
    return found


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about scan and snap."""
    rows: list[list] = []
    jobs = [(seed, kind) for seed in range(SEEDS[form]) for kind in (False, True)]
    for seed, kind in tqdm(jobs, desc="scan and snap", unit="training"):
        step = f"{seed}-{'permuted' if kind else 'trained'}"
        rows += steps.do(step, lambda: trained(seed, kind))  # noqa: B023
    claims = claims_of(rows, range(SEEDS[form]))
    left = np.mean([row[4] for row in rows if row[:2] == ["error", "trained"]
                    and row[3] == ITERATIONS])  # fmt: skip
    headline = HEADLINE.format(claims=claims, left=left)
    return result("scan_and_snap", form, headline, claims, rows)


if __name__ == "__main__":
    main(run, draw)
