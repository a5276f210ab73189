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
from functools import partial
from typing import Any

import numpy as np
import torch
from drawing import level, panels, tidy, titled
from lab import LabResult, Steps, main, of_limit, result, values
from numpy.typing import NDArray
from torch import Tensor

WIDTH, TOKENS, COUNTS = 64, 6, (1, 5)
STEP, ITERATIONS, EVERY = 0.1, 3000, 50
SEEDS = {"quick": 6, "full": 30}
SHOWN = {
    "cosine": "cosine of p with the SVM of the best tokens",
    "local cosine": "... with that of the tokens it selects",
    "mass": "attention on the best tokens",
}


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


def claims_of(rows: list[list]) -> list[dict]:
    """Returns the claims: to which direction and which token attention goes."""
    one, several = (f"{samples} samples" for samples in COUNTS)
    said = {
        "start": values(rows, "gradient", one, ITERATIONS).mean(),
        "random": values(rows, "random", one, ITERATIONS).mean(),
        "best": values(rows, "cosine", several, ITERATIONS).mean(),
        "selected": values(rows, "selected", several, ITERATIONS).mean(),
        "even": 1 / TOKENS,
        "width": WIDTH,
        "tokens": TOKENS,
    }
    asked = {"svm": ("cosine", one), "mass": ("mass", one), "local": ("local cosine", several)}
    return [
        of_limit(f"max_margin.{rule}", rows, of, 1.0, ITERATIONS, **said)
        for rule, of in asked.items()
    ]


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the direction of p."""
    jobs = {
        f"{samples}-{seed}": partial(trained, samples, seed)
        for samples in COUNTS
        for seed in range(SEEDS[form])
    }
    rows = steps.rows(jobs, "max-margin")
    one, several = (f"{samples} samples" for samples in COUNTS)
    return result(
        "max_margin", form, claims_of(rows), rows, iterations=ITERATIONS, step=STEP,
        samples=COUNTS[1], best=values(rows, "cosine", several, ITERATIONS).mean(),
        random=values(rows, "random", one, ITERATIONS).mean(),
        on_average=math.sqrt(2 / math.pi / WIDTH),
    )  # fmt: skip


def draw(found: LabResult) -> Any:
    """Draws the cosines and the attention along training, a thin line a seed and the mean."""
    figure, axes = panels(len(SHOWN))
    for axis, (name, words) in zip(axes, SHOWN.items(), strict=True):
        for place, (setting, rows) in enumerate(found.numbers(name).groupby("setting", sort=False)):
            wide = rows.pivot(index="place", columns="seed", values="value")
            axis.plot(wide, color=f"C{place}", lw=0.6, alpha=0.4)
            axis.plot(wide.mean(axis=1), color=f"C{place}", lw=2, label=f"{setting}, mean")
        random = found.numbers("random")["value"].mean()
        chance, kind = (
            (1 / TOKENS, "even attention") if name == "mass" else (random, "random direction")
        )
        level(axis, chance, f"{kind}, {chance:.2f}")
        tidy(axis, xlabel="steps", title=words, ylim=(None, 1.03))
    several = found.numbers("cosine", setting=f"{COUNTS[1]} samples")
    best = several[several["place"] == several["place"].max()]["value"].mean()
    return titled(figure, found, best=best)


if __name__ == "__main__":
    main(run, draw)
