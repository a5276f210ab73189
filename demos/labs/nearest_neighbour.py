"""Does attention learn to copy the label of the nearest neighbour in its context?

    python demos/labs/nearest_neighbour.py [--quick | --full] --out DIR

N points x_j on the unit sphere have labels -1 or 1 that are drawn apart; a query is a further
point, with a mark of its own. `f = sum_j S_j y_j` by one softmax attention with matrix W on tokens
[x; y; mark], trained to answer the label of the nearest neighbour, by gradient descent on the
squared loss. The slides start at W = diag(0, ..., -sigma) on the mark, and claim that W keeps the
form diag(xi_1 I, 0, -xi_2), that both coefficients rise, and that the loss goes from (1 - 1/N) / 2
to 0. With labels drawn apart the loss is `1/2 E[sum_j S_j^2 - 2 S_i* + 1]`, which is what is
trained here, on fresh points at each step. Under a shift the slides bound the loss by R^2 N^2
T^(-c delta), with delta the gap between the nearest and the next neighbour; constants are not
given.

Our reading: points uniform on the sphere, N = 16, d = 4, sigma = 10, rate 10.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from drawing import curve, level, panels, tidy, titled
from lab import LabResult, Steps, claim, descended, main, of_limit, result, values
from torch import Tensor

D, N, SIGMA = 4, 16, 10.0
RATE, BATCH, ITERATIONS, EVERY = 10.0, 512, 4000, 100
SEEDS = {"quick": 2, "full": 10}
TESTS, GAPS, NEAREST = 4000, (0.05, 0.1, 0.2, 0.4), 0.9


def sphere(*shape: int, generator: torch.Generator) -> Tensor:
    """Returns points that are uniform on the unit sphere, [..., d]."""
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


def attention(points: Tensor, queries: Tensor, w: Tensor) -> Tensor:
    """Returns S, [sample, N + 1]: what the query gives each point, and itself.

    Tokens are [x; y; mark], the last one is the query itself. Labels stand for nothing here and are
    0: they are drawn apart, and W of the form that is claimed does not read them.
    """
    samples, n, d = points.shape
    context = torch.zeros(samples, n + 1, d + 2, dtype=points.dtype)
    context[:, :n, :d], context[:, n, :d], context[:, n, d + 1] = points, queries, 1
    return torch.softmax(torch.einsum("bnd,de,be->bn", context, w, context[:, n]), dim=-1)


def nearest(points: Tensor, queries: Tensor) -> Tensor:
    return torch.einsum("bnd,bd->bn", points, queries).argmax(dim=-1)


def loss_of(s: Tensor, best: Tensor) -> Tensor:
    """Returns 1/2 E[sum_j S_j^2 - 2 S_i* + 1] over the points, without the query's own token."""
    own = s[:, :-1]
    chosen = own.gather(1, best[:, None])[:, 0]
    return 0.5 * (own.square().sum(dim=-1) - 2 * chosen + 1).mean()


def start(d: int = D, sigma: float = SIGMA) -> Tensor:
    w = torch.zeros(d + 2, d + 2, dtype=torch.float64)
    w[-1, -1] = -sigma
    return w


def in_form(w: Tensor) -> tuple[float, float, float]:
    """Returns xi_1, xi_2, and the share of |W| that lies outside diag(xi_1 I, 0, -xi_2)."""
    d = len(w) - 2
    first, second = float(w[:d, :d].diagonal().mean()), -float(w[-1, -1])
    form = torch.zeros_like(w)
    form[:d, :d].diagonal().fill_(first)
    form[-1, -1] = -second
    return first, second, float((w - form).norm() / w.norm())


def shifted(gap: float, generator: torch.Generator, n: int = N) -> tuple[Tensor, Tensor]:
    """Returns points and queries off the training's distribution, with an exact gap.

    Queries lie in the half of the sphere where the first coordinate is positive. The nearest point
    has the inner product .9 with its query, and all others .9 - gap, which is the worst case.
    """
    queries = sphere(TESTS, D, generator=generator)
    queries[:, 0] = queries[:, 0].abs()
    along = torch.full((TESTS, n), NEAREST - gap, dtype=torch.float64)
    along[:, 0] = NEAREST
    apart = sphere(TESTS, n, D, generator=generator)
    apart -= torch.einsum("bnd,bd->bn", apart, queries)[..., None] * queries[:, None]
    apart /= apart.norm(dim=-1, keepdim=True)
    return along[..., None] * queries[:, None] + (1 - along**2).sqrt()[..., None] * apart, queries


def trained(seed: int) -> list[list]:
    """Returns rows along a training of the whole W."""
    generator = torch.Generator().manual_seed(seed)
    tests = sphere(TESTS, N, D, generator=generator), sphere(TESTS, D, generator=generator)
    far = {gap: shifted(gap, generator) for gap in GAPS}
    w = start().requires_grad_()

    def look() -> dict[str, Any]:
        s, best = attention(*tests, w), nearest(*tests)
        first, second, outside = in_form(w)
        found = {"loss": loss_of(s, best), "xi 1": first, "xi 2": second}
        found |= {"outside the form": outside, "attention": s.gather(1, best[:, None]).mean()}
        return found | {
            f"loss, gap {gap}": loss_of(attention(*each, w), nearest(*each))
            for gap, each in far.items()
        }

    def loss() -> Tensor:
        points = sphere(BATCH, N, D, generator=generator)
        queries = sphere(BATCH, D, generator=generator)
        return loss_of(attention(points, queries, w), nearest(points, queries))

    return descended([w], [RATE], loss, look, ("trained", seed), ITERATIONS, EVERY)


def exponents(rows: list[list], gap: float) -> np.ndarray:
    """Returns by seed the slope of ln(loss) over ln(T), from a tenth of the training on."""
    at = [place for place in range(0, ITERATIONS + 1, EVERY) if place >= ITERATIONS / 10]
    losses = np.array([values(rows, f"loss, gap {gap}", None, place) for place in at])
    logs = np.log(np.maximum(losses, 1e-300)).T
    return np.array([np.polyfit(np.log(at), own, 1)[0] for own in logs])


def of_rise(rows: list[list], number: int) -> dict:
    """Returns the claim that xi_1 or xi_2 rises."""
    begun, end = (values(rows, f"xi {number}", None, at) for at in (0, ITERATIONS))
    rule = f"nearest_neighbour.xi_{number}"
    return claim(rule, end, cases={"": end - begun}, baseline=begun.mean())


def of_gaps(slopes: dict[float, np.ndarray]) -> dict:
    """Returns the claim that the loss under a shift falls the faster the wider the gap.

    slopes: by gap from the narrowest to the widest, for each seed.
    """
    narrow, *_, wide = slopes
    return claim(
        "nearest_neighbour.shifted", (slopes[wide] - slopes[narrow]) / (wide - narrow),
        cases={f"{more} less {gap}": slopes[more] - slopes[gap] for gap, more in pairwise(slopes)},
        baseline=0.0, narrow=narrow, wide=wide,
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the nearest neighbour."""
    jobs = {f"seed-{seed}": partial(trained, seed) for seed in range(SEEDS[form])}
    rows = steps.rows(jobs, "nearest neighbour")
    slopes = {gap: exponents(rows, gap) for gap in GAPS}
    claims = [
        *(of_limit(f"nearest_neighbour.{name}", rows, (name, "trained"), limit, ITERATIONS,
                   even=1 / N) for name, limit in (("loss", 0.0), ("attention", 1.0))),
        *(of_rise(rows, number) for number in (1, 2)),
        of_gaps(slopes),
    ]  # fmt: skip
    rows += [
        ["exponent", f"gap {gap}", seed, ITERATIONS, float(value)]
        for gap, each in slopes.items() for seed, value in enumerate(each)
    ]  # fmt: skip
    return result(
        "nearest_neighbour", form, claims, rows, iterations=ITERATIONS, narrow=GAPS[0],
        wide=GAPS[-1], steepest=slopes[GAPS[-1]].mean(), flattest=slopes[GAPS[0]].mean(),
    )  # fmt: skip


def draw(found: LabResult) -> Any:
    """Draws loss and attention, the coefficients, and the loss under a shift, over iterations."""
    figure, (left, middle, right) = panels(3)
    for name, words in (("loss", "loss"), ("attention", "attention on the nearest")):
        curve(left, found.numbers(name), label=words)
    chance = found.table()["baseline"].iloc[0]
    level(left, chance, f"loss of even attention, {chance:.3f}")
    for name in ("xi 1", "xi 2"):
        curve(middle, found.numbers(name), label=name.replace(" ", "_"))
    for gap in GAPS:
        rows = found.numbers(f"loss, gap {gap}")
        curve(right, rows[rows["place"] > 0], label=f"gap {gap}")
    outside = found.numbers("outside the form")
    last = outside[outside["place"] == outside["place"].max()]["value"].mean()
    tidy(left, xlabel="iteration", title="loss and attention on fresh points", ylim=(0, 1.02))
    words = f"coefficients of W; {last:.1%} of |W| lies outside"
    tidy(middle, xlabel="iteration", title=words)
    words = "loss under a shift, by the gap to the next"
    tidy(right, xlabel="iteration", title=words, xscale="log", yscale="log")
    return titled(figure, found, seeds=found.numbers("loss")["seed"].nunique())


if __name__ == "__main__":
    main(run, draw)
