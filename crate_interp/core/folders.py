"""Folders whose files change together or not at all, with one writer at a time.

The index of a folder, a JSON file such as meta.json, holds the digest of every other file. It is
removed first and written last, so a folder whose writer died has no index. Before the first change
a journal lists the old files and the new ones; the next writer reads it.
"""

import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from crate_interp.core.files import (
    check_regular,
    digest,
    flush,
    foreign,
    is_one,
    is_own_name,
    open_regular,
    own_name,
    remove_unfinished,
    stays_inside,
    write_text,
)
from crate_interp.core.safe_text import plain

LOCK, _STAGE, _JOURNAL = ".crate-interp.lock", ".crate-interp-new-", ".crate-interp-change-"
_LONGEST_INDEX = 2**28  # bytes
# what we write into a lock, or what filelock writes on a disk without locks
_LOCKED = re.compile(rb"(process \d+ on [^\n]*|\d+\n[^\n]*\n([^\n]*\n)?)?")
# Only files that this library writes. Nothing else is removed, whatever an index says.
_SUFFIXES = (
    ".parquet", ".json", ".html", ".js", ".png", ".webp", ".csv", ".txt", ".safetensors",
)  # fmt: skip


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """Makes this thread the only writer of a folder, and makes the folder if it is missing.

    The lock ends with the process, even if it is killed. A thread may take a lock twice. A folder
    that was made here is removed if it is empty at the end.

    Raises ValueError if the folder cannot be written, if another process or thread writes it, and
    if the lock's name is that of a file of another program.
    """
    out = Path(folder)
    check_lock(out / LOCK)
    lock, nested, made = _acquire(out)
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


def _acquire(out: Path) -> tuple[BaseFileLock, bool, bool]:
    """Returns the lock of a folder, taken for this thread.

    Also returns whether the thread held it before, and whether this call made the folder.
    """
    try:
        str(out).encode()  # raises for a name that is not valid text
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out.resolve() / LOCK, timeout=0, is_singleton=True)
        nested = lock.is_locked
        lock.acquire()
        return lock, nested, made
    except Timeout:
        raise ValueError(
            f"{str(out)!r} is being written by {_holder(out)}: wait until it ends, "
            "or give another folder."
        ) from None
    except (OSError, ValueError) as error:
        # ValueError: a name with a NUL, or one that is not valid text
        odd = isinstance(error, UnicodeEncodeError)
        reason = "its name holds bytes that are not valid text" if odd else ""
        reason = reason or getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot write into {str(out)!r}: {reason}. Give another folder."
        ) from None


def check_lock(path: Path) -> None:
    """Raises ValueError if a lock's name is that of something that is no lock of ours."""
    check_regular(path)
    try:
        with open_regular(path) as file:
            content = file.read(1000)
    except (OSError, ValueError):  # whoever takes the lock says what is wrong with the folder
        return
    if not _LOCKED.fullmatch(content):
        raise foreign(path.parent, [path.name])


def check_ours(out: Path, index: str, names: Collection[str]) -> None:
    """Raises ValueError if files with these names would be lost when a folder is replaced."""
    _check_ours(out, index, dict.fromkeys(names, ""), _before(out, index, listed(out / index)))


@contextmanager
def replacing(
    folder: str | Path,
    index: str,
    content: Mapping[str, Any],
    kept: Collection[str] = (),
    owned: Collection[str] = (),
) -> Iterator[Path]:
    """Yields an empty folder; its files replace those of `folder` when the block ends.

    At the end the index holds `content`, and under "files" the digest of every new file and of
    every file in `kept`. The files in `kept` must be in the old index. All other files of the old
    index are removed, unless `folder` already has every new file. Files in `owned` that are not new
    are removed in either case. Files that no index names stay. Until the block ends, or if it
    raises, `folder` does not change, except that unfinished files of a dead writer are removed.

    Raises ValueError if the folder cannot be written, is being written by another process, or has,
    in the place of a new file, a link, a folder or a file that is not the one the index names.
    """
    with locked(folder) as out:
        _remove_unfinished(out)
        with _stage(out) as stage:
            yield stage
            change = _prepare(stage, out, index, content, kept, owned)
            try:
                _commit(stage, out, index, change)
            except KeyboardInterrupt:
                _commit(stage, out, index, change)  # finishes the commit that was interrupted
                raise


@contextmanager
def _stage(out: Path) -> Iterator[Path]:
    stage = out / own_name(_STAGE)
    stage.mkdir(mode=0o700)
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # does not follow links


def _remove_unfinished(out: Path) -> None:
    for dead in _stages(out):
        shutil.rmtree(dead, ignore_errors=True)
    remove_unfinished(out)


def tidy(folder: Path, index: str) -> None:
    """Removes what a dead writer left in a folder whose index is in place.

    Does nothing if another process is writing the folder. Raises ValueError if the lock's name is
    that of a file of another program.
    """
    check_lock(folder / LOCK)
    marks = (folder / LOCK, _journal(folder, index), *_stages(folder))
    if not any(os.path.lexists(mark) for mark in marks):
        return
    with suppress(ValueError), locked(folder) as out:
        _remove_unfinished(out)
        old = listed(out / index)
        if old:
            before = _before(out, index, old)
            orphans = [
                name for name in before if name not in old and is_one(out / name, before[name])
            ]
            _remove(out, orphans)
            _journal(out, index).unlink(missing_ok=True)


def discard(folder: Path, index: str) -> None:
    """Removes the files that the index of a folder names, the index first; other files stay."""
    if not folder.is_dir():
        return
    with locked(folder) as out:
        before = _before(out, index, listed(out / index))
        if before:
            gone = [name for name, digests in before.items() if is_one(out / name, digests)]
            for name in (*gone, index):
                _check_place(out, name)
            with _stage(out) as stage:
                _write_journal(stage, index, before, {})
                os.replace(_journal(stage, index), _journal(out, index))
            (out / index).unlink(missing_ok=True)
            _remove(out, gone)
            _journal(out, index).unlink()


def is_free(folder: Path, index: str) -> bool:
    """Tells whether a folder is missing, empty, or holds only unfinished files of a dead writer."""
    if not folder.exists():
        return True
    if not folder.is_dir() or (folder / index).exists():
        return False
    names = [path.name for path in folder.iterdir()]
    return bool(_stages(folder)) or all(name == LOCK for name in names)


def _stages(out: Path) -> list[Path]:
    found = [path for path in out.glob(f"{_STAGE}*") if is_own_name(path.name)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def listed(path: Path) -> dict[str, str]:
    """Returns the digests that an index lists, by file name; the dict may be empty."""
    return named(read_index(path).get("files"))


def named(files: object) -> dict[str, str]:
    """Returns the digests of files by their names.

    Names that lead out of the folder, and files of a kind that we do not write, are left out.
    """
    items = files.items() if isinstance(files, dict) else ()
    return {name: value for name, value in items if is_inside(name) and isinstance(value, str)}


def read_index(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty one if the file holds none."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST_INDEX:
            return {}
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_inside(name: object) -> bool:
    """Tells whether a name is one that we write in a folder, such as "figures/a.png"."""
    if not isinstance(name, str) or len(name) > 1000 or not stays_inside(name):
        return False
    path = PurePosixPath(name)
    spelled = path.as_posix() == name and not path.name.startswith(".")
    return spelled and path.suffix in _SUFFIXES


def differs(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Returns the names of files that are missing or have another digest."""
    places = {name: Path(os.path.realpath(folder / name)) for name in files}  # follows links
    return [name for name, wanted in files.items() if not is_one(places[name], [wanted])]


def _holder(out: Path) -> str:
    try:
        with open(out / LOCK, encoding="utf-8", errors="replace") as file:
            return plain(file.read(300)) or "another process"
    except OSError:
        return "another process"


def _journal(out: Path, index: str) -> Path:
    return out / f"{_JOURNAL}{index}"


def _write_journal(
    stage: Path, index: str, before: Mapping[str, Collection[str]], after: Mapping[str, str]
) -> None:
    lists = [{name: list(digests) for name, digests in before.items()}]
    lists.append({name: [value] for name, value in after.items()})
    write_text(_journal(stage, index), json.dumps({"files": lists}))


def _before(out: Path, index: str, old: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the digests that the index and the journal give for each file.

    Raises ValueError if the journal's name is that of something else.
    """
    found = {name: [value] for name, value in old.items()}
    journal = _journal(out, index)
    check_regular(journal)
    lists = read_index(journal).get("files")
    if journal.exists() and not isinstance(lists, list):
        raise foreign(out, [journal.name])
    for files in lists if isinstance(lists, list) else ():
        for name, digests in files.items() if isinstance(files, dict) else ():
            if is_inside(name) and isinstance(digests, list):
                found.setdefault(name, []).extend(map(str, digests))
    return found


@dataclass(frozen=True)
class _Change:
    """The work of a commit: files to move in, files to remove, and whether old files change."""

    moved: list[str]
    gone: list[str]
    replaces: bool


def _prepare(
    stage: Path,
    out: Path,
    index: str,
    content: Mapping[str, Any],
    kept: Collection[str],
    owned: Collection[str],
) -> _Change:
    """Writes the index into the stage, and returns which files to move and which to remove."""
    new = sorted(path for path in stage.rglob("*") if path.is_file())
    digests = {path.relative_to(stage).as_posix(): digest(path) for path in new}
    old = listed(out / index)
    before = _before(out, index, old)
    same = {name for name in digests if old.get(name) == digests[name]}
    same -= set(differs(out, {name: digests[name] for name in same}))
    moved = [name for name in digests if name not in same]
    if not moved:  # the folder has all new files already: other listed files stay
        kept = [*kept, *(name for name in old if name not in (*owned, *digests))]
    others = {name for name in before if name not in digests and name not in kept}
    # a file with a digest that is not listed belongs to the user
    gone = [name for name in others if is_one(out / name, before[name])]
    left = [name for name in owned if name not in digests and name not in gone]
    gone += [name for name in left if os.path.lexists(out / name)]
    for name in (*moved, *gone, index):
        _check_place(out, name)
    _check_ours(out, index, {name: digests.get(name, "") for name in (*moved, *gone)}, before)
    after = {name: old[name] for name in kept} | digests
    write_text(stage / index, json.dumps({**content, "files": after}, indent=2) + "\n")
    _write_journal(stage, index, before, after)
    mode = stat.S_IMODE((stage / index).stat().st_mode)
    for name in moved:
        (stage / name).chmod(mode)  # safetensors makes files that only their owner can read
        flush(stage / name)
    return _Change(moved, gone, not old or bool(set(old) - same - set(kept)))


def _check_ours(
    out: Path, index: str, files: Mapping[str, str], before: Mapping[str, Collection[str]]
) -> None:
    """Raises ValueError if `out` has other files than those of the index under some names.

    files: name -> digest of the new file, which may be there already. before: the result of
    `_before`. The index of an early version names no files; its files are taken for ours.
    """
    there = read_index(out / index)
    if there and "files" not in there:
        return
    names = [name for name in files if os.path.lexists(out / name)]
    odd = [name for name in names if not is_one(out / name, [*before.get(name, ()), files[name]])]
    if odd:
        raise foreign(out, odd)


def _commit(stage: Path, out: Path, index: str, change: _Change) -> None:
    """Puts the staged files into their places, the index last; it can run again after a crash."""
    if not (stage / index).exists():
        return
    if _journal(stage, index).exists():
        os.replace(_journal(stage, index), _journal(out, index))
        flush(out)
    if change.replaces:
        (out / index).unlink(missing_ok=True)
        flush(out)
    _remove(out, change.gone)
    for name in change.moved:
        if (stage / name).exists():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / name, out / name)
    flush(out)
    os.replace(stage / index, out / index)
    _journal(out, index).unlink(missing_ok=True)
    flush(out)


def _remove(out: Path, names: Collection[str]) -> None:
    for name in names:
        (out / name).unlink(missing_ok=True)
        if (out / name).parent != out:
            with suppress(OSError):
                (out / name).parent.rmdir()  # only if it is empty


def _check_place(out: Path, name: str) -> None:
    """Raises ValueError if a name must not be written: it is behind a link, or names a folder."""
    path = out / name
    above = [up for up in path.parents if out in up.parents and os.path.lexists(up)]
    for up in above:
        if up.is_symlink() or not up.is_dir():
            kind = "a link" if up.is_symlink() else "not a folder"
            raise ValueError(f"{str(up)!r} is {kind}: remove it, or give another folder.")
    if not os.access((*above, out)[0], os.W_OK | os.X_OK):
        raise ValueError(f"cannot write into {str((*above, out)[0])!r}: give another folder.")
    check_regular(path)
