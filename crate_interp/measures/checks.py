"""What every measure asks of its tensors, and how it computes with them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def require_floats(tensor: Tensor, axes: str) -> None:
    """ValueError unless this is a floating tensor with at least the named last axes, such as "pos d_model"."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"a measure takes a torch tensor [..., {axes}], got {type(tensor).__name__}."
        )
    if not tensor.is_floating_point():
        raise ValueError(
            f"a measure takes floats, got {tensor.dtype}: convert with .float() or .double()."
        )
    if tensor.ndim < len(axes.split()):
        raise ValueError(f"a measure takes [..., {axes}], got shape {list(tensor.shape)}.")


def in_full_precision(function: Callable) -> Callable:
    """The function with autocast off: a Gram in bfloat16 has a rate that is wrong by half, or below zero."""

    @wraps(function)
    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        device = first.device.type if isinstance(first, Tensor) else "cpu"
        if not torch.is_autocast_enabled(device):
            return function(first, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(first, *args, **kwargs)

    return run


def all_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no Inf; by a sum, which looks at each entry only where it is not finite itself."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def squares_fit(lengths: Tensor) -> bool:
    """Whether no row is so short or so long that squares of its entries leave the range of floats; zeros do not fit."""
    if not lengths.numel():  # an empty batch has no least
        return True
    least, most = lengths.aminmax()
    return bool(least > 1e-15) and bool(most < 1e15)  # NaN is neither


def largest_entry(x: Tensor) -> Tensor:
    """The largest absolute entry of each row `[..., 1]`, to divide by: 1 for a row of zeros. Without gradient."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    return largest.masked_fill(largest == 0, 1)


def qr(u: Tensor) -> tuple[Tensor, Tensor]:
    """torch.linalg.qr for every floating dtype: half precision, for which LAPACK has none, is factored in float32."""
    half = u.dtype in (torch.float16, torch.bfloat16)
    q, r = torch.linalg.qr(u.float() if half else u)
    return q.to(u.dtype), r.to(u.dtype)
