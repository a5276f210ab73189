"""JoMA (arXiv 2310.00535): Theorems 1 to 5, and Figures 2, 3 and 4.

Theorems 1 and 3 are of gradient flows, the others are in closed form.
The theorems have the corrections that they need, the figures the constants of the released scripts.
"""

import itertools
import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import quad, solve_ivp
from scipy.optimize import brentq
from scipy.special import erf, erfinv, ndtr
from torch import Tensor

from crate_interp.measures import attention_entropy

KINDS = ("linear", "exp", "softmax")  # of attention, Theorem 1
END = 2.0  # the time at which the drift is read
SLACK = math.sqrt(math.pi / 2) + 1  # Theorem 4: how far the exact time may lie above its main part
DELTA = np.array([1.0, 0.7, -0.4, 0.1])  # Theorem 2: an example


def flowed(rate, times: ArrayLike, start: ArrayLike) -> NDArray:
    """Returns the solution of `v' = rate(v)` at the times, [token, time], to 12 digits."""
    times = np.asarray(times)
    solved = solve_ivp(
        lambda _, v: rate(v), (0, times[-1]), start, t_eval=times,
        method="DOP853", rtol=1e-12, atol=1e-13,
    )  # fmt: skip
    return solved.y


# Theorem 1: attention logits follow the weights of the layer above


def problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens counts x [sample, token], targets [sample, unit] and a state [token, 4].

    The state is V [token, unit] with the attention logits z [token] as its last column.
    """
    rng = np.random.default_rng(seed)
    x, target = rng.integers(0, 4, (13, 5)).astype(float) + 0.1, rng.uniform(-0.9, 0.9, (13, 3))
    return x, target, np.concatenate([rng.normal(size=(5, 3)) / 2, np.ones((5, 1)) / 2], axis=1)


def attended(kind: str, z: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns b, the tokens x weighted by attention: x z, x e^z, or x e^z over its sum."""
    raw = x * z if kind == "linear" else x * np.exp(z)
    return raw / raw.sum(axis=1, keepdims=True) if kind == "softmax" else raw


def flow(kind: str, state: np.ndarray, x: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the gradient flow of `1/2 mean |target - tanh(b V)|^2` in V and z."""
    v, z = state[:, :-1], state[:, -1]
    b = attended(kind, z, x)
    out = np.tanh(b @ v)
    g = (target - out) * (1 - out**2)  # g_h h'
    back = g @ v.T  # [sample, token]
    dz = x * back if kind == "linear" else b * back
    if kind == "softmax":
        dz = dz - b * (b * back).sum(axis=1, keepdims=True)
    return np.concatenate([b.T @ g, dz.sum(axis=0)[:, None]], axis=1) / len(x)


def invariant(kind: str, state: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Returns what Theorem 1 says stays constant for each token, [token].

    `z^2 - sum_k v_k^2` (linear), `z - 1/2 sum_k v_k^2` (exp), and for softmax
    `z_m - 1/2 sum_k (v_km^2 - |v_k|^2 mean_m)`, where mean [token] is the b of the start averaged
    over samples. The minus sign and |v_k|^2 of the last are as the released code has them.
    """
    squares, z = (state[:, :-1] ** 2).sum(axis=1), state[:, -1]
    if kind == "linear":
        return z**2 - squares
    return z - (squares - (mean * squares.sum() if kind == "softmax" else 0)) / 2


def integrated(kind: str, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the state at 0 and at END by Runge-Kutta's method of order 4, and the mean b at 0."""
    x, target, start = problem(seed)
    h, state = END / steps, start
    for _ in range(steps):
        k1 = flow(kind, state, x, target)
        k2 = flow(kind, state + h / 2 * k1, x, target)
        k3 = flow(kind, state + h / 2 * k2, x, target)
        k4 = flow(kind, state + h * k3, x, target)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return start, state, attended(kind, start[:, -1], x).mean(axis=0)


def drift(kind: str, steps: int, seed: int, of: str = "") -> tuple[float, float]:
    """Returns how far the invariant moved by END, and how far the logits did: largest of tokens.

    of: whose invariant; that of another kind is no constant, and serves as the baseline.
    """
    start, end, mean = integrated(kind, steps, seed)
    of = of or kind
    change = invariant(of, end, mean) - invariant(of, start, mean)
    return float(np.abs(change).max()), float(np.abs(end[:, -1] - start[:, -1]).max())


# Theorem 2: v' = delta e^(v^2 / 2), where one feature blows up first


def growth_invariant(v: NDArray, delta: NDArray, root: float = math.sqrt(2)) -> NDArray:
    """Returns `erf(v / root) / delta`; by sqrt 2 it is `sqrt(2 / pi) t` for every token.

    The paper prints erf(v / 2), which is not the same for all tokens: d/dt erf(v / a) is
    proportional to e^(-v^2 / a^2) v', so that a^2 must be 2. v [token, time], delta [token].
    """
    return erf(v / root) / delta[:, None]


def blow_up_time(delta: NDArray) -> float:
    """Returns `sqrt(pi / 2) / max |delta|`, when the token with the largest |delta| diverges."""
    return math.sqrt(math.pi / 2) / float(np.abs(delta).max())


def grown(delta: NDArray, t: float) -> NDArray:
    """Returns v at time t from v = 0: `sqrt 2 erfinv(sqrt(2 / pi) delta t)`."""
    return math.sqrt(2) * erfinv(math.sqrt(2 / math.pi) * delta * t)


# Theorem 3: one ReLU unit on an even mixture of isotropic inputs centred at x+ and at 0

AXIS = np.eye(5)[0]  # the direction of x+
DENSITIES = {"normal": (1.0,), "of two scales": (0.5, 2.0)}
GRADIENTS = ("constant, mu along x+", "constant, mu against x+", "of a squared loss")


def half_space(v: NDArray, centre: NDArray, scales: tuple) -> tuple[NDArray, NDArray]:
    """Returns E[1(u > 0) x] and E[relu(u) x] exactly, where u = v^T x, [token] each.

    x is isotropic about the centre: an even mixture of normal distributions of some scales.
    """
    length, mean = float(np.linalg.norm(v)), float(v @ centre)
    first, second = np.zeros((2, len(v)))
    for scale in scales:
        s = scale * length
        share = ndtr(mean / s)
        bump = math.exp(-((mean / s) ** 2) / 2) / math.sqrt(2 * math.pi)
        first += centre * share + v * scale / length * bump
        second += centre * (mean * share + s * bump) + v * scale**2 * share
    return first / len(scales), second / len(scales)


def unit_flow(gradient: str, distance: float, scales: tuple) -> tuple:
    """Returns v' as a function of v, and its critical point mu; distance: of x+ from 0.

    The gradient sent back is constant in each part, with the ratio that makes mu critical, or that
    of `1/2 E (relu(v^T x) - y)^2` with y = 1 about x+ and 0 about 0.
    """
    plus = distance * AXIS
    if gradient.startswith("constant"):
        mu = AXIS if "along" in gradient else -AXIS
        ratio = half_space(mu, plus, scales)[0][0] / half_space(mu, 0 * plus, scales)[0][0]
        return (
            lambda v: half_space(v, plus, scales)[0] - ratio * half_space(v, 0 * plus, scales)[0],
            mu,
        )

    def rate(v: NDArray) -> NDArray:
        answered, second = half_space(v, plus, scales)
        return (answered - second - half_space(v, 0 * plus, scales)[1]) / 2

    return rate, brentq(lambda size: rate(size * AXIS)[0], 1e-3, 1e3) * AXIS


def near_critical(gradient: str, distance: float, scales: tuple) -> dict[str, float]:
    """Returns the eigenvalues of C, and what `C (mu - v)` leaves of v' at up to |mu| / 10 from mu.

    across, along: eigenvalues, from central differences, orthogonal to mu, s beta_1, and along it.
    misfit: |lambda|, what is left at 200 places; misfit of one: the same of the best C = beta I.
    """
    rate, mu = unit_flow(gradient, distance, scales)
    rng, size = np.random.default_rng(0), float(np.linalg.norm(mu))
    step = size * 1e-4 * np.eye(len(mu))
    along, across = (
        float((rate(mu - step[at]) - rate(mu + step[at]))[at] / step[at, at] / 2) for at in (0, 1)
    )
    away = rng.normal(size=(200, len(mu)))
    away *= rng.uniform(0, size / 10, (200, 1)) / np.linalg.norm(away, axis=1, keepdims=True)
    pull = np.array([rate(mu - each) for each in away])
    c = np.array([along, *[across] * (len(mu) - 1)])
    one = (away * pull).sum() / (away * away).sum()
    misfit, alone = (
        float(np.linalg.norm(pull - away * each) / np.linalg.norm(pull)) for each in (c, one)
    )
    return {"across": across, "along": along, "misfit": misfit, "misfit of one": alone}


# Theorem 4: v' = (mu - v) e^(v^2 / 2), larger features converge exponentially faster


def elapsed(mu: float, y: float) -> float:
    """Returns the time until `ln 1 / (1 - v / mu) = y`, from v = 0.

    It is `F(r, mu) = int_0^r e^(-mu^2 x^2 / 2) / (1 - x) dx` at r = 1 - e^-y, in the variable y,
    where nothing is singular. `0 <= F - e^(-mu^2 / 2) y <= sqrt(pi / 2) + 1`.
    """
    rate = lambda s: math.exp(-(mu**2) * (1 - math.exp(-s)) ** 2 / 2)  # noqa: E731
    return quad(rate, 0, y, epsabs=1e-13, epsrel=1e-12, limit=500)[0]


def converged(mu: ArrayLike, times: ArrayLike) -> NDArray:
    """Returns `ln 1 / (1 - v / mu)` of each token at the times, [token, time], from v = 0."""
    square = np.square(mu)
    return flowed(lambda y: np.exp(square * (1 - np.exp(-y)) ** 2 / 2), times, 0 * square)


# Theorem 5: two leaves of a binary latent hierarchy under one class


def sibling(rho: float, depth: int, height: int, offset: float) -> float:
    """Returns P[y_l = 1 | y_m = 1] for latents `depth` below the class, in branches of `height`.

    `1/2 (1 + rho^2H - 2 rho^(L-1) rho_0) / (1 - rho^(L-1) rho_0)`. offset: rho_0, which is
    `sum_k P[y_0 = k] (2 P[y_l = 0 | y_0 = k] - 1)` of the latent just below the class. The paper
    prints `sum_k P[y_0 = k] P[y_l = 0 | y_0 = k]`, which fails.
    """
    rho0 = rho ** (depth - 1) * offset
    return (1 + rho ** (2 * height) - 2 * rho0) / (1 - rho0) / 2


def classes(q: float) -> tuple[NDArray, NDArray]:
    """Returns three classes' prior and P[first latent = 0 | class], of mean q over classes."""
    return np.array([0.5, 0.3, 0.2]), np.clip(q + np.array([0.04, -0.04, -0.04]), 0, 1)


def enumerated(rho: float, depth: int, height: int, prior: NDArray, first: NDArray) -> float:
    """Returns the same by summing over every path. prior, first: see `classes`."""
    step = np.array([[1 + rho, 1 - rho], [1 - rho, 1 + rho]]) / 2
    joint = np.zeros((2, 2))
    for k, *path in itertools.product(range(len(prior)), *[range(2)] * (depth + height)):
        shared, left, right = path[: depth - height], path[depth - height : depth], path[depth:]
        p = prior[k] * (first[k] if shared[0] == 0 else 1 - first[k])
        for chain in (shared, [shared[-1], *left], [shared[-1], *right]):
            p *= math.prod(step[a, b] for a, b in itertools.pairwise(chain))
        joint[left[-1], right[-1]] += p
    return joint[1, 1] / joint[:, 1].sum()


# Figure 4: v' = (mu - v) o softmax(v^2 / 3)

TOKENS, START, RATE, ITERATIONS = 10, 0.05, 0.02, 5000


def targets(seed: int) -> Tensor:
    """Returns mu of the script, [10]: sorted uniform numbers from 1 to 4; seed 0 is published."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(TOKENS, generator=generator) * 3 + 1).sort().values


def entropies(mu: Tensor, *, attends: bool = True, iterations: int = ITERATIONS) -> Tensor:
    """Returns the entropy of softmax(v^2 / 3) before each iteration, `[iteration, *batch]`, nats.

    Each adds `eta (mu - v) o softmax(v^2 / 3)` to v; without attention the factor is 1 / 10. The
    paper's text says softmax(v^2), its script softmax(v^2 / 3). mu `[*batch, 10]`.
    """
    v, found = torch.full_like(mu, START), []
    for _ in range(iterations):
        pattern = torch.softmax(v**2 / 3, dim=-1)
        found.append(attention_entropy(pattern[..., None, :])[..., 0])
        v = v + RATE * (mu - v) * (pattern if attends else 1 / TOKENS)
    return torch.stack(found)


def asymptote(mu: Tensor) -> Tensor:
    """Returns the entropy of softmax(mu^2 / 3), where v ends. mu `[*batch, 10]` -> `[*batch]`."""
    return attention_entropy(torch.softmax(mu**2 / 3, dim=-1)[..., None, :])[..., 0]


# Figures 2 and 3: softmax attention and a linear layer learn to name the class of a column of X

M_C, CLASSES, D, T, LEARNING_RATE = 20, 20, 30, 0.5, 0.1
INPUTS = ("gauss", "random")


def inputs(kind: str, generator: torch.Generator) -> Tensor:
    """Returns X [token, class]: ten common tokens, and ten that belong to classes if "gauss"."""
    x = torch.rand(M_C, CLASSES, generator=generator) / 2
    if kind == "gauss":
        token, label = torch.arange(M_C // 2), torch.arange(CLASSES)
        x[: M_C // 2] = torch.exp(-((token[:, None] - label / CLASSES * M_C / 2) ** 2) / 30)
    return x / x.sum(dim=0)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Returns the correlation over the last axis, `[...]`."""
    a, b = a - a.mean(dim=-1, keepdim=True), b - b.mean(dim=-1, keepdim=True)
    return (a * b).sum(dim=-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-8)


def joint_training(kind: str, seeds: int, iterations: int) -> dict[str, np.ndarray]:
    """Returns what Figures 2 and 3 draw, from full-batch descent, all seeds side by side.

    The embedding is the identity, so the rows of W [30, class] are V, the query's row, and nine
    rows that nothing moves; |W|^2 is of all of them, and b is the mean of X, as in the script.
    whole, squares, rest: correlation of the logits z with Theorem 1's estimate, its part
    `sum_k v_k^2 / 2T` and its part `-|W|^2 mean / 2T`, [iteration, seed]; v0: the weights of
    class 0, [iteration, seed, token]; x: the X of the first seed.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    x = torch.stack([inputs(kind, generator) for generator in generators])
    w = torch.stack([torch.randn(D, CLASSES, generator=g) for g in generators]) / 100
    z = torch.stack([torch.randn(M_C, generator=g) for g in generators]) / 100
    w.requires_grad_()
    z.requires_grad_()
    mean, labels = x.mean(dim=-1), torch.arange(CLASSES).expand(seeds, -1)
    found = {"whole": [], "squares": [], "rest": [], "v0": []}
    constant = None
    for _ in range(iterations):
        with torch.no_grad():
            squares = (w[:, :M_C] ** 2).sum(dim=-1) / 2 / T
            rest = -mean * (w**2).sum(dim=(-2, -1))[:, None] / 2 / T
            constant = z - squares - rest if constant is None else constant
            for name, part in [("whole", squares + rest + constant), ("squares", squares)]:
                found[name].append(correlation(z, part))
            found["rest"].append(correlation(z, rest))
            found["v0"].append(w[:, :M_C, 0].clone())
        b = torch.softmax(z[..., None] / T + x.log(), dim=-2)  # e^(z/T) x over its sum
        logits = b.mT @ w[:, :M_C] + w[:, M_C : M_C + 1]  # the query's row: the residual
        loss = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum") / CLASSES
        slopes = torch.autograd.grad(loss, [w, z])
        with torch.no_grad():
            for parameter, slope in zip((w, z), slopes, strict=True):
                parameter -= LEARNING_RATE * slope
    return {name: torch.stack(rows).numpy() for name, rows in found.items()} | {"x": x[0].numpy()}
