"""The chunks of a run, in memory or in a folder that goes on where it stopped, and their shards.

Two finished blocks of equally many chunks, of which the first begins at an even multiple of their
length, merge at once: ((0 1) (2 3)) 4. So the order of merging depends only on the number of
chunks, whoever measured them and when, rows are copied log2 n times, and a run of n chunks keeps
log2 n blocks. A block is in one file, which is complete or absent.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as parquet
from filelock import FileLock

from crate_interp.core.files import check_regular, digest, digest_of_bytes, flush, foreign, write
from crate_interp.core.folders import read_index, writable
from crate_interp.core.run_options import note
from crate_interp.questions.experiment import Pass, Tables, Task
from crate_interp.results.result_files import table_from

RUN, CHUNKS, LOCK = "run.json", "chunks", "merge.lock"
_ABOUT = b"crate_interp"  # the entry of a file's metadata that says what it holds
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)
_BLOCK = r"-(\d{6,})(?:\+(\d+))?\.parquet"  # the first chunk; how many, if there are several
_FILE = re.compile(r"[a-z]+(-\d+)?" + _BLOCK)


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
        raise ValueError(f"shard={shard!r}{where}: give 'i/n' with i from 0 to n - 1.")
    return Shard(int(match[1]), int(match[2]))


@dataclass(frozen=True, order=True)
class Block:
    """Merged neighbouring chunks: `count` of them from chunk `first` on, and their samples."""

    first: int
    count: int
    start: int
    stop: int


@dataclass
class InMemory:
    """Chunks of a run without a folder."""

    meta: Mapping[str, Any]
    shard: Shard = WHOLE
    out: Path = cast(Path, None)  # without a folder
    blocks: dict[str, dict[int, Block]] = field(default_factory=dict)
    tables: dict[tuple[str, Block], Tables] = field(default_factory=dict)

    def open(self, step: Pass, look: Callable[[Tables], object] | None = None) -> None:
        """Looks up the finished blocks of a pass; look(tables) is called for each of them."""
        self.blocks[step.name] = {}

    def finished(self, step: Pass, number: int) -> Block | None:
        """Returns the block that holds a chunk, or None if the chunk has to be measured."""
        blocks = self.blocks[step.name].values()
        return next((one for one in blocks if 0 <= number - one.first < one.count), None)

    def put(self, step: Pass, task: Task, tables: Tables) -> None:
        """Keeps the tables of a chunk, and merges blocks as far as they are there."""
        block = Block(task.number, 1, task.start, task.stop)
        self._keep(step, block, tables)
        self._fold(step, block)

    def _fold(self, step: Pass, block: Block) -> None:
        """Merges a block with its sibling, the two with theirs, and so on."""
        while not step.apart and (other := self._sibling(step, block)):
            one, two = sorted((block, other))
            block = Block(one.first, one.count + two.count, one.start, two.stop)
            tables = step.merged(self.read(step, one), self.read(step, two), self.meta)
            self._keep(step, block, tables)
            self._drop(step, one, two)

    def merged(self, step: Pass, total: int) -> Tables | None:
        """Returns the merged tables of a pass of `total` chunks, or None if chunks are missing."""
        blocks = sorted(self.blocks[step.name].values())
        if sum(block.count for block in blocks) != total:
            return None
        tables = self.read(step, blocks[-1])
        for block in reversed(blocks[:-1]):
            tables = step.merged(self.read(step, block), tables, self.meta)
        if self.out is None:  # frees their memory; files stay, and so does what was written
            self._drop(step, *blocks)
        return tables

    def ended(self, step: Pass, total: int) -> None:
        """Notes how many chunks a pass has."""

    def read(self, step: Pass, block: Block) -> Tables:
        """Returns the tables of a block."""
        return self.tables[step.name, block]

    def _sibling(self, step: Pass, block: Block) -> Block | None:
        """Returns the finished block that this one merges with."""
        other = self.blocks[step.name].get(block.first ^ block.count)
        return other if other and other.count == block.count else None

    def _keep(self, step: Pass, block: Block, tables: Tables) -> None:
        self.tables[step.name, block] = tables
        self.blocks[step.name][block.first] = block

    def _drop(self, step: Pass, *blocks: Block) -> None:
        for block in blocks:
            self.tables.pop((step.name, block), None)
            if self.blocks[step.name].get(block.first) == block:
                del self.blocks[step.name][block.first]


@dataclass
class InFolder(InMemory):
    """Chunks of a run in OUT/chunks. Several shards may write there.

    run: the digest of run.json, which each file of a chunk holds too. seen: the files that were
    read and found whole, by their times and sizes.
    """

    run: str = ""
    seen: dict[Path, tuple[tuple[int, int, int], Block]] = field(default_factory=dict)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Waits until nobody else writes or merges blocks; the disk may be full meanwhile."""
        with writable(self.out), FileLock(self.out / CHUNKS / LOCK):
            yield

    def path(self, step: Pass, first: int, count: int) -> Path:
        """Returns the file of a block."""
        more = f"+{count}" if count > 1 else ""
        return self.out / CHUNKS / f"{step.name}-{first:06d}{more}.parquet"

    def open(self, step: Pass, look: Callable[[Tables], object] | None = None) -> None:
        """Reads which blocks are finished; a damaged file is put aside, and measured again."""
        with self.locked():
            self._list(step)
            if look is not None:
                for block in self.blocks[step.name].values():
                    look(self.read(step, block))

    def _list(self, step: Pass) -> None:
        kept = self.blocks[step.name] = {}
        found: list[Block] = []
        for path in (self.out / CHUNKS).glob(f"{step.name}-*.parquet"):
            if re.fullmatch(re.escape(step.name) + _BLOCK, path.name):
                check_regular(path)
                block = self._whole(step, path)
                if block is None:
                    aside = path.with_name(f"{path.name}.{digest(path)[7:19]}.damaged")
                    os.replace(path, aside)
                    note(f"{path} was damaged and is measured again; it is kept as {aside.name}.")
                else:
                    found.append(block)
        for block in sorted(found, key=lambda one: (-one.count, one.first)):
            if self.finished(step, block.first):  # its writer died before it removed the parts
                self.path(step, block.first, block.count).unlink()
            else:
                kept[block.first] = block
        for first in sorted(kept):  # of a writer that died before it merged
            if first in kept:
                self._fold(step, kept[first])

    def _whole(self, step: Pass, path: Path) -> Block | None:
        """Returns what a file holds, if it is a whole block of this run."""
        try:
            stamp = _stamp(path)
            if self.seen.get(path, (None,))[0] != stamp:
                about, tables = _opened(path)
                block = Block(*about["block"])
                right = about["run"] == self.run
                right &= path == self.path(step, block.first, block.count)
                if not right or (step.intact is not None and not step.intact(tables)):
                    return None
                self.seen[path] = stamp, block
            return self.seen[path][1]
        except _UNREADABLE:
            return None

    def put(self, step: Pass, task: Task, tables: Tables) -> None:
        """Writes the tables of a chunk; they are on the disk when this returns."""
        with self.locked():
            super().put(step, task, tables)

    def merged(self, step: Pass, total: int) -> Tables | None:
        """Returns the merged tables of a pass, or None if other shards still miss chunks."""
        with self.locked():
            self._list(step)
            return super().merged(step, total)

    def ended(self, step: Pass, total: int) -> None:
        """Raises ValueError if the pass had another number of chunks before."""
        path = self.out / CHUNKS / f"{step.name}.json"
        check_regular(path)
        if path.exists() and not _counts(path):
            raise foreign(path.parent, [path.name])
        blocks = self.blocks[step.name].values()
        known = read_index(path).get("chunks", total)
        more = max((block.first + block.count for block in blocks), default=0)
        if known != total or more > total:
            words = f"has {max(known, more):,} chunks of {step.name!r}, but this data has {total:,}"
            words += ". Give the data with which it began, or resume=False (--restart)."
            raise ValueError(f"the run in {str(self.out)!r} {words}")
        with writable(self.out):
            write(path, lambda part: part.write_text(json.dumps({"chunks": total})))

    def read(self, step: Pass, block: Block) -> Tables:
        """Returns the tables of a block."""
        path = self.path(step, block.first, block.count)
        try:
            return _opened(path)[1]
        except _UNREADABLE as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}). Run the call again.") from None

    def _sibling(self, step: Pass, block: Block) -> Block | None:
        try:  # another shard may have written it, or merged it with another
            path = self.path(step, block.first ^ block.count, block.count)
            about = json.loads((parquet.read_schema(path).metadata or {})[_ABOUT])
            return Block(*about["block"]) if about["run"] == self.run else None
        except _UNREADABLE:
            return None  # damaged: found when the pass is opened again

    def _keep(self, step: Pass, block: Block, tables: Tables) -> None:
        contents = []
        for table in tables.values():
            table.to_parquet(buffer := io.BytesIO(), index=False, compression="zstd")
            contents.append(buffer.getvalue())
        sha256 = _digest(list(tables), contents)
        about = {"run": self.run, "block": astuple(block), "sha256": sha256}
        file = pa.table({"table": list(tables), "content": pa.array(contents, pa.large_binary())})
        file = file.replace_schema_metadata({_ABOUT: json.dumps(about)})
        path = self.path(step, block.first, block.count)

        def writer(part: Path) -> None:  # its parts are compressed already
            parquet.write_table(file, part, compression="none", use_dictionary=False)
            flush(part)

        write(path, writer)
        flush(path.parent)
        self.seen[path] = _stamp(path), block
        self.blocks[step.name][block.first] = block

    def _drop(self, step: Pass, *blocks: Block) -> None:
        for block in blocks:
            self.path(step, block.first, block.count).unlink(missing_ok=True)
        super()._drop(step, *blocks)


def _stamp(path: Path) -> tuple[int, int, int]:
    there = path.stat()
    return there.st_mtime_ns, there.st_size, there.st_ino


def _opened(path: Path) -> tuple[dict[str, Any], Tables]:
    """Returns what a chunk file says of itself, and its tables; raises ValueError if it changed."""
    file = parquet.read_table(path)
    about = json.loads(file.schema.metadata[_ABOUT])
    names, contents = (file[name].to_pylist() for name in ("table", "content"))
    if about["sha256"] != _digest(names, contents):
        raise ValueError("its content is not what was written")
    return about, {name: table_from(part) for name, part in zip(names, contents, strict=True)}


def _digest(names: list[str], contents: list[bytes]) -> str:
    return digest_of_bytes(b"".join([json.dumps(names).encode(), *contents]))


def _counts(path: Path) -> bool:
    """Tells whether a file is one in which a run notes how many chunks a pass has."""
    return set(read_index(path)) == {"chunks"}


def is_ours(path: Path) -> bool:
    """Tells whether a file in chunks/ is one that a run wrote and nobody changed."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.suffix == ".json":
        return _counts(path)
    try:
        if path.suffix == ".arrow":
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as rows:
                return {"sample", "input"} <= set(rows.schema.names)
        return bool(_FILE.fullmatch(path.name) and _opened(path))
    except _UNREADABLE:
        return False
