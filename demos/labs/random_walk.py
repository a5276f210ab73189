"""Does a one-layer transformer learn a random walk on a circle, unless the walk is certain?

    python demos/labs/random_walk.py [--quick | --full] --out DIR

The walk has K states and goes one on with probability p, else one back; the model and its training
are those of circle.py, from zero, at the published size: K = 6, N = 97, 1000 + 1000 sequences,
eps = .1, rate 1. --full has 12 seeds. Claims: for 0 < p < 1 accuracy
reaches max(p, 1 - p), attention the last state, and V the direction of Pi^T. For p = 0 or 1, where
the next state is certain, accuracy stays at 1 / K for ever.

That last equilibrium is unstable, so it is computed with the K distinct sequences and weights. The
naive form, a matrix product over all sequences, leaves it through rounding, and is shown for that.
"""

from typing import Any

import numpy as np
from circle import (
    EPS,
    LENGTH,
    Model,
    balanced,
    direction_distance,
    grouped,
    transition,
    walks,
    zero,
)
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from random_walk_drawing import draw
from tqdm.auto import tqdm

STATES, TOKENS = 6, 97  # K, N
SEEDS = {"quick": 3, "full": 12}
CERTAIN_SEEDS = 12
PROBABILITIES, CERTAIN = (0.5, 0.8), (0, 1)
COUNT, RATE = 1000, 1.0
SETTLED = 10  # iterations, after which attention is one on the last state
SEEN = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # iterations at which numbers are taken
SHORT, LONG = 50, 400  # iterations of the naive and of the grouped form
FULL = "published size"

HEADLINE = (
    "At p = 0.5 accuracy is {claims[0][ours]:.3f} and V tends to Pi^T as T^{claims[2][ours]:.2f}, "
    "at p = 0.8 accuracy is {claims[3][ours]:.3f} but V's distance falls as "
    "T^{claims[5][ours]:.2f}: it tends to the root of Pi^T. At p = 0 and 1 accuracy stays at 1 / "
    "K; a naive sum leaves that by rounding in {escaped} of {runs} trainings."
)


def uncertain(p: float, states: int, tokens: int, seed: int) -> list[list]:
    """Returns rows of a walk with 0 < p < 1: accuracy, attention on the parent, distances."""
    data = walks(p, states, tokens, COUNT, seed)
    fresh = walks(p, states, tokens, COUNT, seed + 1000)
    model, pi = zero(states, tokens), transition(p, states).T
    setting, rows = f"K={states} p={p}", []
    likelier = (fresh.states[:, -1] + (1 if p >= 0.5 else -1)) % states
    bayes = float((likelier == fresh.following).mean())
    rows.append(["accuracy of Bayes", setting, seed, 0, bayes])
    for at in range(1, max(SEEN) + 1):
        model.step(data, RATE)
        if at in SEEN:
            right = model.predict(fresh.states).argmax(axis=1) == fresh.following
            parent = model.attention(fresh.states)[:, -2]
            rows.append(["accuracy", setting, seed, at, float(right.mean())])
            rows.append(["attention on the parent", setting, seed, at, float(parent.mean())])
            rows += distances(model, pi, "distance", setting, seed, at)
    return rows


def of_exact_shares(p: float, states: int, tokens: int, seed: int) -> list[list]:
    """Returns rows of the distances of V's direction, trained on walks of exact probabilities.

    Each walk is turned to every start and followed by both next states. By iteration 10 attention
    is one on the last state, and a step of gradient descent is `V += Pi^T / (K (V + eps))`.
    """
    data, model = balanced(p, states, tokens, COUNT, seed), zero(states, tokens)
    setting, pi, rows = f"K={states} p={p}", transition(p, states).T, []
    for at in range(1, max(SEEN) + 1):
        if at <= SETTLED:
            model.step(data, RATE)
        else:
            model.v = model.v + RATE * pi / states / (model.v + EPS)
        if at in SEEN:
            rows += distances(model, pi, "exact: distance", setting, seed, at)
    return [*rows, ["exact: attention on the parent", setting, seed, SETTLED,
                    float(model.attention(data.states)[:, -2].min())]]  # fmt: skip


def distances(
    model: Model, pi: np.ndarray, name: str, setting: str, seed: int, at: int
) -> list[list]:
    """Returns rows of the distance of V's direction to that of Pi^T, and of its entries' roots."""
    goals = (("Pi", pi), ("root of Pi", pi**0.5))
    return [
        [f"{name} to {goal}", setting, seed, at, direction_distance(model.v, wanted)]
        for goal, wanted in goals
    ]


def naive_step(model: Model, x: np.ndarray, labels: np.ndarray) -> None:
    """Takes the step of `Model.step` as matrix products over all sequences.

    x [n, state, N - 1] and labels [n, state] are one-hot. The numbers are the same but for
    rounding.
    """
    states = x.argmax(axis=1)
    pattern = model.attention(states)
    mixed = (x @ pattern[:, :-1, None])[..., 0]  # [n, state]
    f = ((labels @ model.v) * mixed).sum(axis=1)
    pull = 1 / (f + EPS) / len(x)
    gain = (labels @ model.v)[:, None] @ x  # [n, 1, N - 1]
    gain = np.pad(gain[:, 0], ((0, 0), (0, 1)))
    slope = pull[:, None] * pattern * (gain - (gain * pattern).sum(axis=1, keepdims=True))
    model.v = model.v + RATE * labels.T @ (pull[:, None] * mixed)
    model.a = model.a + RATE * LENGTH * (x @ slope[:, :-1, None]).sum(axis=(0, 2))
    model.c = model.c + RATE * LENGTH**2 * (np.ones(len(x)) @ slope)


def certain(p: int, states: int, tokens: int, seed: int) -> list[list]:
    """Returns rows of a walk with p = 0 or 1, grouped and naive."""
    data = walks(p, states, tokens, COUNT, seed)
    fresh = grouped(walks(p, states, tokens, COUNT, seed + 1000))
    few, setting = grouped(data), f"K={states} p={p}"
    commonest = float(np.bincount(data.following).max() / COUNT)
    forms = {"grouped": zero(states, tokens), "naive": zero(states, tokens)}
    for _ in range(LONG):
        forms["grouped"].step(few, RATE)
    one_hot = np.eye(states)
    x, labels = one_hot[data.states].transpose(0, 2, 1), one_hot[data.following]
    for _ in range(SHORT):
        naive_step(forms["naive"], np.ascontiguousarray(x), labels)
    rows = [["share of the commonest label", setting, seed, 0, commonest]]
    for form, model in forms.items():
        pattern = model.attention(few.states)[:, :-1]
        for name, other in (("accuracy", fresh), ("training accuracy", few)):
            right = model.predict(other.states).argmax(axis=1) == other.following
            rows.append([f"{form}: {name}", setting, seed, 0, float(right @ other.weights)])
        unequal = float(np.ptp(model.v, axis=1).max())
        rows.append([f"{form}: range in V's rows", setting, seed, 0, unequal])
        rows.append([f"{form}: range of attention", setting, seed, 0, float(np.ptp(pattern))])
    return rows


def values(rows: list[list], quantity: str, setting: str, at: int) -> list[float]:
    """Returns a quantity over seeds."""
    return [row[4] for row in rows if (row[0], row[1], row[3]) == (quantity, setting, at)]


def of_uncertain(rows: list[list], states: int, tokens: int, p: float) -> list[dict]:
    """Returns the claims of a walk with 0 < p < 1: accuracy, attention, how V nears Pi^T.

    The distance of V is measured with exact shares of the walks.
    """
    setting, last = f"K={states} p={p}", max(SEEN)
    at = lambda name, when: np.array(values(rows, name, setting, when))  # noqa: E731
    accuracy, bayes = at("accuracy", SHORT), at("accuracy of Bayes", 0)
    parent = at("attention on the parent", SHORT)
    start, far = (at("exact: distance to Pi", when) for when in (SHORT, last))
    common: Any = dict(setting=setting, size=FULL, n=len(far))
    return [
        claim("random_walk.accuracy", accuracy.tolist(), published=f"{max(p, 1 - p)}",
              cases={"less the best": mean_and_interval((accuracy - max(p, 1 - p)).tolist())[1]},
              baseline=float(bayes.mean()), **common, why=f"Chance is {1 / states:.3f}."),
        claim("random_walk.attention", parent.tolist(), published="1 - e^-Omega(N)",
              baseline=1 / tokens, **common, why=f"1 less it is {1 - parent.mean():.0e}."),
        claim("random_walk.distance", (np.log(far / start) / np.log(last / SHORT)).tolist(),
              published="-1/2", baseline=0.0, **common,
              why=f"It is {start.mean():.3f} at iteration {SHORT} and {far.mean():.3f} at {last}, "
              f"where it is {at('exact: distance to root of Pi', last).mean():.3f} to the root of "
              "each entry of Pi^T. Exact shares; a sample has "
              f"{at('distance to Pi', last).mean():.3f}."),
    ]  # fmt: skip


def of_certain(rows: list[list], states: int) -> dict:
    """Returns the claim for p = 0 and 1: the largest range, which a naive sum drives up."""
    ranges = {
        form: {
            f"p = {p}": max(
                values(rows, f"{form}: range in V's rows", f"K={states} p={p}", 0)
                + values(rows, f"{form}: range of attention", f"K={states} p={p}", 0)
            )
            for p in CERTAIN
        }
        for form in ("grouped", "naive")
    }
    return claim(
        "random_walk.stays", max(ranges["grouped"].values()), states=states, size=FULL,
        published=f"{1 / states:.3f}", baseline=min(ranges["naive"].values()), n=CERTAIN_SEEDS,
        cases={name: (value, value) for name, value in ranges["grouped"].items()},
        why="Training accuracy is the share of the commonest label.",
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the random walk."""
    rows, claims = [], []
    jobs: list[tuple[Any, Any, int]] = [(make, p, seed) for make in (uncertain, of_exact_shares)
            for p in PROBABILITIES for seed in range(SEEDS[form])]  # fmt: skip
    jobs += [(certain, p, seed) for p in CERTAIN for seed in range(CERTAIN_SEEDS)]
    for make, p, seed in tqdm(jobs, desc="walks", unit="training"):
        step = f"{make.__name__}-{STATES}-{p}-{seed}"
        rows += steps.do(step, lambda: make(p, STATES, TOKENS, seed))  # noqa: B023
    for p in PROBABILITIES:
        claims += of_uncertain(rows, STATES, TOKENS, p)
    claims.append(of_certain(rows, STATES))
    escaped = sum(row[4] > 0.5 for row in rows if row[0] == "naive: training accuracy")
    runs = sum(row[0] == "naive: training accuracy" for row in rows)
    headline = HEADLINE.format(claims=claims, escaped=escaped, runs=runs)
    return result("random_walk", form, headline, claims, rows)


if __name__ == "__main__":
    main(run, draw)
