"""Lists what the pickle of a torch file may hold: functions that make tensors, plain constants.

NumPy numbers, which trainers leave in such files, become plain numbers, and paths become tuples.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

import crate_interp.checkpoints.formats.pickles as pickles
from crate_interp.checkpoints.formats.pickles import PickleError, Record

_MOST_AXES = 16  # maximum number of axes of a tensor
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_MOST_PARTS = 8  # maximum number of items in a tuple that is the key of a dict
_FORMS = {
    "f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b",
    "u8": "<Q", "u4": "<I", "u2": "<H", "u1": "<B", "b1": "<?",
}  # fmt: skip
_LONGEST = 8  # maximum bytes of a number
NAMESPACE = Record("argparse.Namespace")  # the command line of the masked autoencoder's trainer


@dataclass(frozen=True, slots=True)
class StorageKind:
    """One of torch's classes of storages, with the dtype of its numbers."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Storage:
    """`numel` numbers of the storage named `key`, from number `first` on."""

    key: str
    dtype: torch.dtype
    numel: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        """The size in bytes of these numbers."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Where the numbers of a tensor lie: in the storage named `key`, from number `first` on."""

    key: str
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The count of the tensor's numbers."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes of the tensor's numbers."""
        return self.numel * self.dtype.itemsize

    @property
    def place(self) -> str:
        """A text that identifies the tensor in the file, for use as the key of a dict.

        A tuple of ints would not do: a file could choose ints whose hashes collide.
        """
        return f"{self.key} {self.first} {self.shape} {self.strides}"

    @property
    def span(self) -> int:
        """The count of the storage's numbers from the tensor's first to its last, both included."""
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps) if self.numel else 0


class Number:
    """A number as the key of a dict.

    Python's ints hash to themselves, so a file could hold many ints that share one slot of a dict
    and so make the dict slow. Here the number's text is hashed: Python salts the hash of a text, so
    no file can foresee the hash.
    """

    __slots__ = ("value",)

    def __init__(self, value: int | float) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(str(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and other.value == self.value

    def __repr__(self) -> str:
        return repr(self.value)


def key_of(value: Any) -> Any:
    """Returns a value as the key of a dict.

    Equal values, such as 1, 1.0 and True, are the same key. Raises PickleError unless the value is
    text, a number, True, False, None, or a short tuple of these.
    """
    if type(value) in (str, type(None)):
        return value
    if type(value) is bool or (type(value) is float and value.is_integer()):
        value = int(value)
    if type(value) is int and -(2**63) <= value < 2**63:
        return Number(value)
    if type(value) is float and value == value and value not in (float("inf"), -float("inf")):
        return Number(value)
    if type(value) is tuple and len(value) <= _MOST_PARTS and tuple not in map(type, value):
        return tuple(key_of(part) for part in value)
    kind = "number of more than 64 bits" if type(value) is int else type(value).__name__
    raise PickleError(f"has a {kind} as the key of a dict; expected text or a number")


def whole(value: Any) -> int:
    """Returns a value that is a count or a position; raises PickleError for any other value."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise PickleError(f"has a {type(value).__name__} where a count of numbers belongs")
    return value


def _empty(value: Any) -> bool:
    return value is None or (type(value) in (dict, OrderedDict) and not value)


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _MOST_AXES:
        raise PickleError("has a tensor whose shape is not a tuple of counts")
    return tuple(whole(size) for size in value)


def _check_flags(dtype: torch.dtype, requires_grad: Any, hooks: Any, metadata: Any) -> None:
    real = dtype.is_floating_point or dtype.is_complex
    if type(requires_grad) is not bool or (requires_grad and not real):
        raise PickleError("has a tensor that requires a gradient but cannot have one")
    if not _empty(hooks):
        raise PickleError("has a tensor with hooks")
    if not _empty(metadata):
        raise PickleError("has a tensor that must be negated or conjugated when it is read")


def _tensor(arguments: tuple, spend: Callable[[int], None]) -> StoredTensor:
    """Reads a call of torch._utils._rebuild_tensor in a pickle."""
    match arguments:
        case (Storage() as storage, first, shape, strides):
            pass
        case _:
            raise PickleError("has a tensor that is not given by storage, place, shape and strides")
    tensor = StoredTensor(storage.key, storage.dtype, whole(first), _sizes(shape), _sizes(strides))
    if len(tensor.shape) != len(tensor.strides) or prod(filter(None, tensor.shape)) >= 2**63:
        raise PickleError("has a tensor with an impossible shape")
    if tensor.first + tensor.span > storage.numel:
        raise PickleError(f"has a tensor that goes beyond its storage {storage.key}")
    return StoredTensor(
        storage.key, storage.dtype, storage.first + first, tensor.shape, tensor.strides
    )


def _tensor_v2(arguments: tuple, spend: Callable[[int], None]) -> StoredTensor:
    """Reads a call of torch._utils._rebuild_tensor_v2 in a pickle."""
    if len(arguments) not in (6, 7):
        raise PickleError("has a tensor in the format of another version of torch")
    tensor = _tensor(arguments[:4], spend)
    _check_flags(tensor.dtype, arguments[4], arguments[5], (*arguments[6:], None)[0])
    return tensor


def _parameter(arguments: tuple, spend: Callable[[int], None]) -> StoredTensor:
    """Reads a call of torch._utils._rebuild_parameter, and returns the parameter's tensor."""
    match arguments:
        case (StoredTensor() as tensor, requires_grad, hooks):
            _check_flags(tensor.dtype, requires_grad, hooks, None)
            return tensor
    raise PickleError("has a parameter that is not a tensor")


def _parameter_with_state(arguments: tuple, spend: Callable[[int], None]) -> StoredTensor:
    """Reads a call of torch._utils._rebuild_parameter_with_state; drops the attributes."""
    tensor = _parameter(arguments[:3], spend)
    state = arguments[3] if len(arguments) == 4 else False
    if not _empty(state):
        if type(state) is not dict:
            raise PickleError("has a parameter with odd attributes")
        spend(len(state))
        if any(type(key) is not str or hasattr(torch.nn.Parameter, key) for key in state):
            raise PickleError("has a parameter with odd attributes")
    return tensor


def _ordered(arguments: tuple, spend: Callable[[int], None]) -> OrderedDict:
    """Reads a collections.OrderedDict: empty, or made from pairs as in Python 2."""
    if not arguments:
        return OrderedDict()
    (items,) = arguments if len(arguments) == 1 else (None,)
    spend(len(items) if type(items) is list else 0)
    if type(items) is not list or any(
        type(pair) not in (list, tuple) or len(pair) != 2 for pair in items
    ):
        raise PickleError("has a dict made of something other than pairs")
    return OrderedDict((key_of(key), value) for key, value in items)


def _counter(arguments: tuple, spend: Callable[[int], None]) -> dict:
    """Reads a collections.Counter, which holds the milestones of a schedule, as a plain dict."""
    if not arguments:
        return {}
    if len(arguments) != 1 or type(arguments[0]) is not dict:
        raise PickleError("has a Counter of something other than a dict")
    spend(len(arguments[0]))
    return dict(arguments[0])


def _size(arguments: tuple, spend: Callable[[int], None]) -> tuple[int, ...]:
    """Reads a torch.Size as a tuple."""
    if len(arguments) != 1:
        raise PickleError("has a torch.Size that is not a shape")
    return _sizes(arguments[0])


def _device(arguments: tuple, spend: Callable[[int], None]) -> torch.device:
    """Reads a torch.device."""
    match arguments:
        case (str(kind),) | (str(kind), int()) if len(kind) < _MOST_AXES:
            try:
                return torch.device(*arguments)
            except (RuntimeError, TypeError, ValueError, OverflowError):
                pass
    raise PickleError("has a device that torch does not know")


def _path(arguments: tuple, spend: Callable[[int], None]) -> tuple[str, ...]:
    """Reads a path of pathlib, which trainers leave beside the weights, as the tuple of its names.

    The names are not joined: a short pickle could repeat a long name many times.
    """
    spend(len(arguments))
    if any(type(name) is not str for name in arguments):
        raise PickleError("has a path that is not made of names")
    return arguments


def _check_order(state: object) -> None:
    """Raises PickleError unless the state of a NumPy dtype says little-endian, or no byte order."""
    if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|"):
        raise PickleError("has a NumPy number that is not little-endian")


def _numpy_dtype(arguments: tuple, spend: Callable[[int], None]) -> pickles.Made:
    """Reads a numpy.dtype; only dtypes of numbers are admitted."""
    match arguments:
        case (str(name), bool(), bool()) if name in _FORMS:
            return pickles.Made(_FORMS[name], _check_order)
    raise pickles.NotAdmittedError("a numpy.dtype that is not of numbers")


def _bytes(arguments: tuple, spend: Callable[[int], None]) -> bytes:
    """Reads a call of _codecs.encode, which pickles of protocol 2 use for bytes.

    Only the few bytes of a number are admitted.
    """
    match arguments:
        case (str(text), "latin1") if len(text) <= _LONGEST and all(ord(one) < 256 for one in text):
            return text.encode("latin1")
    raise pickles.NotAdmittedError("_codecs.encode of anything but the bytes of a number")


def _numpy_scalar(arguments: tuple, spend: Callable[[int], None]) -> int | float | bool:
    """Reads a NumPy scalar as a Python number."""
    match arguments:
        case (pickles.Made(value=str(form)), bytes(raw)) if len(raw) == struct.calcsize(form):
            return struct.unpack(form, raw)[0]
    raise pickles.NotAdmittedError("a NumPy scalar that is not a number")


STORAGES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16, "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8, "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64, "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
}  # fmt: skip
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128,
)  # fmt: skip
_FUNCTIONS = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch.Size": _size,
    "torch.device": _device,
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "numpy.dtype": _numpy_dtype,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "_codecs.encode": _bytes,
    # from Python 3.13 on, the classes lie in pathlib._local
    **{f"{place}.{name}": _path for place in ("pathlib", "pathlib._local") for name in _PATHS},
}
NAMES: dict[str, Any] = {
    **{name: pickles.Function(name, call) for name, call in _FUNCTIONS.items()},
    **{name: StorageKind(dtype) for name, dtype in STORAGES.items()},
    **{str(dtype): dtype for dtype in _DTYPES},
    NAMESPACE.name: NAMESPACE,
}
TORCH = pickles.Dialect(
    NAMES,
    (2, 3),
    "NONE NEWTRUE NEWFALSE EMPTY_TUPLE BININT BININT1 BININT2 BINFLOAT LONG1 BINUNICODE "
    "SHORT_BINSTRING EMPTY_DICT EMPTY_LIST MARK TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM "
    "SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL REDUCE NEWOBJ BUILD BINPERSID",
    key_of,
)
