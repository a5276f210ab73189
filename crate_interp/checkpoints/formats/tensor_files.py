"""Reads named tensors from a file without ever executing its content."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from crate_interp.checkpoints.formats import zip_archives
from crate_interp.checkpoints.formats.npz import is_npz, read_npz
from crate_interp.checkpoints.formats.torch_files import read_archive, read_legacy, read_tensors
from crate_interp.checkpoints.formats.torch_names import StoredTensor
from crate_interp.checkpoints.progress import byte_bar
from crate_interp.config import CrateConfig
from crate_interp.core.errors import CheckpointError
from crate_interp.measures.checks import all_finite
from crate_interp.models.sae import SAEConfig

_CONTAINERS = ("state_dict", "model")  # keys under which training scripts store the weights
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PREFIXES = ("module.", "_orig_mod.")  # prefixes left by DataParallel and torch.compile
_SHARE = 2**22  # bytes to copy from one mapping, or a sixteenth of the file if that is more
_MAX_HEADER, _MAX_CONFIG, _MAX_TENSORS = 2**24, 2**24, 100_000


@dataclass(frozen=True)
class Contents:
    """The weights of a model, and everything known about them before the model is built.

    where: the source's name in errors. config: the config in the file or next to it, or empty.
    namespace: whether the file held an argparse.Namespace, as files of the masked autoencoder do.
    owned: whether the tensors need no copy, because nothing else holds them. folder: the folder of
    the file, which may also hold a tokenizer. family: the caller's, or else the one in the table of
    models. row: the config fields in the table of models. given: the config fields from the caller.
    cfg: the complete config if the folder's format contains it, else None.
    """

    tensors: dict[str, Tensor]
    where: str
    config: dict[str, Any] = field(default_factory=dict)
    namespace: bool = False
    owned: bool = False
    folder: Path | None = None
    family: str | None = None
    row: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    cfg: CrateConfig | SAEConfig | None = None


def read_file(path: Path) -> Contents:
    """Returns the content of a .safetensors, torch or .npz file, recognised by its first bytes.

    Nothing in a torch file is run. Only weights are read, and no other content such as an
    optimiser's state. Raises CheckpointError for any other file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file: give a file or a folder.")
    try:
        with open(path, "rb", buffering=0) as file:
            head = zip_archives.read_at(file, 0, 9)
            if len(head) == 9 and head[8:9] == b"{":
                tensors = _read_safetensors(path, head)
                config = read_config(path.parent / "config.json")
                return Contents(tensors, str(path), config, owned=True, folder=path.parent)
            return _read_other(file, head, path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a readable checkpoint: {error}. Is it truncated?"
        ) from None
    except CheckpointError:
        raise
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception:  # errors that a parser raises on foreign bytes have no common class
        raise CheckpointError(
            f"{path} is not a readable checkpoint: wanted .safetensors, .npz, or a torch file "
            "of tensors and plain values. Is it truncated, or a renamed file of another kind?"
        ) from None


def _read_other(file: BinaryIO, head: bytes, path: Path) -> Contents:
    """Returns the content of an .npz or a torch file."""
    where = str(path)
    if head.startswith(zip_archives.MAGIC):
        entries = zip_archives.read_directory(file, where)
        if is_npz(entries):
            return Contents(read_npz(file, entries, where), where, owned=True, folder=path.parent)
        found = read_archive(file, entries, where)
    else:
        found = read_legacy(file, where)
    stored = state_dict_of(found.content, where, StoredTensor)
    if len(stored) > _MAX_TENSORS:
        raise CheckpointError(f"{where} has {len(stored)} tensors: no checkpoint has so many.")
    for name, value in stored.items():
        _check_kind(name, value.dtype, value.span < value.numel, value.numel, where)
    # the sparse autoencoders are published with separate config files
    config = (
        plain_values(found.namespace)
        or model_args(found.content)
        or read_config(path.with_name(f"{path.stem}_cfg.json"))
    )
    tensors, named = read_tensors(file, stored, found.places, where), found.namespace is not None
    return Contents(tensors, where, config, named, owned=True, folder=path.parent)


def model_args(loaded: Any) -> dict[str, Any]:
    """Returns the plain values under "model_args" in a training dict, as nanoGPT writes them.

    loaded: anything that a torch file can hold. The result is empty if it has no such values.
    """
    return plain_values(loaded.get("model_args") if isinstance(loaded, Mapping) else None)


def plain_values(values: Any) -> dict[str, Any]:
    """Returns the entries whose key is text and whose value is a number, a bool or text.

    The result is empty if `values` is not a mapping.
    """
    if not isinstance(values, Mapping):
        return {}
    return {
        key: value
        for key, value in values.items()
        if isinstance(key, str) and isinstance(value, (bool, int, float, str))
    }


def _read_safetensors(path: Path, head: bytes) -> dict[str, Tensor]:
    """Returns the tensors, copied out of the file.

    The size of the header is checked before the header is parsed.
    """
    size = int.from_bytes(head[:8], "little")
    if size > _MAX_HEADER or size > path.stat().st_size:
        raise CheckpointError(
            f"{path} claims a header of {size} bytes: the file is damaged, or was made to do harm."
        )
    with safe_open(path, framework="pt", device="cpu") as file:
        names = list(file.keys())
    if len(names) > _MAX_TENSORS:
        raise CheckpointError(f"{path} has {len(names)} tensors: no checkpoint has so many.")
    with open(path, "rb") as raw:
        header = json.loads(raw.read(8 + size)[8:])  # safe_open has already checked the header
    sizes = {
        name: header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in names
    }
    tensors = {}
    with byte_bar(sum(sizes.values()), f"reading {path.name}") as bar:
        for group in _shares(sizes):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in group:
                    tensors[name] = file.get_tensor(name).clone()
                    bar.update(sizes[name])
    return tensors


def _shares(sizes: dict[str, int]) -> list[list[str]]:
    """Returns the names of the tensors in groups, each with about a sixteenth of all bytes.

    Each group is read through a mapping of its own. The pages of a mapping count as memory of this
    process until the mapping is closed, so one mapping for all groups would double the peak of
    memory.
    """
    share = max(_SHARE, sum(sizes.values()) // 16)
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if held + size > share and groups[-1]:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file, or None if there is no such file.

    Raises CheckpointError if it is not a regular file, or not JSON.
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a regular file.")
        if path.stat().st_size > _MAX_CONFIG:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: no config is so large.")
        return json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file that another library wrote.

    The result is empty if there is no such file, or if the file is a config of our own. Raises
    CheckpointError if the file holds something other than a JSON object.
    """
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a JSON object.")
    return {} if content.get("library") == "crate_interp" else content


def state_dict_of(loaded: Any, where: str, kind: type = Tensor) -> dict[str, Any]:
    """Returns the named tensors of a state dict, of a training dict with one, or of a module.

    The prefixes of DataParallel and torch.compile are removed. loaded: anything that a torch file
    can hold. kind: the class that its tensors must have. where: the source's name in errors. Raises
    CheckpointError if `loaded` is none of these three.
    """
    if isinstance(loaded, torch.nn.Module):
        loaded = loaded.state_dict()
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{where} holds a {type(loaded).__name__}; expected a state dict of names and tensors."
        )
    held = [key for key in _CONTAINERS if isinstance(loaded.get(key), Mapping)]
    if len(held) > 1:
        raise CheckpointError(
            f"{where} holds weights under {' and '.join(map(repr, held))}: "
            "pass one of them, as a state dict."
        )
    loaded = loaded[held[0]] if held else loaded
    if not loaded:
        raise CheckpointError(f"{where} holds no tensors.")
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, kind):
            raise CheckpointError(
                f"{where} is not a state dict: {key!r} is a {type(value).__name__}, not a tensor."
            )
    tensors = dict(loaded)
    for prefix in _PREFIXES * 2:  # twice, because either wrapper may be inside the other
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name[len(prefix) :]: value for name, value in tensors.items()}
    return tensors


def check_weights(tensors: Mapping[str, Tensor], where: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError unless all tensors are dense, floating, finite, and fit `dtype`."""
    for name, value in tensors.items():
        check_dense(name, value, where)
        if not all_finite(value):
            count = int((~value.isfinite()).sum())
            raise CheckpointError(
                f"{where}: {name} holds {count} NaN or Inf among its {value.numel()} numbers; "
                "nothing was loaded."
            )
        if value.dtype != dtype and not all_finite(value.to(dtype)):
            raise CheckpointError(
                f"{where}: {name} holds numbers too large for {dtype}: load it with another dtype."
            )


def check_dense(name: str, value: Tensor, where: str) -> None:
    """Raises CheckpointError unless a tensor is dense, floating, and stores all its numbers."""
    kind: object = value.dtype
    if value.layout != torch.strided or value.is_meta:
        kind = "on the meta device" if value.is_meta else value.layout
    expanded = kind is value.dtype and (
        value.untyped_storage().nbytes() < value.numel() * value.element_size()
    )
    _check_kind(name, kind, expanded, value.numel(), where)


def _check_kind(name: str, kind: object, expanded: bool, count: int, where: str) -> None:
    if kind not in DTYPES:
        raise CheckpointError(
            f"{where}: {name} is {kind}; expected a dense floating point tensor of 16 bits or more."
        )
    if expanded:
        raise CheckpointError(
            f"{where}: {name} claims {count} numbers, but stores fewer (it is an expanded view)."
        )
