"""NumPy's numbers in the pickle of a torch file, as trainers leave them: plain Python numbers."""

import struct
from collections.abc import Callable
from typing import Any

from crate_interp.checkpoints.formats.pickles import Function, Made, NotAdmittedError, PickleError

_FORMS = {
    "f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b",
    "u8": "<Q", "u4": "<I", "u2": "<H", "u1": "<B", "b1": "<?",
}  # fmt: skip
_LONGEST = 8  # bytes of a number


def _check_state(state: object) -> None:
    """Raises PickleError unless a dtype is of numbers of this machine's order of bytes."""
    if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|"):
        raise PickleError("has a NumPy number of another machine")


def _dtype(arguments: tuple, spend: Callable[[int], None]) -> Made:
    """Stands for numpy.dtype, of numbers alone."""
    match arguments:
        case (str(name), bool(), bool()) if name in _FORMS:
            return Made(_FORMS[name], _check_state)
    raise NotAdmittedError("a numpy.dtype that is not of numbers")


def _bytes(arguments: tuple, spend: Callable[[int], None]) -> bytes:
    """Stands for _codecs.encode, by which pickles of protocol 2 hold a few bytes."""
    match arguments:
        case (str(text), "latin1") if len(text) <= _LONGEST and all(ord(one) < 256 for one in text):
            return text.encode("latin1")
    raise NotAdmittedError("_codecs.encode of anything but the bytes of a number")


def _scalar(arguments: tuple, spend: Callable[[int], None]) -> int | float | bool:
    """Stands for numpy.core.multiarray.scalar, as a number of Python."""
    match arguments:
        case (Made(value=str(form)), bytes(raw)) if len(raw) == struct.calcsize(form):
            return struct.unpack(form, raw)[0]
    raise NotAdmittedError("a NumPy scalar that is no number")


NAMES: dict[str, Any] = {
    name: Function(name, call)
    for name, call in (
        ("numpy.dtype", _dtype),
        ("numpy.core.multiarray.scalar", _scalar),
        ("numpy._core.multiarray.scalar", _scalar),
        ("_codecs.encode", _bytes),
    )
}
