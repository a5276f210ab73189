"""How often intervals that say 95 % hold the truth: means, texts, shares, one network of others.

An experiment draws n samples and asks whether the true mean lies in the interval. The experiments
of a line are columns that are resampled together: the same row numbers, other rows.
"""

import sys
from functools import partial

import numpy as np
from timing import verdict
from windows_of_texts import SIZES, STATISTICS, covered_texts

from crate_interp.stats.contrasts import against_networks
from crate_interp.stats.intervals import mean_interval

EXPERIMENTS = 4000
# distribution: (samples, true mean, coverage wanted at n = 32)
DRAWN = {
    "normal": (lambda random, size: random.normal(size=size), 0.0, 0.93),
    "lognormal(0, 1)": (lambda random, size: random.lognormal(size=size), np.exp(0.5), 0.92),
    "Bernoulli .1": (lambda random, size: random.random(size) < 0.1, 0.1, 0.93),
}
SAMPLES, IMAGES = (8, 16, 32, 64), 64


def covered(random: np.random.Generator, name: str, n: int) -> float:
    draw, truth, _ = DRAWN[name]
    low, high = mean_interval(draw(random, (n, EXPERIMENTS)))
    return ((low <= truth) & (truth <= high)).mean()


def networks_covered(random: np.random.Generator, seeds: int, spread: float) -> float:
    """Coverage where networks differ by `spread` sds of samples; a new network's mean is the truth.

    Every network, trained or not, is measured on IMAGES images of its own.
    """
    error = np.full(EXPERIMENTS, IMAGES**-0.5)
    level = partial(random.normal, size=EXPERIMENTS)
    own = 1 + error * level()
    twins = np.stack([spread * level() + error * level() for _ in range(seeds)])
    low, high = against_networks(own, error, twins).ends
    truth = 1 - spread * level()
    return ((low <= truth) & (truth <= high)).mean()


def main() -> bool:
    random, good = np.random.default_rng(0), True
    noise = (0.95 * 0.05 / EXPERIMENTS) ** 0.5
    print(f"{EXPERIMENTS} experiments a line, standard error {noise:.4f}")
    for name, (_, _, wanted) in DRAWN.items():
        for n in SAMPLES:
            share = covered(random, name, n)
            if n == 32:
                good &= verdict(f"{name}, n = {n}", share, wanted, at_least=True)
            else:
                print(f"{name}, n = {n}: {share:.3f}")
    for name in STATISTICS:
        for memory in (0.35, 0.55, 0.75):
            share, windows = covered_texts(random, name, memory, EXPERIMENTS)
            words = f"{name} of {len(SIZES)} texts, correlation {memory} of neighbouring windows"
            good &= verdict(words, share, 0.9, at_least=True)
            print(f"  as if the windows were independent: {windows:.3f}")
    for seeds in (3, 5):
        for spread in (0.3, 1.0):
            share = networks_covered(random, seeds, spread)
            words = f"a trained network against {seeds} random ones that differ by {spread} sd"
            good &= verdict(f"{words} of the samples", share, 0.93, at_least=True)
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
