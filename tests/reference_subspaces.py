"""Slow forms of subspaces, dictionaries, ranks and denoising.

Written from the papers, one sample at a time, in 50 digits where float64 would lose some. Imports
numpy and scipy, and no code under test.
"""

import numpy as np

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
)
from reference_sparsity import attention_entropy


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

    def share(i, j):
        lengths = gram[i, i] * gram[j, j]
        return gram[i, j] ** 2 / lengths if lengths else MP.mpf(0)

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

    def share(token, p):
        return token @ p @ token / (token @ token) if token.any() else MP.mpf(0)

    return floats([[share(token, p) for p in projectors] for token in exact(z)])


def membership_entropy(z: np.ndarray, u: np.ndarray) -> np.ndarray:
    shares = [
        e / e.sum() if e.any() else np.full(len(u), 1 / len(u)) for e in projection_energy(z, u)
    ]
    return attention_entropy(np.array(shares))


def membership_balance(membership: np.ndarray) -> float:
    """The entropy of the tokens each head holds, with its own number of heads as base."""
    sizes = [sum(row) for row in exact(membership)]
    shares = [size / sum(sizes) for size in sizes]
    return floats(-sum(p * MP.log(p, len(sizes)) for p in shares if p))


def contraction_coverage(contraction: np.ndarray) -> np.ndarray:
    """(sum w)^2 / (N sum w^2) of the columns' sums w."""
    columns = [sum(a) for a in exact(contraction)]
    return floats([sum(w) ** 2 / (len(w) * (w @ w)) if any(w) else MP.mpf(0) for w in columns])


def representatives_in_use(contraction: np.ndarray) -> np.ndarray:
    """m^2 over the squared cosines of all pairs of rows that are not zero."""
    out = []
    for a in exact(contraction):
        rows = [row for row in a if any(row)]
        pairs = sum((x @ y) ** 2 / ((x @ x) * (y @ y)) for x in rows for y in rows)
        out.append(len(rows) ** 2 / pairs if rows else MP.mpf(0))
    return floats(out)


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
