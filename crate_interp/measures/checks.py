"""Checks and arithmetic that all measures share."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.device_waits import waits

# the shapes that most measures take
Tokens = Float[Tensor, "*batch pos d_model"]
Bases = Float[Tensor, "head d_model d_head"]
Code = Float[Tensor, "*batch pos d_mlp"]
HeadCodes = Float[Tensor, "*batch head pos d_head"]
Pattern = Float[Tensor, "*batch query key"]
P = ParamSpec("P")
R = TypeVar("R")
AUTOCAST = ("cpu", "cuda", "mps", "xpu")  # kinds of devices
NO_TOKENS = "there are no tokens to measure"


def require_floats(tensor: Tensor, axes: str) -> None:
    """Raises ValueError unless a tensor is floating and has the last axes that `axes` names.

    axes: names with spaces between them, such as "pos d_model"; other axes can come before them.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a measure takes a tensor [..., {axes}], got {type(tensor).__name__}.")
    if not tensor.is_floating_point():
        raise ValueError(f"a measure takes floats, got {tensor.dtype}: use .float() or .double().")
    if tensor.ndim < len(axes.split()):
        raise ValueError(f"a measure takes [..., {axes}], got shape {list(tensor.shape)}.")


def require_entries(tensor: Tensor, axes: str, empty: str) -> None:
    """Checks as `require_floats` does, and raises ValueError if there are no entries.

    axes: two names; an empty batch before these two axes is allowed. empty: the first words of the
    error.
    """
    require_floats(tensor, axes)
    if 0 in tensor.shape[-2:]:
        raise ValueError(f"{empty}: the last axes ({axes}) are {list(tensor.shape[-2:])}.")


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function so that it runs with autocast off.

    The rate of a Gram matrix in bfloat16 can be wrong by half, or negative, and the effect of one
    code on a logit is lost in rounding.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]
        if not kinds:
            return function(*args, **kwargs)
        with torch.autocast(kinds[0], enabled=False):
            return run(*args, **kwargs)  # autocast may be on for another kind too

    return run


def all_finite(tensor: Tensor) -> bool:
    """Tells whether a tensor holds neither NaN nor Inf.

    It sums the tensor, and looks at each entry only if the sum is not finite.
    """
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def squares_fit(lengths: Tensor) -> bool:
    """Tells whether rows of these lengths can be squared within the range of floats.

    It is False if a row is all zeros, shorter than 1e-15, longer than 1e15, or NaN, and also on an
    accelerator, where asking takes longer than what it saves.
    """
    if not lengths.numel():  # an empty batch has no minimum
        return True
    if waits(lengths):
        return False
    least, most = lengths.aminmax()
    return bool(least > 1e-15) and bool(most < 1e15)  # both are False for NaN


def largest_entry(x: Tensor) -> Tensor:
    """Returns each row's largest absolute entry, `[..., 1]`, as a divisor without gradient.

    It is 1 for a row of zeros.
    """
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    return largest.masked_fill(largest == 0, 1)


@torch.no_grad()
def fewest(values: Tensor, name: str, share: float) -> tuple[Tensor, Tensor]:
    """Returns how many of a row's largest values hold a share of their sum, and the sum."""
    checks.share(name, share)
    held = values.double().sort(dim=-1, descending=True).values.cumsum(dim=-1)
    # 1e-12 below the share, because the same sum in another order may be an ulp lower
    return (held < share * held[..., -1:] * (1 - 1e-12)).sum(dim=-1) + 1, held[..., -1]


def qr(u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `torch.linalg.qr` of u for every floating dtype.

    LAPACK has no half precision: float16 and bfloat16 are factored in float32.
    """
    half = u.dtype in (torch.float16, torch.bfloat16)
    q, r = torch.linalg.qr(u.float() if half else u)
    return q.to(u.dtype), r.to(u.dtype)
