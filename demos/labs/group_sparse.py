"""Does a one-layer transformer find the one group of variables that decides the label?

    python demos/labs/group_sparse.py [--quick | --full] --out DIR

D groups x_1 .. x_D of d normal variables; the label is the sign of <v*, x_j*>, with j* the second.
The model is `f = sum_j v^T H softmax(H^T W h_j)`, where H has the groups over positions
`p_i[j] = sin(i j pi / (D + 1))`, trained by gradient descent on the logistic loss from zero. Claims
of the theorem: attention goes to j*, v in the direction of v*, the loss to zero. At the published
sizes (n, d, D) = (500, 4, 6) and (200, 2, 4); the rate of the published runs is not known, here it
is .1. The theorem is about the expected loss, so its claims are asked of trainings on fresh
samples; those on one sample stand beside them.

Downstream: a new v*, the same j*, and |<v*, x_j*>| of at least .5. W is kept, v starts at zero, and
both learn from one sample a step. The theorem: O~((d + D) / error) samples are enough, where a
linear logistic regression on vec(X) needs Omega(d D / error). Here d = D = m, so that one grows as
m and the other as m^2. Every learner has the best of four rates, by the other seeds.
"""

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from drawing import curve, level, panels, tidy, titled
from lab import LabResult, Steps, claim, descended, main, of_limit, result, values
from torch import Tensor

SIZES = ((500, 4, 6), (200, 2, 4))  # n, d, D
CHOSEN = 1  # j*, from 0
RATE, ITERATIONS = 0.1, 2000
SEEDS = {"quick": 2, "full": 12}
FRESH, TESTS, EVERY = 4000, 1000, 50  # samples of both tests; iterations between numbers
FORMS = ("sample", "fresh")
WIDTHS, MARGIN, ERROR = (6, 8, 12, 16), 0.5, 0.1  # m = d = D; of the downstream task
RATES = (0.25, 1.0, 4.0, 16.0)  # over the squared length of what v multiplies
PRETRAINED, ZERO, LINEAR = LEARNERS = ("W pre-trained", "W = 0", "linear on vec(X)")
SHOWN = {  # in the figure, with the level before training
    "attention": ("attention on the chosen group", None),
    "cosine": ("cosine of v and v*", 0.0),
    "loss": ("loss on fresh samples, nats", math.log(2)),
}


def positions(groups: int) -> Tensor:
    """Returns orthogonal positions, [group, position]."""
    i = torch.arange(1, groups + 1, dtype=torch.float64)
    return torch.sin(i[:, None] * i * torch.pi / (groups + 1))


def samples(
    count: int, direction: Tensor, groups: int, generator: torch.Generator, margin: float = 0.0
) -> tuple:
    """Returns H [sample, group, d + D], tokens as rows, and labels of -1 and 1, [sample].

    x of the chosen group is moved by the margin along the direction, away from the other label.
    """
    d = len(direction)
    x = torch.randn(count, groups, d, generator=generator, dtype=torch.float64)
    labels = torch.sign(x[:, CHOSEN] @ direction)
    x[:, CHOSEN] += margin * labels[:, None] * direction
    return torch.cat([x, positions(groups).expand(count, -1, -1)], dim=-1), labels


def forward(h: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns f [sample] and the attention [sample, query, key], of H with tokens as rows."""
    pattern = torch.softmax(h @ w.mT @ h.mT, dim=-1)  # the key's score is h_i^T W h_j
    return (pattern @ h @ v).sum(dim=-1), pattern


def logistic(f: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.softplus(-labels * f).mean()


def drawn_direction(d: int, generator: torch.Generator) -> Tensor:
    """Returns a v* of length 1, [d]."""
    direction = torch.randn(d, generator=generator, dtype=torch.float64)
    return direction / direction.norm()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, requires_grad=True)


def trained(n: int, d: int, groups: int, form: str, seed: int) -> list[list]:
    """Returns rows along a training on one sample, or on fresh ones of the same size."""
    generator = torch.Generator().manual_seed(seed)
    direction = drawn_direction(d, generator)
    h, labels = samples(n, direction, groups, generator)
    tests = samples(FRESH, direction, groups, generator)
    v, w = zeros(d + groups), zeros(d + groups, d + groups)

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


def pretrained(m: int, generator: torch.Generator) -> Tensor:
    """Returns W after the same training on fresh samples, at d = D = m, [2 m, 2 m]."""
    direction, v, w = drawn_direction(m, generator), zeros(2 * m), zeros(2 * m, 2 * m)

    def loss() -> Tensor:
        h, labels = samples(SIZES[1][0], direction, m, generator)
        return logistic(forward(h, v, w)[0], labels)

    descended([v, w], [RATE, RATE], loss, dict, ("", 0), ITERATIONS, EVERY)
    return w.detach()


def linear(h: Tensor, a: Tensor) -> Tensor:
    """Returns the answers of a linear model of vec(X), [sample, rate], for a [rate, m, m]."""
    return torch.einsum("njd,rjd->nr", h[..., : a.shape[1]], a)


def of_rates(h: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Returns the answers of one layer, [sample, rate], for v and w of several rates."""
    return torch.stack([forward(h, *one)[0] for one in zip(v, w, strict=True)], dim=-1)


def downstream(m: int, seed: int) -> list[list]:
    """Returns rows of the error of each learner and rate after so many samples of one task."""
    generator = torch.Generator().manual_seed(seed)
    kept = pretrained(m, generator)
    direction, last, rates = drawn_direction(m, generator), 2 * m * m, torch.tensor(RATES).double()
    taught = samples(last + 1, direction, m, generator, MARGIN)
    tests, wanted = samples(TESTS, direction, m, generator, MARGIN)
    count, rows = len(rates), []
    for name in LEARNERS:
        if name == LINEAR:
            answers, parameters = linear, [zeros(count, m, m)]
            steps = [(rates / m**2)[:, None, None]]
        else:
            w = (kept if name == PRETRAINED else 0 * kept).repeat(count, 1, 1).requires_grad_()
            answers, parameters = of_rates, [zeros(count, 2 * m), w]
            one = rates / m**2 / (m + (m + 1) / 2)
            steps = [one[:, None], one[:, None, None]]
        stream = iter(zip(*taught, strict=True))

        def loss(answers=answers, parameters=parameters, stream=stream) -> Tensor:
            h, label = next(stream)
            return logistic(answers(h[None], *parameters), label) * count

        def look(answers=answers, parameters=parameters, name=name) -> dict[str, Any]:
            wrong = answers(tests, *parameters) * wanted[:, None] <= 0
            errors = wrong.double().mean(dim=0)
            return {f"{name}, {at}": errors[at] for at in range(count)}

        key = f"d = D = {m}", seed
        rows += descended(parameters, steps, loss, look, key, last, max(m // 4, 1))
    return rows


def at_best_rate(rows: list[list], m: int) -> list[list]:
    """Returns rows of each learner's accuracy along its samples, and of how many it needs.

    A seed has the rate with the least error, mean along the curve, over the other seeds.
    """
    setting, found = f"d = D = {m}", []
    places = sorted({row[3] for row in rows if row[1] == setting})
    for name in LEARNERS:
        curves = np.stack([
            values(rows, f"{name}, {at}", setting).reshape(-1, len(places))
            for at in range(len(RATES))
        ])  # fmt: skip  # [rate, seed, place]
        mean = curves.mean(axis=-1)
        best = (mean.sum(axis=1, keepdims=True) - mean).argmin(axis=0)
        for seed, rate in enumerate(best):
            curve = dict(zip(places, curves[rate, seed], strict=True))
            needs = min((at for at in places if curve[at] <= ERROR), default=2 * places[-1])
            found.append([f"samples, {name}", setting, seed, m, needs])
            found += [[f"accuracy, {name}", setting, seed, at, 1 - curve[at]] for at in places]
    return found


def of_downstream(rows: list[list]) -> list[dict]:
    """Returns the claims of the downstream task: how samples grow with m, and accuracy."""
    needed = {
        name: np.array([values(rows, f"samples, {name}", place=m) for m in WIDTHS])
        for name in (PRETRAINED, LINEAR)
    }  # [m, seed]
    power = {name: np.polyfit(np.log(WIDTHS), np.log(each), 1)[0] for name, each in needed.items()}
    claims = [
        claim(f"group_sparse.{rule}", power[name], baseline=power[other].mean(),
              ends=(WIDTHS[0], WIDTHS[-1]), few=needed[name][0].mean(),
              many=needed[name][-1].mean())
        for rule, name, other in (
            ("downstream", PRETRAINED, LINEAR), ("linear", LINEAR, PRETRAINED)
        )
    ]  # fmt: skip
    after = {
        (name, m): values(rows, f"accuracy, {name}", f"d = D = {m}", m * m)
        for name, m in product(LEARNERS, WIDTHS)
    }
    gains = {
        f"{m}, less {rival}": after[PRETRAINED, m] - after[rival, m]
        for m, rival in product(WIDTHS, (ZERO, LINEAR))
    }
    ours, zero, regression = (after[name, WIDTHS[-1]] for name in LEARNERS)
    return [*claims, claim(
        "group_sparse.transfer", ours, cases=gains, m=WIDTHS[-1], count=WIDTHS[-1] ** 2,
        baseline=regression.mean(), zero=zero.mean(),
    )]  # fmt: skip


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
    tasks = {
        f"downstream-{m}-{seed}": partial(downstream, m, seed)
        for m, seed in product(WIDTHS, range(SEEDS[form]))
    }
    tried = steps.rows(tasks, "downstream")
    rows += [row for m in WIDTHS for row in at_best_rate(tried, m)]
    claims = [row for size in SIZES for row in of_size(rows, size)] + of_downstream(rows)
    one, agreement = (
        values(rows, name, f"{SIZES[0]} sample", ITERATIONS).mean()
        for name in ("attention", "cosine")
    )
    return result(
        "group_sparse", form, claims, rows, steps=ITERATIONS, one=one, agreement=agreement
    )


def draw_downstream(axes: Any, found: LabResult) -> None:
    """Draws accuracy along the samples at the least and the largest m, and samples over m."""
    for axis, m in zip(axes, (WIDTHS[0], WIDTHS[-1]), strict=False):
        for name in LEARNERS:
            curve(axis, found.numbers(f"accuracy, {name}", setting=f"d = D = {m}"), label=name)
        axis.axvline(m * m, color="black", lw=0.8, ls=":")
        tidy(axis, xlabel="samples (dotted: d D)", ylim=(0.4, 1.02),
             title=f"downstream accuracy, d = D = {m}")  # fmt: skip
    for name, colour in ((PRETRAINED, "C0"), (LINEAR, "C2")):
        rows = found.numbers(f"samples, {name}")
        curve(axes[2], rows, "o-", color=colour, label=name)
    tidy(axes[2], 0, xlabel="m = d = D", xscale="log", yscale="log",
         title=f"samples until the error is {ERROR:g}")  # fmt: skip
    axes[2].set_xticks(WIDTHS, WIDTHS)
    axes[2].minorticks_off()


def draw(found: LabResult) -> Any:
    """Draws attention, direction and loss along training, then the downstream task."""
    figure, (axes, below) = panels(3, 2, size=(14, 7.5))
    draw_downstream(below, found)
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
