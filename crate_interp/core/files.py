"""Writing of files that are complete or absent: written elsewhere first, then moved into place."""

import errno
import glob
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from crate_interp.core.safe_text import plain

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NAMED = 5  # the most files that an error names
_WEEK = 7 * 24 * 3600  # seconds
_OWN = re.compile(r"(.+[.-][0-9a-f]{8})([0-9a-f]{8})(\.\w+)?", re.DOTALL)
# flags of a file that is opened although its name may be a link or a pipe; Windows lacks them
CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def write(path: Path, writer: Callable[[Path], Any]) -> None:
    """Calls `writer` with a new empty file next to `path`, then moves this file to `path`.

    The writer must write into the file, and not put another file in its place. Files of the same
    kind that a dead process left are removed.
    """
    with unfinished(path) as part:
        writer(part)
        flush(part)
        os.replace(part, path)
    remove_unfinished(path.parent, f".{path.name}.")


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a new empty file next to `path`, and removes it at the end unless it was renamed.

    While the block runs, `remove_unfinished` leaves the file alone in every process.
    """
    while True:
        part = path.with_name(own_name(f".{path.name}.", ".part"))
        # the system subtracts the umask from this mode
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        held = _hold(handle)
        if held is None or (held and os.fstat(handle).st_nlink):
            break
        os.close(handle)  # before it was locked, another process took it for a dead one's file
    if fcntl is None:
        os.close(handle)  # Windows does not rename open files
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
        if fcntl is not None:
            os.close(handle)


def remove_unfinished(folder: Path, prefix: str = ".") -> None:
    """Removes the files of `unfinished` that dead processes left in a folder.

    On a disk without locks, these are the files that nobody changed for a week.
    """
    for path in folder.glob(f"{glob.escape(prefix)}*.part"):
        if is_own_name(path.name):
            with suppress(OSError):  # another process may remove it first
                _remove_dead(path)


def _remove_dead(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | CAREFULLY)
    try:
        found = os.fstat(handle)
        held = _hold(handle) if stat.S_ISREG(found.st_mode) else False
        if held:
            path.unlink()
    finally:
        os.close(handle)
    if held is None and time.time() - found.st_mtime > _WEEK:
        path.unlink()


def _hold(handle: int) -> bool | None:
    """Locks an open file until it is closed; returns False if another process has locked it.

    Returns None if the disk has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def own_name(start: str, end: str = "") -> str:
    """Returns a new name, by which `is_own_name` knows that this library made it.

    start: ends in "." or "-". end: a suffix or nothing.
    """
    start += secrets.token_hex(4)
    return f"{start}{_mark(start + end)}{end}"


def is_own_name(name: str) -> bool:
    """Tells whether `own_name` made a name: its last digits are a digest of its other letters."""
    found = _OWN.fullmatch(name)
    return found is not None and found[2] == _mark(found[1] + (found[3] or ""))


def _mark(text: str) -> str:
    return hashlib.sha256(f"crate_interp {text}".encode("utf-8", "surrogatepass")).hexdigest()[:8]


def odd_kind(path: Path) -> str:
    """Returns "a link", "a folder" or "no regular file", or "" for a regular file or nothing."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return ""
    if stat.S_ISREG(mode):
        return ""
    kinds = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"))
    return next((words for test, words in kinds if test(mode)), "no regular file")


def check_regular(path: Path) -> None:
    """Raises ValueError if a file is to be written where there is a link, a folder or a pipe."""
    kind = odd_kind(path)
    if kind:
        raise ValueError(
            f"{str(path)!r} is {kind} where a file is to be written: remove it, or give another "
            "folder."
        )


def foreign(folder: Path, names: Collection[str]) -> ValueError:
    """Returns the error for files that would be lost, and that no index or ledger of ours names."""
    some = ", ".join(plain(repr(name), 100) for name in sorted(names)[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ValueError(
        f"{str(folder)!r} holds files that crate_interp did not write, or that were changed since, "
        f"and that would be lost: {some}{more}. Nothing was removed. Move these files to another "
        "place, or give another folder."
    )


def flush(path: Path) -> None:
    """Waits until the bytes of a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
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
    """Opens a regular file, or a link to one, for reading.

    Raises OSError for anything else. A folder, pipe, socket or device is not opened.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{str(path)!r} is a folder, pipe, socket or device, not a file")
    # a pipe that has taken the file's place since then cannot block
    at_once = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{str(path)!r} is no longer a file")
    return file


def stays_inside(name: object) -> bool:
    """Tells whether a relative path stays inside the folder that it starts from."""
    return (
        isinstance(name, str)
        and name not in ("", ".")
        and not PurePosixPath(name).is_absolute()
        and ".." not in PurePosixPath(name).parts
        and not set(name) & {"\\", "\0"}
    )
