"""Does attention that is trained turn to the max-margin direction between tokens?

    python demos/labs/max_margin.py [--quick | --full] --out DIR

`f(X) = v^T X^T softmax(X p)` with a fixed v and labels Y. The token of a sample with the highest
Y v^T x is the one to select. Gradient descent on p with the logistic loss is claimed to go to
infinity in the direction of the attention SVM, `min |p|^2` with `p^T (x_selected - x_other) >= 1`
for all others (arXiv 2306.13596): from anywhere for one sample, and near a solution in general.
Other choices of one token a sample have an SVM each, to which it may go instead ("local"). Steps
have a length of their own, .1, since the gradient vanishes.

Our sizes: width 64, 6 tokens, 1 and 5 samples, so that each SVM can be solved.
"""

import math

import numpy as np
import torch
from lab import LabResult, Steps, claim, main, result, towards
from max_margin_drawing import draw
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

WIDTH, TOKENS, COUNTS = 64, 6, (1, 5)
STEP, ITERATIONS, EVERY = 0.1, 3000, 50
SEEDS = {"quick": 6, "full": 30}
SIZE = f"width {WIDTH}, {TOKENS} tokens"

HEADLINE = (
    "After {iterations} steps of length {step} the cosine of p with the max-margin direction is "
    "{claims[0][ours]:.3f} for one sample and {best:.3f} for {samples} ({claims[2][ours]:.3f} with "
    "that of the tokens it selects); random directions have {random:.2f}, or "
    "{on_average:.2f} on average."
)


def margins(x: Tensor, chosen: Tensor) -> Tensor:
    """Returns x_chosen - x_t for all other tokens of each sample, [constraint, width].

    x: [sample, token, width]. chosen: [sample].
    """
    rows = torch.arange(len(x))
    apart = x[rows, chosen][:, None] - x
    others = torch.ones(x.shape[:2], dtype=torch.bool)
    others[rows, chosen] = False
    return apart[others]


def svm(a: NDArray) -> NDArray:
    """Returns the shortest p with a p >= 1, [width]; a: [constraint, width] of full row rank.

    Its dual is min 1/2 |a^T l|^2 - sum l over l >= 0, a least squares with l >= 0.
    """
    from scipy.optimize import nnls

    target = np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0]  # a target = 1
    weights, _ = nnls(a.T, target)
    return a.T @ weights


def problem(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens of length one, v and labels."""
    x = torch.randn(samples, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    v = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.where(torch.rand(samples, generator=generator) < 0.5, -1.0, 1.0).double()
    return x / x.norm(dim=-1, keepdim=True), v, labels


def loss_of(p: Tensor, x: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    pattern = torch.softmax(x @ p, dim=-1)
    f = torch.einsum("st,std,d->s", pattern, x, v)
    return torch.nn.functional.softplus(-labels * f).mean()


def slope_of(p: Tensor, x: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    """Returns the gradient of the loss with respect to p, without cancellation.

    Where attention is nearly 1 on a token, autograd loses the rest, which decides the direction.
    Here the slope of f by score t is s_t sum_u s_u (v^T x_t - v^T x_u), of terms with one sign.
    """
    pattern = torch.softmax(x @ p, dim=-1)
    values = x @ v
    apart = values[:, :, None] - values[:, None]  # [sample, t, u]
    by_score = pattern * torch.einsum("stu,su->st", apart, pattern)
    f = (pattern * values).sum(dim=-1)
    factor = -labels * torch.sigmoid(-labels * f) / len(x)
    return torch.einsum("s,st,std->d", factor, by_score, x)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300))


def trained(samples: int, seed: int) -> list[list]:
    """Returns rows along a training: cosines with the SVMs, the length of p, selection."""
    generator = torch.Generator().manual_seed(1000 * samples + seed)
    x, v, labels = problem(samples, generator)
    wanted = (labels[:, None] * (x @ v)).argmax(dim=-1)
    best = torch.from_numpy(svm(margins(x, wanted).numpy()))
    p = 0.01 * torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    random = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    first, setting = slope_of(p, x, v, labels), f"{samples} samples"
    rows: list[list] = []
    for at in range(ITERATIONS + 1):
        if at % EVERY == 0:
            found = selection(p, x, wanted)
            local = torch.from_numpy(svm(margins(x, (x @ p).argmax(dim=-1)).numpy()))
            found |= {"cosine": cosine(p, best), "local cosine": cosine(p, local)}
            found |= {"random": abs(cosine(random, best)), "gradient": cosine(-first, best)}
            rows += [[name, setting, seed, at, value] for name, value in found.items()]
        slope = slope_of(p, x, v, labels)
        p = p - STEP * slope / slope.norm().clamp_min(1e-300)
    return rows


def selection(p: Tensor, x: Tensor, wanted: Tensor) -> dict[str, float]:
    """Returns the length of p, the mass on the tokens to select, and the share selected."""
    pattern = torch.softmax(x @ p, dim=-1)
    mass = pattern.gather(1, wanted[:, None]).mean()
    share = (pattern.argmax(dim=-1) == wanted).double().mean()
    return {"length": float(p.norm()), "mass": float(mass), "selected": float(share)}


def at(rows: list[list], name: str, samples: int, iteration: int | None = None) -> list[float]:
    """Returns a number over seeds, at an iteration or at the end."""
    when, key = ITERATIONS if iteration is None else iteration, [name, f"{samples} samples"]
    return [row[4] for row in rows if row[:2] == key and row[3] == when]


def of_limit(rows: list[list], rule: str, name: str, samples: int, why: str) -> dict:
    """Returns the claim that a number goes to 1."""
    begun, half, end = (
        np.array(at(rows, name, samples, iteration))
        for iteration in (0, ITERATIONS // 2, ITERATIONS)
    )
    return claim(
        f"max_margin.{rule}", end.tolist(), published="1", n=len(end), size=SIZE,
        cases=towards(1 - begun, 1 - half, 1 - end),
        baseline=float(begun.mean()), why=why,
    )  # fmt: skip


def claims_of(rows: list[list]) -> list[dict]:
    """Returns the claims: to which direction and which token attention goes."""
    one, several = COUNTS
    start = np.mean(at(rows, "gradient", one))
    random = np.mean(at(rows, "random", one))
    best, selected = np.mean(at(rows, "cosine", several)), np.mean(at(rows, "selected", several))
    return [
        of_limit(rows, "svm", "cosine", one, f"The first gradient has {start:.2f}, a random "
                 f"direction {random:.2f}."),
        of_limit(rows, "mass", "mass", one, f"Even attention has {1 / TOKENS:.3f}."),
        of_limit(rows, "local", "local cosine", several,
                 f"They are the best ones in {selected:.0%}; the cosine with the SVM of the best "
                 f"is {best:.3f}, since other choices are local solutions."),
    ]  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the direction of p."""
    rows: list[list] = []
    jobs = [(samples, seed) for samples in COUNTS for seed in range(SEEDS[form])]
    for samples, seed in tqdm(jobs, desc="max-margin", unit="training"):
        rows += steps.do(f"{samples}-{seed}", lambda: trained(samples, seed))  # noqa: B023
    claims = claims_of(rows)
    headline = HEADLINE.format(
        iterations=ITERATIONS,
        step=STEP,
        claims=claims,
        samples=COUNTS[1],
        best=np.mean(at(rows, "cosine", COUNTS[1])),
        random=np.mean(at(rows, "random", COUNTS[0])),
        on_average=math.sqrt(2 / math.pi / WIDTH),
    )
    return result("max_margin", form, headline, claims, rows)


if __name__ == "__main__":
    main(run, draw)
