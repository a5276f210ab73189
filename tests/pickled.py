"""Pickles and torch files written by hand, operation by operation."""

import zipfile

import pytest

import crate_interp as ci
from crate_interp.checkpoints.formats.pickles import read_pickle
from crate_interp.checkpoints.formats.torch_names import TORCH

TEXT = b"X\x01\x00\x00\x00"  # a text of one character follows


def fails(match, path, **given):
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(path, **given)
    assert "\n" not in str(caught.value)


def zipped(pickled, path, storages=(bytes(4),)):
    """Writes a torch file whose pickle is `pickled`."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (
            ("data.pkl", pickled),
            ("byteorder", b"little"),
            *((f"data/{key}", content) for key, content in enumerate(storages)),
            ("version", b"3\n"),
        ):
            archive.writestr(f"archive/{name}", content)
    return path


def run(body):
    """Returns what a pickle without storages holds."""
    return read_pickle(b"\x80\x02" + body, TORCH)


def tensor_of(
    numel=4, first=0, shape=(2, 2), strides=(2, 1), kind="Float", flags=b"\x89", more=b""
):
    """Returns the operations that make one tensor of storage 0."""

    def number(value):
        size = (value.bit_length() + 8) // 8
        return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = (
        b"(X\x07\x00\x00\x00storagectorch\n" + kind.encode() + b"Storage\n" + TEXT + b"0"
        b"X\x03\x00\x00\x00cpu" + number(numel) + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(first) + numbers(shape)
        + numbers(strides) + flags + b"ccollections\nOrderedDict\n)R" + more + b"tR"
    )  # fmt: skip


def state_dict(tensor):
    return b"\x80\x02}" + TEXT + b"a" + tensor + b"s."
