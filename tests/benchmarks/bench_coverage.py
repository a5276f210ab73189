"""How often intervals over texts that say 95 % hold the truth: windows of a text are alike.

An experiment draws the windows of all texts and asks whether the true mean lies in the interval.
The other intervals are tested in tests/test_coverage.py.
"""

import sys

import numpy as np
from timing import verdict
from windows_of_texts import SIZES, STATISTICS, covered_texts

EXPERIMENTS = 4000


def main() -> bool:
    random, good = np.random.default_rng(0), True
    noise = (0.95 * 0.05 / EXPERIMENTS) ** 0.5
    print(f"{EXPERIMENTS} experiments a line, standard error {noise:.4f}")
    for name in STATISTICS:
        for memory in (0.35, 0.55, 0.75):
            share, windows = covered_texts(random, name, memory, EXPERIMENTS)
            words = f"{name} of {len(SIZES)} texts, correlation {memory} of neighbouring windows"
            good &= verdict(words, share, 0.9, at_least=True)
            print(f"  as if the windows were independent: {windows:.3f}")
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
