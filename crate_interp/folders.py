"""Folders that are whole or not there: their files change together, and one writer at a time.

The index of a folder, a JSON file such as meta.json, holds the digest of every other file. It is
moved away first and written last, so that a folder whose writer died has none.
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout

from crate_interp.files import digest, flush, publish, write_text
from crate_interp.words import plain

LOCK, _STAGE, _OLD = ".crate-interp.lock", ".crate-interp-new-", ".crate-interp-old.json"
_MOST_FILES, _LONGEST_INDEX = 100_000, 2**26
# What this library writes. Nothing else is removed, whatever an index says.
_SUFFIXES = (".parquet", ".json", ".html", ".png", ".webp", ".csv", ".txt", ".safetensors")


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """Makes this thread the only writer of a folder, which is made if there is none.

    The lock ends with the process, however it ends. A thread may take a lock that it has. A folder
    that was made here and is still empty at the end goes.

    Raises ValueError if the folder cannot be written, or another process or thread writes it.
    """
    out, made = Path(folder), not Path(folder).exists()
    lock, nested = _acquire(out)
    try:
        if not nested:
            (out / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield out
    finally:
        if not nested:
            with suppress(OSError):
                (out / LOCK).unlink()
        lock.release()
        if made:
            with suppress(OSError):
                out.rmdir()


def _acquire(out: Path) -> tuple[FileLock, bool]:
    """Returns the lock of a folder, which this thread now holds, and whether it did before."""
    try:
        str(out).encode()  # what writes tables takes no name that is no text
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out.resolve() / LOCK, timeout=0, is_singleton=True)
        nested = lock.is_locked
        lock.acquire()
        return lock, nested
    except Timeout:
        raise ValueError(
            f"{str(out)!r} is being written by {_holder(out)}: wait until it ends, "
            "or give another folder."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL, or one that is no text
        odd = isinstance(error, UnicodeEncodeError)
        reason = "its name holds bytes that are no text here" if odd else ""
        reason = reason or getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot write into {str(out)!r}: {reason}. Give another folder."
        ) from None


@contextmanager
def replacing(
    folder: str | Path,
    index: str,
    content: Mapping[str, Any],
    kept: Collection[str] = (),
    owned: Collection[str] = (),
) -> Iterator[Path]:
    """Yields an empty folder whose files take their place in `folder` when the block is done.

    At the end the index holds `content`, and under "files" the digest of every new file and of the
    `kept` ones, which the old index names too. Files of the old index that are neither new nor kept
    are removed, and so are `owned` ones; but if all new files are there already, the others stay.
    Files that no index names stay too. Until the block is done nothing in `folder` changes; after
    an error nothing has. What a dead writer began is removed.

    Raises ValueError if the folder cannot be written, is being written by another process, or has a
    link or a folder in the place of a file.
    """
    with locked(folder) as out:
        for dead in _stages(out):
            shutil.rmtree(dead, ignore_errors=True)  # follows no link
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=out))
        try:
            yield stage
            change = _prepare(stage, out, index, content, kept, owned)
            try:
                _commit(stage, out, index, *change)
            except KeyboardInterrupt:
                _commit(stage, out, index, *change)  # goes on where it was
                raise
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def discard(folder: Path, index: str) -> None:
    """Removes the files that the index of a folder names, the index first; other files stay."""
    if not (folder / index).exists():
        return
    with locked(folder) as out:
        names = list(listed(out / index))
        for name in names:
            _check_place(out, name)
        (out / index).unlink()
        _remove(out, names)


def is_free(folder: Path, index: str) -> bool:
    """Tells whether a folder is missing, is empty, or holds what a dead writer began in it."""
    if not folder.exists():
        return True
    if not folder.is_dir() or (folder / index).exists():
        return False
    return bool(_stages(folder)) or not [path for path in folder.iterdir() if path.name != LOCK]


def _stages(out: Path) -> list[Path]:
    return list(out.glob(f"{_STAGE}*"))


def listed(path: Path) -> dict[str, str]:
    """Returns the digests that an index holds by the names of files; none if it holds none.

    Names that lead out of the folder, and files that are not of our kinds, are left out.
    """
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST_INDEX:
            return {}
        files = json.loads(path.read_bytes())["files"]
        items = list(files.items())[:_MOST_FILES]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {}
    return {name: value for name, value in items if is_inside(name) and isinstance(value, str)}


def is_inside(name: object) -> bool:
    """Tells whether a name is that of a file of ours inside a folder, such as "figures/a.png"."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name or len(name) > 1000:
        return False
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
    return inside and not path.name.startswith(".") and path.suffix in _SUFFIXES


def differs(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Returns, of files and their digests, the names whose file is missing or another one."""
    return [name for name, wanted in files.items() if not _is(folder / name, wanted)]


def _holder(out: Path) -> str:
    try:
        with open(out / LOCK, encoding="utf-8", errors="replace") as file:
            return plain(file.read(300)) or "another process"
    except OSError:
        return "another process"


def _is(path: Path, wanted: str) -> bool:
    try:
        return digest(path) == wanted
    except OSError:
        return False


Change = tuple[list[str], list[str], bool]  # new names, names to remove, whether old ones change


def _prepare(
    stage: Path,
    out: Path,
    index: str,
    content: Mapping[str, Any],
    kept: Collection[str],
    owned: Collection[str],
) -> Change:
    """Writes the index into the stage and returns what has to be moved and removed."""
    new = sorted(path for path in stage.rglob("*") if path.is_file())
    digests = {path.relative_to(stage).as_posix(): digest(path) for path in new}
    old = listed(out / index) or listed(out / _OLD)  # where a writer died before
    same = {name for name in digests if old.get(name) == digests[name]}
    same -= set(differs(out, {name: digests[name] for name in same}))
    moved = [name for name in digests if name not in same]
    if not moved:  # the same files again: what lies beside them stays
        kept = [*kept, *(name for name in old if name not in (*owned, *digests))]
    gone = [name for name in {**old, **dict.fromkeys(owned)} if name not in (*digests, *kept)]
    for name in (*moved, *gone, index):
        _check_place(out, name)
    for name in moved:
        publish(stage / name)
    files = {name: old[name] for name in kept} | digests
    text = json.dumps({**content, "files": files}, indent=2)
    write_text(stage / index, text + "\n")
    return moved, gone, not old or bool(set(old) - same - set(kept))


def _commit(
    stage: Path, out: Path, index: str, moved: list[str], gone: list[str], changes: bool
) -> None:
    """Puts the staged files into their places, the index last. May be called again."""
    if not (stage / index).exists():
        return
    if changes and (out / index).exists():
        os.replace(out / index, out / _OLD)
        flush(out)
    _remove(out, gone)
    for name in moved:
        if (stage / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / name, out / name)
    flush(out)
    os.replace(stage / index, out / index)
    (out / _OLD).unlink(missing_ok=True)
    flush(out)


def _remove(out: Path, names: Collection[str]) -> None:
    for name in names:
        (out / name).unlink(missing_ok=True)
        if (out / name).parent != out:
            with suppress(OSError):
                (out / name).parent.rmdir()  # if nothing else is in it


def _check_place(out: Path, name: str) -> None:
    """Raises ValueError if a link leads a name out of the folder, or a folder has its place."""
    path = out / name
    links = [up for up in path.parents if out in up.parents and up.is_symlink()]
    if links:
        raise ValueError(f"{str(links[0])!r} is a link: remove it, or give another folder.")
    if path.is_dir() and not path.is_symlink():
        raise ValueError(f"{str(path)!r} is a folder, wanted a file: remove it.")
