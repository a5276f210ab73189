"""A strip of verdicts: a row for each question, with a sign for each layer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

MINUS = "\N{MINUS SIGN}"
_SIGNS = {1: ("+", "good"), -1: (MINUS, "bad"), 0: ("?", ""), None: (".", "")}


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


def sign_of(way: int | None, word: str, ringed: bool = False) -> Sign:
    """Returns the sign for a `way`: 1 is good, -1 bad, 0 undecided, None not compared."""
    mark, kind = _SIGNS[way]
    return Sign(mark, word, kind, ringed)


def low_to_high(values: ArrayLike, write: Callable[[float], str] = "{:.2g}".format) -> str:
    """Returns the lowest and the highest of some numbers in words, such as "0.1 to 0.3".

    If both look the same, the text has one number. It is "" if all numbers are NaN.
    """
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    ends = (known.min(), known.max()) if len(known) else ()
    return " to ".join(dict.fromkeys(write(float(end)) for end in ends))
