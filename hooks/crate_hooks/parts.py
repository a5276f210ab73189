"""The part of an activation that an edit changes: some heads, atoms or positions."""

from collections.abc import Callable, Collection, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from crate_hooks.checks import at

Edit = Callable[[Tensor, Any], Tensor]
Chosen = int | Collection[int] | Tensor | None  # which heads, atoms or positions; None for all

_QUERIES = ("hook_pattern", "hook_attn_scores")  # [batch, head, query, key]


def edited(
    value: Callable[[Tensor, Any], Tensor], heads: Chosen, atoms: Chosen, positions: Chosen
) -> Edit:
    """Returns the edit that puts `value(tensor, hook)` in the chosen part and keeps the rest."""
    chosen = {"heads": heads, "atoms": atoms, "positions": positions}
    wanted = {name: _numbers(name, which) for name, which in chosen.items() if which is not None}

    def run(tensor: Tensor, hook: Any = None) -> Tensor:
        new = value(tensor, hook)
        if not wanted:
            return new
        mask = torch.ones((), dtype=torch.bool, device=tensor.device)
        for name, numbers in wanted.items():
            axis = _axis(name, tensor, hook)
            on = torch.zeros(tensor.shape[axis], dtype=torch.bool, device=tensor.device)
            on[_inside(name, numbers, tensor.shape[axis], hook)] = True
            mask = mask & on.view(-1, *[1] * (tensor.ndim - 1 - axis))
        return torch.where(mask, new, tensor)

    return run


def _axis(name: str, tensor: Tensor, hook: Any) -> int:
    """Returns the axis of the tensor at a point that holds heads, atoms or positions."""
    queries = str(getattr(hook, "name", "")).endswith(_QUERIES)
    if name == "heads" and tensor.ndim == 4:
        return 1 if queries else 2
    if name == "atoms" and tensor.ndim == 3:
        return 2
    if name == "positions" and tensor.ndim in (3, 4):
        return 2 if queries else 1
    wanted = {
        "heads": "[batch, pos, head, ...]",
        "atoms": "[batch, pos, atom]",
        "positions": "[batch, pos, ...]",
    }[name]
    raise ValueError(
        f"{at(hook)} is {list(tensor.shape)} and has no {name}: hang the edit on a point with axes "
        f"{wanted}."
    )


def _numbers(name: str, which: Chosen) -> list[int]:
    """Returns a number or several numbers as a list."""
    values: Any = getattr(which, "tolist", lambda: which)()  # of a tensor or an array
    values = [values] if isinstance(values, Integral) else values
    integers = isinstance(values, (list, tuple, range, set)) and all(
        isinstance(value, Integral) and not isinstance(value, bool) for value in values
    )
    if not integers or not values:
        raise ValueError(
            f"{name}={which!r}: give a whole number, a list of whole numbers, or None for all."
        )
    return [int(value) for value in values]


def _inside(name: str, numbers: Sequence[int], count: int, hook: Any) -> list[int]:
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong:
        raise ValueError(
            f"{name}={wrong[0]}: {at(hook)} has {name} 0 to {count - 1}, give one of these."
        )
    return list(numbers)
