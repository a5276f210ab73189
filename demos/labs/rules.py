"""The rules of all claims: data/rules.csv, and how an answer follows from intervals by a rule.

A row of the file says of a kind of claim: lab and key; about: a white box, or other models;
trainings: how many trainings of a network its sentence speaks of, 0 if none was trained; claim: its
text, which names a network that was trained once; place: where the document says it, "ours" if none
does; said: what it says there, in our words; statistic, and the baseline that stands beside it;
range: the values that are possible; test and bar: what the interval of the statistic must do; over:
"all" if every part must do it, "settings" if each setting has an answer of its own; bar_from: where
the bar comes from; unit and n: of the interval; form: quick or full; needs: what must hold before
the rule is asked at all.
"""

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "data" / "rules.csv"
SUPPORTED, REFUTED, DEPENDS, UNDECIDED = "supported", "not supported", "depends", "undecided"
ANSWERS = (SUPPORTED, REFUTED, DEPENDS, UNDECIDED)
TESTS, OVER = ("above", "below", "within"), ("", "all", "settings")
FEW = 4  # settings that are looked at one by one; of more it counts how many say yes

Interval = tuple[float, float]


class Rule(NamedTuple):
    """A row of the file, as text; the module says what each column is."""

    lab: str
    key: str
    about: str
    trainings: str
    claim: str
    place: str
    said: str
    statistic: str
    range: str
    test: str
    bar: str
    over: str
    bar_from: str
    unit: str
    n: str
    baseline: str
    form: str
    needs: str

    def bounds(self) -> Interval:
        """Returns the least and the largest possible value, infinite where there is none."""
        ends = [float(end) for end in self.range.split()]
        return (*ends, *(-math.inf, math.inf)[len(ends) :])  # type: ignore[return-value]

    def words(self) -> str:
        """Returns statistic and test, such as "gain, by layer: each above 0"."""
        of = {"": "", "all": "all parts ", "settings": "each "}[self.over]
        return f"{self.statistic}: {of}{self.test} {self.bar}"

    def units(self, n: str) -> str:
        """Returns of how many units the interval is, and whether networks were trained once."""
        return f"{n} {self.unit}" + ", one training each" * (self.trainings == "1")


@cache
def rules() -> dict[str, Rule]:
    """Returns the rules by "lab.key"."""
    with FILE.open(newline="", encoding="utf-8") as lines:
        rows = [Rule(**row) for row in csv.DictReader(lines)]  # type: ignore[arg-type]
    return {f"{row.lab}.{row.key}": row for row in rows}


def digest() -> str:
    """Returns the SHA-256 of the file."""
    return hashlib.sha256(FILE.read_bytes()).hexdigest()


def verdict(test: str, bar: float, interval: Interval) -> bool | None:
    """Returns whether an interval says yes or no, or None if it holds both answers.

    above, below: the interval lies on that side of the bar. within: it lies from -bar to bar, which
    is a claim of equivalence; no is an interval that lies outside.
    """
    low, high = interval
    if math.isnan(low) or math.isnan(high):
        return None
    if test == "within":
        return True if -bar <= low and high <= bar else False if low > bar or high < -bar else None
    if test == "below":
        low, high, bar = -high, -low, -bar
    return True if low > bar else False if high <= bar else None


def answer(rule: Rule, cases: Mapping[str, Interval], met: bool = True) -> str:
    """Returns the answer to a claim from the intervals of its cases, by name.

    Supported: all say yes. Not supported: one says no. Depends: of several settings some say yes
    and some no; of more than `FEW` intervals more must say yes than chance allows. Undecided: no
    case says no, and an interval holds both answers, there is none, or what the rule needs is not
    met.
    """
    found = [verdict(rule.test, float(rule.bar), ends) for ends in cases.values()]
    if not found or not met:
        return UNDECIDED
    if all(found):
        return SUPPORTED
    if False not in found:
        return UNDECIDED
    exact = any(low == high for low, high in cases.values())
    least = 1 if exact or len(found) <= FEW else above_chance(len(found))
    return DEPENDS if rule.over == "settings" and found.count(True) >= least else REFUTED


def above_chance(n: int) -> int:
    """Returns how many of n intervals of 95 % lie above a bar at which all are, in under 5 %."""
    shares = (math.comb(n, k) * 0.025**k * 0.975 ** (n - k) for k in range(n))
    return next(k + 1 for k, below in enumerate(accumulate(shares)) if 1 - below < 0.05)


def asked(rule: Rule, cases: Mapping[str, Interval]) -> str:
    """Returns the intervals that a rule was asked about, or how many of them say what."""
    if len(cases) > FEW:
        says = Counter(verdict(rule.test, float(rule.bar), ends) for ends in cases.values())
        return f"{says[True]} yes, {says[False]} no, {says[None]} neither"
    ends = {
        name: f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        for name, (low, high) in cases.items()
    }
    return "; ".join(f"{name} {words}".strip() for name, words in ends.items())


def lowest(*intervals: Interval) -> Interval:
    """Returns the interval of the smallest of several numbers: it is above a bar if all are."""
    return min(low for low, _ in intervals), min(high for _, high in intervals)


def highest(*intervals: Interval) -> Interval:
    """Returns the interval of the largest of several numbers: it is below a bar if all are."""
    return max(low for low, _ in intervals), max(high for _, high in intervals)


def beyond(own: Interval, *rivals: Interval) -> Interval:
    """Returns the interval of a number less the largest of its rivals, whatever they share.

    It lies above 0 if the number's interval lies above all of theirs, and below 0 if it lies below
    one of them.
    """
    low, high = highest(*rivals)
    return own[0] - high, own[1] - low


def short_of(own: Interval, *rivals: Interval) -> Interval:
    """Returns the same of a number less the smallest of its rivals: below 0 is below all."""
    low, high = lowest(*rivals)
    return own[0] - high, own[1] - low
