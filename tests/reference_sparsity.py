"""Slow forms of sparsity, attention statistics and lasso.

Written from the papers, one sample at a time, in 50 digits where float64 would lose some. Imports
numpy and scipy, and no code under test.
"""

import functools
import math
from fractions import Fraction

import numpy as np
import scipy.optimize

from exact import exact, floats, frobenius


def per_row(function):
    """The function of a row, for all rows of the last axis."""
    return functools.wraps(function)(
        lambda x, *args: np.apply_along_axis(function, -1, x, *args)[()]
    )


# ---- lasso


def lasso_objective(z: np.ndarray, y: np.ndarray, d: np.ndarray, lambd) -> np.ndarray:
    """1/2 |y - D z|^2 + <lambd, |z|> of each token."""
    rests = exact(y) - exact(z) @ exact(d).T
    penalties = abs(exact(z)) @ exact(np.broadcast_to(lambd, z.shape[1]))
    return floats(
        [rest @ rest / 2 + penalty for rest, penalty in zip(rests, penalties, strict=True)]
    )


def lasso_kkt_residual(z: np.ndarray, y: np.ndarray, d: np.ndarray, lambd) -> np.ndarray:
    """Each entry's distance from optimal is min(z_i, g_i).

    At the optimum z_i = 0 <= g_i or g_i = 0 <= z_i.
    """
    out = []
    for code, target in zip(exact(z), exact(y), strict=True):
        slope = exact(d).T @ (exact(d) @ code - target) + exact(np.broadcast_to(lambd, code.shape))
        out.append(frobenius([min(x, g) for x, g in zip(code, slope, strict=True)]))
    return floats(out)


def lasso_solution(y: np.ndarray, d: np.ndarray, lambd) -> np.ndarray:
    """By the dual: y - D z is the point of {t: D^T t <= lambd} nearest to y.

    One NNLS finds it (Lawson and Hanson).
    """
    out, d, goal = [], np.asarray(d, np.float64), np.append(np.zeros(len(d)), 1.0)
    for target in np.asarray(y, np.float64):
        size = np.linalg.norm(target)
        system = np.vstack([-d, d.T @ (target / size) - np.broadcast_to(lambd, d.shape[1]) / size])
        weights = scipy.optimize.nnls(system, goal)[0]
        out.append(size * weights / (goal - system @ weights)[-1])
    return np.array(out)


# ---- sparsity and attention


@per_row
def zero_fraction(x: np.ndarray, tol: float = 0.0) -> float:
    return sum(abs(v) <= tol for v in x) / len(x)


@per_row
def l0_norm(x: np.ndarray) -> float:
    return float(sum(v != 0 for v in x))


@per_row
def l1_norm(x: np.ndarray) -> float:
    return math.fsum(abs(float(v)) for v in x)


@per_row
def mean_magnitude(x: np.ndarray) -> float:
    return math.fsum(abs(float(v)) for v in x) / len(x)


@per_row
def l1_l2_ratio(x: np.ndarray) -> float:
    return math.fsum(abs(float(v)) for v in x) / math.hypot(*x) if x.any() else 0.0


@per_row
def hoyer(x: np.ndarray) -> float:
    n = len(x)
    ratio = math.fsum(abs(float(v)) for v in x) / math.hypot(*x) if x.any() else 1.0
    return (math.sqrt(n) - ratio) / (math.sqrt(n) - 1)


@per_row
def gini(x: np.ndarray) -> float:
    """Half the relative mean absolute difference: sum_ij | |x_i| - |x_j| | / (2 n sum |x|)."""
    sizes = [Fraction(abs(float(v))) for v in x]
    if not any(sizes):
        return 1 - 1 / len(x)
    return float(sum(abs(a - b) for a in sizes for b in sizes) / (2 * len(x) * sum(sizes)))


@per_row
def support_for_energy(x: np.ndarray, energy: float = 0.9) -> float:
    squares = sorted((Fraction(float(v)) ** 2 for v in x), reverse=True)
    return min(k for k in range(len(x) + 1) if sum(squares[:k]) >= Fraction(energy) * sum(squares))


def firing_rate(z: np.ndarray, tol: float = 0.0) -> np.ndarray:
    return np.array([sum(abs(v) > tol for v in column) / len(z) for column in z.T])


@per_row
def attention_entropy(row: np.ndarray) -> float:
    return -math.fsum(float(p) * math.log(p) for p in row if p > 0)


@per_row
def official_attention_entropy(row: np.ndarray) -> float:
    return -math.fsum(float(p) * math.log(float(p) + 1e-8) for p in row)


@per_row
def top_mass(row: np.ndarray, k: int) -> float:
    return math.fsum(sorted(row, reverse=True)[:k])


@per_row
def mass_cover(row: np.ndarray, mass: float) -> float:
    parts = sorted((Fraction(float(p)) for p in row), reverse=True)
    return min(k for k in range(len(parts) + 1) if sum(parts[:k]) >= Fraction(mass) * sum(parts))


@per_row
def effective_support(row: np.ndarray) -> float:
    return 1 / math.fsum(float(p) ** 2 for p in row)


def causal_uniform_entropy(n: int) -> float:
    """ln(n!) / n."""
    return math.lgamma(n + 1) / n
