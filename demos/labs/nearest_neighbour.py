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

import math
from itertools import pairwise

import numpy as np
import torch
from lab import LabResult, Steps, claim, main, mean_and_interval, result, towards
from nearest_neighbour_drawing import draw
from torch import Tensor
from tqdm.auto import tqdm

D, N, SIGMA = 4, 16, 10.0
RATE, BATCH, ITERATIONS, EVERY = 10.0, 512, 4000, 100
SEEDS = {"quick": 2, "full": 10}
TESTS, GAPS, NEAREST = 4000, (0.05, 0.1, 0.2, 0.4), 0.9
SIZE = "d = 4, N = 16 (sizes of the slides are not given)"

HEADLINE = (
    "The loss falls from {claims[0][baseline]:.4f} to {claims[0][ours]:.4f} in {iterations} steps, "
    "attention on the nearest neighbour rises to {claims[1][ours]:.2f}, and xi_1 to "
    "{claims[2][ours]:.1f}; under a shift the loss falls as T^{steepest:.2f} at a gap of {wide} "
    "and as T^{flattest:.2f} at {narrow}."
)


def sphere(*shape: int, generator: torch.Generator) -> Tensor:
    """Returns points that are uniform on the unit sphere, [..., d]."""
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


def tokens(points: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Returns context [sample, N + 1, d + 2] and query [sample, d + 2] as [x; y; mark].

    The last token is the query itself. Labels stand for nothing here and are 0: they are drawn
    apart, and W of the form that is claimed does not read them.
    """
    samples, n, d = points.shape
    context = torch.zeros(samples, n + 1, d + 2, dtype=points.dtype)
    context[:, :n, :d], context[:, n, :d], context[:, n, d + 1] = points, queries, 1
    return context, context[:, n]


def attention(points: Tensor, queries: Tensor, w: Tensor) -> Tensor:
    """Returns S, [sample, N + 1]: what the query gives each point, and itself."""
    context, query = tokens(points, queries)
    return torch.softmax(torch.einsum("bnd,de,be->bn", context, w, query), dim=-1)


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
    w, rows = start().requires_grad_(), []
    for at in range(ITERATIONS + 1):
        if at % EVERY == 0:
            with torch.no_grad():
                s, best = attention(*tests, w), nearest(*tests)
                first, second, outside = in_form(w)
                found = {"loss": loss_of(s, best).item(), "xi 1": first, "xi 2": second}
                found["outside the form"] = outside
                found["attention"] = s.gather(1, best[:, None]).mean().item()
                for gap, each in far.items():
                    found[f"loss, gap {gap}"] = loss_of(attention(*each, w), nearest(*each)).item()
            rows += [[name, "trained", seed, at, value] for name, value in found.items()]
        points = sphere(BATCH, N, D, generator=generator)
        queries = sphere(BATCH, D, generator=generator)
        loss = loss_of(attention(points, queries, w), nearest(points, queries))
        (slope,) = torch.autograd.grad(loss, [w])
        with torch.no_grad():
            w -= RATE * slope
    return rows


def over_seeds(rows: list[list], name: str, at: int) -> list[float]:
    return [row[4] for row in rows if row[0] == name and row[3] == at]


def exponent(rows: list[list], name: str, seed: int) -> float:
    """Returns the slope of ln(loss) over ln(T), from a tenth of the training on."""
    points = [(row[3], row[4]) for row in rows if row[0] == name and row[2] == seed]
    kept = [(math.log(at), math.log(max(v, 1e-300))) for at, v in points if at >= ITERATIONS / 10]
    steps, losses = zip(*kept, strict=True)
    return float(np.polyfit(steps, losses, 1)[0])


def of_limit(rows: list[list], name: str, limit: float, published: str, why: str) -> dict:
    """Returns the claim that a number goes to a limit."""
    begun, half, end = (over_seeds(rows, name, at) for at in (0, ITERATIONS // 2, ITERATIONS))
    return claim(
        f"nearest_neighbour.{name}", end, published=published, n=len(end), size=SIZE,
        cases=towards(*(abs(np.array(each) - limit) for each in (begun, half, end))),
        baseline=float(np.mean(begun)), why=f"Half-way it is {np.mean(half):.4f}. {why}",
    )  # fmt: skip


def of_rise(rows: list[list], number: int) -> dict:
    """Returns the claim that xi_1 or xi_2 rises."""
    begun, end = (over_seeds(rows, f"xi {number}", at) for at in (0, ITERATIONS))
    _, ends = mean_and_interval(np.subtract(end, begun).tolist())
    return claim(
        f"nearest_neighbour.xi_{number}", end, published="grows", n=len(end), size=SIZE,
        cases={"": ends}, baseline=float(np.mean(begun)), why="The rule asks of end less start.",
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the nearest neighbour."""
    rows: list[list] = []
    for seed in tqdm(range(SEEDS[form]), desc="nearest neighbour", unit="training"):
        rows += steps.do(f"seed-{seed}", lambda seed=seed: trained(seed))
    claims = [
        of_limit(rows, "loss", 0.0, "(1 - 1/N) / 2 to 0", "The exact rule has 0."),
        of_limit(rows, "attention", 1.0, "1", f"Even attention has {1 / N:.4f}."),
        *(of_rise(rows, number) for number in (1, 2)),
    ]
    slopes = {
        gap: [exponent(rows, f"loss, gap {gap}", seed) for seed in range(SEEDS[form])]
        for gap in GAPS
    }
    claims.append(of_gaps(slopes))
    rows += [
        ["exponent", f"gap {gap}", seed, ITERATIONS, value]
        for gap, values in slopes.items() for seed, value in enumerate(values)
    ]  # fmt: skip
    steepest, flattest = (np.mean(slopes[gap]) for gap in (GAPS[-1], GAPS[0]))
    headline = HEADLINE.format(
        claims=claims,
        iterations=ITERATIONS,
        steepest=steepest,
        wide=GAPS[-1],
        flattest=flattest,
        narrow=GAPS[0],
    )
    return result("nearest_neighbour", form, headline, claims, rows)


def of_gaps(slopes: dict[float, list[float]]) -> dict:
    """Returns the claim that the loss under a shift falls the faster the wider the gap.

    slopes: by gap from the narrowest to the widest, for each seed.
    """
    cases = {
        f"{wide} less {narrow}": mean_and_interval(np.subtract(slopes[wide], slopes[narrow]))[1]
        for narrow, wide in pairwise(slopes)
    }
    steps = np.subtract(slopes[GAPS[-1]], slopes[GAPS[0]]) / (GAPS[-1] - GAPS[0])
    return claim(
        "nearest_neighbour.shifted", steps.tolist(), cases=cases, n=len(steps), size=SIZE,
        published="-c delta, c not given", baseline=0.0,
        why=f"The number is the change from a gap of {GAPS[0]} to one of {GAPS[-1]}, over it.",
    )  # fmt: skip


if __name__ == "__main__":
    main(run, draw)
