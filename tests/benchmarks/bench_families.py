"""How often a family of tests finds something where nothing is: heads of ablate, layers of compare.

A family is the columns of one table, 24 heads or the 7 layers of a statistic, and n samples. The
mean of each column is 0, so any p of 0.05 or less is wrong. For the power, one column is shifted by
its standard deviation, up and down by turns. Both tools make p as `p_of` does, here from 999
resamples in place of 10,000, which adds noise to p but takes a tenth of the time.
"""

import sys

import numpy as np
from timing import verdict

from crate_interp.stats import bootstrap, intervals
from crate_interp.stats.contrasts import paired
from crate_interp.stats.intervals import LEVEL

WANTED, RESAMPLES = 0.06, 999
# families to draw of each number of samples and columns
LINES = {(8, 24): 200, (16, 24): 200, (32, 7): 1000, (32, 24): 1000, (64, 24): 200, (256, 24): 200}
LOGNORMAL = np.exp(0.5), ((np.e - 1) * np.e) ** 0.5  # mean and standard deviation
# distribution: (numbers with mean 0, their standard deviation)
DRAWN = {
    "normal": (lambda random, size: random.normal(size=size), 1.0),
    "t, 3 df": (lambda random, size: random.standard_t(3, size=size), 3**0.5),
    "lognormal": (lambda random, size: random.lognormal(size=size) - LOGNORMAL[0], LOGNORMAL[1]),
    "80 % zeros": (
        lambda random, size: np.where(random.random(size) < 0.8, 0, random.normal(size=size)),
        0.2**0.5,
    ),
}


def p_of(values: np.ndarray) -> np.ndarray:
    return intervals.max_t(values, paired(values).p)


def shares(name: str, n: int, columns: int, families: int) -> tuple[float, float]:
    """Returns in which share of families anything is found, and one shifted column is found."""
    random = np.random.default_rng([n, columns, len(name)])
    draw, sd = DRAWN[name]
    wrong = found = 0
    for number in range(families):
        values = draw(random, (n, columns))
        wrong += (p_of(values) <= LEVEL).any()
        if number % 3 == 0:
            values[:, 0] += sd * (-1) ** number
            found += p_of(values)[0] <= LEVEL
    return wrong / families, found / len(range(0, families, 3))


def main() -> bool:
    bootstrap.RESAMPLES = RESAMPLES
    good = True
    for name in DRAWN:
        for (n, columns), families in LINES.items():
            wrong, found = shares(name, n, columns, families)
            noise = (LEVEL * (1 - LEVEL) / families) ** 0.5
            words = f"{name}, n = {n}, {columns} columns: power {found:.2f}, family-wise error"
            if n == 32:
                good &= verdict(f"{words} (+- {noise:.3f})", wrong, WANTED)
            else:
                print(f"{words} (+- {noise:.3f}): {wrong:.3f}")
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
