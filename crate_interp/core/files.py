"""Files that are written whole or not at all, and read once with notes of what they held."""

import glob
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from crate_interp.core.safe_text import plain

_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_OWN = re.compile(r".+[.-]([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{8}(\.\w+)?", re.DOTALL)


def write(path: Path, writer: Callable[[Path], Any]) -> None:
    """Calls `writer` with a new empty file next to `path`, then moves this file to `path`.

    Files of the same kind that a dead process left are removed.
    """
    with unfinished(path) as part:
        writer(part)
        os.replace(part, path)
    remove_unfinished(path.parent, f".{path.name}.")


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a new empty file next to `path`, and removes it at the end unless it was renamed."""
    part = path.with_name(own_name(f".{path.name}.", ".part"))
    part.touch()
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def remove_unfinished(folder: Path, prefix: str = ".") -> None:
    """Removes the files of `unfinished` that dead processes of this machine left in a folder."""
    for path in folder.glob(f"{glob.escape(prefix)}*.part"):
        found = _OWN.fullmatch(path.name)
        if found and found[1] == _HOST and not lives(int(found[2])):
            with suppress(OSError):  # another process may remove it first
                path.unlink()


def lives(process: int) -> bool:
    """Tells whether a process of this machine runs."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


def own_name(start: str, end: str = "") -> str:
    """Returns a new name, by which `is_own_name` knows that this library made it.

    start: ends in "." or "-". end: a suffix or nothing.
    """
    return f"{start}{_HOST}-{os.getpid()}-{secrets.token_hex(4)}{end}"


def is_own_name(name: str) -> bool:
    """Tells whether a name has the form of `own_name`: machine, process and a random number."""
    return _OWN.fullmatch(name) is not None


def check_regular(path: Path) -> None:
    """Raises ValueError if a file is to be written where there is a link, a folder or a pipe."""
    link = os.path.islink(path)
    if link or (os.path.exists(path) and not os.path.isfile(path)):
        what = "a link" if link else "a folder or a pipe"
        raise ValueError(f"{str(path)!r} is {what} where a file is to be written: remove it.")


def foreign(folder: Path, names: Collection[str]) -> ValueError:
    """Returns the error for files that would be lost, and that no index or ledger of ours names."""
    some = ", ".join(plain(repr(name), 100) for name in sorted(names)[:5])
    return ValueError(
        f"{str(folder)!r} holds {len(names)} files that crate_interp did not write, or that have "
        f"changed since: {some}. Nothing was removed. Move them, or give another folder."
    )


def flush(path: Path) -> None:
    """Waits until the bytes of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes text in UTF-8. Lone surrogates, which UTF-8 cannot hold, become escapes."""
    content = text.encode("utf-8", "backslashreplace")
    write(path, lambda part: part.write_bytes(content))


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, as "sha256:" and 64 hexadecimal digits.

    Raises OSError if it is not a regular file.
    """
    with open_regular(path) as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def is_one(path: Path, digests: Collection[str] | None) -> bool:
    """Tells whether a regular file, and no link to it, has one of some digests."""
    try:
        return bool(digests) and not path.is_symlink() and digest(path) in digests
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False


def digest_of_bytes(content: bytes) -> str:
    """Returns the SHA-256 of bytes, written as `digest` writes it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def open_regular(path: str | Path) -> BufferedReader:
    """Opens a regular file, or a link to one, for reading; a pipe would wait for its writer.

    Raises OSError for anything else.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{str(path)!r} is a folder, pipe, socket or device, not a file")
    return open(path, "rb")


def stays_inside(name: object) -> bool:
    """Tells whether a relative path stays inside the folder that it starts from."""
    path = PureWindowsPath(name) if isinstance(name, str) else PureWindowsPath()  # takes / and \
    return bool(path.parts) and not path.anchor and not {"..", "\0"} & {*path.parts, *str(name)}


# nanoseconds: a file that changed this shortly before it was read may change again without new
# times, because file systems count times in steps of up to two seconds
STEP = 2 * 10**9
_UNSETTLED = -1  # in place of the change time of such a file, so that its times never compare equal


class Stamp(NamedTuple):
    """The size of a file and the times of its last changes: bytes, and nanoseconds since 1970."""

    size: int
    mtime_ns: int
    ctime_ns: int


class Content(NamedTuple):
    """The SHA-256 of the bytes of a file, and the file's stamp just before they were read."""

    sha256: bytes
    stamp: Stamp


_NOTED: ContextVar[dict[str, Content] | None] = ContextVar("noted", default=None)


@contextmanager
def noted() -> Iterator[dict[str, Content]]:
    """Yields a dictionary, path -> content, which `read` fills while the context is open."""
    found: dict[str, Content] = {}
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)


def read(path: str | Path) -> bytes:
    """Returns the bytes of a file. Within `noted`, also digests the bytes.

    Raises OSError if it is not a regular file.
    """
    with open_regular(path) as file:
        # looked at before reading: a later change then has other times than those noted here
        found = os.fstat(file.fileno())
        data = file.read()
    seen = _NOTED.get()
    if seen is not None:
        stamp = stamp_of(found)
        if time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) < STEP:
            stamp = stamp._replace(ctime_ns=_UNSETTLED)
        seen[os.fspath(path)] = Content(hashlib.sha256(data).digest(), stamp)
    return data


def stamp_of(status: os.stat_result) -> Stamp:
    """Returns the stamp in the answer of `os.stat`."""
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)
