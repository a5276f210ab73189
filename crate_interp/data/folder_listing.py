"""The picture files under a folder: their order, sizes, labels and fingerprint."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import expanduser
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from crate_interp.core.files import write
from crate_interp.core.folders import listed
from crate_interp.core.pictures import SUFFIXES, UNREAD_SUFFIXES, quoted
from crate_interp.core.safe_text import plain
from crate_interp.results.result_reading import META

if TYPE_CHECKING:
    import pyarrow


def path_and_option(text: str) -> tuple[Path, str | None]:
    """Splits a text at its last colon into a path and an option.

    The option is None if the text has no colon, or if the whole text is an existing path.
    """
    text = expanduser(text)  # Path.expanduser raises for an unknown user
    before, colon, after = text.rpartition(":")
    return (Path(text), None) if not colon or os.path.exists(text) else (Path(before), after)


def pictures_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Returns the paths of the files that `names_under` yields."""
    return [folder / name for name in names_under(folder, suffixes)]


def names_under(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Iterator[str]:
    """Yields, in order, the names of the files under a folder that end in one of `suffixes`.

    A name is the path below the folder, written with /; names are in order part by part. Files and
    folders whose names begin with a dot are left out, and so are the files of a result that was
    saved under the folder. Links are followed wherever they lead, because the user unpacked the
    folder, except links that lead back to a folder that contains them.

    Raises ValueError if a folder is reached twice, because its pictures would count twice.
    """
    results: set[str] = set()
    places: dict[tuple[int, int], str] = {}  # the folders so far, by inode

    def walk(below: str) -> Iterator[str]:
        try:
            place = os.stat(folder / below)
            with os.scandir(folder / below) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError:  # the folder may not be entered, or its path is too long
            return
        first = places.setdefault((place.st_dev, place.st_ino), below)
        if first != below and below.startswith(first):  # a link to a folder that contains it
            return
        if first != below:
            raise ValueError(
                f"{quoted(folder / first)} and {quoted(folder / below)} are the same folder: "
                "pictures would count twice. Remove the link."
            )
        if any(entry.name == META for entry in entries):
            results.update(below + name for name in listed(folder / below / META))
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if os.path.isdir(entry.path):
                yield from walk(f"{below}{entry.name}/")
            elif os.path.splitext(entry.name)[1].lower() in suffixes:
                if below + entry.name not in results:
                    yield below + entry.name

    yield from walk("")


def inside(folder: Path, name: str, where: Path) -> Path:
    """Returns the path of the file `name` in a folder.

    Links in the folder are the user's own and are followed. where: the path of the list that
    contains the name, for the error. Raises ValueError if the name leads out of the folder, or if
    no file can have this name.
    """
    parts = PureWindowsPath(name)  # takes both / and \ as separators
    try:
        os.fsencode(name)
        right = name and not parts.anchor and ".." not in parts.parts and "\0" not in name
    except UnicodeEncodeError:  # a lone surrogate that does not stand for a byte
        right = False
    if not right:
        raise ValueError(
            f"{quoted(where)} names the file {quoted(name)}, which is not inside "
            f"{quoted(folder)}: it is not read."
        )
    return folder / name


def names_and_sizes(paths: Sequence[Path], names: Sequence[str]) -> str:
    """Returns a fingerprint of files, made of their names and sizes; no content is read."""
    return fingerprint_of(names, [path.stat().st_size for path in paths])


def fingerprint_of(names: Iterable[str], sizes: Iterable[int]) -> str:
    """Returns the fingerprint made of the names and sizes of files."""
    digest = hashlib.sha256()
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        line = bytes_of(name).replace(b"\n", b"\0")  # names never hold a zero byte
        digest.update(b"\n" * (number > 0) + line + f" {size}".encode())
    return f"names-and-sizes:sha256:{digest.hexdigest()}"


def bytes_of(name: str) -> bytes:
    """Returns the bytes of a file name, also if they are not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def first_folders(names: Iterable[str]) -> list[str] | None:
    """Returns the first folder of every name as labels, or None if a file is in no folder.

    Labels are written into tables and files, so characters that would harm them become escapes.
    Raises ValueError if two folders would get the same label.
    """
    labels: list[str] = []
    folders: dict[str, str] = {}  # label -> folder
    known: dict[str, str] = {}
    for name in names:
        folder, slash, _ = name.partition("/")
        if not slash:
            return None
        if folder not in known:
            known[folder] = plain(folder, 1000)
            if folders.setdefault(known[folder], folder) != folder:
                raise ValueError(
                    f"two folders {quoted(folder)} differ in invisible characters: rename one."
                )
        labels.append(known[folder])
    return labels


@dataclass(frozen=True)
class Listing:
    """The names and sizes of the pictures under a folder, listed once, without opening them.

    unread: the number of files with each suffix of a picture format that is not read; it is not
    kept in the file of a listing.
    """

    folder: Path
    names: list[str]
    sizes: list[int]
    unread: Counter[str] = field(default_factory=Counter, compare=False)

    @classmethod
    def of(cls, folder: Path) -> "Listing":
        """Lists the pictures that a folder holds now."""
        every = list(names_under(folder, SUFFIXES + UNREAD_SUFFIXES))
        names = [name for name in every if os.path.splitext(name)[1].lower() in SUFFIXES]
        unread = Counter(os.path.splitext(name)[1].lower() for name in set(every) - set(names))
        return cls(folder, names, [_size(folder / name) for name in names], unread)

    @classmethod
    def kept(cls, path: Path, folder: Path) -> "Listing | None":
        """Returns a folder's listing from a file that `keep` wrote; None if the file has none."""
        import pyarrow.parquet as parquet

        if path.is_symlink() or not is_listing(path):
            return None
        table: Any = parquet.read_table(path)
        if table.schema.metadata != _schema(folder).metadata:
            return None
        names = [name.decode("utf-8", "surrogateescape") for name in table["name"].to_pylist()]
        return cls(folder, names, table["size"].to_pylist())

    def keep(self, path: Path) -> None:
        """Writes the listing into a file, unless the file exists."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        if not path.exists():
            columns = [list(map(bytes_of, self.names)), self.sizes]
            table = pa.table(columns, schema=_schema(self.folder))
            write(path, lambda part: parquet.write_table(table, part))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names and sizes. No content is read."""
        return fingerprint_of(self.names, self.sizes)

    def paths(self, numbers: Iterable[int]) -> list[Path]:
        """Returns the paths of files by their numbers.

        Raises ValueError if a file has vanished or changed its size since the folder was listed.
        """
        paths = []
        for number in numbers:
            path = inside(self.folder, self.names[number], self.folder)
            before, now = self.sizes[number], _size(path)
            if before != now:
                what = "is gone" if now < 0 else f"has {now:,} bytes"
                raise ValueError(
                    f"{quoted(path)} {what}, but had {before:,} bytes when the folder was listed: "
                    "the data has changed. Put the file back; or, to start over, give another "
                    "folder for the result, or resume=False (--restart)."
                )
            paths.append(path)
        return paths


def is_listing(path: Path) -> bool:
    """Tells whether a file has the columns of a file that `Listing.keep` writes."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        schema = parquet.read_schema(path)
    except (OSError, ValueError, pa.ArrowException):
        return False
    return schema.equals(_schema(Path())) and list(schema.metadata or ()) == [b"folder"]


def _size(path: Path) -> int:
    """Returns the size of a file, or -1 if it cannot be read, such as that of a broken link."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _schema(folder: Path) -> "pyarrow.Schema":
    import pyarrow as pa

    columns = [("name", pa.large_binary()), ("size", pa.int64())]
    return pa.schema(columns, metadata={"folder": bytes_of(os.path.abspath(folder))})
