"""Named tensors from a .npz file of the JAX training.

Only the weights are read, one member at a time, and never a pickle.
"""

import zipfile
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from crate_interp.checkpoints.progress import byte_bar
from crate_interp.errors import CheckpointError

_WEIGHTS = "params/"  # beside opt/ and chrono/, which are more than half of a training file
_OLD_NAME, _NAME = "/Attention_0/", "/MultiHeadDotProductSubspaceAttention_0/"
_FLOATS = ("<f2", "<f4", "<f8")
_BFLOAT16 = "|V2"  # numpy has no bfloat16 and stores it as two bytes
_MAX_MEMBERS = 100_000
# float weights hardly compress; a small array of zeros does
_MAX_RATIO, _SMALL, _TOTAL = 50, 2**20, 2**26


def is_npz(path: Path) -> bool:
    """Tells whether this is a zip of arrays. A torch file is a zip of other things."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return bool(names) and all(name.endswith(".npy") for name in names)


def read_npz(path: Path) -> dict[str, Tensor]:
    """Returns the weights by their path in the tree, without "params/".

    Sizes are checked before anything is allocated: what the headers claim, what the archive
    stores and what the file has room for must agree. Raises CheckpointError if they do not,
    and for anything but plain arrays of floats.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > _MAX_MEMBERS:
            raise CheckpointError(f"{path} has {len(members)} entries: no checkpoint has so many.")
        if sum(info.compress_size for info in members) > path.stat().st_size:
            raise CheckpointError(
                f"{path} claims entries larger than the file: it is damaged or was made to harm."
            )
        stored = sum(info.compress_size for info in members)
        if sum(info.file_size for info in members) > max(_TOTAL, _MAX_RATIO * stored):
            raise CheckpointError(
                f"{path} claims {sum(info.file_size for info in members)} bytes in {stored}: "
                "weights do not compress so."
            )
        inside = [info for info in members if info.filename.startswith(_WEIGHTS)]
        tensors: dict[str, Tensor] = {}
        with byte_bar(
            sum(info.file_size for info in inside or members), f"reading {path.name}"
        ) as bar:
            for info in inside or members:
                name = (
                    info.filename.removesuffix(".npy")
                    .removeprefix(_WEIGHTS)
                    .replace(_OLD_NAME, _NAME)
                )
                if name in tensors:
                    raise CheckpointError(f"{path} holds {name} twice.")
                tensors[name] = _read_member(archive, info, f"{path}: {name}")
                bar.update(info.file_size)
    return tensors


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> Tensor:
    if info.file_size > max(_SMALL, _MAX_RATIO * info.compress_size):
        raise CheckpointError(
            f"{where} claims {info.file_size} bytes in {info.compress_size}: "
            "weights do not compress so."
        )
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
        header = file.tell()
    if dtype.str not in (*_FLOATS, _BFLOAT16):
        raise CheckpointError(
            f"{where} holds {dtype}, weights are float16, bfloat16, float32 or float64."
        )
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != info.file_size - header:
        raise CheckpointError(
            f"{where} claims shape {list(shape)} and stores {info.file_size - header} bytes."
        )
    with archive.open(info) as file:
        array = np.lib.format.read_array(file)  # refuses objects by itself too
    array = np.ascontiguousarray(array).reshape(shape)  # a scalar gains an axis on the way
    if dtype.str == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
