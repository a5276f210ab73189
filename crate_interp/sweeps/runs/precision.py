"""Mixed precision: the model computes in bfloat16, the probes measure in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from crate_interp.core import checks
from crate_interp.models.hooked import HookedModel
from crate_interp.sweeps.runs.batches import Forward

_DTYPES = {"bfloat16": torch.bfloat16}


def in_precision(precision: str | None, forward: Forward) -> Forward:
    """Returns a forward that runs under torch.autocast; None changes nothing.

    Raises ValueError for anything but None and "bfloat16".
    """
    if precision is None:
        return forward
    checks.one_of("precision", precision, tuple(_DTYPES))
    return partial(_autocast, forward=forward, dtype=_DTYPES[precision])


def _autocast(model: HookedModel, batch: Tensor, forward: Forward, dtype: torch.dtype) -> None:
    with torch.autocast(batch.device.type, dtype=dtype):
        forward(model, batch)


@contextmanager
def measuring(acts: dict[str, Tensor], device: str) -> Iterator[dict[str, Tensor]]:
    """Yields activations in the form that probes measure: float32, with autocast off."""
    if not torch.is_autocast_enabled(device):
        yield acts
        return
    half = (torch.bfloat16, torch.float16)
    with torch.autocast(device, enabled=False):
        yield {name: x.float() if x.dtype in half else x for name, x in acts.items()}
