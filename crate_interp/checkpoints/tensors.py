"""From a file to named tensors, without ever executing what the file holds."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from crate_interp.checkpoints.errors import CheckpointError
from crate_interp.checkpoints.npz import is_npz, read_npz
from crate_interp.measures.checks import all_finite

_CONTAINERS = ("state_dict", "model")  # keys under which training scripts keep the weights
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PREFIXES = ("module.", "_orig_mod.")  # left by DataParallel and torch.compile


def read_file(path: Path) -> dict[str, Tensor]:
    """The weights in a .safetensors, torch or .npz file, told apart by content; CheckpointError where it is none.

    Torch files are read with `weights_only=True`, memory-mapped; optimiser state beside the weights is not touched.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(9)
        if len(head) == 9 and head[8:9] == b"{":
            return dict(load_file(path))
        if is_npz(path):
            return read_npz(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: {error}. Is it truncated?") from None
    except CheckpointError:
        raise
    except Exception:  # what a parser raises on bytes it was not made for has no common class
        # torch's own words are left out: they advise to switch the protection off
        raise CheckpointError(
            f"{path} is not a readable checkpoint: wanted .safetensors, .npz, or a torch file that loads with weights_only=True. "
            "Is it truncated, or something else renamed? If it holds Python objects beside tensors, save the state dict "
            "alone: torch.save(model.state_dict(), path)."
        ) from None
    return state_dict_of(loaded, str(path))


def state_dict_of(loaded: Any, where: str) -> dict[str, Tensor]:
    """The named tensors of a state dict, of a training dict that holds one, or of a module; prefixes stripped."""
    if isinstance(loaded, torch.nn.Module):
        loaded = loaded.state_dict()
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{where} holds a {type(loaded).__name__}, wanted a state dict: names and tensors.")
    for key in _CONTAINERS:
        if isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not loaded:
        raise CheckpointError(f"{where} holds no tensors.")
    odd = [key for key, value in loaded.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"{where} is no state dict: {odd[0]!r} is a {type(loaded[odd[0]]).__name__}, not a tensor."
        )
    return _strip_prefixes(dict(loaded))


def _strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES * 2:  # twice: either may wrap the other
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name[len(prefix) :]: value for name, value in tensors.items()}
    return tensors


def check_weights(tensors: Mapping[str, Tensor], where: str, dtype: torch.dtype) -> None:
    """CheckpointError where a tensor is no dense floating one, holds NaN or Inf, or does not fit `dtype`."""
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_meta or value.dtype not in _DTYPES:
            kind = (
                "on the meta device"
                if value.is_meta
                else value.dtype
                if value.layout == torch.strided
                else value.layout
            )
            raise CheckpointError(
                f"{where}: {name} is {kind}, weights are dense floating point tensors of 16 bits or more."
            )
        if value.untyped_storage().nbytes() < value.numel() * value.element_size():
            raise CheckpointError(
                f"{where}: {name} claims {value.numel()} numbers and stores fewer (an expanded view)."
            )
        if not all_finite(value):
            count = int((~value.isfinite()).sum())
            raise CheckpointError(
                f"{where}: {name} holds {count} NaN or Inf of {value.numel()} numbers; nothing was loaded."
            )
        if value.dtype != dtype and not all_finite(value.to(dtype)):
            raise CheckpointError(f"{where}: {name} holds numbers too large for {dtype}: load it with another dtype.")
