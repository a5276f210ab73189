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

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from drawing import curve, level, panels, tidy, titled
from lab import LabResult, Steps, descended, main, of_limit, result, values
from torch import Tensor

SIZES = ((500, 4, 6), (200, 2, 4))  # n, d, D
CHOSEN = 1  # j*, from 0
RATE, ITERATIONS = 0.1, 2000
SEEDS = {"quick": 2, "full": 12}
FRESH, EVERY = 4000, 50  # samples of the test; iterations between numbers
FORMS = ("sample", "fresh")
SHOWN = {  # in the figure, with the level before training
    "attention": ("attention on the chosen group", None),
    "cosine": ("cosine of v and v*", 0.0),
    "loss": ("loss on fresh samples, nats", math.log(2)),
}


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

    def look() -> dict[str, Any]:
        f, pattern = forward(tests[0], v, w)
        norm = v[:d].norm().clamp_min(1e-300)
        return {
            "attention": pattern[:, :, CHOSEN].mean(),
            "loss": logistic(f, tests[1]),
            "accuracy": (f * tests[1] > 0).double().mean(),
            "cosine": v[:d] @ direction / norm,
            "position share": v[d:].norm() / norm,
        }

    def loss() -> Tensor:
        drawn = samples(n, direction, groups, generator) if form == "fresh" else (h, labels)
        return logistic(forward(drawn[0], v, w)[0], drawn[1])

    key = f"{(n, d, groups)} {form}", seed
    return descended([v, w], [RATE, RATE], loss, look, key, ITERATIONS, EVERY)


def of_size(rows: list[list], size: tuple[int, int, int]) -> list[dict]:
    """Returns the three claims of a size, of fresh samples: attention and direction near 1."""
    share, accuracy = (
        values(rows, name, f"{size} fresh", ITERATIONS).mean()
        for name in ("position share", "accuracy")
    )
    return [
        of_limit(f"group_sparse.{name}", rows, (name, f"{size} fresh"), float(name != "loss"),
                 ITERATIONS, shape=size, share=share, accuracy=accuracy)
        for name in ("attention", "cosine", "loss")
    ]  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the group-sparse task."""
    jobs = {
        f"{'-'.join(map(str, size))}-{kind}-{seed}": partial(trained, *size, kind, seed)
        for size, kind, seed in product(SIZES, FORMS, range(SEEDS[form]))
    }
    rows = steps.rows(jobs, "group-sparse")
    claims = [row for size in SIZES for row in of_size(rows, size)]
    one, agreement = (
        values(rows, name, f"{SIZES[0]} sample", ITERATIONS).mean()
        for name in ("attention", "cosine")
    )
    return result(
        "group_sparse", form, claims, rows, steps=ITERATIONS, one=one, agreement=agreement
    )


def draw(found: LabResult) -> Any:
    """Draws attention, direction and loss along training, a line for each size and form."""
    figure, axes = panels(3)
    for axis, (quantity, (words, begun)) in zip(axes, SHOWN.items(), strict=True):
        for size, (kind, style) in product(SIZES, zip(FORMS, ("-", "--"), strict=True)):
            name = f"{size} {kind}"
            curve(axis, found.numbers(quantity, setting=name), style, 0, label=name)
        if begun is not None:
            level(axis, begun, "before training")
        tidy(axis, legend=0, xlabel="iteration", title=words)
    axes[0].set_ylim(0, 1.02)
    axes[0].legend(title="(n, d, D)", fontsize=8)
    return titled(figure, found, seeds=found.numbers("loss")["seed"].nunique())


if __name__ == "__main__":
    main(run, draw)
