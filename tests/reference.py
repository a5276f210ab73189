"""Second, slow implementations written from the papers. Imports numpy and scipy, and no code under test.

The measures take one sample at a time and follow the formula, in 50 digits where float64 would lose some.
"""

import functools
import math
from fractions import Fraction

import numpy as np
import scipy.optimize

from exact import (
    MP,
    basis,
    exact,
    floats,
    frobenius,
    identity,
    logdet,
    singular_values,
    softmax,
    solve,
    sqrt,
)
from forward_reference import _ista, _mssa, forward, published_layout  # noqa: F401


def per_row(function):
    """The function of a row, for all rows of the last axis."""
    return functools.wraps(function)(
        lambda x, *args: np.apply_along_axis(function, -1, x, *args)[()]
    )


# ---- measures, one sample at a time


def coding_rate(z: np.ndarray, eps: float) -> float:
    """1/2 sum ln(1 + d/(N eps^2) s_i^2) over singular values s_i."""
    n, d = z.shape
    s = np.linalg.svd(np.asarray(z, np.float64), compute_uv=False)
    return 0.5 * float(np.log1p(d / (n * eps**2) * s**2).sum())


def subspace_coding_rate(z: np.ndarray, u: np.ndarray, eps: float) -> np.ndarray:
    """coding_rate of the codes z @ u[k] (p = their width), per head."""
    return np.array(
        [coding_rate(np.asarray(z, np.float64) @ np.asarray(uk, np.float64), eps) for uk in u]
    )


def rate_reduction(z: np.ndarray, u: np.ndarray, eps: float) -> float:
    return coding_rate(z, eps) - math.fsum(subspace_coding_rate(z, u, eps))


def official_coding_rate(codes: np.ndarray, eps_squared: float = 0.01) -> np.ndarray:
    """The script's n x n form per head, with zero codes left out of the sum."""
    out = []
    for c in np.asarray(codes, np.float64):
        n, p = c.shape
        norms = np.linalg.norm(c, axis=1, keepdims=True)
        unit = np.divide(c, norms, out=np.zeros_like(c), where=norms > 0)
        out.append(0.5 * np.linalg.slogdet(np.eye(n) + p / (n * eps_squared) * unit @ unit.T)[1])
    return np.array(out)


def mcr2_coding_rate(z: np.ndarray, membership: np.ndarray, eps: float) -> float:
    """sum_k N_k / 2N logdet of the N x N form of the tokens scaled by the roots of their weights."""
    z, (n, d), total = exact(z), z.shape, 0
    labels = membership[:, None] == np.unique(membership) if membership.ndim == 1 else membership
    for weights in exact(labels).T:
        size, scaled = sum(weights), sqrt(weights)[:, None] * z
        if size > 0:
            total += (
                size
                / (2 * n)
                * logdet(identity(n) + d / (size * MP.mpf(eps) ** 2) * (scaled @ scaled.T))
            )
    return floats(total)


def coding_length(z: np.ndarray, eps: float) -> float:
    """(N + d) / 2 log2 det of the N x N form."""
    n, d = z.shape
    gram = exact(z) @ exact(z).T
    return floats(
        (n + d) * logdet(identity(n) + d / (n * MP.mpf(eps) ** 2) * gram) / (2 * MP.log(2))
    )


def dictionary_rate_change(z: np.ndarray, d: np.ndarray, eps: float) -> float:
    return coding_rate(np.asarray(z, np.float64) @ np.asarray(d, np.float64).T, eps) - coding_rate(
        z, eps
    )


# ---- measures: gradients and steps


def coding_rate_gradient(z: np.ndarray, eps: float) -> np.ndarray:
    """a (I + a Z Z^T)^-1 Z, a = d / (N eps^2)."""
    z, (n, d) = exact(z), z.shape
    a = d / (n * MP.mpf(eps) ** 2)
    return floats(a * solve(identity(n) + a * (z @ z.T), z))


def of_heads(z: np.ndarray, u: np.ndarray, eps: float, term) -> np.ndarray:
    """sum_k term(C_k, a) U_k^T with a = p / (N eps^2), in 50 digits."""
    a = u.shape[2] / (len(z) * MP.mpf(eps) ** 2)
    return sum(term(exact(z) @ uk, a) @ uk.T for uk in exact(u))


def subspace_coding_rate_gradient(z: np.ndarray, u: np.ndarray, eps: float) -> np.ndarray:
    """sum_k a (I + a C_k C_k^T)^-1 C_k U_k^T."""
    return floats(of_heads(z, u, eps, lambda c, a: a * solve(identity(len(c)) + a * (c @ c.T), c)))


def neumann_gradient(z: np.ndarray, u: np.ndarray, eps: float) -> np.ndarray:
    return floats(of_heads(z, u, eps, lambda c, a: a * c - a**2 * ((c @ c.T) @ c)))


def neumann_invalid(z: np.ndarray, u: np.ndarray, eps: float) -> np.ndarray:
    a = u.shape[2] / (len(z) * MP.mpf(eps) ** 2)
    return np.array([np.mean(a * singular_values(exact(z) @ uk) ** 2 > 1) for uk in exact(u)])


def gradient_step(z: np.ndarray, u: np.ndarray, eps: float, kappa: float) -> np.ndarray:
    return z - kappa * subspace_coding_rate_gradient(z, u, eps)


def neumann_step(z: np.ndarray, u: np.ndarray, eps: float, kappa: float) -> np.ndarray:
    return floats(
        exact(z) - MP.mpf(kappa) * of_heads(z, u, eps, lambda c, a: a * c - a**2 * (c @ (c.T @ c)))
    )


def first_order_step(z: np.ndarray, u: np.ndarray, eps: float, kappa: float) -> np.ndarray:
    return floats(exact(z) - MP.mpf(kappa) * of_heads(z, u, eps, lambda c, a: a * c))


def third_order_step(z: np.ndarray, u: np.ndarray, eps: float, kappa: float) -> np.ndarray:
    return floats(
        exact(z) + MP.mpf(kappa) * of_heads(z, u, eps, lambda c, a: a**2 * ((c @ c.T) @ c))
    )


def attend(c: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Token i becomes the mean of all tokens, weighed by exp(scale <c_i, c_j>)."""
    return np.array([softmax(MP.mpf(scale) * (c @ query)) @ c for query in c])


def attention_step(z: np.ndarray, u: np.ndarray, eps: float, kappa: float) -> np.ndarray:
    return floats(exact(z) + MP.mpf(kappa) * of_heads(z, u, eps, lambda c, a: a**2 * attend(c)))


def subspace_attention(codes: np.ndarray, scale: float = 1.0) -> np.ndarray:
    return floats([attend(c, scale) for c in exact(codes)])


def paper_mssa(z: np.ndarray, u: np.ndarray, eps: float) -> np.ndarray:
    return floats(of_heads(z, u, eps, lambda c, a: a * attend(c)))


def ista_step(z: np.ndarray, y: np.ndarray, d: np.ndarray, eta: float, lambd: float) -> np.ndarray:
    """The same in columns: relu(z + eta D^T (y - D z) - eta lambd) for each token."""
    d, eta, lambd = exact(d), MP.mpf(eta), MP.mpf(lambd)
    moved = [
        x + eta * (d.T @ (t - d @ x)) - eta * lambd for x, t in zip(exact(z), exact(y), strict=True)
    ]
    return np.maximum(floats(moved), 0)


def spectrum(z: np.ndarray) -> np.ndarray:
    return floats(singular_values(z) ** 2)


def subspace_spectrum(z: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.array([spectrum(exact(z) @ uk) for uk in exact(u)])


def rate_of_spectrum(spectrum: np.ndarray, n_tokens: int, width: int, eps) -> np.ndarray:
    if np.ndim(eps):
        return np.array([rate_of_spectrum(spectrum, n_tokens, width, float(e)) for e in eps])
    return 0.5 * math.fsum(math.log1p(width / (n_tokens * eps**2) * float(x)) for x in spectrum)


def objective_terms(
    z: np.ndarray, u: np.ndarray, eps: float, lambd: float, penalty, normalise: bool
) -> np.ndarray:
    """The three terms, signed: lambd times the penalty, R^c and -R."""
    weight = lambd / z.size if normalise else lambd
    return np.array(
        [weight * penalty(z).sum(), subspace_coding_rate(z, u, eps).sum(), -coding_rate(z, eps)]
    )


def sparse_rate_reduction(z, u, eps, lambd, penalty=None, normalise=False) -> float:
    return objective_terms(z, u, eps, lambd, penalty or l0_norm, normalise).sum()


def layer_objectives(layers, bases, z, eps, lambd, penalty=None, normalise=False) -> np.ndarray:
    out = []
    for layer, u in zip(layers, bases, strict=True):
        z = layer(z)
        out.append(sparse_rate_reduction(z, u, eps, lambd, penalty, normalise))
    return np.array(out)


def lasso_objective(z: np.ndarray, y: np.ndarray, d: np.ndarray, lambd) -> np.ndarray:
    """1/2 |y - D z|^2 + <lambd, |z|> of each token."""
    rests = exact(y) - exact(z) @ exact(d).T
    penalties = abs(exact(z)) @ exact(np.broadcast_to(lambd, z.shape[1]))
    return floats(
        [rest @ rest / 2 + penalty for rest, penalty in zip(rests, penalties, strict=True)]
    )


def lasso_kkt_residual(z: np.ndarray, y: np.ndarray, d: np.ndarray, lambd) -> np.ndarray:
    """Each entry's distance from optimal is min(z_i, g_i): then z_i = 0 <= g_i or g_i = 0 <= z_i."""
    out = []
    for code, target in zip(exact(z), exact(y), strict=True):
        slope = exact(d).T @ (exact(d) @ code - target) + exact(np.broadcast_to(lambd, code.shape))
        out.append(frobenius([min(x, g) for x, g in zip(code, slope, strict=True)]))
    return floats(out)


def lasso_solution(y: np.ndarray, d: np.ndarray, lambd) -> np.ndarray:
    """By the dual: y - D z is the point of {t: D^T t <= lambd} nearest to y, which one NNLS finds (Lawson and Hanson)."""
    out, d, goal = [], np.asarray(d, np.float64), np.append(np.zeros(len(d)), 1.0)
    for target in np.asarray(y, np.float64):
        size = np.linalg.norm(target)
        system = np.vstack([-d, d.T @ (target / size) - np.broadcast_to(lambd, d.shape[1]) / size])
        weights = scipy.optimize.nnls(system, goal)[0]
        out.append(size * weights / (goal - system @ weights)[-1])
    return np.array(out)


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


# ---- measures: subspaces, dictionaries, ranks


def orthonormality_defect(u: np.ndarray) -> float:
    u, p = exact(u), u.shape[1]
    return floats(frobenius(u.T @ u - identity(p)) / MP.sqrt(p))


def completeness_defect(u: np.ndarray) -> float:
    heads, d, p = u.shape
    return floats(frobenius(sum(uk @ uk.T for uk in exact(u)) - identity(d)) / MP.sqrt(d))


def principal_cosines(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return floats(singular_values(basis(u).T @ basis(v)))


def principal_angles(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return floats([MP.acos(min(c, 1)) for c in singular_values(basis(u).T @ basis(v))])


def subspace_overlap(u: np.ndarray, v: np.ndarray) -> float:
    """tr(P_u P_v) / p of the projectors."""
    pu, pv = (q @ q.T for q in (basis(u), basis(v)))
    return floats(np.trace(pu @ pv) / u.shape[1])


def head_overlap(u: np.ndarray) -> np.ndarray:
    return np.array(
        [
            np.mean([subspace_overlap(a, b) for j, b in enumerate(u) if j != i])
            for i, a in enumerate(u)
        ]
    )


def incoherence(u: np.ndarray) -> float:
    return max(principal_cosines(u[i], u[j])[0] for i in range(len(u)) for j in range(i))


def column_cosines(d: np.ndarray) -> np.ndarray:
    """The root of <a, b>^2 / (<a, a> <b, b>)."""
    gram = exact(d).T @ exact(d)
    share = lambda i, j: (
        gram[i, j] ** 2 / (gram[i, i] * gram[j, j]) if gram[i, i] * gram[j, j] else MP.mpf(0)
    )  # noqa: E731
    return floats([[MP.sqrt(share(i, j)) for j in range(len(gram))] for i in range(len(gram))])


def mutual_coherence(d: np.ndarray) -> float:
    return max(x for i, row in enumerate(column_cosines(d)) for j, x in enumerate(row) if i != j)


def dictionary_defect(d: np.ndarray) -> float:
    """By |G|_F^2 - tr(G)^2 / n, G the smaller Gram."""
    d = exact(d)
    gram = d.T @ d if d.shape[0] >= d.shape[1] else d @ d.T
    n = len(gram)
    return floats(MP.sqrt((frobenius(gram) ** 2 - np.trace(gram) ** 2 / n) / n))


def condition_number(d: np.ndarray) -> float:
    s = singular_values(d)
    return floats(s[0] / s[-1] if s[-1] > 1e-24 * s[0] else MP.inf)


def projection_energy(z: np.ndarray, u: np.ndarray) -> np.ndarray:
    """|P_k z|^2 / |z|^2 with the projector P_k = U_k (U_k^T U_k)^-1 U_k^T."""
    projectors = [uk @ solve(uk.T @ uk, uk.T) for uk in exact(u)]
    share = lambda token, p: token @ p @ token / (token @ token) if token.any() else MP.mpf(0)  # noqa: E731
    return floats([[share(token, p) for p in projectors] for token in exact(z)])


def membership_entropy(z: np.ndarray, u: np.ndarray) -> np.ndarray:
    shares = [
        e / e.sum() if e.any() else np.full(len(u), 1 / len(u)) for e in projection_energy(z, u)
    ]
    return attention_entropy(np.array(shares))


def subspace_snr(z: np.ndarray, u: np.ndarray) -> np.ndarray:
    z, out = exact(z), []
    for uk in u:
        inside = z @ basis(uk) @ basis(uk).T
        signal, noise = frobenius(inside), frobenius(z - inside)
        out.append(signal / noise if noise > 1e-24 * signal else MP.inf if signal else MP.mpf(0))
    return floats(out)


def stable_rank(w: np.ndarray) -> float:
    return floats((frobenius(w) / singular_values(w)[0]) ** 2) if w.any() else 0.0


def effective_rank(z: np.ndarray) -> float:
    shares = singular_values(z) / (sum(singular_values(z)) or 1)
    return floats(MP.exp(-sum(p * MP.log(p) for p in shares if p > 0))) if z.any() else 0.0


def _posterior(x, u, sigma, width, shrink) -> np.ndarray:
    u, out = exact(u), []
    for token in exact(x):
        projections = np.array([uk @ (uk.T @ token) for uk in u])
        weights = softmax(np.array([(uk.T @ token) @ (uk.T @ token) / width for uk in u]))
        out.append(weights @ projections / shrink)
    return floats(out)


def posterior_mean(x: np.ndarray, u: np.ndarray, sigma: float) -> np.ndarray:
    s2 = MP.mpf(sigma) ** 2
    return _posterior(x, u, sigma, 2 * s2 * (1 + s2), 1 + s2)


def paper_posterior_mean(x: np.ndarray, u: np.ndarray, sigma: float) -> np.ndarray:
    return _posterior(x, u, sigma, 2 * MP.mpf(sigma) ** 2, 1)


def bayes_mean(x: np.ndarray, u: np.ndarray, sigma: float) -> np.ndarray:
    """posterior_mean from densities: sum_k p(k | x) S_k (S_k + s^2 I)^-1 x with S_k = U_k U_k^T."""
    u, s2, out = exact(u), MP.mpf(sigma) ** 2, []
    for token in exact(x):
        covariances = [uk @ uk.T + s2 * identity(len(token)) for uk in u]
        solved = [solve(c, token[:, None])[:, 0] for c in covariances]
        weights = softmax(
            np.array(
                [-(token @ w + logdet(c)) / 2 for c, w in zip(covariances, solved, strict=True)]
            )
        )
        out.append(sum(p * (uk @ (uk.T @ w)) for p, uk, w in zip(weights, u, solved, strict=True)))
    return floats(out)
