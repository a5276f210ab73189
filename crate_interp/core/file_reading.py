"""Reads a file into memory once, and notes which bytes it held: digest, size and times."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from crate_interp.core.files import open_regular

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


def stamp_of(found: os.stat_result) -> Stamp:
    """Returns the stamp in the answer of `os.stat`."""
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns)
