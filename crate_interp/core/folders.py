"""Folders whose files change together or not at all, with one writer at a time.

The index of a folder, a JSON file such as meta.json, holds the digest of every other file. It is
removed first and written last, so a folder whose writer died has no index. Before the first change
a journal lists the old files and the new ones; the next writer reads it.
"""

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout

from crate_interp.core import files

LOCK, _STAGE, _JOURNAL = ".crate-interp.lock", ".crate-interp-new-", ".crate-interp-change-"
# Only files that this library writes. Nothing else is removed, whatever an index says.
_SUFFIXES = (
    ".parquet", ".json", ".html", ".js", ".png", ".webp", ".csv", ".txt", ".safetensors",
)  # fmt: skip

Index = Mapping[str, Any] | None  # what an index holds; None: there will be none
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writable(out: Path, *others: type[Exception]) -> Iterator[None]:
    """Turns an OSError in the `with` block, or one of `others`, into a ValueError that says why."""
    try:
        yield
    except (OSError, *others) as error:
        advice, reason = "Give another folder.", getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) in _FULL:
            advice = "Finished chunks are kept. Free some space, then run the same command again."
        if isinstance(error, Timeout):
            reason = "it is being written by another process, wait until it ends"
        if isinstance(error, FileExistsError):
            reason = "it is a file, and a folder is wanted"
        raise ValueError(f"cannot write into {str(out)!r}: {reason}. {advice}") from None


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """Makes this thread the only writer of a folder, and makes the folder if it is missing.

    The lock ends with the process, even if it is killed. A thread may take a lock twice. A folder
    that was made here is removed if it is empty at the end. Raises ValueError if the folder cannot
    be written, or if another process or thread writes it.
    """
    out = Path(folder)
    files.check_regular(out / LOCK)
    with writable(out, ValueError):  # ValueError: a name that no folder can have
        str(out).encode()  # raises for a name that is not valid text
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out.resolve() / LOCK, timeout=0, is_singleton=True)
        nested = lock.is_locked
        lock.acquire()
    try:
        yield out
    finally:
        if not nested:
            (out / LOCK).unlink(missing_ok=True)
        lock.release()
        if new:
            with suppress(OSError):
                out.rmdir()


@contextmanager
def replacing(
    folder: str | Path, index: str, content: Index, names: Collection[str] = ()
) -> Iterator[Path]:
    """Yields an empty folder; its files replace those of `folder` when the block ends.

    At the end the index holds `content`, and under "files" the digest of every new file and of
    every file in `names`, which must be in the old index; with None there is no index. All other
    files of the old index are removed, unless `folder` already has every new file. Files that no
    index names stay. If the block raises, `folder` does not change.

    Raises ValueError if the folder cannot be written, is being written by another process, or has,
    in the place of a new file, a link, a folder or a file that is not the one the index names.
    """
    with locked(folder) as out:
        _remove_dead(out)
        stage = out / files.own_name(_STAGE)
        stage.mkdir()
        try:
            yield stage
            _move(stage, out, index, content, names)
        finally:
            shutil.rmtree(stage, ignore_errors=True)  # does not follow links


def _move(stage: Path, out: Path, index: str, content: Index, names: Collection[str]) -> None:
    """Puts the files of a stage into their places, the index last."""
    staged = sorted(path for path in stage.rglob("*") if path.is_file())
    new = {path.relative_to(stage).as_posix(): files.digest(path) for path in staged}
    old, known = listed(out / index), _noted_digests(out, index)
    moved = [name for name in new if old.get(name) != new[name] or differs(out, {name: new[name]})]
    if new and not moved:  # the folder has all new files already
        names = [name for name in old if name not in new]
    gone = [name for name in known if name not in new and name not in names]
    gone = [name for name in gone if files.is_one(out / name, known[name])]  # others are the user's
    for name in (*moved, *gone, index):
        _check_place(out, name)
    check_ours(out, index, (*moved, *gone), new)
    after = dict(sorted(({name: old[name] for name in names} | new).items()))
    if content is not None:
        files.write_text(stage / index, json.dumps({**content, "files": after}, indent=2) + "\n")
    for name, value in after.items():
        known.setdefault(name, []).append(value)
    journal = out / f"{_JOURNAL}{index}"
    files.write_text(journal, json.dumps({"files": known}))
    mode = journal.stat().st_mode
    (out / index).unlink(missing_ok=True)
    for name in gone:
        (out / name).unlink()
        if (out / name).parent != out:
            with suppress(OSError):
                (out / name).parent.rmdir()  # only if it is empty
    for name in moved:
        (stage / name).chmod(mode)  # safetensors makes files that only their owner can read
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, out / name)
    if content is not None:
        os.replace(stage / index, out / index)
    journal.unlink()


def _remove_dead(out: Path) -> None:
    """Removes the unfinished files and stages of dead writers; the caller holds the lock."""
    for path in _stages(out):
        shutil.rmtree(path, ignore_errors=True)
    files.remove_unfinished(out)


def tidy(folder: Path, index: str) -> None:
    """Removes what a dead writer left in a folder, unless another process is writing it."""
    if _stages(folder) or os.path.lexists(folder / f"{_JOURNAL}{index}"):
        with suppress(ValueError), locked(folder) as out:
            _remove_dead(out)
            if (out / index).exists():  # otherwise the next writer needs the journal
                (out / f"{_JOURNAL}{index}").unlink(missing_ok=True)


def discard(folder: Path, index: str) -> None:
    """Removes the files that the index of a folder names, the index first; other files stay."""
    if folder.is_dir() and _noted_digests(folder, index):
        with replacing(folder, index, None):
            pass


def is_free(folder: Path, index: str) -> bool:
    """Tells whether a folder is missing, empty, or holds only unfinished files of a dead writer."""
    if not folder.exists():
        return True
    if not folder.is_dir() or (folder / index).exists():
        return False
    begun = _stages(folder) or (folder / f"{_JOURNAL}{index}").exists()
    return bool(begun) or all(path.name == LOCK for path in folder.iterdir())


def _stages(out: Path) -> list[Path]:
    found = [path for path in out.glob(f"{_STAGE}*") if files.is_own_name(path.name)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def listed(path: Path) -> dict[str, str]:
    """Returns the digests that an index lists, by file name; the dict may be empty."""
    return named(read_index(path).get("files"))


def named(entries: object) -> dict[str, str]:
    """Returns the digests of files by their names.

    Names that lead out of the folder, and files of a kind that we do not write, are left out.
    """
    items = entries.items() if isinstance(entries, dict) else ()
    return {name: value for name, value in items if is_inside(name) and isinstance(value, str)}


def read_index(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty one if the file holds none."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_inside(name: object) -> bool:
    """Tells whether a name is one that we write in a folder, such as "figures/a.png"."""
    if not isinstance(name, str) or len(name) > 1000 or not files.stays_inside(name):
        return False
    path = PurePosixPath(name)
    return path.as_posix() == name and not path.name.startswith(".") and path.suffix in _SUFFIXES


def differs(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Returns the names of files that are missing or have another digest."""
    places = {name: Path(os.path.realpath(folder / name)) for name in digests}  # follows links
    return [name for name, wanted in digests.items() if not files.is_one(places[name], [wanted])]


def _noted_digests(out: Path, index: str) -> dict[str, list[str]]:
    """Returns the digests that the index and the journal give for each file."""
    found = {name: [value] for name, value in listed(out / index).items()}
    entries = read_index(out / f"{_JOURNAL}{index}").get("files")
    for name, digests in entries.items() if isinstance(entries, dict) else ():
        if is_inside(name) and isinstance(digests, list):
            found.setdefault(name, []).extend(map(str, digests))
    return found


def check_ours(
    out: Path, index: str, names: Collection[str], new: Mapping[str, str] | None = None
) -> None:
    """Raises ValueError if files with these names would be lost when a folder is replaced.

    new: the digests of new files, which may be there already.
    """
    known, new = _noted_digests(out, index), new or {}
    there = [name for name in names if os.path.lexists(out / name)]
    ours = {name: [*known.get(name, ()), new.get(name, "")] for name in there}
    odd = [name for name in there if not files.is_one(out / name, ours[name])]
    if odd:
        raise files.foreign(out, odd)


def _check_place(out: Path, name: str) -> None:
    """Raises ValueError if a name must not be written: it is behind a link, or names a folder."""
    for up in (path for path in (out / name).parents if out in path.parents):
        if up.is_symlink() or (up.exists() and not up.is_dir()):
            raise ValueError(f"{str(up)!r} is not a folder: remove it, or give another folder.")
    files.check_regular(out / name)
