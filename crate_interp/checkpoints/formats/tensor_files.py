"""Reads named tensors from a file without ever executing its content."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from crate_interp.checkpoints.state_dicts import PLAIN, Choice, find_weights
from crate_interp.config import CrateConfig
from crate_interp.core.errors import CheckpointError
from crate_interp.measures.checks import all_finite
from crate_interp.models.sae import SAEConfig

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BEGINNING = 64  # bytes that tell the kind of a file
_SHARE = 2**22  # bytes to copy from one mapping, or a sixteenth of the file if that is more
_MAX_HEADER, _MAX_CONFIG, _MAX_TENSORS = 2**24, 2**24, 100_000


@dataclass(frozen=True)
class Contents:
    """The weights of a model, and everything known about them before the model is built.

    where: the source's name in errors. config: the config in the file or next to it, or empty.
    namespace: the plain values of the argparse.Namespace in the file, a trainer's command line.
    owned: whether the tensors need no copy, because nothing else holds them. folder: the folder of
    the file, which may also hold a tokenizer. family: the caller's, or else the one in the table of
    models. row: the config fields in the table of models, or None for a file that is not there.
    given: the config fields from the caller.
    cfg: the complete config if the folder's format contains it, else None. notes: what the source
    holds besides the weights of this model, and was left out.
    """

    tensors: dict[str, Tensor]
    where: str
    config: dict[str, Any] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)
    owned: bool = False
    folder: Path | None = None
    family: str | None = None
    row: dict[str, Any] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    cfg: CrateConfig | SAEConfig | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listing:
    """What a weight file holds, before its numbers are read.

    kind: the class of the tensors in `content`. read: returns the numbers of the given tensors.
    config, namespace: as in Contents.
    """

    content: object
    kind: type
    read: Callable[[dict[str, Any]], dict[str, Tensor]]
    config: dict[str, Any] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)


def read_file(path: Path, choice: Choice = PLAIN) -> Contents:
    """Returns the weights in a .safetensors, torch or .npz file, recognised by its first bytes.

    Nothing in a torch file is run. Only the weights of one model are read, and no other content
    such as an optimiser's state. Raises CheckpointError for any other file.
    """
    with listing(path) as listed:
        found = find_weights(listed.content, str(path), listed.kind, choice)
        tensors = listed.read(found.tensors)
    config, namespace = listed.config, listed.namespace
    return Contents(
        tensors, str(path), config, namespace, owned=True, folder=path.parent, notes=found.notes
    )


@contextmanager
def listing(path: Path) -> Iterator[Listing]:
    """Opens a weight file and lists what it holds; `read` works while the file is open.

    Raises CheckpointError as `read_file` does.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file: give a file or a folder.")
    with ExitStack() as opened:
        with _readable(path):
            file = opened.enter_context(open(path, "rb", buffering=0))
            head = zip_archives.read_at(file, 0, _BEGINNING)
            _check_beginning(head, path)
            safe = len(head) > 8 and head[8:9] == b"{"
            listed = _list_safetensors(path, head) if safe else _list_other(file, head, path)
        yield listed


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns every error of a parser into a CheckpointError."""
    try:
        yield
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


def _check_beginning(head: bytes, path: Path) -> None:
    """Raises CheckpointError for what downloads leave in place of a weight file."""
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if begin.startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(
            f"{path} holds an HTML page, such as the warning of a drive, and no weights: download "
            "the file itself."
        )
    if begin.startswith(b"version https://git-lfs.github.com/"):
        raise CheckpointError(
            f"{path} is a git-lfs pointer, and holds no weights: run git lfs pull."
        )


def _list_other(file: BinaryIO, head: bytes, path: Path) -> Listing:
    """Lists the content of an .npz or a torch file; the arrays of an .npz file are read at once."""
    where = str(path)
    if head.startswith(zip_archives.MAGIC):
        entries = zip_archives.read_directory(file, where)
        if is_npz(entries):
            return Listing(read_npz(file, entries, where), Tensor, dict)
        found = read_archive(file, entries, where)
    else:
        found = read_legacy(file, where)

    def read(stored: dict[str, StoredTensor]) -> dict[str, Tensor]:
        if len(stored) > _MAX_TENSORS:
            raise CheckpointError(f"{where} has {len(stored)} tensors: no checkpoint has so many.")
        for name, value in stored.items():
            _check_kind(name, value.dtype, value.span < value.numel, value.numel, where)
        with _readable(path):
            return read_tensors(file, stored, found.places, where)

    # the sparse autoencoders are published with separate config files
    config = model_args(found.content) or read_config(path.with_name(f"{path.stem}_cfg.json"))
    return Listing(found.content, StoredTensor, read, config, plain_values(found.namespace))


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


@dataclass(frozen=True)
class _Entry:
    """A tensor in a safetensors file: its name, the name of its dtype, its bytes."""

    name: str
    dtype: str
    size: int


def _list_safetensors(path: Path, head: bytes) -> Listing:
    """Lists the tensors; the size of the header is checked before the header is parsed."""
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
    entries = {}
    for name in names:
        first, end = header[name]["data_offsets"]
        entries[name] = _Entry(name, header[name]["dtype"], end - first)

    def read(wanted: dict[str, _Entry]) -> dict[str, Tensor]:
        with _readable(path):
            return _read_safetensors(path, wanted)

    return Listing(entries, _Entry, read, read_config(path.parent / "config.json"))


def _read_safetensors(path: Path, wanted: dict[str, _Entry]) -> dict[str, Tensor]:
    """Returns the wanted tensors, copied out of the file."""
    tensors = {}
    sizes = {name: entry.size for name, entry in wanted.items()}
    with byte_bar(sum(sizes.values()), f"reading {path.name}") as bar:
        for group in _shares(sizes):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in group:
                    tensors[name] = file.get_tensor(wanted[name].name).clone()
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
