"""An interpreter of pickles that cannot call anything but what its caller lists.

It knows the operations of protocol 2 that torch writes. Every value costs at least one byte of
the pickle, nothing walks into a value once it is made, and the keys of dicts are text or numbers
that a file cannot make collide: the time and the memory are proportional to the bytes read.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pickletools import opcodes
from typing import Any

LONGEST = 2**24  # bytes; those of the published files have some 10,000
_MOST_STEPS, _MOST_CONTAINERS = 2**21, 2**19
_LONGEST_NAME = 200  # characters of a module, or of a name in it
_MOST_PARTS = 8  # of a tuple that is a key
_PROTOCOLS, _STOP = (b"\x80\x02", b"\x80\x03"), ord(".")


class PickleError(ValueError):
    """A damaged pickle, or one that no honest writer makes; the text follows "its pickle"."""


class NotAdmittedError(PickleError):
    """A pickle that asks for something its reader does not admit; the text says for what."""


class TooShortError(PickleError):
    """A pickle that goes on where its bytes end."""


@dataclass(frozen=True)
class Function:
    """What a pickle may call.

    call: takes the tuple of arguments, and a function to be told how many items it looks at.
    """

    name: str
    call: Callable[[tuple, Callable[[int], None]], Any]


@dataclass(frozen=True)
class Record:
    """A class whose instances are read as bags of plain values; nothing of it is run."""

    name: str


@dataclass(eq=False)
class Bag:
    """An instance of a Record: the values that were pickled."""

    record: Record
    values: dict[Any, Any] | None = None


@dataclass(eq=False)
class Made:
    """A value that a Function made, and whose state the pickle sets by a BUILD.

    check: raises PickleError for a state that is not that of such a value; it is not kept.
    """

    value: Any
    check: Callable[[object], None]


class Number:
    """A number as the key of a dict.

    Python's ints hash to themselves, so a file could choose any number of them that meet in one
    slot of the dict. The hash of a text has a secret in it.
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


@dataclass(frozen=True)
class Reading:
    """What a pickle holds, where its bytes end, what it imported, and the steps that it took."""

    value: Any
    end: int
    imported: frozenset[str]
    steps: int


def read_pickle(
    data: bytes,
    names: Mapping[str, Any],
    resolve: Callable[[Any], Any] | None = None,
    start: int = 0,
) -> Reading:
    """Returns the value of the pickle that begins at `start`.

    names: what each import stands for: a Function, a Record, or a plain constant. resolve: turns
    persistent ids into values. Raises NotAdmittedError for anything else that is imported, called
    or built, and PickleError for a pickle that is damaged.
    """
    machine = _Machine(data, names, resolve, start)
    return Reading(machine.run(), machine.at, frozenset(machine.imported), machine.steps)


def key_of(value: Any) -> Any:
    """Returns a value as the key of a dict.

    Values that are equal, such as 1, 1.0 and True, are one key. Raises PickleError unless it is
    text, a number, True, False, None, or a short tuple of those.
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
    raise PickleError(f"has a {kind} as the key of a dict, wanted text or a number")


@dataclass(eq=False)
class _Machine:
    data: bytes
    names: Mapping[str, Any]
    resolve: Callable[[Any], Any] | None
    start: int
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # heights of the stack
    memo: list[Any] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)
    steps: int = 0
    containers: int = 0

    def __post_init__(self) -> None:
        self.at = self.start

    def run(self) -> Any:
        if self.take(2) not in _PROTOCOLS:
            raise PickleError("is not of protocol 2: save it again without pickle_protocol")
        while True:
            code = self.take(1)[0]
            self.spend(1)
            if code == _STOP:
                value = self.pop()
                if self.stack or self.marks:
                    raise PickleError("leaves something over at its end")
                return value
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise NotAdmittedError(f"the operation {_OTHERS.get(code, code)}")
            operation(self)

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise TooShortError("ends too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > 2 * (self.at - self.start):  # each item looked at was a byte once
            raise PickleError("repeats itself more often than its size allows")
        if self.steps > _MOST_STEPS:
            raise PickleError(f"has more than {_MOST_STEPS} values: no checkpoint has so many")

    def push_new(self, container: Any) -> None:
        """Pushes a value that takes memory of its own."""
        self.containers += 1
        if self.containers > _MOST_CONTAINERS:
            raise PickleError(f"makes more than {_MOST_CONTAINERS} containers")
        self.stack.append(container)

    def need(self, count: int) -> None:
        """Raises PickleError unless so many values lie above the last mark."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise PickleError("takes values that are not there")

    def pop(self) -> Any:
        self.need(1)
        return self.stack.pop()

    def pop_after_mark(self) -> list[Any]:
        if not self.marks:
            raise PickleError("takes values that are not there")
        place = self.marks.pop()
        items = self.stack[place:]
        del self.stack[place:]
        return items


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _unpack(form: str) -> Callable[[_Machine], None]:
    packed = struct.Struct(form)
    return lambda machine: machine.stack.append(packed.unpack(machine.take(packed.size))[0])


def _text(size: int) -> Callable[[_Machine], None]:
    def run(machine: _Machine) -> None:
        raw = machine.take(int.from_bytes(machine.take(size), "little"))
        try:
            machine.stack.append(raw.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise PickleError("has text that is no UTF-8") from None

    return run


def _long(machine: _Machine) -> None:
    raw = machine.take(machine.take(1)[0])  # at most 255 bytes
    machine.stack.append(int.from_bytes(raw, "little", signed=True))


def _put(size: int) -> Callable[[_Machine], None]:
    def run(machine: _Machine) -> None:
        place, memo = int.from_bytes(machine.take(size), "little"), machine.memo
        machine.need(1)
        if place > len(memo) + 1:  # Python 2 began at 1
            raise PickleError("numbers its values out of order")
        if place > len(memo):
            memo.append(_NOTHING)
        memo[place : place + 1] = [machine.stack[-1]]

    return run


def _get(size: int) -> Callable[[_Machine], None]:
    def run(machine: _Machine) -> None:
        place = int.from_bytes(machine.take(size), "little")
        if place >= len(machine.memo) or machine.memo[place] is _NOTHING:
            raise PickleError("refers to a value that is not there")
        machine.stack.append(machine.memo[place])

    return run


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def run(machine: _Machine) -> None:
        machine.need(count)
        items = tuple(machine.stack[-count:])
        del machine.stack[-count:]
        machine.push_new(items)

    return run


def _append(machine: _Machine, items: list[Any]) -> None:
    machine.need(1)
    if type(machine.stack[-1]) is not list:
        raise PickleError("appends to what is no list")
    machine.stack[-1].extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    machine.need(1)
    target = machine.stack[-1]
    if type(target) not in (dict, OrderedDict) or len(items) % 2:
        raise PickleError("sets items of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[key_of(key)] = value


def _import(machine: _Machine) -> None:
    words = []
    for _ in range(2):
        end = machine.data.find(b"\n", machine.at, machine.at + _LONGEST_NAME)
        if end < 0:
            raise TooShortError("has a name without an end")
        words.append(machine.take(end - machine.at).decode("utf-8", "replace"))
        machine.take(1)
    name = ".".join(words)
    if name not in machine.names:
        raise NotAdmittedError(name)
    machine.imported.add(name)
    machine.stack.append(machine.names[name])


def _call(machine: _Machine) -> None:
    arguments, function = machine.pop(), machine.pop()
    if type(function) is not Function or type(arguments) is not tuple:
        raise NotAdmittedError(f"a call of {_called(function)}")
    machine.push_new(function.call(arguments, machine.spend))


def _new(machine: _Machine) -> None:
    arguments, record = machine.pop(), machine.pop()
    if type(record) is not Record or arguments != ():
        raise NotAdmittedError(f"an instance of {_called(record)}")
    machine.push_new(Bag(record))


def _build(machine: _Machine) -> None:
    state = machine.pop()
    machine.need(1)
    target = machine.stack[-1]
    if type(target) is Made:
        return target.check(state)
    if type(state) not in (dict, OrderedDict):
        raise PickleError("sets attributes from what is no dict")
    if type(target) is Bag and target.values is None:
        target.values = state
    elif type(target) is not OrderedDict:  # whose attributes, such as _metadata, nobody reads
        raise NotAdmittedError(f"attributes of a {type(target).__name__}")


def _called(value: Any) -> str:
    return value.name if type(value) in (Function, Record) else f"a {type(value).__name__}"


def _persistent(machine: _Machine) -> None:
    if machine.resolve is None:
        raise NotAdmittedError("a persistent id")
    machine.push_new(machine.resolve(machine.pop()))


_NOTHING = object()
_OTHERS = {ord(operation.code): operation.name for operation in opcodes}
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord(")"): _push(()),
    ord("J"): _unpack("<i"),
    ord("K"): _unpack("<B"),
    ord("M"): _unpack("<H"),
    ord("G"): _unpack(">d"),
    0x8A: _long,
    ord("X"): _text(4),
    ord("U"): _text(1),
    ord("}"): lambda machine: machine.push_new({}),
    ord("]"): lambda machine: machine.push_new([]),
    ord("("): lambda machine: machine.marks.append(len(machine.stack)),
    ord("t"): lambda machine: machine.push_new(tuple(machine.pop_after_mark())),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("a"): lambda machine: _append(machine, [machine.pop()]),
    ord("e"): lambda machine: _append(machine, machine.pop_after_mark()),
    ord("s"): lambda machine: _set_items(machine, [machine.pop(), machine.pop()][::-1]),
    ord("u"): lambda machine: _set_items(machine, machine.pop_after_mark()),
    ord("q"): _put(1),
    ord("r"): _put(4),
    ord("h"): _get(1),
    ord("j"): _get(4),
    ord("c"): _import,
    ord("R"): _call,
    0x81: _new,
    ord("b"): _build,
    ord("Q"): _persistent,
}
