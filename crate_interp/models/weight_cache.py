"""The digest of a model, and a cache of values computed from its weights until they change."""

import hashlib
import json
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash  # comes with datasets
from torch import Tensor, nn

from crate_interp.core import checks
from crate_interp.models.runtimes import onloaded

Mark = dict[str, Hashable]  # name of a parameter or config -> what tells its values from others

# model -> mark of its weights, and values computed from them; an entry disappears with its model
_VALUES: WeakKeyDictionary[nn.Module, tuple[tuple, dict[Hashable, Any]]] = WeakKeyDictionary()


def model_digest(model: nn.Module) -> str:
    """Returns the SHA-256 of the config and of every tensor's name, dtype, shape and bytes.

    A setting that was assumed and the same setting when given make the same network.
    """
    cfg: Any = model.cfg
    settings = {name: value for name, value in cfg.to_dict().items() if name != "assumed"}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    with onloaded(model):
        for name, value in sorted(_tensors(model).items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(_bytes(value))
    return f"sha256:{digest.hexdigest()}"


def values_of_weights(model: nn.Module) -> dict[Hashable, Any]:
    """Returns a dict for values computed from a model, by name; a change of the model empties it.

    The values must not refer to the model.
    """
    with onloaded(model):
        now = _mark(model), [value.device for value in model.parameters()]
    if model not in _VALUES or _VALUES[model][0] != now:
        _VALUES[model] = now, {}
    return _VALUES[model][1]


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
            "another model: call model.run_with_cache(x) again."
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
    digests: dict[int, bytes] = {}  # a bridge has several names for one tensor
    for name, value in _tensors(model).items():
        if id(value) not in digests:
            # SHA-256 reads at a tenth of this speed
            digests[id(value)] = xxhash.xxh3_128_digest(_bytes(value))
        mark[name] = value.dtype, value.shape, digests[id(value)]
    return mark


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns every parameter and every buffer, those too that a saved file leaves out."""
    return model.state_dict(keep_vars=True) | dict(model.named_buffers(remove_duplicate=False))


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
