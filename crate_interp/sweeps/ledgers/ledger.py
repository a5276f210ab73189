"""The folder of a run: its settings, a file for each chunk, and a ledger of their digests.

run.json holds the settings. Each chunk is a file, which is written under a temporary name. Then the
process that made the chunk adds the file's digest to its own ledger, and after that it renames the
file. A chunk counts as done if any ledger holds the digest of its file. So a process may die at any
moment, several processes may work at once, no clock is needed, and no file of ours is in no ledger.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from crate_interp.core.files import (
    CAREFULLY,
    check_regular,
    digest,
    digest_of_bytes,
    flush,
    open_regular,
    own_name,
    unfinished,
    write,
)
from crate_interp.core.folders import read_index
from crate_interp.core.safe_text import file_name
from crate_interp.results.kinds import Tables
from crate_interp.sweeps.ledgers.chunk_tables import packed, unpacked
from crate_interp.sweeps.ledgers.folder_access import (
    alone,
    check_alone,
    lock_of,
    remove_leftovers,
    working,
    writable,
)
from crate_interp.sweeps.ledgers.own_files import (
    CHUNKS,
    LEDGERS,
    RUN,
    check_places,
    discard,
    is_line,
    is_run,
    parsed,
)
from crate_interp.sweeps.ledgers.run_settings import check_same
from crate_interp.sweeps.ledgers.shards import Shard


@dataclass(frozen=True)
class Entry:
    """A ledger's line about a chunk, which has the samples from `start` to `stop` - 1.

    sha256: the digest of the chunk's file.
    """

    start: int
    stop: int
    sha256: str


@dataclass
class Ledger:
    """The files of a run.

    fresh: whether the run started over. damaged: chunk files whose digest is in no ledger.
    """

    out: Path
    fresh: bool = False
    damaged: set[str] = field(default_factory=set)
    _seen: dict[tuple[str, int], tuple[Any, str]] = field(default_factory=dict)

    def path(self, stage: str, chunk: int) -> Path:
        """Returns the file of a chunk."""
        return self.out / CHUNKS / f"{stage}-{chunk:06d}.parquet"

    def write(
        self, stage: str, chunk: int, start: int, stop: int, tables: Tables, seconds: float
    ) -> None:
        """Writes the tables of a chunk; they are on the disk when this returns."""
        content = packed(tables)
        with writable(self.out):
            self.put(
                stage, self.path(stage, chunk), lambda part: part.write_bytes(content),
                chunk=chunk, start=start, stop=stop, seconds=round(seconds, 3),
            )  # fmt: skip

    def put(self, stage: str, path: Path, writer: Callable[[Path], Any], **line: object) -> str:
        """Writes a file into the folder of the chunks, and returns its digest.

        The file's name and digest are in a ledger before the file is in place. line: further
        entries of the ledger's line. A file that is there already is replaced if a ledger has its
        digest, and renamed otherwise.
        """
        found = ""

        def noting(part: Path) -> None:
            nonlocal found
            writer(part)
            found = digest(part)
            self._note(stage=stage, **line, file=path.name, sha256=found)
            self._make_way(path)

        write(path, noting)
        flush(path.parent)
        return found

    def _make_way(self, path: Path) -> None:
        check_regular(path)
        if path.exists():
            there = digest(path)
            lines = self._lines()
            if there not in {line["sha256"] for line in lines if line.get("file") == path.name}:
                os.replace(path, path.with_name(f"{path.name}.{there[7:19]}.damaged"))

    def begin(self, stage: str, chunks: int) -> None:
        """Records how many chunks a stage has.

        Raises ValueError if a ledger has a different number.
        """
        known = self.lengths().get(stage, chunks)
        if known != chunks:
            raise ValueError(
                f"the ledgers in {str(self.out)!r} record {known:,} chunks of {stage!r}, but this "
                f"data has {chunks:,} chunks. Give the data with which the run began, or start "
                "over with resume=False (--restart)."
            )
        if stage not in self.lengths():
            with writable(self.out):
                self._note(stage=stage, chunks=chunks)

    def read(self, stage: str, chunk: int, entries: Mapping[int, Sequence[Entry]]) -> Tables:
        """Returns the tables of a chunk; entries: the result of `entries(stage)`.

        Raises ValueError if the chunk's file is missing, or if its digest is in no ledger.
        """
        path = self.path(stage, chunk)
        try:
            content = _read(path)
            digest = digest_of_bytes(content)
            if digest not in {entry.sha256 for entry in entries.get(chunk, ())}:
                raise ValueError("its digest is in no ledger")
            return unpacked(content)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r} is damaged ({error}). Run the same command again: it measures this "
                "chunk again."
            ) from None

    def has(self, stage: str, chunk: int, entries: Mapping[int, Sequence[Entry]]) -> bool:
        """Tells whether a chunk's file exists and has the digest of one of the chunk's entries."""
        wanted = {entry.sha256 for entry in entries.get(chunk, ())}
        path = self.path(stage, chunk)
        try:
            found = path.stat()
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            if self._seen.get((stage, chunk), (None, ""))[0] != mark:
                digest = digest_of_bytes(_read(path))
                self._seen[stage, chunk] = (mark, digest)
        except OSError:
            return False
        whole = self._seen[stage, chunk][1] in wanted
        if wanted and not whole:
            self.damaged.add(path.name)
        return whole

    def missing(self, stage: str) -> list[int] | None:
        """Returns the missing or damaged chunks of a stage; None if their number is unknown."""
        count, entries = self.lengths().get(stage), self.entries(stage)
        if count is None:
            return None
        return [chunk for chunk in range(count) if not self.has(stage, chunk, entries)]

    def lengths(self) -> dict[str, int]:
        """Returns the recorded number of chunks of each stage.

        Raises ValueError if the ledgers record different numbers for a stage.
        """
        found: dict[str, int] = {}
        for line in self._lines():
            known = found.setdefault(line["stage"], line["chunks"]) if "chunks" in line else None
            if known != line.get("chunks"):
                raise ValueError(
                    f"the ledgers in {str(self.out)!r} record both {known:,} and "
                    f"{line['chunks']:,} chunks of {line['stage']!r}. Start over with "
                    "resume=False (--restart), or give another folder."
                )
        return found

    def entries(self, stage: str) -> dict[int, list[Entry]]:
        """Returns the ledgers' entries for the chunks of a stage."""
        found: dict[int, list[Entry]] = {}
        for line in self._lines():
            if line["stage"] == stage and "chunk" in line:
                entry = Entry(line["start"], line["stop"], line["sha256"])
                found.setdefault(line["chunk"], []).append(entry)
        return found

    def _note(self, **line: Any) -> None:
        """Appends a line to the ledger of this process."""
        path = self.out / _ledger_of(os.getpid())
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | CAREFULLY, 0o666)
        with open(handle, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            # the disk was full while an earlier line was written
            torn = file.read() not in (b"", b"\n")
            file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if not size:
            flush(self.out)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of all ledgers, without unfinished lines of processes that died."""
        for path in sorted(self.out.glob(LEDGERS)):
            with suppress(OSError):  # a pipe, or a folder
                yield from (line for _, line in parsed(path) if is_line(line))


@cache
def _ledger_of(process: int) -> str:
    """Returns the name of the ledger that a process writes; no file of another has this name."""
    host = file_name(socket.gethostname()) or "host"
    return own_name(f"ledger-{host}-{process}-", ".jsonl")


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


@contextmanager
def opened(out: Path, settings: Mapping[str, Any], shard: Shard, resume: bool) -> Iterator[Ledger]:
    """Yields the ledger of a run with these settings, in a folder that is created if needed.

    While the ledger is open, no other process can work on the same shard. What dead processes left
    is removed. resume=False removes an earlier run.

    Raises ValueError if the folder cannot be written, if it holds a run with other settings, if
    another process works on this shard, and for resume=False in one of several shards. Also raises
    ValueError if files that are not ours would be lost, or a link would be followed.
    """
    if not resume and shard.total > 1:
        raise ValueError(
            f"resume=False in shard {shard} would remove the chunks of other shards. Remove "
            f"{str(out)!r} yourself before you start the shards, or give another folder."
        )
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        check_places(out)
    with working(out, shard):
        with writable(out):
            remove_leftovers(out, lock_of(out, shard))
            if not resume:
                check_alone(out, shard)
                discard(out)
            (out / CHUNKS).mkdir(exist_ok=True)
            _agree(out, settings)
        yield Ledger(out, fresh=not resume)


def _agree(out: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings, or raises ValueError if the folder has different settings.

    Chunks without settings are refused too, because they may belong to any run.
    """
    # checked first, because another process writes run.json before a ledger
    begun = next(Ledger(out)._lines(), None) is not None
    if begun and not os.path.lexists(out / RUN):
        raise ValueError(
            f"{str(out / RUN)!r} is missing, although the folder has ledgers of chunks. Start over "
            "with resume=False (--restart), or give another folder."
        )
    with unfinished(out / RUN) as part:
        part.write_text(json.dumps(settings, indent=2) + "\n")
        flush(part)
        try:
            # a link creates a complete run.json or none, and only for the first of several
            # processes
            os.link(part, out / RUN)
        except FileExistsError:
            _compare(out, settings)
        except OSError:  # a disk without hard links
            with alone(out):
                if not os.path.lexists(out / RUN):
                    os.replace(part, out / RUN)
            _compare(out, settings)


def _compare(out: Path, settings: Mapping[str, Any]) -> None:
    found = read_index(out / RUN)
    if not is_run(found):
        raise ValueError(
            f"{str(out / RUN)!r} holds no settings of a run. Move it to another place and start "
            "over with resume=False (--restart), or give another folder."
        )
    check_same(found, json.loads(json.dumps(settings)), str(out))
