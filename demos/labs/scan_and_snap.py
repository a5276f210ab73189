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
from functools import partial
from typing import Any

import numpy as np
import torch
from drawing import curve, panels, tidy, titled
from lab import LabResult, Steps, claim, descended, main, result, values
from torch import Tensor

ANSWERS, DISTINCT, COMMON = 5, 4, 6
RATE_Y, RATE_Z, ITERATIONS, EVERY = 1.0, 0.05, 6000, 30
SEEDS = {"quick": 3, "full": 12}
TOKENS = ANSWERS * DISTINCT + COMMON


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

    def loss() -> Tensor:
        asked = torch.randperm(ANSWERS, generator=generator) if permuted else answers
        return loss_of(counts, z, y, asked)

    rates = [RATE_Z * ANSWERS, RATE_Y * ANSWERS]  # the loss is a mean over answers
    key = "permuted" if permuted else "trained", seed
    look = lambda: measured(z, begun)  # noqa: E731
    return descended([z, y], rates, loss, look, key, ITERATIONS, EVERY)


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


def published(t: np.ndarray, c0: float) -> np.ndarray:
    """Returns ln(C0 + 2K (eta_Z / eta_Y) ln^2(M eta_Y t / K)) of iterations t > 0."""
    inner = np.log(np.maximum(TOKENS * RATE_Y * t / ANSWERS, 1.0))
    return np.log(c0 + 2 * ANSWERS * (RATE_Z / RATE_Y) * inner**2)


# what the published form is compared with, by seed with the better one, each with three constants:
# ln(t + C0) with any C0 for which it is defined, and a power of t, which nears a limit
RIVALS = (lambda t, c0: np.log(t - t[0] + c0), lambda t, c0: t**-c0)


def misfit(t: np.ndarray, b: np.ndarray, form: Callable = published) -> float:
    """Returns the share of the variance of B after t0 that a form of growth leaves.

    C0, a scale and an offset are fitted: the form is an order of growth, without constants.
    """
    from scipy.optimize import minimize_scalar

    late = t > 2 * ANSWERS * math.log(TOKENS) / RATE_Y
    left = lambda c: left_by(form(t[late], math.exp(c)), b[late])  # noqa: E731
    best: Any = minimize_scalar(left, bounds=(-5.0, 8.0), method="bounded")
    return float(best.fun)


def left_by(form: np.ndarray, b: np.ndarray) -> float:
    """Returns the share of the variance of b that a straight line in `form` leaves."""
    return float(1 - np.corrcoef(form, b)[0, 1] ** 2)


def against(rule: str, own: np.ndarray, rivals: np.ndarray) -> dict:
    """Returns the claim about values by seed beside those of a rival, paired by seed.

    A score must also rise, or fall, by itself.
    """
    cases = {"difference": own - rivals} | ({} if rule == "form" else {"score": own})
    size: Any = {"answers": ANSWERS, "own": DISTINCT, "common": COMMON}
    return claim(f"scan_and_snap.{rule}", own, cases=cases, baseline=rivals.mean(), **size)


def claims_of(rows: list[list], seeds: int) -> list[dict]:
    """Returns the claims about the end of the trainings, and about the curve B(t)."""
    found = [
        against(name, *(values(rows, name, kind, ITERATIONS) for kind in ("trained", "permuted")))
        for name in ("distinct", "common")
    ]
    t = np.arange(0.0, ITERATIONS + 1, EVERY)
    curves = values(rows, "growth", "trained").reshape(seeds, -1)
    rivals = [min(misfit(t, b, form) for form in RIVALS) for b in curves]
    return [*found, against("form", np.array([misfit(t, b) for b in curves]), np.array(rivals))]


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about scan and snap."""
    jobs = {
        f"{seed}-{kind}": partial(trained, seed, kind == "permuted")
        for seed in range(SEEDS[form])
        for kind in ("trained", "permuted")
    }
    rows = steps.rows(jobs, "scan and snap")
    left = values(rows, "error", "trained", ITERATIONS).mean()
    return result("scan_and_snap", form, claims_of(rows, SEEDS[form]), rows, left=left)


def draw(found: LabResult) -> Any:
    """Draws the scores, the growth B(t), and what one B leaves unexplained, over iterations."""
    figure, axes = panels(3)
    lines = [(0, name, setting, line + colour, f"{name}, {setting}")
             for name, colour in (("distinct", "C0"), ("common", "C1"))
             for setting, line in (("trained", "-"), ("permuted", ":"))]  # fmt: skip
    lines += [
        (1, "growth", "trained", "-C0", "measured"),
        (2, "error", "trained", "-C0", "trained"),
        (2, "error", "permuted", ":C0", "permuted answers"),
    ]
    for at, name, setting, style, words in lines:
        rows = found.numbers(name, setting=setting)
        curve(axes[at], rows[rows["place"] > 0], style, 0.15, label=words)
    tidy(axes[0], xlabel="iteration", title="mean score of tokens")
    tidy(axes[1], xlabel="iteration", title="B(t), the growth of who wins", xscale="log")
    words = "share of who wins that one B leaves"
    tidy(axes[2], xlabel="iteration", title=words, yscale="log")
    return titled(figure, found)


if __name__ == "__main__":
    main(run, draw)
