"""Who works on the folder of a run: shards, their locks, and what stops writing."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout

from crate_interp.core.files import check_regular, remove_unfinished
from crate_interp.core.folders import tidy
from crate_interp.results.result_files import META

RUN, CHUNKS = "run.json", "chunks"
_FOLD = ".crate-interp-fold.lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOMENT = 0.3  # seconds, in which a process that looks for dead ones gives a lock back


class Shard(NamedTuple):
    """Process number `place` (from 0) of `total`; it takes every total-th chunk."""

    place: int
    total: int

    def __str__(self) -> str:
        return f"{self.place}/{self.total}"


WHOLE = Shard(0, 1)


def shard_of(shard: str | None) -> Shard:
    """Returns the shard that "i/n" names; None takes i and n from RANK and WORLD_SIZE.

    If these variables are unset, this process takes all chunks.

    Raises ValueError unless 0 <= i < n.
    """
    where = ""
    if shard is None:
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None or size is None:
            return WHOLE
        shard, where = f"{rank}/{size}", " (RANK and WORLD_SIZE of the environment)"
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard) if isinstance(shard, str) else None
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(
            f"shard={shard!r}{where}: give 'i/n' with i from 0 to n - 1, such as '0/4' for the "
            "first of four."
        )
    return Shard(int(match[1]), int(match[2]))


def device_of_rank() -> str:
    """Returns this process's GPU, "cuda:N" for LOCAL_RANK N, or "cpu" without GPUs.

    If this process sees fewer GPUs than there are ranks (for example, only its own GPU), N is taken
    modulo the number of visible GPUs.
    """
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


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


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Waits until no other process merges chunks or writes pages in a folder."""
    path = out / _FOLD
    check_regular(path)
    with writable(out), FileLock(path):
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


@contextmanager
def working(out: Path, shard: Shard, every: bool) -> Iterator[None]:
    """Keeps other processes from working on a shard; the lock ends with the process.

    every: refuses a process on any other shard too. Raises ValueError if another process works on
    the shard, or with another number of shards.
    """
    mine = out / CHUNKS / f"shard-{shard.place}-of-{shard.total}.lock"
    check_regular(mine)
    with ExitStack() as stack:
        with writable(out):
            try:
                stack.enter_context(FileLock(mine, timeout=_MOMENT))
            except Timeout:  # a Timeout is an OSError too
                raise ValueError(
                    f"another process works on shard {shard} of {str(out)!r}. Wait until it ends, "
                    "give each process its own shard (shard='i/n'), or give another folder."
                ) from None
            try:
                for path in (out / CHUNKS).glob("shard-*.lock"):
                    friend = path.stem.endswith(f"-of-{shard.total}") and not every
                    if path != mine and not friend:
                        with FileLock(path, timeout=_MOMENT):
                            pass
            except Timeout:
                raise ValueError(
                    f"another process works in {str(out)!r}, with another number of shards, or "
                    "resume=False would remove its chunks. Wait until that process ends, or give "
                    "another folder."
                ) from None
        yield


def remove_leftovers(out: Path) -> None:
    """Removes what dead processes left in the folder of a run.

    Raises ValueError if a lock's name is that of a link or a folder.
    """
    check_regular(out / _FOLD)
    for folder in (out, out / CHUNKS):
        remove_unfinished(folder)
    with suppress(OSError), FileLock(out / _FOLD, timeout=0):
        tidy(out, META)
        (out / _FOLD).unlink()
