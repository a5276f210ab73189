"""The folder of a run: opened for one set of settings, and by one process for each shard."""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from crate_interp.core import checks, files
from crate_interp.core.folders import read_index, tidy, writable
from crate_interp.core.safe_text import plain
from crate_interp.questions import chunks
from crate_interp.results.result import Result
from crate_interp.results.result_files import META

FORMAT = 3  # of run.json
_FOLD = ".crate-interp-fold.lock"
_MOMENT = 0.3  # seconds, in which a process that looks for dead ones gives a lock back


@contextmanager
def in_folder(
    out: Path,
    result: type[Result],
    settings: Mapping[str, Any],
    code: Mapping[str, Any],
    shard: chunks.Shard = chunks.WHOLE,
    resume: bool = True,
) -> Iterator[chunks.InFolder]:
    """Yields the chunks of a run in a folder, while no other process can work on the same shard.

    settings, code: what the numbers depend on. Raises ValueError if the folder cannot be written,
    if it holds another kind of result or a run with other settings, and if files that are not ours
    would be lost, or a link would be followed.
    """
    result.check_folder(out)
    run = {"format": FORMAT, "kind": result.KIND, "settings": settings, "code": code}
    run = json.loads(json.dumps(run, default=lambda number: number.item()))
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        parts = out / chunks.CHUNKS
        for path in (out / chunks.RUN, parts / chunks.LOCK):  # a run does not write through a link
            files.check_regular(path)
        if parts.is_symlink():
            raise ValueError(f"{str(parts)!r} is a link: remove it, or give another folder.")
        parts.mkdir(exist_ok=True)
    with working(out, shard, every=not resume):
        with writable(out):
            # what dead processes left
            files.check_regular(out / _FOLD)
            for folder in (out, parts):
                files.remove_unfinished(folder)
            with suppress(OSError), FileLock(out / _FOLD, timeout=0):
                tidy(out, META)
                (out / _FOLD).unlink()
            if not resume:
                _discard(out)
        with alone(out):
            began = _agree(out, run)
        digest = files.digest_of_bytes(json.dumps(run | began, sort_keys=True).encode())
        yield chunks.InFolder(settings, shard, out=out, run=digest)


def _agree(out: Path, run: Mapping[str, Any]) -> dict[str, str]:
    """Writes the settings of a run, or raises ValueError if the folder has others.

    Returns what tells this run from one that started over with the same settings.
    """
    path = out / chunks.RUN
    if not path.exists():
        if any((out / chunks.CHUNKS).glob("*.parquet")):
            raise ValueError(f"{str(path)!r} is missing: start over with resume=False (--restart).")
        began = {"began": secrets.token_hex(8)}
        files.write_text(path, json.dumps({**run, **began}, indent=2) + "\n")
        return began
    there = read_index(path)
    if not _is_run(there):
        raise ValueError(f"{str(path)!r} holds no settings of a run: give another folder.")
    began = {"began": str(there.pop("began", ""))}
    old, new = dict(_flat(there)), dict(_flat(run))
    differences = [
        _difference(name, old.get(name, _ABSENT), new.get(name, _ABSENT))
        for name in dict.fromkeys([*new, *old])
        # an assumed setting and the same setting when given make the same numbers
        if old.get(name, _ABSENT) != new.get(name, _ABSENT) and not name.endswith("config.assumed")
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if differences[3:] else ""
        raise ValueError(
            f"{str(out)!r} holds a run with other settings: {'; '.join(differences[:3])}{more}. "
            "Give the same settings to continue, another folder, or resume=False (--restart)."
        )
    return began


_ABSENT = object()
# what hold digests, which say nothing to a reader
_DIGESTS = {"settings.model_digest": "another model", "settings.data": "other data"}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of nested dictionaries by their dotted names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _difference(name: str, old: object, new: object) -> str:
    """Says how a setting of the run in a folder (old) differs from that of the call (new)."""
    if name in _DIGESTS:
        return _DIGESTS[name]
    # the settings of a run contain the settings of its result, hence the double prefix
    name = plain(name.replace("settings.settings.", "settings.").removeprefix("code."), 100)
    if all(str(one).startswith("sha256:") for one in (old, new)):
        return f"{name} has changed"
    there, here = ("absent" if x is _ABSENT else plain(checks.quote(x), 80) for x in (old, new))
    return f"{name} is {there} there and {here} here"


def _is_run(settings: Mapping[str, Any]) -> bool:
    """Tells whether the content of a run.json is that of a run of ours, of whatever version."""
    kinds = {"format": int, "kind": str, "settings": dict}
    return all(type(settings.get(name)) is kind for name, kind in kinds.items())


def _discard(out: Path) -> None:
    """Removes the settings and chunks of a run; its result stays.

    Raises ValueError, before anything is removed, if something there is not ours.
    """
    written = sorted((out / chunks.CHUNKS).iterdir())
    written = [path for path in written if path.suffix not in (".lock", ".damaged")]
    for path in written:
        files.check_regular(path)
    odd = [f"{chunks.CHUNKS}/{path.name}" for path in written if not chunks.is_ours(path)]
    run = out / chunks.RUN
    odd += [chunks.RUN] if os.path.lexists(run) and not _is_run(read_index(run)) else []
    if odd:
        raise files.foreign(out, odd)
    for path in (*written, run):
        path.unlink(missing_ok=True)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Waits until no other process merges chunks or writes pages in a folder."""
    path = out / _FOLD
    files.check_regular(path)
    with writable(out), FileLock(path):
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


@contextmanager
def working(out: Path, shard: chunks.Shard, every: bool) -> Iterator[None]:
    """Keeps other processes from working on a shard; the lock ends with the process.

    every: refuses a process on any other shard too. Raises ValueError if another process works on
    the shard, or with another number of shards.
    """
    mine = out / chunks.CHUNKS / f"shard-{shard.place}-of-{shard.total}.lock"
    files.check_regular(mine)
    with ExitStack() as stack:
        with writable(out):
            try:
                stack.enter_context(FileLock(mine, timeout=_MOMENT))
            except Timeout:  # a Timeout is an OSError too
                words = f"works on shard {shard} of {str(out)!r}. Wait until it ends"
                raise ValueError(f"another process {words}.") from None
            try:
                for path in (out / chunks.CHUNKS).glob("shard-*.lock"):
                    friend = path.stem.endswith(f"-of-{shard.total}") and not every
                    if path != mine and not friend:
                        with FileLock(path, timeout=_MOMENT):
                            pass
            except Timeout:
                why = "with other shards, or resume=False would remove its chunks"
                words = f"another process works in {str(out)!r}, {why}. Wait until it ends."
                raise ValueError(words) from None
        yield
