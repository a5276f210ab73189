"""Files that are complete or not there: written beside their place, then moved into it."""

import glob
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

_WEEK = 7 * 24 * 3600  # seconds
_MODE = 0o644  # readable by all; safetensors and tempfile make files for their owner alone


def write(path: Path, writer: Callable[[Path], Any]) -> None:
    """Calls `writer` with a unique name, and moves the file that it wrote to `path`.

    Unfinished files that a dead process left beside `path` are removed after a week.
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
        return  # Windows opens no folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes text in UTF-8. What UTF-8 cannot hold, lone surrogates, becomes an escape."""
    content = text.encode("utf-8", "backslashreplace")
    write(path, lambda part: part.write_bytes(content))


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, as "sha256:" and 64 hexadecimal digits.

    Raises OSError if it is no regular file.
    """
    if not path.is_file():  # a pipe would never end
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def digest_of_bytes(content: bytes) -> str:
    """Returns the SHA-256 of bytes, as `digest` returns that of a file."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def stays_inside(name: object) -> bool:
    """Tells whether a name is a path that stays in the folder in which it begins."""
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
