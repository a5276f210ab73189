"""Slow forms of the gradients of the rates, and of the steps of a layer.

Written from the papers, one sample at a time, in 50 digits where float64 would lose some. Imports
numpy and scipy, and no code under test.
"""

import numpy as np

from exact import MP, exact, floats, identity, singular_values, softmax, solve


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
