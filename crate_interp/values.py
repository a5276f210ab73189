"""What a field of a config may hold."""

from numbers import Integral
from typing import Any


def is_int(value: Any) -> bool:
    """Whether a value is a whole number, numpy's included, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers too


def is_number(value: Any) -> bool:
    """Whether a value is a finite number and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e38 < value < 1e38  # NaN is not


def whole(name: str, value: Any) -> int:
    """A count as an int; ValueError naming the field that is none."""
    if not is_int(value) or not 1 <= value < 2**31:
        raise ValueError(f"{name}={value!r}: give a whole number of at least 1.")
    return int(value)


def height_width(name: str, value: Any) -> tuple[int, int]:
    """A size as (height, width); ValueError naming the field that is none."""
    pair = (value, value) if is_int(value) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2 or not all(is_int(side) and 1 <= side < 2**31 for side in pair):
        raise ValueError(f"{name}={value!r}: give an int, or (height, width).")
    return int(pair[0]), int(pair[1])
