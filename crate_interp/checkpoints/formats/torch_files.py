"""Reads torch files without running their content: tensors and plain Python values, nothing else.

torch's own reader is never called. Our own interpreter reads the pickle, and finds where the
numbers of each tensor are. Then only the numbers of the wanted tensors are read.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

import crate_interp.checkpoints.formats.pickles as pickles
from crate_interp.checkpoints.formats import torch_names
from crate_interp.checkpoints.formats.pickles import PickleError
from crate_interp.checkpoints.formats.torch_names import Storage, StorageKind, StoredTensor
from crate_interp.checkpoints.formats.zip_archives import Entry, read_at, read_into
from crate_interp.checkpoints.progress import byte_bar
from crate_interp.core.errors import CheckpointError

_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_RECORDS = {  # allowed contents of the entries that describe the archive
    "version": rb"0*([1-9]|10)\n?",
    "byteorder": rb"little",
    ".storage_alignment": rb"\d{1,9}",
    ".data/serialization_id": rb"[ -~]*",
}
_SMALL = 2**12  # maximum bytes of an entry that describes the archive
# The pickles of an older file are at its beginning. These numbers of bytes are tried in turn.
_BEGINNINGS = (2**16, 2**20, pickles.LONGEST)
_LONGEST_KEY = 64  # maximum characters of a storage's key; torch's keys are numbers
_SPARE, _MOST_TIMES, _MOST_SPANS = 2**20, 2, 32


@dataclass(frozen=True)
class TorchFile:
    """The content of a torch file; tensors are StoredTensors whose numbers are not read yet.

    namespace: the values of the file's argparse.Namespace, which `content` leaves out, or None.
    places: the position in the file where each storage begins.
    """

    content: Any
    namespace: Mapping[str, Any] | None
    places: dict[str, int]


def read_archive(file: BinaryIO, entries: list[Entry], where: str) -> TorchFile:
    """Returns the content of a torch file that is a zip with the given entries.

    Raises CheckpointError for a zip that is no torch file, for a pickle that asks for anything but
    tensors and plain values, and for storages that are not as large as the pickle says.
    """
    if any(entry.compressed for entry in entries):
        raise CheckpointError(
            f"{where} has compressed entries, but torch writes none: "
            "give the file as torch.save wrote it."
        )
    inside = _inside(entries, where)
    if "constants.pkl" in inside:
        raise CheckpointError(
            f"{where} is a TorchScript archive, which holds code: "
            "save only the state dict: torch.save(model.state_dict(), path)."
        )
    if "data.pkl" not in inside or inside["data.pkl"].size > pickles.LONGEST:
        raise CheckpointError(
            f"{where} is a zip without a data.pkl as torch writes it: "
            "it is not a readable checkpoint."
        )
    _check_records(file, inside, where)

    def place(storage: Storage) -> int:
        entry = inside.get(f"data/{storage.key}")
        if entry is None or entry.size != storage.nbytes:
            stored = "nothing" if entry is None else f"{entry.size} bytes"
            raise PickleError(
                f"expects {storage.nbytes} bytes in storage {storage.key}, but the zip has {stored}"
            )
        return entry.start

    storages = _Storages()
    data = read_at(file, inside["data.pkl"].start, inside["data.pkl"].size)
    try:
        if inside["data.pkl"].crc not in (0, zlib.crc32(data)):  # 0: torch omitted the checksum
            raise PickleError("differs from its checksum")
        reading = pickles.read_pickle(data, torch_names.TORCH, storages.resolve)
        if reading.end != len(data):
            raise PickleError("continues after its end")
        places = {storage.key: place(storage) for storage in storages.whole.values()}
    except PickleError as error:
        _refuse(error, where)
    return _torch_file(reading, places)


def read_legacy(file: BinaryIO, where: str) -> TorchFile:
    """Returns the content of a torch file of the older kind, which is not a zip.

    Such a file has five pickles (a magic number, a version, the system, the object, the keys of its
    storages), and then the storages. Raises CheckpointError as `read_archive` does.
    """
    size = os.fstat(file.fileno()).st_size
    if read_at(file, 0, 4) != b"\x80\x02\x8a\x0a":
        raise CheckpointError(
            f"{where} is not a readable checkpoint: wanted .safetensors, .npz, or a torch file "
            "of tensors and plain values. Is it truncated, or a renamed file of another kind?"
        )
    storages, readings = _five_pickles(file, where)
    end = readings[-1].end
    magic, protocol, system, _, keys = (reading.value for reading in readings)
    little = isinstance(system, dict) and system.get("little_endian") is True
    if magic != _LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL or not little:
        _damaged(where, "does not begin as torch writes it on a little-endian machine")
    named = type(keys) is list and all(type(key) is str for key in keys)
    if not named or len(set(keys)) < len(keys) or set(keys) != set(storages.whole):
        _damaged(where, "does not list its storages")
    places = {}
    for key in keys:
        storage = storages.whole[key]
        held = int.from_bytes(read_at(file, end, 8), "little")
        places[key], end = end + 8, end + 8 + storage.nbytes
        if held != storage.numel or end > size:
            _damaged(
                where,
                f"expects {storage.nbytes} bytes in storage {key}, but the file has another number",
            )
    if end != size:
        raise CheckpointError(
            f"{where} continues after its last storage, with {size - end} bytes that belong to "
            "nothing."
        )
    return _torch_file(readings[3], places)


def _five_pickles(file: BinaryIO, where: str) -> tuple["_Storages", list[pickles.Reading]]:
    """Returns the storages that an older file describes, and the five pickles at its beginning.

    The numbers in the storages are not read.
    """
    for length in _BEGINNINGS:
        data = read_at(file, 0, length)
        storages, readings, end = _Storages(legacy=True), [], 0
        try:
            for number in range(5):
                resolve = storages.resolve if number == 3 else None
                readings.append(pickles.read_pickle(data, torch_names.TORCH, resolve, end))
                end = readings[-1].end
            return storages, readings
        except pickles.TooShortError:
            continue
        except PickleError as error:
            _refuse(error, where)
    _damaged(where, "ends too early")


def read_tensors(
    file: BinaryIO, wanted: Mapping[str, StoredTensor], places: Mapping[str, int], where: str
) -> dict[str, Tensor]:
    """Returns the wanted tensors, each contiguous and in memory of its own.

    Several names of one stored tensor get the same tensor. Raises CheckpointError, before anything
    is allocated, if the tensors are overlapping views that claim far more than the file holds.
    """
    _check_total(wanted, file, where)
    tensors: dict[str, Tensor] = {}
    title = f"reading {os.path.basename(where)}"
    with byte_bar(sum(value.nbytes for value in wanted.values()), title) as bar:
        for value in wanted.values():
            if value.place not in tensors:
                tensors[value.place] = _read_tensor(file, value, places, where)
            bar.update(value.nbytes)
    return {name: tensors[value.place] for name, value in wanted.items()}


class _Storages:
    """Turns persistent ids into storages; ids with the same key give the same storage."""

    def __init__(self, legacy: bool = False) -> None:
        self.legacy = legacy
        self.whole: dict[str, Storage] = {}
        self.views: dict[str, Storage] = {}

    def resolve(self, saved: Any) -> Storage:
        """Returns the storage that an id names. Raises PickleError if the id names none."""
        if type(saved) is not tuple or len(saved) != 5 + self.legacy or saved[0] != "storage":
            raise PickleError("has a persistent id that is not a storage")
        _, kind, key, location, numel, *view = saved
        if type(kind) is not StorageKind or type(key) is not str or type(location) is not str:
            raise PickleError("has a persistent id that is not a storage")
        if len(key) > _LONGEST_KEY:  # the key is repeated for every tensor in the storage
            raise PickleError(f"has a storage key of {len(key)} characters, which is too long")
        storage = self.whole.setdefault(key, Storage(key, kind.dtype, torch_names.whole(numel)))
        if storage != Storage(key, kind.dtype, numel) or key in self.views:
            raise PickleError(f"describes storage {key} in two ways")
        if not view or view[0] is None:
            return storage
        match view[0]:
            case (str(name), int(first), int(count)):
                part = Storage(key, kind.dtype, torch_names.whole(count), torch_names.whole(first))
            case _:
                raise PickleError("has a persistent id that is not a storage")
        if first + count > numel or name in self.whole or self.views.get(name, part) != part:
            raise PickleError(f"describes storage {name} in two ways")
        self.views[name] = part
        return part


def _refuse(error: PickleError, where: str) -> NoReturn:
    if not isinstance(error, pickles.NotAdmittedError):
        _damaged(where, str(error))
    raise CheckpointError(
        f"{where} is not a readable checkpoint: its pickle asks for {error}, "
        "but only tensors and plain values are admitted; nothing was run. "
        "Save only the state dict: torch.save(model.state_dict(), path)."
    )


def _damaged(where: str, how: str) -> NoReturn:
    raise CheckpointError(
        f"{where} is not a readable checkpoint: its pickle {how}. "
        "Is it truncated, or a renamed file of another kind?"
    )


def _inside(entries: list[Entry], where: str) -> dict[str, Entry]:
    """Returns the entries of a torch archive by their names inside its single folder."""
    root = entries[0].name.split("/")[0] + "/" if entries else ""
    inside = {entry.name.removeprefix(root): entry for entry in entries}
    # torch ignores the case of its entries
    if len(inside) < len(entries) or any(
        entry.name == name or name != name.lower() for name, entry in inside.items()
    ):
        raise CheckpointError(
            f"{where} is not a readable checkpoint: the entries of the zip are not named as torch "
            "names them."
        )
    return inside


def _check_records(file: BinaryIO, inside: dict[str, Entry], where: str) -> None:
    """Raises CheckpointError unless the entries in _RECORDS are as torch writes them.

    These entries describe the archive.
    """
    for name, pattern in _RECORDS.items():
        entry = inside.get(name)
        if entry is None and name != "version":
            continue  # older versions of torch do not write this entry
        said = b""
        if entry is not None and entry.size <= _SMALL:
            said = read_at(file, entry.start, entry.size)
        if said == b"big":
            raise CheckpointError(
                f"{where} was written by a big-endian machine: load it there with torch, "
                "and save its weights as .safetensors."
            )
        if not re.fullmatch(pattern, said):
            raise CheckpointError(
                f"{where} is not a readable checkpoint: its entry {name} is not as torch writes "
                "it. Is it truncated, or a renamed file of another kind?"
            )


def _torch_file(reading: pickles.Reading, places: dict[str, int]) -> TorchFile:
    """Returns the content without the argparse.Namespaces at its top level.

    The values of the first one become `namespace`.
    """
    content = reading.value
    if torch_names.NAMESPACE.name not in reading.imported:
        return TorchFile(content, None, places)
    held = content.items() if isinstance(content, Mapping) else ()
    spaces = [value.values or {} for _, value in held if isinstance(value, pickles.Bag)]
    left = {key: value for key, value in held if not isinstance(value, pickles.Bag)}
    return TorchFile(left if spaces else content, (spaces or [{}])[0], places)


def _check_total(wanted: Mapping[str, StoredTensor], file: BinaryIO, where: str) -> None:
    """Raises CheckpointError if overlapping tensors claim too many bytes for the file's size.

    One limit applies to the bytes of the tensors. Another limit applies to the bytes that are read,
    which include the gaps in strided views. A view with several names counts once.
    """
    known = {value.place: value for value in wanted.values()}.values()
    size = os.fstat(file.fileno()).st_size
    claimed = sum(value.nbytes for value in known)
    spanned = sum(value.span * value.dtype.itemsize for value in known)
    if claimed > _MOST_TIMES * size + _SPARE or spanned > _MOST_SPANS * size + _SPARE:
        raise CheckpointError(
            f"{where} claims more numbers than it holds: its tensors are overlapping views."
        )


def _read_tensor(
    file: BinaryIO, value: StoredTensor, places: Mapping[str, int], where: str
) -> Tensor:
    """Returns one tensor, contiguous even if it is strided in the file."""
    if not value.numel:
        return torch.empty(value.shape, dtype=value.dtype)
    read = torch.empty(value.span, dtype=value.dtype)
    place = places[value.key] + value.first * value.dtype.itemsize
    read_into(file, place, read.view(torch.uint8).numpy().data, where)
    tensor = read.as_strided(value.shape, value.strides)
    if value.span == value.numel and tensor.is_contiguous():
        return read.view(value.shape)
    return tensor.clone(memory_format=torch.contiguous_format)
