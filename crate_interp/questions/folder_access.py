"""The folder of a run: who writes there, in which shard, and with which settings."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from crate_interp.core import checks
from crate_interp.core.files import check_regular, remove_unfinished
from crate_interp.core.folders import tidy
from crate_interp.core.safe_text import plain
from crate_interp.results.result_files import META


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
    if shard is None:
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None or size is None:
            return WHOLE
        shard, where = f"{rank}/{size}", " (RANK and WORLD_SIZE of the environment)"
    else:
        where = ""
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


_ABSENT = object()


def check_same(there: Mapping[str, Any], here: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if two settings differ; the message names the fields that differ.

    there: the settings of the run in the folder `where`. here: the settings of the call.
    """
    old, new = dict(_flat(there)), dict(_flat(here))
    names = [
        name
        for name in dict.fromkeys([*new, *old])
        # an assumed setting and the same setting when given make the same numbers
        if old.get(name, _ABSENT) != new.get(name, _ABSENT) and not name.endswith("config.assumed")
    ]
    if names:
        # the settings of a run contain the settings of its result, hence the double prefix
        named = {name: name.replace("settings.settings.", "settings.") for name in names[:3]}
        shown = "; ".join(_difference(own, name, old, new) for name, own in named.items())
        more = f" (and {len(names) - 3} more)" if names[3:] else ""
        raise ValueError(
            f"{where!r} holds a run with other settings: {shown}{more}. Give the same settings to "
            "continue, another folder, or resume=False (--restart) to start over."
        )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of nested dictionaries by their dotted names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _difference(shown: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    whose = plain(shown.removeprefix("code."), 100)
    if shown != whose and name in old and name in new and str(new[name]).startswith("sha256:"):
        return f"{whose} has changed"  # a digest says nothing to a reader
    return f"{whose} is {_value(old, name)} there and {_value(new, name)} here"


def _value(fields: Mapping[str, Any], name: str) -> str:
    return checks.shown(fields[name]) if name in fields else "absent"


RUN, CHUNKS = "run.json", "chunks"
_FOLD = ".crate-interp-fold.lock"
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


def check_alone(out: Path, shard: Shard, every: bool) -> None:
    """Raises ValueError if another process works with another number of shards.

    every: refuses a process on any other shard too.
    """
    for path in (out / CHUNKS).glob("shard-*.lock"):
        friend = path.stem.endswith(f"-of-{shard.total}") and not every
        if path != lock_of(out, shard) and not friend:
            try:
                with FileLock(path, timeout=_MOMENT):
                    pass
            except Timeout:
                raise ValueError(
                    f"another process works in {str(out)!r}, with another number of shards, or "
                    "resume=False would remove its chunks. Wait until that process ends, or give "
                    "another folder."
                ) from None


def lock_of(out: Path, shard: Shard) -> Path:
    """Returns the lock of a shard."""
    return out / CHUNKS / f"shard-{shard.place}-of-{shard.total}.lock"


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
        lock.release()


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
