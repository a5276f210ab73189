"""Digests of functions and of all they read, to tell whether a run measures what it measured.

A function of the user's counts with its code, its defaults, the variables it closes over, and the
globals and helpers that it names; tensors, arrays, modules and objects count by their content. A
function or class of an installed library counts by its name and the library's version.
"""

import copyreg
import dis
import functools
import hashlib
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

_OURS = ("crate_interp", "crate_hooks")
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type(...), range, slice)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
# what Python itself adds to a class; it says nothing about what the class does
_OF_A_CLASS = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__",
    "_abc_impl", "__orig_bases__", "__parameters__",
}  # fmt: skip
# what torch keeps in every module beside weights and hooks, which count otherwise
_OF_A_MODULE = {name for name in vars(nn.Module()) if name.startswith("_")} | {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Unknown(ValueError):
    """A value whose content cannot be told from another's, such as an open file."""


def parts_of(value: object) -> dict[str, str]:
    """Returns digests of the parts of a function, such as {"code": ..., "global scale": ...}.

    Other values have one part, "value". Raises Unknown, with the names that lead to it, for a value
    whose content cannot be read.
    """
    return {name: f"sha256:{part.hex()}" for name, part in _Reader().parts(value).items()}


def hooks_of(model: nn.Module) -> dict[str, list[object]]:
    """Returns the functions that hooks and edits run inside a model, by the names of its modules.

    These are hooks of any kind, and a `forward` that an instance or a class of the user's has in
    place of ours. Hooks that torch runs for every module have the name "every module".
    """
    found = {"every module": _hooks_on(torch.nn.modules.module, "_global")}
    for name, module in model.named_modules():
        own = _hooks_on(module)
        own += [] if _of_library(vars(module).get("forward")) else [vars(module)["forward"]]
        own += [] if library_of(type(module).__module__) else [type(module)]
        found[name or "model"] = own
    return {name: own for name, own in found.items() if own}


def _hooks_on(owner: Any, prefix: str = "") -> list[object]:
    return [hook for name in _HOOKS for hook in getattr(owner, f"{prefix}{name}").values()]


def _of_library(function: Any) -> bool:
    """Tells whether a forward is none, or one that a library put in place, as accelerate does."""
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return function is None or library_of(home) is not None


@functools.cache
def library_of(module: str) -> str | None:
    """Returns the name and version of the library of a module, or None for the user's modules."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return None if root == "__main__" else "python"
    if root in _OURS:
        return root  # a run records our version
    package: Any = sys.modules.get(root)
    places = [getattr(package, "__file__", None) or "", *map(str, getattr(package, "__path__", ()))]
    if any("site-packages" in place or "dist-packages" in place for place in places):
        return f"{root} {getattr(package, '__version__', '')}"
    return None


def _by_name(value: Any) -> str | None:
    """Returns the library and the full name of a thing that a library's module holds, else None."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not library_of(module):
        return None
    held: Any = sys.modules.get(module)
    for part in name.split("."):
        held = getattr(held, part, None)
    same = isinstance(value, type) or held is value or getattr(held, "__wrapped__", None) is value
    return f"{library_of(module)}: {module}.{name}" if same else None


class _Reader:
    """Reads values into digests; a value inside itself counts by how far outside it begins."""

    def __init__(self) -> None:
        self._open: dict[object, int] = {}  # id of a value that is being read -> depth
        self._done: dict[object, tuple[bytes, object]] = {}  # the object keeps its id from reuse

    def of(self, value: Any, names: Iterable[str] = ()) -> bytes:
        """Returns the digest of a value.

        names: the attributes of a user's module that count; all count if it has none of these.
        """
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value).encode())
        key = (id(value), *sorted(names)) if isinstance(value, types.ModuleType) else id(value)
        if key in self._done:
            return self._done[key][0]
        if key in self._open:
            return _hash("outer", str(len(self._open) - self._open[key]).encode())
        self._open[key] = len(self._open)
        try:
            found = self._read(value, names)
        except Unknown:
            raise
        except Exception as error:  # such as those of objects that cannot be copied
            kind = type(value).__name__
            raise Unknown(f"a {kind} whose content cannot be read ({error})") from None
        finally:
            del self._open[key]
        self._done[key] = (found, value)
        return found

    def _read(self, value: Any, names: Iterable[str]) -> bytes:
        kind, name = type(value), _by_name(value)
        if name is not None:
            return _hash("named", name.encode())
        if kind in (list, tuple):
            return _hash(kind.__name__, *map(self.of, value))
        if kind in (set, frozenset):
            return _hash("set", *sorted(map(self.of, value)))
        if kind in (dict, types.MappingProxyType):
            pairs = [self.of(key) + self._named(str(key), one) for key, one in value.items()]
            return _hash("mapping", *pairs)
        if kind in _LOCKS:
            return _hash(kind.__name__)
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            about = f"{value.dtype} {list(value.shape)}".encode()
            return _hash("tensor", self.of(kind), about, raw.data)
        if isinstance(value, np.ndarray):
            raw = self.of(value.tolist()) if value.dtype.hasobject else value.tobytes()
            return _hash("array", f"{value.dtype} {value.shape}".encode(), self.of(kind), raw)
        if isinstance(value, nn.Module):
            return self._network(value)
        if isinstance(value, (types.FunctionType, types.MethodType)):
            return _hash_all("function", self.parts(value))
        if isinstance(value, types.CodeType):
            own = repr((value.co_names, value.co_freevars, value.co_flags)).encode()
            # a frozenset among the constants has no order
            return _hash("code", value.co_code, own, self.of(value.co_consts))
        if isinstance(value, types.ModuleType):
            return self._module(value, names)
        if isinstance(value, type):
            held = {name: own for name, own in vars(value).items() if name not in _OF_A_CLASS}
            parts = {name: self._named(name, own) for name, own in held.items()}
            return _hash("class", *map(self.of, value.__bases__), _hash_all("class", parts))
        if isinstance(value, (staticmethod, classmethod, property)):
            inner = [getattr(value, name, None) for name in ("__func__", "fget", "fset")]
            return _hash(kind.__name__, *map(self.of, inner))
        # what Python would write to make a copy of an object; the object makes no copy
        written = copyreg.dispatch_table.get(kind)
        made = written(value) if written else value.__reduce_ex__(2)
        made = (made,) if isinstance(made, str) else made  # a name, as of a cached function
        state = [list(part) if isinstance(part, Iterator) else part for part in made]
        if not library_of(kind.__module__) or isinstance(made[0], str):
            state.append(getattr(value, "__dict__", None))  # a reduction may leave it out
        return _hash("object", self.of(kind), self.of(state))

    def parts(self, value: Any) -> dict[str, bytes]:
        """Returns the digests of what a function is made of and what it reads, by name."""
        if type(value) is functools.partial:
            name, held, inner = "arguments", (value.args, value.keywords), value.func
        elif isinstance(value, types.MethodType):
            name, held, inner = "object", value.__self__, value.__func__
        elif isinstance(value, types.FunctionType) and not _by_name(value):
            return self._function(value)
        else:
            return {"value": self.of(value)}
        found = self.parts(inner)  # may have a part of this name, too
        return found | {name: _hash(name, self.of(held), found.get(name, b""))}

    def _function(self, function: types.FunctionType) -> dict[str, bytes]:
        code, home = function.__code__, function.__globals__
        library = library_of(str(home.get("__name__", "")))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        read = {f"closure {name}": _content(cell) for name, cell in cells}
        read["defaults"] = (function.__defaults__, function.__kwdefaults__)
        own = {name: vars(function)[name] for name in vars(function) if name != "__wrapped__"}
        read["attributes"] = own
        codes = list(_codes(code))
        if library:  # a function that a library made, such as one that a decorator returns
            parts = {"code": _hash("named", f"{library}: {code.co_qualname}".encode())}
        else:
            parts = {"code": self.of(code)}
            steps = [step for one in codes for step in dis.get_instructions(one)]
            globals_ = {one.argval for one in steps if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
            imported = {one.argval for one in steps if one.opname == "IMPORT_NAME"}
            read |= {f"global {name}": home[name] for name in sorted(globals_ & home.keys())}
            read |= {f"import {name}": _imported(name) for name in sorted(imported)}
        names = {name for one in codes for name in one.co_names}
        return parts | {name: self._named(name, value, names) for name, value in read.items()}

    def _named(self, name: str, value: object, names: Iterable[str] = ()) -> bytes:
        try:
            return self.of(value, names)
        except Unknown as error:
            name = name.rpartition(" ")[2]
            raise Unknown(f"{name!r}, {error}" if str(error)[0] != "'" else f"{error}") from None

    def _module(self, module: types.ModuleType, names: Iterable[str]) -> bytes:
        library, held = library_of(module.__name__), vars(module)
        if library:
            return _hash("module", f"{library}: {module.__name__}".encode())
        every = {name for name, own in held.items() if not isinstance(own, types.ModuleType)}
        chosen = set(names) & held.keys() or {name for name in every if name[:2] != "__"}
        read = {name: self._named(name, held[name], names) for name in sorted(chosen)}
        return _hash_all("module", read)

    def _network(self, module: nn.Module) -> bytes:
        """Reads weights, buffers, hooks and plain attributes of a module and of its parts."""
        parts = {}
        for name, one in module.named_modules():
            tensors = (*one.named_parameters(recurse=False), *one.named_buffers(recurse=False))
            own = {key: own for key, own in vars(one).items() if key not in _OF_A_MODULE}
            own = {} if isinstance(one, HookPoint) else own
            read = (type(one), dict(tensors), own, _hooks_on(one))
            parts[name] = _hash("module", *map(self.of, read))
        return _hash_all("network", parts)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return "no value"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code and the codes of the functions defined inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _imported(name: str) -> object:
    try:
        return import_module(name)
    except Exception:  # the function meets the same error, or names a module of its own package
        return "not imported"


def _hash_all(kind: str, parts: Mapping[str, bytes]) -> bytes:
    return _hash(kind, *(name.encode() + part for name, part in parts.items()))


def _hash(kind: str, *parts: Any) -> bytes:
    """Returns the SHA-256 of a kind and of parts, each with its length."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(f"\0{len(part)}\0".encode())
        digest.update(part)
    return digest.digest()
