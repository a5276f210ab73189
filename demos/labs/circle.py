"""A random walk on a circle, and a one-layer transformer that learns to predict its next state.

The model is `f = V X softmax(X~^T W x~_N)`: X [state, N] has the one-hot states of the walk and a
zero for the N-th, which is to be predicted; X~ is X over positions p_i[j] = sin(i j pi / (M + 1)).
Its loss is `-ln(f_y + eps)`.

The positions are orthogonal and all of length sqrt((M + 1) / 2), so W matters by one vector alone,
W x~_N. A score is `a[x_i] + c_i`, with a number for each state and one for each position. A step of
gradient descent on W moves a by |p|^2 and c by |p|^4 times the gradient in the scores.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    get rounding errors that differ from entry to entry, and training multiplies those: see
    `random_walk`.
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
    """V [to, from], and the scores' numbers a [state] and c [position]."""

    v: NDArray
    a: NDArray
    c: NDArray

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
        self.a = self.a + rate * LENGTH * change
        self.c = self.c + rate * LENGTH**2 * slope.sum(axis=0)


def zero(states: int, tokens: int) -> Model:
    """Returns the model before training from zero."""
    return Model(np.zeros((states, states)), np.zeros(states), np.zeros(tokens))


def direction_distance(v: NDArray, wanted: NDArray) -> float:
    """Returns the Frobenius distance of two matrices scaled to norm 1, from 0 to 2."""
    return float(np.linalg.norm(v / np.linalg.norm(v) - wanted / np.linalg.norm(wanted)))
