"""Writing of files that are complete or absent: written elsewhere first, then moved into place."""

import glob
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

_WEEK = 7 * 24 * 3600  # seconds
_MODE = 0o644  # readable by all; safetensors and tempfile make files that only their owner can read


def write(path: Path, writer: Callable[[Path], Any]) -> None:
    """Calls `writer` with a unique path, then moves the file that `writer` wrote to `path`.

    Unfinished files that a dead process left next to `path` are removed after a week.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        writer(part)
        publish(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    _remove_old(path.parent, f".{glob.escape(path.name)}.*.part")


def publish(part: Path) -> None:
    """Makes a complete file readable by all, and waits until it is on the disk."""
    part.chmod(_MODE)
    flush(part)


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
    if not path.is_file():  # reading from a pipe would never end
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def digest_of_bytes(content: bytes) -> str:
    """Returns the SHA-256 of bytes, written as `digest` writes it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def open_regular(path: Path) -> BinaryIO:
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


def _remove_old(folder: Path, pattern: str) -> None:
    """Removes regular files of a folder that match a pattern and are older than a week."""
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process may remove it first
            if not path.is_symlink() and time.time() - path.stat().st_mtime > _WEEK:
                path.unlink()
