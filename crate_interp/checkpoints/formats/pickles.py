"""Interprets pickles, and calls only the functions that a Dialect lists.

A Dialect lists the functions and the operations that one writer of pickles uses. Time and memory
are proportional to the bytes read: every value costs at least one byte of the pickle, a finished
value is never traversed again, and a file cannot make the keys of a dict collide.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pickletools import opcodes
from typing import Any

LONGEST = 2**24  # maximum bytes of a pickle; pickles in published files have about 10,000
_MOST_STEPS, _MOST_CONTAINERS = 2**21, 2**19
_LONGEST_NAME = 200  # maximum characters in the name of a module, or of an object in it
_PROTO, _STOP = 0x80, ord(".")


class PickleError(ValueError):
    """A pickle is damaged, or holds something that no legitimate writer makes.

    The message is the end of a sentence that begins with "its pickle".
    """


class NotAdmittedError(PickleError):
    """A pickle asks for a thing that its reader does not admit. The message names the thing."""


class TooShortError(PickleError):
    """The given bytes end before the pickle does."""


@dataclass(frozen=True)
class Function:
    """A function that a pickle may call.

    call: takes the tuple of arguments and a function `spend`, and returns the value. It calls
    spend(n) for n items that it reads.
    """

    name: str
    call: Callable[[tuple, Callable[[int], None]], Any]


@dataclass(frozen=True)
class Record:
    """A class whose instances are read as plain attributes; none of its code runs."""

    name: str


@dataclass(eq=False)
class Bag:
    """An instance of a Record, with its attributes as they were pickled."""

    record: Record
    values: dict[Any, Any] | None = None


@dataclass(eq=False)
class Made:
    """A value made by a Function; the pickle sets its state afterwards.

    check: raises PickleError for a state that such a value cannot have. The state is not kept.
    """

    value: Any
    check: Callable[[object], None]


@dataclass(frozen=True)
class Dialect:
    """Lists everything that the pickles of one writer may contain; a reader refuses the rest.

    names: the allowed imports, and for each a Function, a Record or a plain constant. protocols:
    the allowed protocol numbers. operations: the allowed operations, by their names in pickletools,
    with spaces between them. key_of: turns a value into the key of a dict, or raises PickleError.
    """

    names: Mapping[str, Any]
    protocols: tuple[int, ...]
    operations: str
    key_of: Callable[[Any], Any]

    @cached_property
    def table(self) -> dict[int, Callable[["_Machine"], None]]:
        """The functions that carry out the allowed operations, by the codes of the operations."""
        names = self.operations.split()
        return {
            ord(opcode.code): _OPERATIONS[opcode.name] for opcode in opcodes if opcode.name in names
        }


@dataclass(frozen=True)
class Reading:
    """The result of reading a pickle: value, position of the end, imports, number of steps."""

    value: Any
    end: int
    imported: frozenset[str]
    steps: int


def read_pickle(
    data: bytes, dialect: Dialect, resolve: Callable[[Any], Any] | None = None, start: int = 0
) -> Reading:
    """Reads the pickle that begins at `start`.

    resolve: turns persistent ids into values. Raises NotAdmittedError for anything that the dialect
    does not list, and PickleError for a pickle that is damaged.
    """
    machine = _Machine(data, dialect, resolve, start)
    return Reading(machine.run(), machine.at, frozenset(machine.imported), machine.steps)


@dataclass(eq=False)
class _Machine:
    data: bytes
    dialect: Dialect
    resolve: Callable[[Any], Any] | None
    start: int
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # height of the stack at each mark
    memo: list[Any] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)
    steps: int = 0
    containers: int = 0

    def __post_init__(self) -> None:
        self.at = self.start

    def run(self) -> Any:
        first, protocol = self.take(2)
        if first != _PROTO or protocol not in self.dialect.protocols:
            known = " or ".join(map(str, self.dialect.protocols))
            raise PickleError(f"is not of protocol {known}: save it again without pickle_protocol")
        operations = self.dialect.table
        while True:
            code = self.take(1)[0]
            self.spend(1)
            if code == _STOP:
                value = self.pop()
                if self.stack or self.marks:
                    raise PickleError("leaves unused values at its end")
                return value
            operation = operations.get(code)
            if operation is None:
                raise NotAdmittedError(f"the operation {_NAMES.get(code, code)}")
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
        # each item takes at least one byte of the pickle
        if self.steps > 2 * (self.at - self.start):
            raise PickleError("repeats itself more often than its size allows")
        if self.steps > _MOST_STEPS:
            raise PickleError(f"has more than {_MOST_STEPS} values: no checkpoint has so many")

    def push_new(self, container: Any) -> None:
        """Pushes a container, and counts it."""
        self.containers += 1
        if self.containers > _MOST_CONTAINERS:
            raise PickleError(f"makes more than {_MOST_CONTAINERS} containers")
        self.stack.append(container)

    def need(self, count: int) -> None:
        """Raises PickleError unless at least `count` values lie above the last mark."""
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


def _sized(machine: _Machine, size: int, value_of: Callable[[bytes], Any]) -> None:
    """Pushes a value. Its length comes before it, as a number of `size` bytes."""
    length = int.from_bytes(machine.take(size), "little")
    machine.stack.append(value_of(machine.take(length)))


def _text_of(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise PickleError("has text that is not UTF-8") from None


def _int_of(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _put(machine: _Machine, size: int) -> None:
    place, memo = int.from_bytes(machine.take(size), "little"), machine.memo
    machine.need(1)
    if place > len(memo) + 1:  # Python 2's numbering began at 1
        raise PickleError("numbers its values out of order")
    if place > len(memo):
        memo.append(_NOTHING)
    memo[place : place + 1] = [machine.stack[-1]]


def _memoize(machine: _Machine) -> None:
    machine.need(1)
    machine.memo.append(machine.stack[-1])


def _get(machine: _Machine, size: int) -> None:
    place = int.from_bytes(machine.take(size), "little")
    if place >= len(machine.memo) or machine.memo[place] is _NOTHING:
        raise PickleError("refers to a value that is not there")
    machine.stack.append(machine.memo[place])


def _tuple_of(machine: _Machine, count: int) -> None:
    machine.need(count)
    items = tuple(machine.stack[-count:])
    del machine.stack[-count:]
    machine.push_new(items)


def _append(machine: _Machine, items: list[Any]) -> None:
    machine.need(1)
    if type(machine.stack[-1]) is not list:
        raise PickleError("appends to something other than a list")
    machine.stack[-1].extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    machine.need(1)
    target = machine.stack[-1]
    if type(target) not in (dict, OrderedDict) or len(items) % 2:
        raise PickleError("sets items of something other than a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[machine.dialect.key_of(key)] = value


def _import(machine: _Machine) -> None:
    words = []
    for _ in range(2):
        end = machine.data.find(b"\n", machine.at, machine.at + _LONGEST_NAME)
        if end < 0:
            raise TooShortError("has a name without an end")
        words.append(machine.take(end - machine.at).decode("utf-8", "replace"))
        machine.take(1)
    _push_named(machine, ".".join(words))


def _import_from_stack(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("imports something other than a name")
    _push_named(machine, f"{module}.{name}"[: 2 * _LONGEST_NAME])


def _push_named(machine: _Machine, name: str) -> None:
    if name not in machine.dialect.names:
        raise NotAdmittedError(name)
    machine.imported.add(name)
    machine.stack.append(machine.dialect.names[name])


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
        raise PickleError("sets attributes from something other than a dict")
    if type(target) is Bag and target.values is None:
        target.values = state
    elif type(target) is not OrderedDict:
        # attributes of an OrderedDict, such as _metadata, are ignored
        raise NotAdmittedError(f"attributes of a {type(target).__name__}")


def _called(value: Any) -> str:
    return value.name if type(value) in (Function, Record) else f"a {type(value).__name__}"


def _persistent(machine: _Machine) -> None:
    if machine.resolve is None:
        raise NotAdmittedError("a persistent id")
    machine.push_new(machine.resolve(machine.pop()))


def _frame(machine: _Machine) -> None:
    machine.take(8)  # the length of the frame, which is not needed to read it


_NOTHING = object()
_CODES = {opcode.name: ord(opcode.code) for opcode in opcodes}
_NAMES = {code: name for name, code in _CODES.items()}
_OPERATIONS: dict[str, Callable[[_Machine], None]] = {
    "NONE": _push(None),
    "NEWTRUE": _push(True),
    "NEWFALSE": _push(False),
    "EMPTY_TUPLE": _push(()),
    "BININT": _unpack("<i"),
    "BININT1": _unpack("<B"),
    "BININT2": _unpack("<H"),
    "BINFLOAT": _unpack(">d"),
    "LONG1": partial(_sized, size=1, value_of=_int_of),
    "SHORT_BINSTRING": partial(_sized, size=1, value_of=_text_of),
    "SHORT_BINUNICODE": partial(_sized, size=1, value_of=_text_of),
    "BINUNICODE": partial(_sized, size=4, value_of=_text_of),
    "BINUNICODE8": partial(_sized, size=8, value_of=_text_of),
    "SHORT_BINBYTES": partial(_sized, size=1, value_of=bytes),
    "BINBYTES": partial(_sized, size=4, value_of=bytes),
    "BINBYTES8": partial(_sized, size=8, value_of=bytes),
    "EMPTY_DICT": lambda machine: machine.push_new({}),
    "EMPTY_LIST": lambda machine: machine.push_new([]),
    "MARK": lambda machine: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine: machine.push_new(tuple(machine.pop_after_mark())),
    "TUPLE1": partial(_tuple_of, count=1),
    "TUPLE2": partial(_tuple_of, count=2),
    "TUPLE3": partial(_tuple_of, count=3),
    "APPEND": lambda machine: _append(machine, [machine.pop()]),
    "APPENDS": lambda machine: _append(machine, machine.pop_after_mark()),
    "SETITEM": lambda machine: _set_items(machine, [machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine: _set_items(machine, machine.pop_after_mark()),
    "BINPUT": partial(_put, size=1),
    "LONG_BINPUT": partial(_put, size=4),
    "MEMOIZE": _memoize,
    "BINGET": partial(_get, size=1),
    "LONG_BINGET": partial(_get, size=4),
    "GLOBAL": _import,
    "STACK_GLOBAL": _import_from_stack,
    "REDUCE": _call,
    "NEWOBJ": _new,
    "BUILD": _build,
    "BINPERSID": _persistent,
    "FRAME": _frame,
}
