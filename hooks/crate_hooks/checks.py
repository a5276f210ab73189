"""Checks of what an edit takes, and the words for it in errors."""

from numbers import Integral, Real
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Point(Protocol):
    """A hook point, as much of it as an edit reads."""

    name: str | None


def require_width(tensor: Tensor, hook: Point | None, width: int, what: str) -> None:
    """Raises ValueError unless the last axis of a tensor at a point is `width` long.

    what: the name, in the error, of the thing that has this width.
    """
    if tensor.shape[-1] != width:
        raise ValueError(
            f"{at(hook)} is {list(tensor.shape)}, but the {what} has {width} dimensions: hang the "
            "edit where d_model comes last."
        )


def require_source(source: Tensor) -> None:
    """Raises ValueError unless the source of an edit is a tensor with at least one sample."""
    if not isinstance(source, Tensor) or source.ndim < 2 or not len(source):
        raise ValueError(
            f"source is {described(source)}: give what the point held in another run, cache[...], "
            "batch first."
        )


def require_number(name: str, value: float) -> None:
    """Raises ValueError, with the argument's `name`, unless `value` is a finite number."""
    if not isinstance(value, Real) or isinstance(value, bool) or not -1e38 < float(value) < 1e38:
        raise ValueError(f"{name}={value!r}: give a finite number.")


def require_seed(seed: int) -> None:
    """Raises ValueError unless the seed is an integer."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r}: give a whole number.")


def is_finite(tensor: Tensor) -> bool:
    """Tells whether a tensor holds neither NaN nor Inf."""
    return bool(tensor.isfinite().all())


def at(hook: Point | None) -> str:
    """Returns the words that name the point of a hook in an error."""
    name = getattr(hook, "name", None)
    return f"what is at {name!r}" if name else "the tensor"


def described(value: object) -> str:
    """Returns the words for a wrong argument in an error: its shape, or its type."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
