"""How often a step is found where there is none, and where there is one.

Prints, for 20, 40 and 100 values, the share of series whose p is at most .05: first for noise with
a memory and for trends, where it may be .06 (and what 2,000 series leave to chance), then for steps
of 2, 4 and 8 standard deviations. With 10 values the answer is None.
"""

import sys

import numpy as np
from timing import verdict

from crate_interp.training.change_points import change_point, fitted, likeness, noise, p_values

SERIES = 2000


def trends(n):
    t = np.arange(n)
    return {
        "AR(0)": (0.0, 0 * t),
        "AR(.7)": (0.7, 0 * t),
        "AR(.9)": (0.9, 0 * t),
        "linear": (0.0, 0.2 * t),
        "linear, AR(.7)": (0.7, 0.2 * t),
        "exp(-t/.05n)": (0.0, 10 * np.exp(-t / (0.05 * n))),
        "exp(-t/.2n)": (0.0, 10 * np.exp(-t / (0.2 * n))),
        "exp(-t/.5n)": (0.0, 10 * np.exp(-t / (0.5 * n))),
    }


def steps(n):
    late = np.arange(n) >= n // 2
    found = {f"step of {size}": (0.0, size * late) for size in (2, 4, 8)}
    return found | {"step of 8, AR(.7)": (0.7, 8 * late)}


def share(phi, course, n, random):
    fit = fitted(noise(phi, SERIES, n, random) + course)
    return (p_values(fit.f, likeness(fit.rest), n) <= 0.05).mean()


def main() -> bool:
    random, largest = np.random.default_rng(7), 0.0
    for n in (20, 40, 100):
        sizes = {name: share(*of, n, random) for name, of in trends(n).items()}
        powers = {name: share(*of, n, random) for name, of in steps(n).items()}
        largest = max(largest, *sizes.values())
        for kind, shares in (("no step", sizes), ("a step", powers)):
            words = ", ".join(f"{name} {value:.3f}" for name, value in shares.items())
            print(f"{n} values, {kind}: {words}")
    print(f"10 values: {change_point(np.arange(10.0))}")
    by_chance = 2 * (0.06 * 0.94 / SERIES) ** 0.5
    return verdict("the largest share without a step", largest, 0.06 + by_chance)


if __name__ == "__main__":
    sys.exit(not main())
