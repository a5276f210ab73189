"""Theorems of JoMA (arXiv 2310.00535), checked by integration and enumeration.

With the corrections that they need.
"""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad, solve_ivp
from scipy.special import erf, erfinv

ODE = dict(method="DOP853", rtol=1e-12, atol=1e-13)


# Theorem 1: attention logits z follow the weights V of the layer above


def flow(kind, state, x, target):
    """Gradient flow of 1/2 mean |target - tanh(b V)|^2 in V [token, unit] and z [token].

    b is the attention-weighted x.
    """
    v, z = state[:, :-1], state[:, -1]
    raw = x * z if kind == "linear" else x * np.exp(z)
    total = raw.sum(axis=1, keepdims=True) if kind == "softmax" else 1.0
    b = raw / total
    out = np.tanh(b @ v)
    g = (target - out) * (1 - out**2)  # g_h h'
    back = g @ v.T  # [sample, token]
    dz = x * back if kind == "linear" else b * back
    if kind == "softmax":
        dz = dz - b * (b * back).sum(axis=1, keepdims=True)
    return np.concatenate([b.T @ g, dz.sum(axis=0)[:, None]], axis=1) / len(x)


def drift(kind, steps):
    """Returns how far the theorem's invariant of each logit has moved by t = 2.

    By Runge-Kutta's method of order 4.
    """
    rng = np.random.default_rng(0)
    x, target = rng.integers(0, 4, (13, 5)).astype(float) + 0.1, rng.uniform(-0.9, 0.9, (13, 3))
    state = np.concatenate([rng.normal(size=(5, 3)) / 2, np.ones((5, 1)) / 2], axis=1)
    h = 2.0 / steps

    def invariant(s):
        squares, z = (s[:, :-1] ** 2).sum(axis=1), s[:, -1]
        if kind == "linear":
            return z**2 - squares
        raw = x * np.exp(state[:, -1])  # the b of the start, held fixed
        mean = (raw / raw.sum(axis=1, keepdims=True)).mean(axis=0) if kind == "softmax" else 0.0
        return z - (squares - mean * squares.sum()) / 2

    s = state
    for _ in range(steps):
        k1 = flow(kind, s, x, target)
        k2 = flow(kind, s + h / 2 * k1, x, target)
        k3 = flow(kind, s + h / 2 * k2, x, target)
        k4 = flow(kind, s + h * k3, x, target)
        s = s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    assert np.abs(s[:, -1] - state[:, -1]).max() > 0.05  # the logits themselves have moved
    return np.abs(invariant(s) - invariant(state)).max()


@pytest.mark.parametrize("kind", ["linear", "exp"])
def test_theorem_1_drifts_by_the_integrator_alone(kind):
    coarse, fine = drift(kind, 64), drift(kind, 128)
    assert fine < 1e-7 and 11 < coarse / fine < 22  # 2^4


def test_theorem_1_holds_for_softmax_in_part_only():
    coarse, fine = drift("softmax", 64), drift("softmax", 128)
    assert fine > 1e-3 and coarse == pytest.approx(fine, rel=1e-3)  # no matter of step size


# Theorem 2: v' = delta e^(v^2 / 2), where one feature blows up first


def test_theorem_2():
    delta = np.array([1.0, 0.7, -0.4, 0.1])
    end = math.sqrt(math.pi / 2) / np.abs(delta).max()
    times = end * np.array([0.1, 0.5, 0.9, 0.999])
    v = solve_ivp(
        lambda t, v: delta * np.exp(v**2 / 2), (0, times[-1]), np.zeros(4), t_eval=times, **ODE
    ).y
    np.testing.assert_allclose(
        erf(v / math.sqrt(2)) / delta[:, None],
        math.sqrt(2 / math.pi) * times[None] + 0 * v,
        rtol=1e-9,
    )
    np.testing.assert_allclose(v[:, -1], math.sqrt(2) * erfinv(0.999 * delta), rtol=1e-7)
    limits = math.sqrt(2) * erfinv(delta[1:])  # of those that do not win
    np.testing.assert_allclose(v[1:, -1], limits, rtol=5e-3)
    printed = erf(v[:, 2] / 2) / delta  # as printed: the same for all
    assert np.ptp(printed) > 0.05 * printed.max()


# Theorem 4: v' = (mu - v) e^(v^2 / 2), larger features converge exponentially faster


def elapsed(mu, y):
    """Returns the time until ln(1 / (1 - v / mu)) = y.

    That is F(r, mu) in the variable y = ln 1 / (1 - r), where nothing is singular.
    """
    return quad(
        lambda s: math.exp(-(mu**2) * (1 - math.exp(-s)) ** 2 / 2),
        0,
        y,
        epsabs=1e-13,
        epsrel=1e-12,
        limit=500,
    )[0]


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0, 3.0])
def test_theorem_4_integral(mu):
    r = np.array([0.1, 0.5, 0.9, 0.999])
    for end in r:
        direct = quad(lambda x: math.exp(-(mu**2) * x**2 / 2) / (1 - x), 0, end, epsrel=1e-12)[0]
        assert elapsed(mu, -math.log1p(-end)) == pytest.approx(direct, rel=1e-9)
    times = [elapsed(mu, -math.log1p(-end)) for end in r]
    v = solve_ivp(
        lambda t, v: (mu - v) * np.exp(v**2 / 2), (0, times[-1]), [0.0], t_eval=times, **ODE
    ).y[0]
    np.testing.assert_allclose(v / mu, r, rtol=1e-8)
    for y in -np.log(np.logspace(-12, -0.01, 25)):
        rest = elapsed(mu, y) - math.exp(-(mu**2) / 2) * y
        assert -1e-12 <= rest <= math.sqrt(math.pi / 2) + 1


def test_theorem_4_ratio():
    mu, slack = np.array([2.0, 1.0]), math.sqrt(math.pi / 2) + 1
    times = np.array([10.0, 100.0, 1000.0])
    y = solve_ivp(
        lambda t, y: np.exp(mu**2 * (1 - np.exp(-y)) ** 2 / 2),
        (0, 1000),
        np.zeros(2),
        t_eval=times,
        **ODE,
    ).y
    away = np.abs(
        y[0] / y[1] / math.exp(1.5) - 1
    )  # Lambda: (t - rest_j) / (t - rest_k) - 1, rests in [0, slack]
    assert (away <= slack / (times - slack)).all() and away[0] > 10 * away[2] > 0


# Theorem 5: two leaves of a binary latent hierarchy under one class


def sibling(rho, depth, height, offset):
    """P[y_l = 1 | y_m = 1] for two latents.

    They lie `depth` below the class and part `height` above them.
    """
    rho0 = rho ** (depth - 1) * offset
    return (1 + rho ** (2 * height) - 2 * rho0) / (1 - rho0) / 2


def enumerated(rho, depth, height, prior, first):
    """The same by summing over every path.

    `prior`: of the classes; `first`: P[first latent = 0 | class].
    """
    step = np.array([[1 + rho, 1 - rho], [1 - rho, 1 + rho]]) / 2
    joint = np.zeros((2, 2))
    for k, *path in itertools.product(range(len(prior)), *[range(2)] * (depth + height)):
        shared, left, right = path[: depth - height], path[depth - height : depth], path[depth:]
        p = prior[k] * (first[k] if shared[0] == 0 else 1 - first[k])
        for chain in (shared, [shared[-1], *left], [shared[-1], *right]):
            p *= math.prod(step[a, b] for a, b in itertools.pairwise(chain))
        joint[left[-1], right[-1]] += p
    return joint[1, 1] / joint[:, 1].sum()


@pytest.mark.parametrize(
    "rho, depth, height, q, wanted",
    [(0.8, 4, 2, 0.5, 0.7048), (0.9, 5, 1, 0.95, 0.7680), (0.7, 3, 2, 0.2, 0.7064)],
)
def test_theorem_5(rho, depth, height, q, wanted):
    assert sibling(rho, depth, height, 2 * q - 1) == pytest.approx(wanted, abs=5e-5)
    prior = np.array([0.5, 0.3, 0.2])
    first = np.clip(q + np.array([0.04, -0.04, -0.04]), 0, 1)  # the mean over classes is q
    assert prior @ first == pytest.approx(q)
    by_paths = enumerated(rho, depth, height, prior, first)
    assert by_paths == pytest.approx(
        sibling(rho, depth, height, prior @ (2 * first - 1)), rel=1e-12
    )
    assert (
        abs(by_paths - sibling(rho, depth, height, prior @ first)) > 0.01
    )  # the offset as printed


# the score of latents against units


def best_correlation(latents, units):
    """Returns the largest correlation of each column of latents with a column of units.

    Constant columns give 0. latents: [sample, latent].
    """
    a, b = (x - x.mean(axis=0) for x in (latents, units))
    norms = np.linalg.norm(a, axis=0)[:, None] * np.linalg.norm(b, axis=0)
    return (np.divide(a.T @ b, norms, out=np.zeros_like(norms), where=norms > 0)).max(axis=1)


def test_best_correlation_and_its_baselines():
    rng = np.random.default_rng(1)
    latents, units = rng.integers(0, 2, (509, 5)).astype(float), rng.normal(size=(509, 31))
    units[:, 7:12], units[:, 12] = 3 * latents + 2, 4.0
    np.testing.assert_allclose(best_correlation(latents, units), 1, rtol=1e-12)
    scaled = units * rng.uniform(0.1, 10, 31) + rng.normal(size=31)
    np.testing.assert_allclose(
        best_correlation(latents, scaled), best_correlation(latents, units), rtol=1e-9
    )
    # chance is not zero: of 30 units the best has about sqrt(2 ln 30 / 509) = 0.12
    permuted = best_correlation(rng.permutation(latents), units)
    untrained = best_correlation(latents, rng.normal(size=(509, 31)))
    for chance in (permuted, untrained):
        assert 0.05 < chance.mean() < 0.2
