"""Zips in which every byte has one meaning: what torch and numpy write, and nothing else."""

import io
import random
import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make
from crate_interp.checkpoints.formats.tensor_files import read_file
from crate_interp.checkpoints.formats.torch_files import read_archive
from crate_interp.checkpoints.formats.zip_archives import Unpacked, read_directory
from crate_interp.core.errors import CheckpointError
from reference import published_layout

END = struct.Struct("<4s4H2LH")


def entries_of(content, tmp_path):
    path = tmp_path / "archive"
    path.write_bytes(content)
    with open(path, "rb") as file:
        return read_directory(file, "it"), [
            Unpacked(file, entry, "it").read(entry.size) for entry in read_directory(file, "it")
        ]


def refused(content, match, tmp_path):
    with pytest.raises(CheckpointError, match=match) as caught:
        entries_of(content, tmp_path)
    assert "\n" not in str(caught.value)


def saved(weights, path):
    torch.save(weights, path)
    return path.read_bytes()


def stored(members, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


class OneWay(io.RawIOBase):
    """A stream that cannot seek: zipfile then writes sizes after the entries."""

    def __init__(self):
        self.parts = []

    def writable(self):
        return True

    def write(self, piece):
        self.parts.append(bytes(piece))
        return len(piece)


MEMBERS = [("a/data.pkl", b"hello" * 50), ("a/data/0", b""), ("a/version", b"3\n")]


@pytest.mark.parametrize("how", ["plain", "packed", "one way", "one way packed", "wide", "torch"])
def test_every_writer(how, tmp_path):
    members = list(MEMBERS)
    packing = zipfile.ZIP_DEFLATED if "packed" in how else zipfile.ZIP_STORED
    if "one way" in how:
        stream = OneWay()
        with zipfile.ZipFile(stream, "w", packing) as archive:
            for name, content in members:
                archive.writestr(name, content)
        content = b"".join(stream.parts)
    elif how == "wide":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in members:
                with archive.open(name, "w", force_zip64=True) as file:
                    file.write(content)
        content = buffer.getvalue()
    elif how == "torch":
        content = saved({"a": torch.arange(9.0), "b": torch.ones(0)}, tmp_path / "w.pth")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    else:
        content = stored(members, packing)
    entries, contents = entries_of(content, tmp_path)
    assert [(entry.name, held) for entry, held in zip(entries, contents, strict=True)] == members


def with_end(content, directory, size, count):
    """The archive with another end record."""
    return content[: -END.size] + END.pack(b"PK\5\6", 0, 0, count, count, size, directory, 0)


def parts_of(content):
    """Where the directory of an archive without a second end record begins, and its size."""
    _, _, _, _, count, size, start, _ = END.unpack(content[-END.size :])
    return start, size, count


def test_two_directories(tmp_path):
    """[A][directory A][B][directory B][an end record that counts from A]: parsers differ."""
    first, second = stored(MEMBERS), stored([("a/data.pkl", b"other")])
    start_a, size_a, count_a = parts_of(first)
    start_b, size_b, count_b = parts_of(second)
    body = first[: start_a + size_a] + second[: start_b + size_b]
    for start, size, count in (
        (start_a, size_b, count_b),
        (start_a, size_a, count_a),
        (start_a + size_a + start_b, size_b, count_b),
        (start_b, size_b, count_b),
        (0, len(body), count_b),
    ):
        refused(
            with_end(body + bytes(END.size), start, size, count),
            "does not follow its directory|is not what its directory says|is damaged",
            tmp_path,
        )
    refused(first + second, "does not follow its directory", tmp_path)


@given(st.binary(min_size=1, max_size=90), st.integers(0, 10**6))
def test_bytes_that_belong_to_nothing(tmp_path_factory, extra, place):
    """Nothing can be slipped in, wherever it is, and whatever the end record then says."""
    content = stored(MEMBERS)
    start, size, count = parts_of(content)
    place %= len(content) + 1
    shifted = content[:place] + extra + content[place:]
    for made in (shifted, with_end(shifted, start + len(extra), size, count)):
        refused(made, "it is not a readable checkpoint", tmp_path_factory.mktemp("w"))


def test_local_headers_say_what_the_directory_says(tmp_path):
    content = stored(MEMBERS)
    # flags, method, checksum, packed size, size, lengths of name and extra field, name
    for place in (6, 8, 14, 18, 22, 26, 28, 31):
        changed = bytearray(content)
        changed[place] ^= 1
        refused(bytes(changed), "not what its directory says|damaged extra field", tmp_path)
    torch_made = saved({"a": torch.arange(9.0)}, tmp_path / "w.pth")
    for place in (6, 8, 14, 18, 22, 26, 31, torch_made.index(b"PK\x07\x08") + 4):
        changed = bytearray(torch_made)
        changed[place] ^= 1
        refused(bytes(changed), "is not what its directory says", tmp_path)


def directory_changed(content, index, change):
    """The archive with some fields of a row of its directory changed: place in the row -> bytes."""
    start, _, _ = parts_of(content)
    data = bytearray(content)
    for _ in range(index):
        long, extra, comment = struct.unpack_from("<3H", data, start + 28)
        start += 46 + long + extra + comment
    for place, new in change.items():
        data[start + place : start + place + len(new)] = new
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({8: b"\x01\x00"}, "encrypted"),
        ({8: b"\x20\x00"}, "encrypted"),
        ({10: b"\x0c\x00"}, "has options no checkpoint uses"),
        ({24: b"\x05\x00\x00\x00"}, "has two sizes"),
        ({38: b"\x10\x00\x00\x00"}, "entries for folders"),
        ({34: b"\x01\x00"}, "encrypted"),
        ({32: b"\x01\x00"}, "encrypted|damaged"),
        ({42: b"\x01\x00\x00\x00"}, "is not what its directory says"),
        ({42: b"\xff\xff\xff\xff"}, "does not say its size"),
        ({20: b"\x00\x01\x00\x00", 24: b"\x00\x01\x00\x00"}, "is not what its directory says"),
        ({46: b"\x00"}, "is damaged"),
        ({46: b"A/DATA/0\x00\x00"}, "is damaged"),
        ({30: b"\x09\x00"}, "damaged"),
        ({28: b"\xff\xff"}, "damaged"),
    ],
)
def test_rows_that_lie(change, match, tmp_path):
    refused(directory_changed(stored(MEMBERS), 0, change), match, tmp_path)


def test_entries_that_overlap_or_repeat(tmp_path):
    content = stored([("a/one", b"x" * 50), ("a/two", b"x" * 50)])
    both = directory_changed(content, 1, {42: bytes(4), 46: b"a/one"})
    refused(both, "the same name", tmp_path)
    refused(directory_changed(content, 1, {42: bytes(4)}), "is not what its directory", tmp_path)
    upper = stored([("a/one", b"x"), ("a/ONE", b"y")])
    refused(upper, "the same name", tmp_path)
    start, size, _ = parts_of(content)
    # one row less: an entry that nobody names
    row = 46 + 5
    less = content[:start] + content[start + row : start + size] + content[-END.size :]
    refused(with_end(less, start, size - row, 1), "is not what its directory", tmp_path)


def test_end_records_that_lie(tmp_path):
    content = stored(MEMBERS)
    start, size, count = parts_of(content)
    refused(content + b"\0", "without an end record at its end", tmp_path)
    refused(content[:-1], "without an end record at its end", tmp_path)
    refused(b"PK\x03\x04", "without an end record at its end", tmp_path)
    comment = content[:-2] + struct.pack("<H", END.size) + content[-END.size :]
    refused(comment, "does not follow its directory", tmp_path)
    for place in (4, 6, 8, 10, 20):
        changed = bytearray(content)
        changed[place - END.size] ^= 1
        refused(bytes(changed), "with an end record that no checkpoint has", tmp_path)
    refused(with_end(content, start + 1, size, count), "does not follow", tmp_path)
    refused(with_end(content, start, size, count - 1), "longer than its entries", tmp_path)
    refused(with_end(content, start, size, count + 1), "is damaged", tmp_path)
    torch_made = saved({"a": torch.arange(9.0)}, tmp_path / "w.pth")
    assert torch_made[-42:-38] == b"PK\x06\x07" and torch_made[-98:-94] == b"PK\x06\x06"
    for place in (-90, -82, -78, -74, -66, -58, -50, -38, -34, -26, -14, -12, -10, -6):
        changed = bytearray(torch_made)
        changed[place] ^= 1
        refused(
            bytes(changed),
            "contradict each other|does not follow its directory|no checkpoint has",
            tmp_path,
        )


def test_many_entries_are_refused_before_they_are_read(tmp_path):
    content = stored([("a/0", b"")])
    start, size, _ = parts_of(content)
    directory = content[start : start + size] * 200_001
    place = start + len(directory)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 200_001, 200_001,
                       len(directory), start)  # fmt: skip
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, place, 1)
    end = END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), start, 0)
    many = content[:start] + directory + wide + locator + end
    refused(many, "200001 entries: no checkpoint has so many", tmp_path)


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_damage_outside_of_contents_is_seen_or_harmless(tmp_path_factory, seed, count):
    """Whatever a few changed bytes do, the contents are the old ones, changed in place, or none."""
    tmp_path, rng = tmp_path_factory.mktemp("w"), random.Random(seed)
    content = saved({"a": torch.arange(5.0)}, tmp_path / "w.pth")
    _, before = entries_of(content, tmp_path)
    changed = bytearray(content)
    for _ in range(count):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    try:
        _, after = entries_of(bytes(changed), tmp_path)
    except CheckpointError:
        return
    assert [len(held) for held in after] == [len(held) for held in before]


def test_both_kinds_of_files_pass_the_same_check(tmp_path):
    """An .npz whose directory is hidden is refused as a torch file is."""
    np.savez(tmp_path / "w.npz", **{"params/cls": np.ones(3, np.float32)})
    content = (tmp_path / "w.npz").read_bytes()
    for made, match in (
        (content + b"\0", "without an end record"),
        (b"#!/bin/sh\n" + content, "is not a readable checkpoint"),
        (content[:4] + b"\xff" + content[5:], "."),
    ):
        (tmp_path / "w.npz").write_bytes(made)
        with pytest.raises(ci.CheckpointError, match=match):
            ci.load(tmp_path / "w.npz")


# ------------------------------------------------------------------ what torch says in its zips


def changed_members(path, change):
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    return stored(change(members))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda held: held[:-2] + held[-1:], "its entry version is not as torch writes it"),
        (lambda held: [*held, ("w/constants.pkl", b"")], "is a TorchScript archive"),
        (lambda held: [*held, ("other/x", b"")], "not named as torch"),
        (lambda held: [(name.upper(), body) for name, body in held], "not named as torch"),
        (lambda held: [(name[2:], body) for name, body in held], "not named as torch"),
        (lambda held: held[1:], "without a data.pkl"),
        (lambda held: [*held[:4], *held[5:]], "storage 0, but the zip has nothing"),
        (lambda held: [(n, b"big" if "order" in n else b) for n, b in held], "big-endian machine"),
        (lambda held: [(n, b"odd" if "order" in n else b) for n, b in held], "entry byteorder"),
        (lambda held: [(n, b"11" if "version" in n else b) for n, b in held], "entry version"),
        (lambda held: [(n, b + b"\0" if "/0" in n else b) for n, b in held], "the zip has 21"),
        (lambda held: [(n, b + b"." if "pkl" in n else b) for n, b in held], "continues after"),
        (lambda held: [("w/", b""), *held], "entries for folders"),
    ],
)
def test_archives_of_something_else(change, match, tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(5.0)}, path)
    path.write_bytes(changed_members(path, lambda held: held))
    assert torch.equal(read_file(path).tensors["a"], torch.arange(5.0))  # repacked, but whole
    path.write_bytes(changed_members(path, change))
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(path)
    assert "\n" not in str(caught.value)


def test_older_versions_of_torch_say_less(tmp_path):
    """Neither byte order nor alignment were written before 2.1 and 2.6."""
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(5.0)}, path)
    short = changed_members(path, lambda held: [held[0], *held[4:-1]])
    path.write_bytes(short)
    assert torch.equal(read_file(path).tensors["a"], torch.arange(5.0))


@pytest.mark.slow
def test_files_of_more_than_4_gb(tmp_path):
    """Torch leaves the numbers out, so that the file takes no place on the disk."""
    path, large = tmp_path / "w.pth", torch.empty(9 * 2**29, dtype=torch.uint8)
    with torch.serialization.skip_data():
        torch.save({"a": torch.ones(5), "large": large, "b": torch.ones(3), "c": large[:0]}, path)
    assert path.stat().st_size > 2**32 > 2**30 > 512 * path.stat().st_blocks
    with open(path, "rb", buffering=0) as file:
        entries = read_directory(file, "it")
        found = read_archive(file, entries, "it")
    assert {entry.name: entry.size for entry in entries}["w/data/1"] == 9 * 2**29
    assert found.places["2"] > 2**32 and found.content["large"].shape == (9 * 2**29,)
    path.unlink()


def test_damage_of_the_pickle_is_seen(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(5.0), "b": torch.ones(2)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"X\x01\x00\x00\x00b") + 5] = ord("c")
    path.write_bytes(content)
    assert set(torch.load(path, weights_only=True)) == {"a", "c"}
    with pytest.raises(ci.CheckpointError, match="its pickle differs from its checksum"):
        ci.load(path)


def test_checksums_that_torch_left_out(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(published_layout(make("crate-alpha")), tmp_path / "w.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    assert ci.load(tmp_path / "w.pth", n_heads=5, image_size=(6, 20)).cfg.n_layers == 3
