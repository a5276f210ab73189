"""The digest of a model, and a cache of values computed from its weights until they change."""

import hashlib
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from crate_interp.models.compat.offload import onloaded

T = TypeVar("T")
_COLUMNS = 512  # integers in a row of a checksum

# model -> marks of its weights, and values computed from them; an entry disappears with its model
_KEPT: WeakKeyDictionary[nn.Module, tuple[tuple, dict[Hashable, Any]]] = WeakKeyDictionary()
_LAST_MARKS: WeakKeyDictionary[nn.Module, "WeightMark"] = WeakKeyDictionary()
_SPREAD = 1024  # numbers of a parameter, at least, whose change is noticed at once


@dataclass(frozen=True)
class WeightMark:
    """What tells the weights of a model from other weights.

    quick: the version counter and a sample of the bits of each parameter. full: sums over all bits.
    """

    quick: tuple
    full: tuple

    def of_part(self, name: str) -> "WeightMark":
        """Returns the mark of a part of the model, such as a tower."""
        start = f"{name}."
        own = (one for one in self.full if one[0].startswith(start))
        return WeightMark((), tuple((one[0].removeprefix(start), *one[1:]) for one in own))


def model_digest(model: nn.Module) -> str:
    """Returns the SHA-256 of the config and of every parameter's name, dtype, shape and bytes."""
    cfg: Any = model.cfg
    digest = hashlib.sha256(json.dumps(cfg.to_dict(), sort_keys=True).encode())
    with onloaded(model):
        for name, value in sorted(model.state_dict().items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def kept(model: nn.Module, name: Hashable, make: Callable[[], T]) -> T:
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


def weight_mark(model: nn.Module) -> WeightMark | None:
    """Returns the mark of a model's weights, or None if they are not in memory.

    A mark has a quick part and sums over all bits of the weights. The sums are computed again only
    if the quick part has changed since the last call.
    """
    if any(value.is_meta for value in model.parameters()):
        return None
    quick, last = _quick(model), _LAST_MARKS.get(model)
    if last is None or last.quick != quick:
        last = _LAST_MARKS[model] = WeightMark(quick, _marks(model)[1])
    return last


def has_weights(model: nn.Module, mark: WeightMark) -> bool:
    """Tells whether a model has the weights that a mark was made of."""
    return _quick(model) == mark.quick or _marks(model)[1] == mark.full


def _quick(model: Any) -> tuple:
    """Returns the names and versions of the parameters, and up to 2,048 spread numbers of each."""
    named = list(model.named_parameters())
    if not named:
        return ()
    spread = torch.cat([_spread(value.detach()).float().cpu() for _, value in named])
    # a weight made in inference mode counts no versions
    versions = ((name, None if one.is_inference() else one._version) for name, one in named)
    return (*versions, spread.numpy().tobytes())


def _spread(value: Tensor) -> Tensor:
    # an odd step, so that the numbers lie in all rows and columns of a matrix of even sides
    return value.reshape(-1)[:: max(1, value.numel() // _SPREAD) | 1]


def _marks(model: Any) -> tuple:
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
