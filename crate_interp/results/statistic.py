"""What a statistic says of itself, and the strip of verdicts that a page shows of statistics."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from crate_interp.stats.verdicts import SHOWN

# (unit, lowest value, highest value, how to read it); the title is made from the name
Facts = tuple[str, float | None, float | None, str]


@dataclass(frozen=True)
class Statistic:
    """A statistic's name, and how to read it.

    Args:
        title: Its heading, such as "Zeros in the code".
        direction: What a higher value means, such as "higher is sparser", or "".
        unit: "" if it has none.
        low: The lowest value that it can have, or None.
        high: The highest value that it can have, or None.
        how: How to read it, in a sentence or two.
        column: Its heading in the short table by layer that commands print, or "" if it has no
            column there.

    Raises:
        ValueError: If the title is empty, or if a field has the wrong type.
    """

    title: str
    direction: str
    unit: str
    low: float | None
    high: float | None
    how: str
    column: str = ""

    @property
    def facts(self) -> Facts:
        """Returns (unit, lowest, highest, how to read it), as a result's meta holds them."""
        return self.unit, self.low, self.high, self.how

    @property
    def labels(self) -> tuple[str, str, str]:
        """Returns (title, direction, column)."""
        return self.title, self.direction, self.column


def described(name: str, facts: object) -> Statistic:
    """Returns the record of "probe.statistic"; facts: a Statistic or a tuple of four fields.

    For a tuple, the title is made from the name: "mine.my_own_number" is called "My own number".
    Raises ValueError for anything else.
    """
    if isinstance(facts, Statistic):
        return facts
    if isinstance(facts, (tuple, list)) and len(facts) == 4:
        return Statistic(title_of(name), "", *facts)
    form = "give (unit, lowest or None, highest or None, how to read it), or a Statistic"
    raise ValueError(f"{name} is described by {facts!r}: {form}.")


def title_of(name: str) -> str:
    """Returns the title made from "probe.statistic", or from the name of a probe alone."""
    last = name.rpartition(".")[2] or name
    words = last.replace("_", " ").strip() or last
    return words[:1].upper() + words[1:]


MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Sign:
    """One cell of a strip of verdicts.

    kind: "good", "bad" or "". ringed: whether a ring shows that untrained networks do the same.
    opens: the id of the element that a click opens. arrow: whether the number is nearer to a claim
    than with random weights, or farther, as an arrow.
    """

    mark: str
    word: str
    kind: str = ""
    ringed: bool = False
    opens: str = ""
    arrow: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a strip of verdicts: a sign for each layer, then a text for each column."""

    title: str
    signs: list[Sign]
    words: list[str]


def sign_of(verdict: str, word: str, ringed: bool = False) -> Sign:
    """Returns the sign of a verdict."""
    shown = SHOWN[verdict]
    return Sign(shown.mark, word, shown.kind, ringed)


def low_to_high(values: ArrayLike, write: Callable[[float], str] = "{:.2g}".format) -> str:
    """Returns the lowest and the highest of some numbers in words, such as "0.1 to 0.3".

    If both look the same, the text has one number. It is "" if all numbers are NaN.
    """
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    ends = (known.min(), known.max()) if len(known) else ()
    return " to ".join(dict.fromkeys(write(float(end)) for end in ends))
