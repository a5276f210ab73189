"""Reads weight files: torch reads torch files, numpy .npz files, safetensors its own; nothing runs.

Torch's weights-only reader makes nothing but tensors and plain values. Its list of names is
extended here by forms of what trainers leave beside weights. A form holds data and has no code.
"""

import json
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from crate_interp.checkpoints.state_dicts import find_weights
from crate_interp.config import CrateConfig
from crate_interp.core.errors import CheckpointError
from crate_interp.core.files import open_regular
from crate_interp.measures.checks import all_finite
from crate_interp.models.redunet import ReduNetConfig
from crate_interp.models.sae import SAEConfig

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ZIP, _OLD_TORCH = b"PK\x03\x04", b"\x80\x02\x8a\x0a"  # how files begin
# how files begin that people take for weights -> what they are
_NO_WEIGHTS = {
    b"<!doctype html": "an HTML page, such as the warning of a drive: download the file itself",
    b"<html": "an HTML page, such as the warning of a drive: download the file itself",
    b"version https://git-lfs.github.com/": "a git-lfs pointer, not weights: run git lfs pull",
}
_NUMBERS = {
    "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
    "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?",
}  # fmt: skip
_JAX_WEIGHTS = "params/"  # opt/ and chrono/ are not read; they are more than half of a file
_JAX_OLD, _JAX_NAME = "/Attention_0/", "/MultiHeadDotProductSubspaceAttention_0/"


@dataclass(frozen=True)
class Contents:
    """The weights of a model, and everything known about them before the model is built.

    where: the source's name in errors. config: the config in the file or next to it, or empty.
    namespace: the plain values of the argparse.Namespace in the file, a trainer's command line.
    folder: the folder of the file, which may also hold a tokenizer. family: the caller's, or else
    the one in the table of models. row: the config fields in the table of models, or None for a
    file that is not there. given: the config fields from the caller.
    cfg: the complete config if the folder's format contains it, else None. notes: what the source
    holds besides the weights of this model, and was left out.
    """

    tensors: dict[str, Tensor]
    where: str
    config: dict[str, Any] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    family: str | None = None
    row: dict[str, Any] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    cfg: CrateConfig | SAEConfig | ReduNetConfig | None = None
    notes: tuple[str, ...] = ()


class _Dtype:
    """A form of numpy.dtype: the name and byte order of a number."""

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.order = name, "|"

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]


class _Array:
    """A form of numpy.ndarray, which is left out; no weights are saved as one."""

    def __init__(self, *_: object) -> None:
        pass

    __setstate__ = __init__


class _Namespace(dict):
    """A form of argparse.Namespace: its attributes as a dict."""

    def __setstate__(self, state: dict) -> None:
        self.update(state)


def _number(dtype: _Dtype, raw: bytes) -> int | float | bool:
    """Returns the value of a NumPy scalar as a Python number."""
    if type(dtype) is not _Dtype or dtype.order not in "<|" or dtype.name not in _NUMBERS:
        raise pickle.UnpicklingError("a NumPy scalar that is not a little-endian number")
    return struct.unpack("<" + _NUMBERS[dtype.name], raw)[0]


# What a pickle may name besides tensors. torch has taken pairs of a form and a name since 2.6.
# NumPy's own dtype and scalar must never stand here: together they make objects of a file's bytes.
_FORMS: list[Any] = [
    (_Namespace, "argparse.Namespace"),
    (dict, "collections.Counter"),
    (lambda *_: {}, "collections.defaultdict"),
    *((kind, f"builtins.{kind.__name__}") for kind in (dict, list, int, float)),
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    *((_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(
        (lambda *parts: "/".join(parts), f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")  # the second in Python 3.13
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    ),
]


def read_file(path: Path, **choice: object) -> Contents:
    """Returns the weights in a .safetensors, torch or .npz file, recognised by its first bytes.

    Nothing in a torch file is run. Tensors are mapped from the disk where the format allows it, so
    an optimiser's state is not read. choice: as in `find_weights`. Raises CheckpointError for any
    other file.
    """
    content = read_content(path)
    options: Any = choice
    tensors, notes = find_weights(content, str(path), **options)
    config = model_args(content)
    if not config:  # sparse autoencoders are published with separate config files
        safe = path.suffix == ".safetensors"
        config = read_config(path.with_name("config.json" if safe else f"{path.stem}_cfg.json"))
    values = content.values() if isinstance(content, Mapping) else ()
    namespace = plain_values(next((one for one in values if isinstance(one, _Namespace)), None))
    return Contents(tensors, str(path), config, namespace, folder=path.parent, notes=notes)


def read_content(path: Path) -> object:
    """Returns all that a weight file holds; its tensors may be mapped from the disk.

    Raises CheckpointError as `read_file` does.
    """
    try:
        with open_regular(path) as file:
            head = file.read(64)
        for start, words in _NO_WEIGHTS.items():
            if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(start):
                raise CheckpointError(f"{path} holds {words}.")
        if head[8:9] == b"{":
            with safe_open(path, framework="pt", device="cpu") as tensors:
                return {name: tensors.get_tensor(name) for name in tensors.keys()}
        if head.startswith(_ZIP):
            return _read_zip(path)
        if head.startswith(_OLD_TORCH):
            return _read_torch(path, mmap=False)
        raise ValueError("its first bytes fit none of them")
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        said = f"asks for {named[1]}" if named else "was refused by torch"
        raise CheckpointError(
            f"{path} is not a readable checkpoint: its pickle {said}: only tensors and plain "
            "values are admitted, and nothing was run. If you trust the file, save its weights "
            "alone: torch.save(torch.load(file, weights_only=False)['state_dict'], 'weights.pt')."
        ) from None
    except Exception as error:  # readers have no common class of errors about foreign bytes
        said = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{path} is not a readable checkpoint: wanted .safetensors, .npz, or a torch file of "
            "tensors and plain values. Is it truncated, or a renamed file of another kind? "
            f"({type(error).__name__}: {said})"
        ) from None


def _read_zip(path: Path) -> object:
    """Returns the content of an .npz file, or of a torch file."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if names and all(name.endswith(".npy") for name in names):
        return _read_npz(path)
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(
            f"{path} is a TorchScript archive, which holds code: save only the state dict: "
            "torch.save(model.state_dict(), path)."
        )
    # torch would take the bytes of a compressed entry for numbers
    return _read_torch(path, mmap=not any(entry.compress_type for entry in entries))


def _read_torch(path: Path, mmap: bool) -> object:
    """Returns the content of a torch file.

    Names that other libraries have added to torch's list are taken off while the file is read.
    """
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(_FORMS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    finally:
        torch.serialization.add_safe_globals(others)


def _read_npz(path: Path) -> dict[str, Tensor]:
    """Returns the weights of the JAX training by their path in the tree, without "params/"."""
    tensors: dict[str, Tensor] = {}
    with np.load(path, allow_pickle=False) as arrays:
        inside = [name for name in arrays.files if name.startswith(_JAX_WEIGHTS)] or arrays.files
        for entry in inside:
            name = entry.removeprefix(_JAX_WEIGHTS).replace(_JAX_OLD, _JAX_NAME)
            array = arrays[entry]
            half = array.dtype.str in ("|V2", "<V2")  # numpy has no bfloat16
            if not half and array.dtype.str not in ("<f2", "<f4", "<f8"):
                raise CheckpointError(f"{path}: {name} holds {array.dtype}; expected floats.")
            tensor = torch.from_numpy(array.view(np.int16) if half else array)
            tensors[name] = tensor.view(torch.bfloat16) if half else tensor
    return tensors


def model_args(loaded: object) -> dict[str, Any]:
    """Returns the plain values under "model_args" in a training dict, as nanoGPT writes them.

    loaded: anything that a torch file can hold. The result is empty if it has no such values.
    """
    return plain_values(loaded.get("model_args") if isinstance(loaded, Mapping) else None)


def plain_values(values: object) -> dict[str, Any]:
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


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file, or None if there is no such file.

    Raises CheckpointError if it is not a regular file, or not JSON.
    """
    try:
        with open_regular(path) as file:
            return json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file that another library wrote.

    The result is empty if there is no such file, or if the file is a config of our own. Raises
    CheckpointError if the file holds something other than a JSON object.
    """
    content = read_json(path) or {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a JSON object.")
    return {} if content.get("library") == "crate_interp" else content


def check_weights(tensors: Mapping[str, Tensor], where: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError unless all tensors are dense, floating, finite, and fit `dtype`."""
    for name, value in tensors.items():
        check_dense(name, value, where)
        if not all_finite(value):
            count = int((~value.isfinite()).sum())
            said = f"{where}: {name} holds {count} NaN or Inf"
            raise CheckpointError(f"{said} among its {value.numel()} numbers.")
        if value.dtype != dtype and not all_finite(value.to(dtype)):
            said = f"{where}: {name} holds numbers too large for {dtype}"
            raise CheckpointError(f"{said}: load it with another dtype.")


def check_dense(name: str, value: Tensor, where: str) -> None:
    """Raises CheckpointError unless a tensor is dense, floating, and stores all its numbers."""
    kind: object = value.dtype
    if value.layout != torch.strided or value.is_meta:
        kind = "on the meta device" if value.is_meta else value.layout
    if kind not in DTYPES:
        said = f"{where}: {name} is {kind}"
        raise CheckpointError(f"{said}; expected a dense floating point tensor of 16 bits or more.")
