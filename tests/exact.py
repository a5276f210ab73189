"""Linear algebra in 50 digits on numpy arrays of mpmath numbers: slow, and without surprises."""

import mpmath
import numpy as np

MP = mpmath.mp.clone()
MP.dps = 50
exp, sqrt = np.frompyfunc(MP.exp, 1, 1), np.frompyfunc(MP.sqrt, 1, 1)


def exact(x) -> np.ndarray:
    """The same numbers in 50 digits."""
    x = np.asarray(x)
    return x if x.dtype == object else np.vectorize(MP.mpf, otypes=[object])(x.astype(np.float64))


def floats(x) -> np.ndarray:
    return np.asarray(x, dtype=object).astype(np.float64)[()]


def identity(n: int) -> np.ndarray:
    return exact(np.eye(n))


def logdet(a: np.ndarray):
    """Sum of the logarithms of the pivots; a is symmetric positive definite."""
    a, total = exact(a).copy(), 0
    for i in range(len(a)):
        total += MP.log(a[i, i])
        a[i + 1 :] -= np.outer(a[i + 1 :, i] / a[i, i], a[i])
    return total


def solve(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Gauss-Jordan; a is symmetric positive definite."""
    n, rows = len(a), np.hstack([a, b])
    for i in range(n):
        rows[i] = rows[i] / rows[i, i]
        for j in set(range(n)) - {i}:
            rows[j] -= rows[j, i] * rows[i]
    return rows[:, n:]


def singular_values(w: np.ndarray) -> np.ndarray:
    """Descending, min(shape) of them, good to 25 digits of the largest."""
    w = exact(w)
    gram = w.T @ w if w.shape[0] > w.shape[1] else w @ w.T
    return np.array(
        [MP.sqrt(max(x, 0)) for x in MP.eigsy(MP.matrix(gram.tolist()), eigvals_only=True)][::-1]
    )


def basis(u: np.ndarray) -> np.ndarray:
    """Gram-Schmidt."""
    u, columns = exact(u), []
    for x in u.T:
        for q in columns:
            x = x - q * (q @ x)
        columns.append(x / MP.sqrt(x @ x))
    return np.array(columns).T


def softmax(x: np.ndarray) -> np.ndarray:
    weights = exp(x - max(x))
    return weights / sum(weights)


def frobenius(w: np.ndarray):
    return MP.sqrt(sum(x * x for x in exact(w).flat))
