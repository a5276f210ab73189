"""Reads named tensors from a .npz file of the JAX training.

Only the weights are read, one array at a time, and no pickle is ever read.
"""

import re
from math import prod
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from crate_interp.checkpoints.formats.zip_archives import Entry, Unpacked
from crate_interp.checkpoints.progress import byte_bar
from crate_interp.core.errors import CheckpointError

_WEIGHTS = "params/"  # opt/ and chrono/ are not read; they are more than half of a training file
_OLD_NAME, _NAME = "/Attention_0/", "/MultiHeadDotProductSubspaceAttention_0/"
_FLOATS = ("<f2", "<f4", "<f8")
_BFLOAT16 = ("|V2", "<V2")  # numpy has no bfloat16 and stores it as two bytes
# limits on compression: float weights hardly compress, but a small array of zeros does
_MAX_RATIO, _SMALL, _TOTAL_RATIO, _TOTAL = 50, 2**20, 8, 2**26
# matches numpy's header byte by byte, so that no Python expression has to be evaluated
_HEADER = re.compile(
    rb"\{'descr': (?P<dtype>'[^']{1,40}'|\[[^\]]*\]), 'fortran_order': (?P<turned>True|False), "
    rb"'shape': \((?P<shape>(?:\d{1,19}, ?)*(?:\d{1,19})?)\), \} *\n"
)
_LONGEST_HEADER = 10_000


def is_npz(entries: list[Entry]) -> bool:
    """Tells whether a zip holds only arrays. The zip of a torch file holds other entries."""
    return bool(entries) and all(entry.name.endswith(".npy") for entry in entries)


def read_npz(file: BinaryIO, entries: list[Entry], where: str) -> dict[str, Tensor]:
    """Returns the weights by their path in the tree of parameters, without "params/".

    Sizes are checked before anything is allocated: those in the headers of the arrays, those in
    the directory of the zip, and the size of the file must agree. Raises CheckpointError if these
    sizes disagree, and for anything but plain arrays of floats.
    """
    inside = [entry for entry in entries if entry.name.startswith(_WEIGHTS)] or entries
    total, stored = sum(entry.size for entry in inside), sum(entry.stored for entry in inside)
    if total > max(_TOTAL, _TOTAL_RATIO * stored):
        raise CheckpointError(
            f"{where} claims that {stored} bytes unpack to {total}: "
            "weights do not compress so much."
        )
    tensors: dict[str, Tensor] = {}
    with byte_bar(total, f"reading {where.rpartition('/')[2]}") as bar:
        for entry in inside:
            name = entry.name.removesuffix(".npy").removeprefix(_WEIGHTS).replace(_OLD_NAME, _NAME)
            if name in tensors:
                raise CheckpointError(f"{where} holds {name} twice.")
            tensors[name] = _read_member(file, entry, f"{where}: {name}")
            bar.update(entry.size)
    return tensors


def _read_member(file: BinaryIO, entry: Entry, where: str) -> Tensor:
    if entry.size > max(_SMALL, _MAX_RATIO * entry.stored):
        raise CheckpointError(
            f"{where} claims that {entry.stored} bytes unpack to {entry.size}: "
            "weights do not compress so much."
        )
    content = Unpacked(file, entry, where)
    dtype, turned, shape, header = _read_header(content, where)
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != entry.size - header:
        raise CheckpointError(
            f"{where} claims shape {list(shape)}, but stores {entry.size - header} bytes."
        )
    array = np.empty(prod(shape), dtype)
    content.fill(array.view(np.uint8).data)
    content.close()
    array = array.reshape(shape, order="F" if turned else "C")
    # reshape removes the axis that ascontiguousarray gives to a scalar
    array = np.ascontiguousarray(array).reshape(shape)
    if dtype == np.int16:
        return torch.from_numpy(array).view(torch.bfloat16)
    return torch.from_numpy(array)


def _read_header(content: Unpacked, where: str) -> tuple[np.dtype, bool, tuple[int, ...], int]:
    """Returns the dtype, whether the order is Fortran's, the shape, and the header's size in bytes.

    The dtype of a bfloat16 array is returned as int16.
    """
    magic = content.read(8)
    wide = magic[6:7] != b"\1"
    long = int.from_bytes(content.read(4 if wide else 2), "little")
    fields = None
    if magic[:6] == b"\x93NUMPY" and magic[6:8] in (b"\1\0", b"\2\0") and long < _LONGEST_HEADER:
        fields = _HEADER.fullmatch(content.read(long))
    if fields is None:
        raise CheckpointError(
            f"{where} is not a readable checkpoint: its header is not one that numpy writes."
        )
    named = fields["dtype"].decode("latin1").strip("'")
    if named not in (*_FLOATS, *_BFLOAT16):
        kind = np.dtype(named) if re.fullmatch(r"[<>|=]?[a-zA-Z]\d?\d?", named) else named
        raise CheckpointError(
            f"{where} holds {kind}; expected float16, bfloat16, float32 or float64."
        )
    shape = tuple(int(size) for size in re.findall(rb"\d+", fields["shape"]))
    dtype = np.dtype(np.int16 if named in _BFLOAT16 else named)
    return dtype, fields["turned"] == b"True", shape, long + (12 if wide else 10)
