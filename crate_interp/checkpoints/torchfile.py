"""Torch files, without running what they hold: tensors, plain Python values, and nothing else."""

import argparse
import re
import threading
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickletools import genops
from typing import Any, BinaryIO

import torch
from torch import Tensor

from crate_interp.errors import CheckpointError

_MAX_MEMBERS, _MAX_PICKLE = 200_000, 2**26
_NAMESPACE = "argparse.Namespace"  # the command line of the masked autoencoder's trainer
# The imports that a pickle of tensors needs. torch has a list of its own for weights_only=True,
# but that one is global to the process: other libraries add to it, and torch itself puts classes
# on it that open network connections.
_ALLOWED = re.compile(
    r"collections\.(OrderedDict|Counter|defaultdict)"
    r"|torch\._utils\._rebuild_(tensor|tensor_v2|parameter|parameter_with_state)"
    r"|torch\.(\w+Storage|storage\.\w+Storage|Size|device|Tensor|nn\.parameter\.Parameter)"
    r"|torch\.(float|double|half|bfloat16|int|long|short|bool|u?int\d+|float\d+)"
    r"|torch\.serialization\._get_layout"
    r"|builtins\.(dict|list|int|float)|__builtin__\.(dict|list|int|float)"
)
_lock = threading.Lock()  # torch's list of admitted classes is one for all threads


def read_torch(path: Path) -> tuple[Any, Mapping[str, Any] | None]:
    """Returns the content of a torch file, and the values of its argparse.Namespace or None.

    The content is memory-mapped where the file is a zip. Every class that the pickle names is
    compared with a list of our own before torch reads it. argparse.Namespace, a bag of values
    without code, is admitted too, and left out of the content. Raises CheckpointError for a
    pickle that names anything else; nothing in it is run.
    """
    mapped = zipfile.is_zipfile(path)
    names = _imports(_pickles(path, mapped))
    odd = sorted(name for name in names if not _ALLOWED.fullmatch(name) and name != _NAMESPACE)
    if odd:
        raise CheckpointError(
            f"{path} is not a readable checkpoint: its pickle asks for {', '.join(odd[:4])}, "
            "and only tensors and plain values are admitted; nothing was run. "
            "Save the state dict alone: torch.save(model.state_dict(), path)."
        )
    return open_torch(path, _NAMESPACE in names)


def open_torch(path: Path, namespace: bool) -> tuple[Any, Mapping[str, Any] | None]:
    """Returns the same as `read_torch`, for a file that `read_torch` has checked before.

    namespace: whether there is an argparse.Namespace in it.
    """
    mapped = zipfile.is_zipfile(path)
    if not namespace:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped), None
    with _lock, torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}, wanted a state dict: names and tensors."
        )
    spaces = {
        key: vars(value) for key, value in loaded.items() if isinstance(value, argparse.Namespace)
    }
    content = {key: value for key, value in loaded.items() if key not in spaces}
    return content, dict(next(iter(spaces.values()), {}))


def _pickles(path: Path, mapped: bool) -> Iterable[bytes | BinaryIO]:
    """Returns the pickles of a file.

    There is one in a zip, and several at the beginning of a file of the older kind.
    """
    if not mapped:
        with open(path, "rb") as file:
            # magic number, version, system, the object, the keys of its storages
            for _ in range(5):
                yield file
        return
    _check_archive(path)
    with zipfile.ZipFile(path) as archive:
        found = [
            info
            for info in archive.infolist()
            if info.filename.endswith("/data.pkl") or info.filename == "data.pkl"
        ]
        if len(found) != 1 or found[0].file_size > _MAX_PICKLE:
            raise CheckpointError(
                f"{path} is a zip without one data.pkl: it is not a readable checkpoint."
            )
        yield archive.read(found[0])


def _imports(pickles: Iterable[bytes | BinaryIO]) -> set[str]:
    """Returns the names of everything that pickles import.

    An operation that no tensor needs counts as an import. So does a tuple made of a tuple that
    was there before: thirty of them, each twice in the next, take hours to hash.
    """
    names = set()
    for content in pickles:
        tuples, before, shared = set(), "", False
        for opcode, argument, _ in genops(content):
            name = opcode.name
            if name == "GLOBAL":
                names.add(".".join(str(argument).split(" ")))
            elif name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER"):
                names.add(f"the operation {name}")
            elif name.startswith("TUPLE") and shared:
                names.add("a tuple of shared tuples")
            if name in ("BINPUT", "LONG_BINPUT") and before.startswith("TUPLE"):
                tuples.add(argument)
            shared = name in ("BINGET", "LONG_BINGET") and argument in tuples
            before = name
    return names


def _check_archive(path: Path) -> None:
    """Raises CheckpointError for members that are compressed or larger than the file.

    Torch does not compress them, so such a file is damaged or was made to harm.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise CheckpointError(f"{path} has {len(members)} entries: no checkpoint has so many.")
    size = path.stat().st_size
    if sum(info.file_size for info in members) > size or any(
        info.compress_type for info in members
    ):
        raise CheckpointError(
            f"{path} claims entries larger than the file: it is damaged or was made to harm."
        )


def check_total(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises CheckpointError if tensors that are views of one another claim too many bytes.

    The same view twice counts once.
    """
    places = {
        (value.data_ptr(), tuple(value.shape), value.stride()): value.nbytes
        for value in tensors.values()
    }
    if sum(places.values()) > 2 * path.stat().st_size + 2**20:
        raise CheckpointError(
            f"{path} claims more numbers than it holds: its tensors are views of one another."
        )
