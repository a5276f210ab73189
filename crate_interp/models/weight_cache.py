"""The digest of a model, and a cache of values computed from its weights until they change."""

import hashlib
import json
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from crate_interp.models.compat.offload import onloaded
from crate_interp.models.hooked import HookedModel

T = TypeVar("T")
_COLUMNS = 512  # integers in a row of a checksum

# model -> marks of its weights, and values computed from them; an entry disappears with its model
_KEPT: WeakKeyDictionary[HookedModel, tuple[tuple, dict[Hashable, Any]]] = WeakKeyDictionary()


def model_digest(model: HookedModel) -> str:
    """Returns the SHA-256 of the config and of every parameter's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(model.cfg.to_dict(), sort_keys=True).encode())
    with onloaded(model):
        for name, value in sorted(model.state_dict().items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def kept(model: HookedModel, name: Hashable, make: Callable[[], T]) -> T:
    """Returns make(), or its earlier result under this name if config and weights have not changed.

    To notice changes, each call reads the weights and sums their bits as whole numbers, by row and
    by column, because torch's version counter misses edits through `.data`. The result of `make`
    must not refer to the model.
    """
    marks = _marks(model)
    if model not in _KEPT or _KEPT[model][0] != marks:
        _KEPT[model] = marks, {}
    made = _KEPT[model][1]
    if name not in made:
        made[name] = make()
    return made[name]


def _marks(model: HookedModel) -> tuple:
    """Returns values that change if the config, device or weights of a model change."""
    with onloaded(model):
        tensors = tuple(
            (name, value.dtype, value.shape, value.device, _sums(value.detach()))
            for name, value in model.state_dict().items()
        )
    return json.dumps(model.cfg.to_dict(), sort_keys=True), tensors


def _sums(value: Tensor) -> bytes:
    """Returns sums of a tensor's bits by row and by column, and the bits that do not fill a row."""
    bits = value.contiguous().reshape(-1).view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits  # int64 needs 8-byte alignment
    whole = bits.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    rows = bits[:whole].view(torch.int64).view(-1, _COLUMNS)
    # integer sums wrap around and are exact
    parts = (rows.sum(dim=0), rows.sum(dim=1), bits[whole:])
    return b"".join(part.cpu().numpy().tobytes() for part in parts)
