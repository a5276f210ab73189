"""Checks the shapes and types that signatures name, for less time than jaxtyping's own check.

jaxtyping puts `jaxtyping.jaxtyped` on every function that it imports. That binds the arguments,
checks them before the call, and checks them again together with the result. `checked` takes its
place: beartype checks the arguments and the result once each. The names of axes are jaxtyping's,
and belong to one call, as with jaxtyping's own check.
"""

import functools
import inspect
import types
import typing

import beartype
import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
_SETTINGS = beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError)


def checked(function=None, *, typechecker):
    """Decorates as `jaxtyping.jaxtyped(function, typechecker=typechecker)` does, for beartype."""
    if function is None:
        return functools.partial(checked, typechecker=typechecker)
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
        return _jaxtyped(function, typechecker=typechecker)
    if not function.__annotations__ or "<locals>" in function.__qualname__:
        return function  # a function inside another is made, and would be prepared, at every call
    config, prepared = jaxtyping.config, []

    @functools.wraps(function)
    def call(*args, **kwargs):
        __tracebackhide__ = True
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        if not prepared:  # at the first call: most functions are never called in a process
            prepared.append(_prepare(function))
        checking, has_shapes = prepared[0]
        if not has_shapes:
            return checking(*args, **kwargs)
        with _jaxtyped("context"):
            return checking(*args, **kwargs)

    return call


def _prepare(function):
    """Returns the function that beartype checks, and whether its signature has shapes."""
    hints = {name: _hint(function, hint) for name, hint in function.__annotations__.items()}
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    functools.update_wrapper(copy, function)
    vars(copy).pop("__wrapped__")
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, hints
    return beartype.beartype(conf=_SETTINGS)(copy), any(map(_has_shapes, hints.values()))


def _hint(function, hint):
    """Returns the hint without strings; Any, as jaxtyping does, if its names are not imported."""
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except NameError:
        return typing.Any


def _has_shapes(hint) -> bool:
    parts = hint if isinstance(hint, list) else typing.get_args(hint)
    return jaxtyping.AbstractArray in getattr(hint, "__mro__", ()) or any(map(_has_shapes, parts))
