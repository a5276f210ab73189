"""Who writes in the folder of a run, and what an error says if nobody can."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from crate_interp.core.files import check_regular, odd_kind, remove_unfinished
from crate_interp.core.folders import tidy
from crate_interp.questions.shards import Shard
from crate_interp.results.result_reading import META

# LISTING: the file with the names and sizes of the data's files, if they were listed
RUN, CHUNKS, LISTING = "run.json", "chunks", "listing.parquet"
LEDGERS = "ledger-*.jsonl"  # of earlier versions
_LOCKS, _FOLD = ".crate-interp-shard-*.lock", ".crate-interp-fold.lock"
_SHARD = re.compile(r"\.crate-interp-shard-[0-9]+-of-[0-9]+\.lock")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOMENT = 0.3  # seconds, in which a process that looks for dead ones gives a lock back


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Waits until no other process merges chunks or writes pages in a folder."""
    path = out / _FOLD
    check_regular(path)
    with FileLock(path):
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Turns an OSError in the `with` block into a ValueError that says why writing failed."""
    try:
        yield
    except OSError as error:
        advice = "Give another folder."
        if error.errno in _FULL:
            advice = "Finished chunks are kept. Free some space, then run the same command again."
        elif isinstance(error, IsADirectoryError):
            advice = f"{str(error.filename2 or error.filename)!r} is a folder. Remove it."
        reason = error.strerror or error
        raise ValueError(f"cannot write into {str(out)!r}: {reason}. {advice}") from None


def check_alone(out: Path, shard: Shard) -> None:
    """Raises ValueError if another process works on another shard of the folder."""
    for path in out.glob(_LOCKS):
        if path != lock_of(out, shard):
            try:
                with FileLock(path, timeout=_MOMENT):
                    pass
            except Timeout:
                raise ValueError(
                    f"another process works in {str(out)!r}, and resume=False would remove its "
                    "chunks. Wait until that process ends, or give another folder."
                ) from None


def lock_of(out: Path, shard: Shard) -> Path:
    """Returns the lock of a shard."""
    return out / _LOCKS.replace("*", f"{shard.place}-of-{shard.total}")


@contextmanager
def working(out: Path, shard: Shard) -> Iterator[None]:
    """Keeps other processes from working on a shard; the lock ends with the process."""
    path = lock_of(out, shard)
    check_regular(path)
    lock = FileLock(path, timeout=_MOMENT)
    with writable(out):
        try:
            lock.acquire()
        except Timeout:  # a Timeout is an OSError too
            raise ValueError(
                f"another process works on shard {shard} of {str(out)!r}. Wait until it ends, give "
                "each process its own shard (shard='i/n'), or give another folder."
            ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()


def remove_leftovers(out: Path, own: Path) -> None:
    """Removes what dead processes left in the folder of a run; own: the lock of this process.

    Raises ValueError if a lock's name is that of a link or a folder.
    """
    check_regular(out / _FOLD)
    for folder in (out, out / CHUNKS):
        remove_unfinished(folder)
    for path in out.glob(_LOCKS):
        with suppress(OSError):  # a Timeout is an OSError too
            empty = not odd_kind(path) and not path.stat().st_size
            if path != own and empty and _SHARD.fullmatch(path.name):
                with FileLock(path, timeout=0):
                    path.unlink()
    with suppress(OSError), FileLock(out / _FOLD, timeout=0):
        tidy(out, META)
        (out / _FOLD).unlink()
