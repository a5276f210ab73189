"""Does a one-layer transformer learn a random walk on a circle, unless the walk is certain?

    python demos/labs/random_walk.py [--quick | --full] --out DIR

The walk has K states and goes one on with probability p, else one back. The model, trained from
zero, is `f = V X softmax(X~^T W x~_N)`: X [state, N] has the one-hot states of the walk and a zero
for the N-th, which is to be predicted; X~ is X over positions p_i[j] = sin(i j pi / (M + 1)). Its
loss is `-ln(f_y + eps)`. It has the published sizes: K = 6 and N = 97, K = 20 and N = 101, both
with 1000 + 1000 sequences, eps = .1, rate 1. --full has 12 seeds. Claims: for 0 < p < 1 accuracy
reaches max(p, 1 - p), attention the last state, and V the direction of Pi^T. For p = 0 or 1, where
the next state is certain, accuracy stays at 1 / K for ever.

From random weights, N(0, .01^2), and with tokens of length 1 in the softmax, training leaves that,
the slides say "to a certain extent": it is run at K = 20.

The positions are orthogonal and all of length sqrt((M + 1) / 2), so W matters by one vector alone,
W x~_N. A score is `a[x_i] + c_i`, with a number for each state and one for each position. A step of
gradient descent on W moves a by |p|^2 and c by |p|^4 times the gradient in the scores.

That last equilibrium is unstable, so it is computed with the K distinct sequences and weights. The
naive form, a matrix product over all sequences, leaves it through rounding, and is shown for that.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from drawing import curve, panels, tidy, titled
from lab import LabResult, Steps, claim, main, result, values
from numpy.typing import NDArray

STATES, MORE = 6, 20
TOKENS = {STATES: 97, MORE: 101}  # K: N
SEEDS = {"quick": 3, "full": 12}
CERTAIN_SEEDS = 12
PROBABILITIES, CERTAIN = ((STATES, 0.5), (STATES, 0.8), (MORE, 0.5)), (0, 1)
COUNT, RATE = 1000, 1.0
SETTLED = 10  # iterations, after which attention is one on the last state
SEEN = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # iterations at which numbers are taken
SHORT, LONG = 50, 400  # iterations of the naive and of the grouped form
SCALE, LATER = 0.01, (1000, 2000)  # of random weights; iterations: the published, and twice those
STARTS = {"random": (0.5, 1), "zero": (1,)}  # with tokens of length 1, and p
M = 1000
LENGTH = (M + 1) / 2  # |p_i|^2
EPS = 0.1


@dataclass(frozen=True)
class Walks:
    """Sequences [n, N - 1] of states, the next state of each [n], and weights [n] of sum 1."""

    states: NDArray
    following: NDArray
    weights: NDArray


def walks(p: float, states: int, tokens: int, count: int, seed: int) -> Walks:
    """Returns random walks of uniform start, which go one state on with p, else one back."""
    rng = np.random.default_rng(seed)
    start = rng.integers(states, size=(count, 1))
    moves = np.where(rng.random((count, tokens - 1)) < p, 1, -1)
    path = np.concatenate([start, start + moves.cumsum(axis=1)], axis=1) % states
    return Walks(path[:, :-1], path[:, -1], np.full(count, 1 / count))


def grouped(data: Walks) -> Walks:
    """Returns the distinct sequences, each with the weight of all that are equal to it.

    A walk of p = 0 or 1 has as many distinct sequences as states. Summed one by one, equal numbers
    get rounding errors that differ from entry to entry, and training multiplies those.
    """
    whole = np.concatenate([data.states, data.following[:, None]], axis=1)
    distinct, inverse = np.unique(whole, axis=0, return_inverse=True)
    weights = np.bincount(inverse.ravel(), data.weights)
    return Walks(distinct[:, :-1], distinct[:, -1], weights)


def balanced(p: float, states: int, tokens: int, count: int, seed: int) -> Walks:
    """Returns walks that have the exact probabilities of the last state and of the next.

    Each of `count` random walks is turned to every start, and followed by both its next states with
    weights p and 1 - p. It shows what training does with no error of sampling there.
    """
    data = walks(p, states, tokens, count, seed)
    turned = (data.states[None] + np.arange(states)[:, None, None]) % states
    turned = turned.reshape(states * count, -1)
    following = np.concatenate([turned[:, -1] + 1, turned[:, -1] - 1]) % states
    weights = np.repeat([p, 1 - p], states * count) / (states * count)
    return Walks(np.concatenate([turned, turned]), following, weights)


def transition(p: float, states: int) -> NDArray:
    """Returns Pi [from, to], the probabilities of the next state."""
    forward = np.roll(np.eye(states), 1, axis=1)
    return p * forward + (1 - p) * forward.T


@dataclass
class Model:
    """V [to, from], the scores' numbers a [state] and c [position], and how far a step moves them.

    of_state, of_place: the factors of the gradient in the scores.
    """

    v: NDArray
    a: NDArray
    c: NDArray
    of_state: float = LENGTH
    of_place: float | NDArray = LENGTH**2

    def attention(self, states: NDArray) -> NDArray:
        """Returns the attention of the last token, [n, N]."""
        scores = np.broadcast_to(self.c, (len(states), len(self.c))).copy()
        scores[:, :-1] += self.a[states]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def by_state(self, states: NDArray, pattern: NDArray) -> NDArray:
        """Returns X softmax(...), the attention that each state gets, [n, state]."""
        n, k = len(states), len(self.a)
        places = states + k * np.arange(n)[:, None]
        flat = np.bincount(places.ravel(), pattern[:, :-1].ravel(), minlength=n * k)
        return flat.reshape(n, k)

    def predict(self, states: NDArray) -> NDArray:
        """Returns f, [n, state]."""
        return self.by_state(states, self.attention(states)) @ self.v.T

    def step(self, data: Walks, rate: float) -> None:
        """Takes one step of gradient descent on the mean loss, in V and W together."""
        pattern = self.attention(data.states)
        mixed = self.by_state(data.states, pattern)
        values = self.v[data.following]  # [n, state]
        pull = data.weights / ((values * mixed).sum(axis=1) + EPS)  # -d loss / d f_y
        gain = np.zeros_like(pattern)  # of the scores' softmax; the last token has no state
        gain[:, :-1] = np.take_along_axis(values, data.states, axis=1)
        slope = pull[:, None] * pattern * (gain - (gain * pattern).sum(axis=1, keepdims=True))
        states = len(self.a)
        change = np.bincount(data.states.ravel(), slope[:, :-1].ravel(), minlength=states)
        towards = np.zeros_like(self.v)
        np.add.at(towards, data.following, pull[:, None] * mixed)
        self.v = self.v + rate * towards
        self.a = self.a + rate * self.of_state * change
        self.c = self.c + rate * self.of_place * slope.sum(axis=0)


def zero(states: int, tokens: int) -> Model:
    """Returns the model before training from zero."""
    return Model(np.zeros((states, states)), np.zeros(states), np.zeros(tokens))


def unit(states: int, tokens: int, scale: float, seed: int) -> Model:
    """Returns the model with tokens of length 1 in the softmax, from normal weights of a scale.

    W x~_N is normal too, so a and c are: of lengths 1 and |p| over that of a token. The last token
    has no state, so that it is its position alone.
    """
    normal = np.random.default_rng([seed, 1]).normal
    places = np.full(tokens, LENGTH / (1 + LENGTH))
    places[-1] = 1
    v, a = normal(size=(states, states)), normal(size=states) / (1 + LENGTH) ** 0.5
    c = normal(size=tokens) * places**0.5
    return Model(scale * v, scale * a, scale * c, 1 / (1 + LENGTH), places)


def direction_distance(v: NDArray, wanted: NDArray) -> float:
    """Returns the Frobenius distance of two matrices scaled to norm 1, from 0 to 2."""
    return float(np.linalg.norm(v / np.linalg.norm(v) - wanted / np.linalg.norm(wanted)))


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


def of_unit_tokens(start: str, p: float, states: int, tokens: int, seed: int) -> list[list]:
    """Returns rows of accuracy and attention with tokens of length 1, by the start."""
    data, fresh = (walks(p, states, tokens, COUNT, at) for at in (seed, seed + 1000))
    if p in CERTAIN:
        data, fresh = grouped(data), grouped(fresh)
    model = unit(states, tokens, SCALE if start == "random" else 0.0, seed)
    setting, rows = f"K={states} p={p}", []
    for at in range(1, (LATER[-1] if p in CERTAIN else LATER[0]) + 1):
        model.step(data, RATE)
        if at in (*SEEN, LONG, *LATER) or at % 100 == 0:
            right = model.predict(fresh.states).argmax(axis=1) == fresh.following
            pattern = model.attention(fresh.states)[:, -2]
            for name, value in (("accuracy", right), ("attention on the parent", pattern)):
                rows.append([f"{start} start: {name}", setting, seed, at,
                             float(value @ fresh.weights)])  # fmt: skip
    return rows


def of_starts(rows: list[list]) -> list[dict]:
    """Returns the claims of a random start: it learns p = 1/2, and leaves chance at p = 1."""
    at = lambda p, when, start="random", what="accuracy": values(  # noqa: E731
        rows, f"{start} start: {what}", f"K={MORE} p={p}", when
    )
    fair, escaped = at(0.5, LATER[0]), {f"{when} iterations": at(1, when) for when in LATER}
    return [
        claim("random_walk.random", fair, cases={"less the best": fair - 0.5}, likelier=0.5,
              baseline=values(rows, "accuracy of Bayes", f"K={MORE} p=0.5").mean(),
              early=at(0.5, LONG).mean(), when=LONG, chance=1 / MORE),
        claim("random_walk.escape", escaped[f"{LATER[-1]} iterations"], cases=escaped,
              baseline=at(1, LATER[-1], "zero").mean(), begun=at(1, LATER[0]).mean(),
              parent=at(1, LATER[-1], what="attention on the parent").mean(), states=MORE),
    ]  # fmt: skip


def of_uncertain(rows: list[list], p: float, states: int) -> list[dict]:
    """Returns the claims of a walk with 0 < p < 1: accuracy, attention, how V nears Pi^T.

    The distance of V is measured with exact shares of the walks.
    """
    setting, last, likelier = f"K={states} p={p}", max(SEEN), max(p, 1 - p)
    at = lambda name, when: values(rows, name, setting, when)  # noqa: E731
    accuracy, parent = at("accuracy", SHORT), at("attention on the parent", SHORT)
    start, far = (at("exact: distance to Pi", when) for when in (SHORT, last))
    return [
        claim("random_walk.accuracy", accuracy, cases={"less the best": accuracy - likelier},
              baseline=at("accuracy of Bayes", 0).mean(), setting=setting, likelier=likelier,
              chance=1 / states),
        claim("random_walk.attention", parent, baseline=1 / TOKENS[states], setting=setting,
              rest=1 - parent.mean()),
        claim("random_walk.distance", np.log(far / start) / np.log(last / SHORT), baseline=0.0,
              setting=setting, short=SHORT, last=last, begun=start.mean(), end=far.mean(),
              root=at("exact: distance to root of Pi", last).mean(),
              sampled=at("distance to Pi", last).mean()),
    ]  # fmt: skip


def of_certain(rows: list[list], states: int) -> dict:
    """Returns the claim for p = 0 and 1: the largest range, which a naive sum drives up."""
    own, naive = (
        {
            f"p = {p}": max(
                values(rows, f"{form}: {name}", f"K={states} p={p}").max()
                for name in ("range in V's rows", "range of attention")
            )
            for p in CERTAIN
        }
        for form in ("grouped", "naive")
    )
    return claim(
        "random_walk.stays", max(own.values()), cases=own, baseline=min(naive.values()),
        n=CERTAIN_SEEDS, states=states, chance=1 / states,
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the random walk."""
    kinds: list[Any] = [
        (make, p, states, seed) for make in (uncertain, of_exact_shares)
        for states, p in PROBABILITIES for seed in range(SEEDS[form])
    ]  # fmt: skip
    kinds += [(certain, p, states, seed) for states in TOKENS for p in CERTAIN
              for seed in range(CERTAIN_SEEDS)]  # fmt: skip
    jobs = {
        f"{make.__name__}-{states}-{p}-{seed}": partial(make, p, states, TOKENS[states], seed)
        for make, p, states, seed in kinds
    }
    jobs |= {
        f"{start}-start-{p}-{seed}": partial(of_unit_tokens, start, p, MORE, TOKENS[MORE], seed)
        for start in STARTS for p in STARTS[start] for seed in range(SEEDS[form])
    }  # fmt: skip
    rows = steps.rows(jobs, "walks")
    claims = [row for states, p in PROBABILITIES for row in of_uncertain(rows, p, states)]
    claims += [of_certain(rows, states) for states in TOKENS] + of_starts(rows)
    naive = np.array([
        values(rows, "naive: training accuracy", f"K={STATES} p={p}") for p in CERTAIN
    ])  # fmt: skip
    return result("random_walk", form, claims, rows, escaped=(naive > 0.5).sum(), runs=naive.size)


def draw(found: LabResult) -> Any:
    """Draws training from zero, from random weights, and the certain walks' accuracy."""
    figure, (axes, below) = panels(3, 2, size=(14, 7.5))
    settings = [f"K={states} p={p}" for states, p in PROBABILITIES]
    for axis, quantity in zip(axes, ("accuracy", "attention on the parent"), strict=False):
        for setting in settings:
            curve(axis, found.numbers(quantity, setting=setting), "o-", 0, label=setting)
        words = {"title": f"{quantity}, from zero", "ylim": (0, 1.03), "xscale": "log"}
        tidy(axis, 8 * (axis is axes[0]), xlabel="iteration", **words)
    names = (("Pi", "-", r"$\Pi^T$"), ("root of Pi", ":", r"$\sqrt{\Pi^T}$"))
    for name, line, words in names:
        for colour, setting in enumerate(settings):
            rows = found.numbers(f"exact: distance to {name}", setting=setting)
            label = f"{setting}, to {words}"
            curve(axes[2], rows, f"o{line}C{colour}", 0, label=label)
    words = "distance of V's direction, exact shares"
    tidy(axes[2], xlabel="iteration", title=words, xscale="log", yscale="log")
    for axis, quantity in zip(below, ("accuracy", "attention on the parent"), strict=False):
        for start, p in [(start, p) for start, each in STARTS.items() for p in each]:
            rows = found.numbers(f"{start} start: {quantity}", setting=f"K={MORE} p={p}")
            curve(axis, rows, label=f"p={p}, {start} start")
        words = f"{quantity}, K={MORE}, tokens of length 1"
        tidy(axis, 8 * (axis is below[0]), xlabel="iteration", title=words, ylim=(0, 1.03))
    ticks = []
    for colour, form in enumerate(("grouped", "naive")):
        rows = found.numbers(f"{form}: training accuracy").groupby("setting", sort=False)
        ticks = [name for name, _ in rows]
        for place, (_, one) in enumerate(rows):
            at = [place + colour * 0.4 + 0.025 * i for i in range(len(one))]
            label = form if place == 0 else None
            below[2].plot(at, one["value"], "o", markersize=4, color=f"C{colour}", label=label)
    below[2].set_xticks([place + 0.3 for place in range(len(ticks))], ticks)
    tidy(below[2], title="certain walks, from zero: each seed", ylim=(0, 1.05))
    return titled(figure, found)


if __name__ == "__main__":
    main(run, draw)
