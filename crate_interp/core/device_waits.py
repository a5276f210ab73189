"""What makes a program wait for an accelerator: questions about values, and transfers."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

_AT_ONCE = {"cpu"}  # devices that answer at once
_LATER: ContextVar[list[Tensor] | None] = ContextVar("_LATER", default=None)
T = TypeVar("T")


def waits(tensor: Tensor) -> bool:
    """Tells whether a question about a tensor's values waits until its device has caught up.

    Then a shortcut that depends on the values costs more than it saves.
    """
    return tensor.device.type not in _AT_ONCE


def holds_somewhere(mask: Tensor) -> bool:
    """Tells whether any entry is True. In a function that `hoping` calls it says no for now."""
    later = _LATER.get()
    if later is None:
        return bool(mask.any())
    later.append(mask.any())
    return False


def hoping(measure: Callable[[], T], inputs: Tensor) -> T:
    """Returns measure(), whose questions to `holds_somewhere` wait for a device once, together.

    If one of the answers is yes after all, it measures again and asks as it goes. inputs: a tensor
    on the device; on a CPU, which answers at once, nothing is put off.
    """
    if not waits(inputs):
        return measure()
    questions: list[Tensor] = []
    token = _LATER.set(questions)
    try:
        found = measure()
    finally:
        _LATER.reset(token)
    return measure() if questions and bool(torch.stack(questions).any()) else found


def sent(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Returns a tensor on a device; a copy to a GPU goes on while the program does."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors on the CPU in float64, moved in one transfer; whole numbers stay exact."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
