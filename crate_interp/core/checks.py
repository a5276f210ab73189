"""Checks of plain arguments: counts, sizes and names. Errors say what to type instead."""

import difflib
import reprlib
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from typing import Any

from crate_interp.core import safe_text

_MOST = 2**31
_REPR = reprlib.Repr()  # repr at a bounded cost, however large or deep the value
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 50
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 2 * safe_text.LONGEST


def is_int(value: object) -> bool:
    """Tells whether a value is an integer, NumPy's included. True and False are not integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def quote(value: object) -> str:
    """Returns a value as errors show it: its repr on one line, cut if it is long.

    Of an array, the type and the shape.
    """
    array: Any = value
    if getattr(array, "ndim", 0) and hasattr(array, "dtype"):
        return f"{array.dtype} of shape {list(array.shape)}"
    return safe_text.plain(_REPR.repr(value))


def is_number(value: object) -> bool:
    """Tells whether a value is a finite real number, NumPy's included, but not True or False."""
    number: Any = value
    return isinstance(value, Real) and not isinstance(value, bool) and -1e38 < number < 1e38


def count(name: str, value: Any, least: int = 1) -> int:
    """Returns a count as an int.

    Raises ValueError, with the argument's `name`, unless `value` is an integer of at least `least`.
    """
    if not is_int(value) or not least <= value < _MOST:
        raise ValueError(f"{name}={quote(value)}: give a whole number of at least {least}.")
    return int(value)


def layer(name: str, value: object, count: int) -> int:
    """Returns a layer before which something starts or stops: 0 to `count`, which is the end.

    Negative layers count from the end. Raises ValueError, with the argument's `name`, for anything
    but a whole number in this range.
    """
    number: Any = value
    if not is_int(value) or not -count <= number <= count:
        raise ValueError(f"{name}={quote(value)}: the model has layers 0 to {count - 1}.")
    return int(number) + count if number < 0 else int(number)


def numbers(name: str, value: object, count: int) -> list[int]:
    """Returns whole numbers from 0 to `count` - 1 in ascending order, each once; None means all.

    Raises ValueError, with the argument's `name`, for anything else, and for none of them.
    """
    chosen: Any = range(count) if value is None else value
    if not isinstance(chosen, (list, tuple, range, set)):
        chosen = ()
    if not chosen or not all(is_int(one) and 0 <= one < count for one in chosen):
        raise ValueError(f"{name}={value!r}: give {name} from 0 to {count - 1}, or None for all.")
    return sorted({int(one) for one in chosen})


def limit(value: object) -> int | None:
    """Returns a number of samples, or None for all.

    Raises ValueError for anything else.
    """
    return None if value is None else count("limit", value)


def size(name: str, value: Any) -> tuple[int, int]:
    """Returns a size as (height, width); an int stands for a square.

    Raises ValueError, with the argument's `name`, for anything else.
    """
    listed = isinstance(value, (list, tuple))
    pair = (value, value) if is_int(value) else tuple(value) if listed else ()
    if len(pair) != 2 or not all(is_int(side) and 1 <= side < _MOST for side in pair):
        raise ValueError(f"{name}={quote(value)}: give an int, or (height, width).")
    return int(pair[0]), int(pair[1])


def flag(name: str, value: object) -> bool:
    """Returns a value that is True or False.

    Raises ValueError, with the argument's `name`, for any other value.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={quote(value)}: give True or False.")
    return value


def non_negative(name: str, value: Any) -> float:
    """Returns a finite number of at least 0.

    Raises ValueError, with the argument's `name`, for any other value.
    """
    return _number(name, value, lambda x: x >= 0, "a finite number of at least 0")


def positive(name: str, value: Any) -> float:
    """Returns a finite number above 0.

    Raises ValueError, with the argument's `name`, for any other value.
    """
    return _number(name, value, lambda x: x > 0, "a finite number above 0")


def share(name: str, value: Any) -> float:
    """Returns a share; raises ValueError unless it is above 0 and at most 1."""
    return _number(name, value, lambda x: 0 < x <= 1, "a share above 0 and at most 1")


def one_of(name: str, value: object, choices: Collection[str]) -> str:
    """Returns a value that is one of `choices`.

    Raises ValueError, with the argument's `name` and the nearest choices, for any other value.
    """
    if not isinstance(value, str) or value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"{name}={quote(value)} is none of {', '.join(choices)}. {hint}".rstrip())
    return value


def one_line(name: str, value: object) -> str:
    """Returns a text on one line, of at most 200 characters, without control characters.

    Raises ValueError, with the argument's `name`, for any other value.
    """
    if not isinstance(value, str) or not safe_text.is_plain(value):
        raise ValueError(f"{name}={quote(value)}: give a text on one line, of 200 characters.")
    return value


def did_you_mean(name: str, choices: Iterable[str], otherwise: str = "") -> str:
    """Returns "did you mean" with up to three close names, or `otherwise` if none is close.

    A name that ends in ".`name`" counts as close: "attention.entropy" is close to "entropy".
    """
    names = list(choices)
    near = [full for full in names if full.endswith(f".{name}")][:3]
    near = near or difflib.get_close_matches(name[: safe_text.LONGEST], names, n=3)
    return f"Did you mean {', '.join(near)}?" if near else otherwise


def _number(name: str, value: Any, fits: Callable[[Any], bool], words: str) -> Any:
    """Returns a number of Python, not of NumPy. Raises ValueError if it does not fit."""
    if not is_number(value) or not fits(value):
        raise ValueError(f"{name}={quote(value)}: give {words}.")
    return value.item() if hasattr(value, "item") else value
