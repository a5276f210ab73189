"""What makes a program wait for an accelerator: questions about values, and transfers."""

from collections.abc import Sequence

import torch
from torch import Tensor

_AT_ONCE = {"cpu"}  # devices that answer at once


def waits(tensor: Tensor) -> bool:
    """Tells whether a question about a tensor's values waits until its device has caught up.

    Then a shortcut that depends on the values costs more than it saves.
    """
    return tensor.device.type not in _AT_ONCE


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
