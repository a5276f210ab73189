"""The one place where a number becomes a verdict, and a verdict becomes what people see.

A verdict is stored as one of the words below; pages, tables and commands show it as `SHOWN` says.
Legends say what the signs stand for: of audits in audits/result.py, of comparisons in
cli/commands.py, of pages by the macro `legend` in viz/templates/macros.html.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from crate_interp.stats import bootstrap, contrasts
from crate_interp.stats.intervals import LEVEL, holm

KEPT, BROKEN, UNDECIDED, NOT_APPLICABLE = "kept", "broken", "undecided", "not applicable"
DEPENDS, BY_CONSTRUCTION = "depends", "by construction"
_ROUNDING = 1e-9  # tolerance for rounding, of numbers of order 1

Bounds = tuple[float, float]  # the lowest and the highest value; infinite without a bound


class Shown(NamedTuple):
    """What people see of a verdict: a sign, an answer, and a kind ("good", "bad" or "")."""

    sign: str
    answer: str
    kind: str = ""

    @property
    def mark(self) -> str:
        """The sign as a page shows it."""
        return self.sign.replace("-", "\N{MINUS SIGN}") or "."


SHOWN = {
    KEPT: Shown("+", "yes", "good"),
    BROKEN: Shown("-", "no", "bad"),
    DEPENDS: Shown("~", "depends on the scaling"),
    BY_CONSTRUCTION: Shown("c", "can't tell: an ideal layer misses the bound too"),
    UNDECIDED: Shown("?", "can't tell"),
    NOT_APPLICABLE: Shown("", ""),
}


class Tests(NamedTuple):
    """P-values `[cell]` of a number, each twice the one-sided p.

    kept: small if the number is shown to pass. broken: small if it is shown to fail.
    """

    kept: Float[np.ndarray, "cell"]
    broken: Float[np.ndarray, "cell"]


def within(
    values: Float[np.ndarray, "cell sample"],
    bounds: Bounds,
    resampled: bootstrap.Studentised,
    n: Int[np.ndarray, "cell"],
) -> Tests:
    """Tests whether the true mean lies within the bounds.

    If all samples lie on one side of a bound by more than rounding, p is at most that of a sign
    test. So numbers that are nearly or exactly the same in all samples, which resamples cannot
    test, are decided too. A value on a bound counts as within it.

    Args:
        values: The values of each cell; NaN where a sample has none.
        bounds: The lowest and the highest value.
        resampled: The bootstrap of the cells.
        n: How many independent samples a cell has.
    """

    def beyond(bound: float, sign: int, least: float) -> np.ndarray:
        p = resampled.above(bound, sign)
        every = np.where(np.isnan(values), True, sign * (values - bound) > least).all(axis=1)
        return np.fmin(np.where(np.isnan(p), 1.0, p), np.where(every, 0.5**n, 1.0))

    low, high = bounds
    kept = np.maximum(beyond(low, 1, -_ROUNDING), beyond(high, -1, -_ROUNDING))
    broken = np.minimum(beyond(low, -1, _ROUNDING), beyond(high, 1, _ROUNDING))
    return Tests(2 * kept, 2 * broken)


def better(difference: contrasts.Difference, way: int) -> Tests:
    """Tests whether a difference has the sign `way`, or the opposite one.

    A difference as small as rounding has no sign.
    """
    equal = np.isnan(difference.value) | (np.abs(difference.value) < _ROUNDING)
    return Tests(*(np.where(equal, 1.0, difference.towards(sign)) for sign in (way, -way)))


def decide(
    inside: Bool[np.ndarray, "cell"],
    tests: Tests,
    rivals: Mapping[str, Tests],
    *,
    family: Shaped[np.ndarray, "cell"],
    exempt: Bool[np.ndarray, "cell"],
    compared: Bool[np.ndarray, "cell"],
) -> dict[str, Any]:
    """Returns the columns p, verdict and reason of the cells of a number.

    Args:
        inside: Whether the value lies within the bounds.
        tests: The test of the bounds.
        rivals: The tests against each baseline; keys: the words for it. The first baseline is the
            null.
        family: Cells of one family are tested together, by Holm's method.
        exempt: Which cells need not beat a rival.
        compared: Which cells were compared with all rivals.
    """
    kept = [tests.kept, *(np.where(exempt, 0.0, test.kept) for test in rivals.values())]
    broken = [tests.broken, *(np.where(exempt, 1.0, test.broken) for test in rivals.values())]
    kept, broken = np.maximum.reduce(kept), np.minimum.reduce(broken)
    for group in np.unique(family):
        at = family == group
        kept[at], broken[at] = holm(kept[at]), holm(broken[at])
    verdict = np.where(kept <= LEVEL, KEPT, np.where(broken <= LEVEL, BROKEN, UNDECIDED))
    reasons = []
    for cell, word in enumerate(verdict):
        failed = [words for words, test in rivals.items() if test.kept[cell] > LEVEL]
        reason = f"not shown to be better than {' and '.join(failed)}"
        if word == BROKEN:
            reason = f"worse than {next(iter(rivals), '')}"
        elif not failed:
            reason = "this is not shown after the correction for the number of layers"
        elif not compared[cell]:
            reason = "random baselines were not measured on these samples"
        silent = word == KEPT or (word == UNDECIDED and not tests.kept[cell] <= LEVEL)
        reasons.append(f"within its bounds, but {reason}" if inside[cell] and not silent else "")
    return {"p": np.minimum(np.minimum(kept, broken), 1.0), "verdict": verdict, "reason": reasons}


def of_interval(low: float, high: float, bounds: Bounds) -> str:
    """Returns "kept" for an interval within the bounds, "broken" for one outside of them."""
    if bounds[0] <= low and high <= bounds[1]:
        return KEPT
    return BROKEN if high < bounds[0] or low > bounds[1] else UNDECIDED


def of_difference(difference: float, p: float) -> str:
    """Returns "kept" for a difference shown to be above 0, "broken" for one shown to be below."""
    if np.isnan(p):
        return NOT_APPLICABLE
    shown = KEPT if difference > 0 else BROKEN
    return shown if p <= LEVEL and difference else UNDECIDED


def together(verdicts: Iterable[Iterable[str]], by_construction: bool) -> str:
    """Returns one verdict for a claim that must hold for several numbers, in several settings.

    Args:
        verdicts: For each number, its verdicts in all settings.
        by_construction: Whether an ideal layer misses all that is not kept.
    """
    by_number = [{*words} - {NOT_APPLICABLE} for words in verdicts]
    every = set().union(*by_number)
    if every <= {KEPT}:
        return KEPT if every else NOT_APPLICABLE
    if BROKEN in every and by_construction:
        return BY_CONSTRUCTION
    if any(BROKEN in words and KEPT not in words for words in by_number):
        return BROKEN
    return DEPENDS if any({KEPT, BROKEN} <= words for words in by_number) else UNDECIDED
