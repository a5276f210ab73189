"""JoMA's joint dynamics (arXiv 2310.00535, Theorem 1) as gradient flows that one can integrate."""

import numpy as np

KINDS = ("linear", "exp", "softmax")
END = 2.0  # the time at which the drift is read


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
