"""Zip archives in which every byte has one meaning.

The entries follow one another from the first byte of the file, the directory follows the last
entry, and the end record follows the directory. Each entry's header agrees with the directory. No
other parser can find other entries in such a file.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from crate_interp.core.errors import CheckpointError

MAGIC = b"PK\x03\x04"  # a zip must begin with its first entry
_END, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # marker for "see the 64-bit field"
_MOST_ENTRIES, _LONGEST_DIRECTORY = 200_000, 2**26
_DESCRIBED_AFTER, _UTF8 = 0x0008, 0x0800
_FLAGS = _DESCRIBED_AFTER | _UTF8 | 0x0006  # 0x0006: the writer's compression level
_STORED, _DEFLATED = 0, 8
_FOLDER = 0x10  # the bit in the DOS attributes that marks a folder
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """One file in an archive: `stored` bytes from `start` on, which unpack to `size` bytes."""

    name: str
    start: int
    stored: int
    size: int
    crc: int
    compressed: bool


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the directory."""

    raw_name: bytes
    name: str
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    offset: int


def read_directory(file: BinaryIO, where: str) -> list[Entry]:
    """Returns the entries of a zip, in the order of its directory.

    Raises CheckpointError unless the whole file is one chain of entries, directory and end
    record, as torch and numpy write it: no gaps, nothing twice, nothing encrypted, no comments.
    """
    offset, size, count = _end(file, where)
    if count > _MOST_ENTRIES or size > _LONGEST_DIRECTORY:
        raise CheckpointError(f"{where} has {count} entries: no checkpoint has so many.")
    rows = _rows(read_at(file, offset, size), count, where)
    if len({row.name.lower() for row in rows}) < len(rows):
        _damaged(where, "two of its entries have the same name")
    starts, place = {}, 0
    for row in sorted(rows, key=lambda row: row.offset):
        starts[row.offset], place = _after(file, row, place, offset, where)
    if place != offset:
        _damaged(where, "there are bytes before its directory that belong to no entry")
    return [
        Entry(row.name, starts[row.offset], row.stored, row.size, row.crc, row.method == _DEFLATED)
        for row in rows
    ]


def read_at(file: BinaryIO, place: int, count: int) -> bytes:
    """Returns `count` bytes from `place` on, or fewer if the file ends earlier."""
    file.seek(place)
    pieces = []
    while count > 0 and (piece := file.read(count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_into(file: BinaryIO, place: int, target: memoryview, where: str) -> None:
    """Fills `target` with the bytes from `place` on."""
    file.seek(place)
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            _damaged(where, "the file ended while it was read")
        done += count


def _damaged(where: str, how: str) -> NoReturn:
    raise CheckpointError(
        f"{where} is not a readable checkpoint: {how}. "
        "Is it truncated, or a renamed file of another kind?"
    )


def _end(file: BinaryIO, where: str) -> tuple[int, int, int]:
    """Returns the place and size of the directory, and the number of its entries."""
    place = os.fstat(file.fileno()).st_size - _END.size
    raw = read_at(file, max(place, 0), _END.size)
    if len(raw) < _END.size or raw[:4] != b"PK\x05\x06":
        _damaged(where, "it is a zip without an end record at its end")
    _, disk, first, here, count, size, offset, comment = _END.unpack(raw)
    if disk or first or here != count or comment:
        _damaged(where, "it is a zip with an end record that no checkpoint has")
    raw = read_at(file, max(place - _LOCATOR.size, 0), _LOCATOR.size)
    if place >= _LOCATOR.size and raw[:4] == b"PK\x06\x07":
        place -= _LOCATOR.size + _END64.size
        wide = read_at(file, max(place, 0), _END64.size)
        if place < 0 or _LOCATOR.unpack(raw)[1:] != (0, place, 1) or wide[:4] != b"PK\x06\x06":
            _damaged(where, "the two end records of the zip contradict each other")
        _, length, _, _, disk, first, here, *wanted = _END64.unpack(wide)
        narrow = ((count, _FULL16), (size, _FULL32), (offset, _FULL32))
        if (length, disk, first, here) != (_END64.size - 12, 0, 0, wanted[0]) or any(
            value not in (full, right) for (value, full), right in zip(narrow, wanted, strict=True)
        ):
            _damaged(where, "the two end records of the zip contradict each other")
        count, size, offset = wanted
    if offset + size != place:
        _damaged(where, "the end record of the zip does not follow its directory")
    return offset, size, count


def _rows(raw: bytes, count: int, where: str) -> list[_Row]:
    rows, place = [], 0
    for _ in range(count):
        fixed = raw[place : place + _CENTRAL.size]
        if len(fixed) < _CENTRAL.size or fixed[:4] != b"PK\x01\x02":
            _damaged(where, "the directory of the zip is damaged")
        (_, _, _, flags, method, _, _, crc, stored, size, long, more, comment, disk, _, kind,
         offset) = _CENTRAL.unpack(fixed)  # fmt: skip
        place += _CENTRAL.size + long + more
        name, extra = raw[place - long - more : place - more], raw[place - more : place]
        size, stored, offset = _wide(extra, (size, stored, offset), where)
        if comment or disk or flags & ~_FLAGS or method not in (_STORED, _DEFLATED):
            _damaged(where, "an entry of the zip is encrypted, or has options no checkpoint uses")
        if kind & _FOLDER or name.endswith(b"/"):
            raise CheckpointError(
                f"{where} is a zip with entries for folders, which torch does not write: pack it "
                "with `zip -0 -r -D`, or give the file as torch.save wrote it."
            )
        if method == _STORED and stored != size:
            _damaged(where, "an uncompressed entry of the zip has two sizes")
        try:
            text = name.decode("utf-8" if flags & _UTF8 else "cp437")
        except UnicodeDecodeError:
            _damaged(where, "an entry of the zip has a name that is not text")
        if place > len(raw) or len(name) != long or not name or "\0" in text or text[-1] == "/":
            _damaged(where, "the directory of the zip is damaged")
        rows.append(_Row(name, text, flags, method, crc, stored, size, offset))
    if place != len(raw):
        _damaged(where, "the directory of the zip is longer than its entries")
    return rows


def _wide(extra: bytes, values: tuple[int, ...], where: str) -> list[int]:
    """Returns sizes and offsets; values of more than 32 bits are read from the extra field."""
    fields, place = {}, 0
    while place + 4 <= len(extra):
        kind, long = struct.unpack_from("<2H", extra, place)
        fields.setdefault(kind, extra[place + 4 : place + 4 + long])
        place += 4 + long
    if place != len(extra):
        _damaged(where, "an entry of the zip has a damaged extra field")
    wide = fields.get(1, b"")
    result = []
    for value in values:
        if value == _FULL32:
            if len(wide) < 8:
                _damaged(where, "an entry of the zip does not say its size")
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        result.append(value)
    return result


def _after(file: BinaryIO, row: _Row, place: int, end: int, where: str) -> tuple[int, int]:
    """Returns where the bytes of an entry begin, and where the next entry must begin.

    place: where the entry must begin. end: where the directory begins.
    """
    wrong = f"the entry {row.name} of the zip is not what its directory says"
    raw = read_at(file, place, _LOCAL.size)
    if row.offset != place or len(raw) < _LOCAL.size or raw[:4] != MAGIC:
        _damaged(where, wrong)
    _, _, flags, method, _, _, crc, stored, size, long, more = _LOCAL.unpack(raw)
    names = read_at(file, place + _LOCAL.size, long + more)
    start = place + _LOCAL.size + long + more
    if names[:long] != row.raw_name or (flags, method) != (row.flags, row.method):
        _damaged(where, wrong)
    if start + row.stored > end:
        _damaged(where, wrong)
    after = start + row.stored
    if flags & _DESCRIBED_AFTER:
        # the header was written before the sizes were known, so its sizes are unset or correct
        if any(
            value not in (0, _FULL32, right)
            for value, right in ((crc, row.crc), (stored, row.stored), (size, row.size))
        ):
            _damaged(where, wrong)
        return start, after + _descriptor(read_at(file, after, 24), row, where, wrong)
    size, stored = _wide(names[long:], (size, stored), where)
    if (crc, stored, size) != (row.crc, row.stored, row.size):
        _damaged(where, wrong)
    return start, after


def _descriptor(raw: bytes, row: _Row, where: str, wrong: str) -> int:
    """Returns the length of the record that follows an entry and repeats the entry's sizes."""
    for form in ("<4sLLL", "<4sLQQ"):
        long = struct.calcsize(form)
        if len(raw) >= long and struct.unpack(form, raw[:long]) == (
            b"PK\x07\x08", row.crc, row.stored, row.size
        ):  # fmt: skip
            return long
    if row.size:
        _damaged(where, wrong)
    return 0  # torch omits this record after an empty entry


class Unpacked:
    """The content of an entry, unpacked piece by piece; its checksum is checked at the end."""

    def __init__(self, file: BinaryIO, entry: Entry, where: str) -> None:
        self._file, self._entry, self._where = file, entry, where
        self._done = self._crc = self._given = 0
        self._inflate = zlib.decompressobj(-15) if entry.compressed else None

    def read(self, count: int) -> bytes:
        """Returns the next `count` bytes. Raises CheckpointError if there are fewer."""
        buffer = bytearray(count)
        self.fill(memoryview(buffer))
        return bytes(buffer)

    def fill(self, target: memoryview) -> None:
        """Fills `target` with the next bytes. Raises CheckpointError if there are too few."""
        done = 0
        while done < len(target):
            piece = self._piece(min(len(target) - done, _PIECE))
            if not piece:
                _damaged(self._where, "an entry holds fewer bytes than it claims")
            target[done : done + len(piece)] = piece
            done += len(piece)

    def close(self) -> None:
        """Raises CheckpointError unless the whole entry was read and its checksum is right."""
        if self._given != self._entry.size or self._crc != self._entry.crc:
            _damaged(self._where, "its checksum differs from its content")

    def _piece(self, count: int) -> bytes:
        rest = self._entry.stored - self._done
        if self._inflate is None:
            piece = read_at(self._file, self._entry.start + self._done, min(count, rest))
            self._done += len(piece)
        else:
            piece, last = b"", False
            while not piece and not last:
                packed = self._inflate.unconsumed_tail
                if not packed:
                    packed = read_at(
                        self._file, self._entry.start + self._done,
                        min(_PIECE, self._entry.stored - self._done),
                    )  # fmt: skip
                    self._done += len(packed)
                last = not packed or self._inflate.eof
                piece = self._inflate.decompress(packed, count)
        self._given += len(piece)
        self._crc = zlib.crc32(piece, self._crc)
        return piece
