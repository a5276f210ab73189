"""Does a one-layer transformer find the one group of variables that decides the label?

    python demos/labs/group_sparse.py [--quick | --full] --out DIR

D groups x_1 .. x_D of d normal variables; the label is the sign of <v*, x_j*>, with j* the second.
The model is `f = sum_j v^T H softmax(H^T W h_j)`, where H has the groups over positions
`p_i[j] = sin(i j pi / (D + 1))`, trained by gradient descent on the logistic loss from zero. Claims
of the theorem: attention goes to j*, v in the direction of v*, the loss to zero. At the published
sizes (n, d, D) = (500, 4, 6) and (200, 2, 4); the rate of the published runs is not known, here it
is .1. The theorem is about the expected loss, so its claims are asked of trainings on fresh
samples; those on one sample stand beside them.
"""

import numpy as np
import torch
from group_sparse_drawing import draw
from lab import LabResult, Steps, claim, main, result, towards
from torch import Tensor
from tqdm.auto import tqdm

SIZES = ((500, 4, 6), (200, 2, 4))  # n, d, D
CHOSEN = 1  # j*, from 0
RATE, ITERATIONS = 0.1, 2000
SEEDS = {"quick": 2, "full": 12}
FRESH, EVERY = 4000, 50  # samples of the test; iterations between numbers
FORMS = ("sample", "fresh")
FULL = "published size"

HEADLINE = (
    "At (500, 4, 6) attention on the chosen group is {one:.2f} after {steps} steps on one "
    "sample and {fresh[ours]:.2f} on fresh ones (before training {fresh[baseline]:.2f}), and v "
    "agrees with v* ({agreement:.4f}, {other[ours]:.4f})."
)


def positions(groups: int) -> Tensor:
    """Returns orthogonal positions, [group, position]."""
    i = torch.arange(1, groups + 1, dtype=torch.float64)
    return torch.sin(i[:, None] * i * torch.pi / (groups + 1))


def samples(count: int, direction: Tensor, groups: int, generator: torch.Generator) -> tuple:
    """Returns H [sample, group, d + D], tokens as rows, and labels of -1 and 1, [sample]."""
    d = len(direction)
    x = torch.randn(count, groups, d, generator=generator, dtype=torch.float64)
    labels = torch.sign(x[:, CHOSEN] @ direction)
    return torch.cat([x, positions(groups).expand(count, -1, -1)], dim=-1), labels


def forward(h: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns f [sample] and the attention [sample, query, key], of H with tokens as rows."""
    pattern = torch.softmax(h @ w.mT @ h.mT, dim=-1)  # the key's score is h_i^T W h_j
    return (pattern @ h @ v).sum(dim=-1), pattern


def logistic(f: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.softplus(-labels * f).mean()


def trained(n: int, d: int, groups: int, form: str, seed: int) -> list[list]:
    """Returns rows along a training on one sample, or on fresh ones of the same size."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(d, generator=generator, dtype=torch.float64)
    direction = direction / direction.norm()
    h, labels = samples(n, direction, groups, generator)
    tests = samples(FRESH, direction, groups, generator)
    v = torch.zeros(d + groups, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(d + groups, d + groups, dtype=torch.float64, requires_grad=True)
    setting, rows = f"{(n, d, groups)} {form}", []
    for at in range(ITERATIONS + 1):
        if at % EVERY == 0:
            with torch.no_grad():
                f, pattern = forward(tests[0], v, w)
                held = pattern[:, :, CHOSEN].mean().item()
                norm = v[:d].norm().clamp_min(1e-300)
                found = [("attention", held), ("loss", logistic(f, tests[1]).item())]
                found += [("accuracy", (f * tests[1] > 0).double().mean().item())]
                found += [("cosine", (v[:d] @ direction / norm).item())]
                found += [("position share", (v[d:].norm() / norm).item())]
            rows += [[name, setting, seed, at, value] for name, value in found]
        if form == "fresh":
            h, labels = samples(n, direction, groups, generator)
        loss = logistic(forward(h, v, w)[0], labels)
        slopes = torch.autograd.grad(loss, [v, w])
        with torch.no_grad():
            v -= RATE * slopes[0]
            w -= RATE * slopes[1]
    return rows


def at(rows: list[list], quantity: str, setting: str, iteration: int | None = None) -> list[float]:
    """Returns a quantity over seeds, at an iteration or at the end."""
    when = ITERATIONS if iteration is None else iteration
    return [row[4] for row in rows if row[:2] == [quantity, setting] and row[3] == when]


def of_size(rows: list[list], size: tuple[int, int, int]) -> list[dict]:
    """Returns the three claims of a size, of fresh samples: attention and direction near 1."""
    setting, claims = f"{size} fresh", []
    extras = {
        "attention": "",
        "cosine": f" The positions' part of v is {np.mean(at(rows, 'position share', setting)):.2f}"
        " times as long as that of x.",
        "loss": f" Accuracy is {np.mean(at(rows, 'accuracy', setting)):.3f} (chance .5).",
    }
    for quantity, extra in extras.items():
        begun, half, end = (
            np.array(at(rows, quantity, setting, iteration))
            for iteration in (0, ITERATIONS // 2, ITERATIONS)
        )
        limit = float(quantity != "loss")
        claims.append(
            claim(f"group_sparse.{quantity}", end.tolist(), size=FULL, n=len(end),
                  cases=towards(*(abs(each - limit) for each in (begun, half, end))),
                  published=f"{limit:.0f}", shape=size, baseline=float(begun.mean()),
                  why=f"Half-way it is {half.mean():.4f}.{extra}")
        )  # fmt: skip
    return claims


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the group-sparse task."""
    rows, jobs = [], [(size, kind, seed) for size in SIZES for kind in FORMS
                      for seed in range(SEEDS[form])]  # fmt: skip
    for size, kind, seed in tqdm(jobs, desc="group-sparse", unit="training"):
        step = f"{'-'.join(map(str, size))}-{kind}-{seed}"
        rows += steps.do(step, lambda: trained(*size, kind, seed))  # noqa: B023
    claims = [row for size in SIZES for row in of_size(rows, size)]
    one, agreement = (
        np.mean(at(rows, name, f"{SIZES[0]} sample")) for name in ("attention", "cosine")
    )
    headline = HEADLINE.format(
        steps=ITERATIONS, one=one, agreement=agreement, fresh=claims[0], other=claims[1]
    )
    return result("group_sparse", form, headline, claims, rows)


if __name__ == "__main__":
    main(run, draw)
