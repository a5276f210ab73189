"""Whether the values of a tensor may be read while a model runs."""

import torch
from torch import Tensor


def readable(x: Tensor) -> bool:
    """Tells whether Python may look at the values of a tensor, for a check or a choice.

    It may not under torch.compile, torch.export, a trace of jit and torch.func.vmap or a gradient
    of torch.func, nor on the meta device, nor of a subclass that only stands for values, as
    FakeTensor does. A forward that would read them there could not be traced, or would be traced
    for one input alone.
    """
    return not (
        torch.compiler.is_compiling()
        or x.is_meta
        or type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore
        or torch._C._get_tracing_state() is not None
    )
