"""Arguments of edits: checks, and the heads, atoms or positions to change."""

from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from crate_hooks.reading import HEADS_FIRST, position_axis

Edit = Callable[[Tensor, Any], Tensor]
Chosen = int | Collection[int] | Tensor | None  # which heads, atoms or positions; None for all


def edited(
    value: Callable[[Tensor, Any], Tensor], heads: Chosen, atoms: Chosen, positions: Chosen
) -> Edit:
    """Returns an edit that writes `value(tensor, hook)` into the chosen part only."""
    chosen = {"heads": heads, "atoms": atoms, "positions": positions}
    wanted = {name: _numbers(name, which) for name, which in chosen.items() if which is not None}

    def run(tensor: Tensor, hook: Any = None) -> Tensor:
        new = value(tensor, hook)
        if not wanted:
            return new
        mask = torch.ones((), dtype=torch.bool, device=tensor.device)
        for name, numbers in wanted.items():
            axis = _axis(name, tensor, hook)
            count = tensor.shape[axis]
            wrong = [number for number in numbers if not -count <= number < count]
            if wrong:
                raise ValueError(f"{name}={wrong[0]}: {at(hook)} has {name} 0 to {count - 1}.")
            on = torch.zeros(count, dtype=torch.bool, device=tensor.device)
            on[list(numbers)] = True
            mask = mask & on.view(-1, *[1] * (tensor.ndim - 1 - axis))
        return torch.where(mask, new, tensor)

    return run


def _axis(name: str, tensor: Tensor, hook: Any) -> int:
    """Returns which axis of the tensor at a point holds the heads, atoms or positions."""
    point = str(getattr(hook, "name", ""))
    first, place = point.endswith(HEADS_FIRST), position_axis(point)
    if name == "heads" and (first or tensor.ndim == 4):
        return 1 if first else 2
    if name == "atoms" and tensor.ndim == 3 and not first:
        return 2
    if name == "positions" and tensor.ndim in (3, 4) and place is not None:
        return place
    wanted = {
        "heads": "[batch, pos, head, ...]",
        "atoms": "[batch, pos, atom]",
        "positions": "[batch, pos, ...]",
    }[name]
    raise ValueError(
        f"{at(hook)} is {list(tensor.shape)} and has no {name}: give a point with axes {wanted}."
    )


def _numbers(name: str, which: Chosen) -> list[int]:
    """Returns a number or several numbers as a list."""
    values: Any = getattr(which, "tolist", lambda: which)()  # for a tensor or an array
    values = [values] if isinstance(values, Integral) else values
    integers = isinstance(values, (list, tuple, range, set)) and all(
        isinstance(value, Integral) and not isinstance(value, bool) for value in values
    )
    if not integers or not values:
        raise ValueError(f"{name}={which!r}: give a whole number, a list of them, or None for all.")
    return [int(value) for value in values]


@runtime_checkable
class Point(Protocol):
    """The properties of a hook point that an edit reads."""

    name: str | None


def require_width(tensor: Tensor, hook: Point | None, width: int, what: str) -> None:
    """Raises ValueError unless the last axis of a tensor at a point is `width` long.

    what: the name of the argument of this width, for the error.
    """
    if tensor.shape[-1] != width:
        raise ValueError(
            f"{at(hook)} is {list(tensor.shape)}, but the {what} has {width} dimensions: put the "
            "edit on a point whose last axis is d_model."
        )


def require_source(source: Tensor) -> None:
    """Raises ValueError unless the source of an edit is a tensor with at least one sample."""
    if not isinstance(source, Tensor) or source.ndim < 2 or not len(source):
        raise ValueError(
            f"source is {described(source)}: give the activations at the point in another run, "
            "such as cache[...], with the batch first."
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
    """Returns the name of a point for an error."""
    name = getattr(hook, "name", None)
    return f"the tensor at {name!r}" if name else "the tensor"


def described(value: object) -> str:
    """Returns a description of a wrong argument for an error: its shape, or its type."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
