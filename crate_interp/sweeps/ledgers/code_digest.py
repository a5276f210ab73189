"""A digest of Python functions, to tell whether the measuring code has changed."""

import functools
import hashlib
from collections.abc import Iterator
from types import CodeType
from typing import Any

_OURS = ("crate_interp", "crate_hooks")


def digest_of_code(value: object) -> str:
    """Returns a digest of functions, of the variables they close over, and of plain values.

    For a class or module that a function uses, and for this library's own functions, only the name
    counts, because the run also records the library's version and the settings of its probes.
    """
    digest = hashlib.sha256()
    for part in _parts(value, set()):
        digest.update(part.encode() + b"\n")
    return f"sha256:{digest.hexdigest()}"


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        yield repr(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(map(repr, value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key)
            yield from _parts(item, seen)
    elif isinstance(value, CodeType):
        yield value.co_code.hex() + repr(value.co_names)
        yield from _parts(value.co_consts, seen)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    elif getattr(value, "__module__", "").partition(".")[0] in _OURS and callable(value):
        yield f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    elif hasattr(value, "__code__"):
        seen = seen | {id(value)}  # a function may close over itself
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield from _parts((value.__code__, value.__defaults__, value.__kwdefaults__, cells), seen)
    elif hasattr(value, "__func__"):
        yield from _parts(value.__func__, seen)
    else:
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        yield f"{type(value).__module__}.{name}"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # the variable has no value yet
        return False
    return True
