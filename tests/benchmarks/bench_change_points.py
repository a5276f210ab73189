"""How often a step is found where there is none, and where there is one.

Prints, for 20, 40 and 100 values, the share of series whose p is at most .05: first for noise with
a memory, noise that fades, and trends, where it may be .06 (and what 500 series leave to chance),
then for steps of 2, 4 and 8 standard deviations. With 10 values the answer is None.
"""

import sys

import numpy as np
from timing import verdict

from crate_interp.training.watch_result import change_point, noise

SERIES = 500


def without(n):
    """Memory, standard deviation and course of series without a step."""
    t, even = np.arange(n), np.ones(n)
    cosine = np.cos(np.pi * t / (2 * n))
    return {
        "AR(0)": (0.0, even, 0 * t),
        "AR(.7)": (0.7, even, 0 * t),
        "AR(.9)": (0.9, even, 0 * t),
        "linear": (0.0, even, 0.2 * t),
        "linear, AR(.7)": (0.7, even, 0.2 * t),
        "exp(-t/.05n)": (0.0, even, 10 * np.exp(-t / (0.05 * n))),
        "exp(-t/.2n)": (0.0, even, 10 * np.exp(-t / (0.2 * n))),
        "noise that fades as a cosine": (0.0, cosine, 0 * t),
        "as its square": (0.0, cosine**2, 0 * t),
        "as its square, AR(.7)": (0.7, cosine**2, 0 * t),
        "as exp(-t/.3n)": (0.0, np.exp(-t / (0.3 * n)), 0 * t),
        "as exp(-t/.1n)": (0.0, np.exp(-t / (0.1 * n)), 0 * t),
    }


def with_step(n):
    late, even = np.arange(n) >= n // 2, np.ones(n)
    found = {f"step of {size}": (0.0, even, size * late) for size in (2, 4, 8)}
    return found | {"step of 8, AR(.7)": (0.7, even, 8 * late)}


def share(of, n, random):
    memory, deviation, course = of
    found = map(change_point, noise(memory, SERIES, n, random) * deviation + course)
    return np.mean([one is not None and one.p <= 0.05 for one in found])


def main() -> bool:
    random, largest = np.random.default_rng(7), 0.0
    for n in (20, 40, 100):
        sizes = {name: share(of, n, random) for name, of in without(n).items()}
        powers = {name: share(of, n, random) for name, of in with_step(n).items()}
        largest = max(largest, *sizes.values())
        for kind, shares in (("no step", sizes), ("a step", powers)):
            words = ", ".join(f"{name} {value:.3f}" for name, value in shares.items())
            print(f"{n} values, {kind}: {words}", flush=True)
    print(f"10 values: {change_point(np.arange(10.0))}")
    by_chance = 2 * (0.06 * 0.94 / SERIES) ** 0.5
    return verdict("the largest share without a step", largest, 0.06 + by_chance)


if __name__ == "__main__":
    sys.exit(not main())
