"""Slow forms of coding rates, spectra and the sparse rate reduction.

Written from the papers, one sample at a time, in 50 digits where float64 would lose some. Imports
numpy and scipy, and no code under test.
"""

import math

import numpy as np

from exact import MP, exact, floats, identity, logdet, singular_values, sqrt
from reference_sparsity import l0_norm


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
    """sum_k N_k / 2N logdet of the N x N form of the tokens times the roots of their weights."""
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


def variational_rate(codes: np.ndarray, membership: np.ndarray, eps: float) -> np.ndarray:
    """n_k / 2N sum of the logarithms of the diagonal of I + d / (n_k eps^2) C_k^T diag(pi_k) C_k.

    Token by token; d is the width of the codes of all heads.
    """
    heads, n, p = codes.shape
    out = []
    for c, weights in zip(exact(codes), exact(membership), strict=True):
        size, total = sum(weights), MP.mpf(0)
        for j in range(p if size else 0):
            energy = sum(weights[i] * c[i, j] ** 2 for i in range(n))
            total += MP.log(1 + heads * p * energy / (size * MP.mpf(eps) ** 2))
        out.append(size * total / (2 * n))
    return floats(out)


def contracted_rate(codes: np.ndarray, contraction: np.ndarray, eps: float) -> np.ndarray:
    """1/2 logdet of the m x m form of the representatives' codes, per head."""
    out = []
    for c, a in zip(exact(codes), exact(contraction), strict=True):
        rep, (m, p) = a @ c, (len(a), c.shape[1])
        out.append(logdet(identity(m) + p / (m * MP.mpf(eps) ** 2) * (rep @ rep.T)) / 2)
    return floats(out)


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


# ---- spectra


def spectrum(z: np.ndarray) -> np.ndarray:
    return floats(singular_values(z) ** 2)


def subspace_spectrum(z: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.array([spectrum(exact(z) @ uk) for uk in exact(u)])


def rate_of_spectrum(spectrum: np.ndarray, n_tokens: int, width: int, eps) -> np.ndarray:
    if np.ndim(eps):
        return np.array([rate_of_spectrum(spectrum, n_tokens, width, float(e)) for e in eps])
    return 0.5 * math.fsum(math.log1p(width / (n_tokens * eps**2) * float(x)) for x in spectrum)


# ---- objective


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
