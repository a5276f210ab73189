"""Weights that the library accelerate keeps on the CPU or on disk until a layer runs.

Between the runs of a layer its parameters are on the meta device, which holds no numbers. Code that
reads weights outside a layer's own forward brings them back first. This module need not import
accelerate, because accelerate leaves its hook on each module that it offloads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


def align_hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks with which accelerate moves a module's weights."""
    hook = module.__dict__.get("_hf_hook")
    return [one for one in getattr(hook, "hooks", (hook,)) if hasattr(one, "execution_device")]


@contextmanager
def onloaded(part: nn.Module) -> Iterator[None]:
    """Keeps a module's weights on the device that uses them, while the context is open.

    Modules that are not offloaded are left alone.
    """
    away = [
        (module, hook)
        for module in part.modules()
        for hook in align_hooks(module)
        if getattr(hook, "offload", False)
    ]
    brought = []
    try:
        for module, hook in away:
            hook.pre_forward(module)
            hook.offload = False  # otherwise a forward would offload the weights again
            brought.append((module, hook))
        yield
    finally:
        for module, hook in reversed(brought):
            hook.offload = True
            hook.post_forward(module, None)


def at_hand(module: nn.Module, name: str = "weight") -> Tensor:
    """Returns a parameter of a module, brought back if it is offloaded."""
    value = getattr(module, name)
    if not value.is_meta:
        return value
    with onloaded(module):
        return getattr(module, name)


def bias_of(linear: nn.Linear) -> Tensor:
    """Returns the bias of a linear map, brought back if it is offloaded; zeros if it has none."""
    if linear.bias is None:
        return torch.zeros_like(at_hand(linear)[:, 0])
    return at_hand(linear, "bias")


def with_weights(measure: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wraps a function so that its first argument's weights are brought back while it runs.

    The first argument is a model or a cache. Given anything else, the function itself must raise an
    error.
    """

    @wraps(measure)
    def run(subject: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        part = getattr(subject, "model", subject)
        part = part if isinstance(part, nn.Module) else getattr(part, "model", None)
        with onloaded(part) if isinstance(part, nn.Module) else nullcontext():
            return measure(subject, *args, **kwargs)

    return run
