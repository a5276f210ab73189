"""The files of a folder, listed once: names and sizes, in memory and in a file."""

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from crate_interp.core.files import write
from crate_interp.core.pictures import SUFFIXES, UNREAD_SUFFIXES, quoted
from crate_interp.data.picture_files import bytes_of, fingerprint_of, inside, names_under

if TYPE_CHECKING:
    import pyarrow

_AT_ONCE = 4096  # entries that are taken out of Arrow's arrays at once
_UNREAD = -1  # stands for a size that cannot be read, such as that of a broken link
_ROWS_PER_BYTE = 64  # a listing with more rows per byte was not written by this library


@dataclass(frozen=True)
class Listing:
    """The names (bytes) and sizes of the pictures under a folder, as Arrow arrays.

    Each entry takes about 16 bytes more than its name. unread: the number of files with each
    suffix of a picture format that is not read; it is not kept in the file of a listing.
    """

    folder: Path
    names: "pyarrow.LargeBinaryArray"
    sizes: "pyarrow.Int64Array"
    unread: Counter[str] = field(default_factory=Counter, compare=False)

    @classmethod
    def of(cls, folder: Path) -> "Listing":
        """Lists the pictures that a folder holds now, without opening them."""
        import pyarrow as pa

        text, ends, sizes = bytearray(), array("q", [0]), array("q")
        unread: Counter[str] = Counter()
        for name in names_under(folder, SUFFIXES + UNREAD_SUFFIXES):
            suffix = os.path.splitext(name)[1].lower()
            if suffix in UNREAD_SUFFIXES:
                unread[suffix] += 1
                continue
            text += bytes_of(name)
            ends.append(len(text))
            sizes.append(_size(folder / name))
        count, nothing = len(sizes), None
        buffers = [nothing, pa.py_buffer(ends), pa.py_buffer(text)]
        names = pa.Array.from_buffers(pa.large_binary(), count, buffers)
        numbers = pa.Array.from_buffers(pa.int64(), count, [nothing, pa.py_buffer(sizes)])
        return cls(folder, names, numbers, unread)

    @classmethod
    def kept(cls, path: Path, folder: Path) -> "Listing | None":
        """Returns a folder's listing from a file that `keep` wrote; None if the file has none."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        try:
            if path.is_symlink() or not path.is_file():
                return None
            with parquet.ParquetFile(path) as file:
                if file.metadata.num_rows > _ROWS_PER_BYTE * path.stat().st_size:
                    return None
                table = file.read()
        except (OSError, ValueError, pa.ArrowException):
            return None
        if table.schema != _schema(folder) or table.schema.metadata != _schema(folder).metadata:
            return None
        names, sizes = (table[name].combine_chunks() for name in ("name", "size"))
        return None if names.null_count or sizes.null_count else cls(folder, names, sizes)

    def keep(self, path: Path) -> None:
        """Writes the listing into a file, unless the file exists."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        if not path.exists():
            table = pa.Table.from_arrays([self.names, self.sizes], schema=_schema(self.folder))
            write(path, lambda part: parquet.write_table(table, part))

    def __len__(self) -> int:
        return len(self.names)

    def name(self, number: int) -> str:
        """Returns the path of a file below the folder, written with /."""
        return _text(self.names[number].as_py())

    def names_of(self, numbers: Int[np.ndarray, "file"]) -> list[str]:
        """Returns the names of files by their numbers, as `name` does, but all at once."""
        import pyarrow as pa

        found: Any = self.names.take(pa.array(numbers))
        return [_text(name) for name in found.to_pylist()]

    def every_name(self) -> Iterator[str]:
        """Yields the names in their order."""
        return (_text(name) for name, _ in self._entries())

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        """Yields names and sizes."""
        for start in range(0, len(self), _AT_ONCE):  # Arrow is slow at single values
            part = slice(start, start + _AT_ONCE)
            yield from zip(self.names[part].to_pylist(), self.sizes[part].to_pylist(), strict=True)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names and sizes. No content is read."""
        return fingerprint_of(self._entries())

    def paths(self, numbers: Iterable[int]) -> list[Path]:
        """Returns the paths of files by their numbers.

        Raises ValueError if a file has vanished or changed its size since the folder was listed.
        """
        found = []
        for number in numbers:
            path = inside(self.folder, self.name(number), self.folder)
            was, now = self.sizes[number].as_py(), _size(path)
            if was != now:
                what = "is gone" if now == _UNREAD else f"has {now:,} bytes"
                raise ValueError(
                    f"{quoted(path)} {what}, but had {was:,} bytes when the folder was listed: the "
                    "data has changed. Put the file back; or, to start over, give another folder "
                    "for the result, or resume=False (--restart)."
                )
            found.append(path)
        return found


def is_listing(path: Path) -> bool:
    """Tells whether a file has the columns of a file that `Listing.keep` writes."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        found = parquet.read_schema(path)
    except (OSError, ValueError, pa.ArrowException):
        return False
    columns = _schema(Path()).remove_metadata()
    return found.remove_metadata().equals(columns) and list(found.metadata or ()) == [b"folder"]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return _UNREAD


def _schema(folder: Path) -> "pyarrow.Schema":
    import pyarrow as pa

    columns = [("name", pa.large_binary()), ("size", pa.int64())]
    return pa.schema(columns, metadata={"folder": bytes_of(os.path.abspath(folder))})
