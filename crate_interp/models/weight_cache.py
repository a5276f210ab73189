"""The digest of a model, and a cache of values computed from its weights until they change."""

import hashlib
import json
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from crate_interp.core import checks
from crate_interp.models.compat.offload import onloaded

T = TypeVar("T")
Mark = dict[str, Hashable]  # name of a parameter or config -> what tells its values from others
_COLUMNS = 512  # integers in a row of a checksum
_EVERY = 8  # one row in eight is also summed by column

# model -> mark of its weights, and values computed from them; an entry disappears with its model
_KEPT: WeakKeyDictionary[nn.Module, tuple[tuple, dict[Hashable, Any]]] = WeakKeyDictionary()


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

    The result of `make` must not refer to the model.
    """
    with onloaded(model):
        now = _mark(model), [value.device for value in model.parameters()]
    if model not in _KEPT or _KEPT[model][0] != now:
        _KEPT[model] = now, {}
    made = _KEPT[model][1]
    if name not in made:
        made[name] = make()
    return made[name]


def weight_mark(model: nn.Module) -> Mark | None:
    """Returns what tells a model from models with other weights or settings.

    The settings are the configs of the model and its towers, and lambd and eta of each layer. Each
    call reads all weights, because torch's version counter misses edits through `.data`. Returns
    None if the weights are not in memory.
    """
    return None if any(value.is_meta for value in model.parameters()) else _mark(model)


def check_mark(mark: Mark | None, model: nn.Module) -> None:
    """Raises ValueError if activations with a mark were made by another model, or before an edit.

    mark: None, for activations that users made and for offloaded weights, passes.
    """
    if mark and (not hasattr(model, "towers") or weight_mark(model) != mark):
        raise ValueError(
            "the model's weights have changed since this cache was made, or the cache is of "
            "another model. Call _, cache = model.run_with_cache(x) again with this model."
        )


def mark_of_part(mark: Mark, name: str) -> Mark:
    """Returns the mark of a part of a model, such as a tower."""
    start = f"{name}."
    return {key.removeprefix(start): one for key, one in mark.items() if key.startswith(start)}


def _mark(model: Any) -> Mark:
    mark: Mark = {}
    parts = {"": model} | {f"{name}.": getattr(model, name) for name in model.towers}
    for start, part in parts.items():
        mark[f"{start}cfg"] = json.dumps(part.cfg.to_dict(), sort_keys=True)
        for layer, block in enumerate(getattr(part, "blocks", ())):
            step = getattr(block, "mlp", None)
            numbers = (getattr(step, name, None) for name in ("lambd", "eta"))
            mark[f"{start}step {layer}"] = str([x for x in numbers if checks.is_number(x)])
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    for (name, value), bits in zip(weights.items(), _sums(list(weights.values())), strict=True):
        mark[name] = value.dtype, value.shape, bits
    return mark


def _sums(values: list[Tensor]) -> list[bytes]:
    """Returns a digest of each tensor's sums; all sums leave their device in one transfer."""
    sums = [_sum(value) for value in values]
    if not sums:
        return []
    whole = torch.cat([one.to(sums[0].device) for one in sums]).cpu()
    pieces = whole.split([len(one) for one in sums])
    return [hashlib.sha256(piece.numpy().data).digest() for piece in pieces]


def _sum(value: Tensor) -> UInt8[Tensor, "byte"]:
    """Returns sums of a tensor's bits by row and by column, and the bits that do not fill a row.

    Every eighth row is summed by column, to notice columns that change places.
    """
    bits = value.contiguous().reshape(-1).view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits  # int64 needs 8-byte alignment
    whole = bits.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    rows = bits[:whole].view(torch.int64).view(-1, _COLUMNS)
    # integer sums wrap around and are exact
    sums = rows.sum(dim=1), rows[::_EVERY].sum(dim=0)
    return torch.cat([*(one.view(torch.uint8) for one in sums), bits[whole:]])
