"""A job: the stages of one measurement, in memory or in a folder that resumes."""

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

from crate_interp.core import checks, files
from crate_interp.core.pictures import quoted
from crate_interp.core.progress import stream, tqdm
from crate_interp.core.run_options import RunOptions
from crate_interp.core.safe_text import plain
from crate_interp.data.picture_contents import check_agree, named
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.results.kinds import Kind, Rules, Tables
from crate_interp.sweeps.engines import ENGINES, Engine
from crate_interp.sweeps.ledgers import ledger as ledgers
from crate_interp.sweeps.ledgers.folder_access import alone, writable
from crate_interp.sweeps.ledgers.ledger import Entry, Ledger
from crate_interp.sweeps.ledgers.own_files import LISTING
from crate_interp.sweeps.ledgers.shards import WHOLE, Shard, shard_of
from crate_interp.sweeps.runs.chunked_pass import Stage, Task, folded, merged
from crate_interp.sweeps.runs.forecast import is_dry, stop_dry, timed
from crate_interp.sweeps.runs.provenance import code_of

if TYPE_CHECKING:
    T = TypeVar("T")
    # A shard of a run returns None while chunks of other shards are missing. If type checkers saw
    # this None, every caller would have to test for it.
    Perhaps = Annotated[T, "or None, in a shard"]
else:
    Perhaps = Optional

# entries of meta that may differ between the runs of a folder, as they do not change numbers
_FREE = ("seconds", "device", "command", "engine", "counts")
_THEN = (
    "The result is written when all chunks are finished. Run the other shards, or the same command "
    "without --shard"
)
_THEN_AGAIN = "The next stage needs all chunks. Run the other shards, then the same command again"


@dataclass
class Job:
    """The stages of one measurement. Their chunks are in a ledger or, without one, in memory."""

    kind: Kind
    meta: dict[str, Any]
    options: RunOptions
    engine: Engine
    ledger: Ledger | None = None
    shard: Shard = WHOLE
    planned: int = 1  # the number of stages
    stages: dict[str, Stage] = field(default_factory=dict)
    _kept: dict[str, Tables] = field(default_factory=dict)
    _chunks: int = 0  # the number of chunks of all stages so far
    # stage -> the tasks that other shards had finished when the stage began here
    _of_others: dict[str, list[Task]] = field(default_factory=dict)

    def run(self, stage: Stage, what: str | None = None) -> None:
        """Measures the missing chunks of a stage that belong to this process.

        what: the name shown on the progress bar.
        """
        stage = self.prepared(stage)
        streamed = isinstance(stage.samples, Stream)
        todo = None if streamed else self._left(stage)
        if stage.whole and is_dry():
            stop_dry(self.kind.name, stage.name)
        self.stages[stage.name] = stage
        if self.ledger and stage.samples.listing:
            with writable(self.ledger.out):
                stage.samples.listing.keep(self.ledger.out / LISTING)
        self._check_pictures(stage)
        own = self._noting(stage)
        name, unit = what or stage.name, stage.model.unit
        if self.planned > 1:
            name += f" ({len(self.stages)} of {self.planned})"
        bar = tqdm(
            total=todo, desc=name, unit=unit.removesuffix("s"),
            disable=not self.options.progress, leave=False,
        )  # fmt: skip
        with bar:
            found = timed(self.engine(stage, own, bar.update), stage, todo, bool(self.ledger))
            if self.ledger is None:
                merge = lambda one, two: stage.merged(one, two, self.meta)  # noqa: E731
                tables = folded((tables for _, tables in _in_order(found)), merge)
                assert tables is not None  # data is never empty
                self._kept[stage.name] = tables
            else:
                self._write(stage, found)
        # frees the twin and the values computed from weights; the next stage has its own
        stage.once.clear()

    def prepared(self, stage: Stage) -> Stage:
        """Returns a stage with this job's options and its kind's rules."""
        rules = self.kind.rules_of(stage.name)
        assert rules is not None, f"{self.kind.name} has no stage {stage.name}"
        return replace(stage, rules=rules, options=self.options)

    def _left(self, stage: Stage) -> int:
        """Returns how many samples of the next stage are left for this process."""
        tasks = list(stage.tasks(self.options.chunk_size))
        return sum(task.samples.n for task in self._own(stage, tasks, self._chunks))

    def tables(self, name: str) -> Tables | None:
        """Returns the merged tables of a stage, or None if some of its chunks are missing."""
        if self.ledger is None:
            return self._kept[name]
        if self.ledger.missing(name) != []:
            return None
        return folded_tables(self.ledger, name, self.stages[name].rules, self.meta)

    def before(self, *names: str) -> dict[str, Tables] | None:
        """Returns the merged tables of the named stages, which the next stage needs.

        If chunks of these stages are missing, prints a note on stderr and returns None.
        """
        found = {name: self.tables(name) for name in names}
        ready = {name: tables for name, tables in found.items() if tables is not None}
        if len(ready) == len(names):
            return ready
        assert self.ledger is not None  # in memory nothing can be missing
        missing = {name: self.ledger.missing(name) for name in names}
        self._say(missing, _THEN_AGAIN)
        return None

    def result(self) -> Any:
        """Returns the result of all stages, and saves it if the job has a folder.

        If chunks are missing, prints a note on stderr and returns None.
        """
        if is_dry():
            stop_dry(self.kind.name)
        if self.ledger is None:
            return _made(self.kind, {name: self._kept[name] for name in self.stages}, self.meta)
        missing = {name: self.ledger.missing(name) for name in self.stages}
        if any(gone != [] for gone in missing.values()):
            self._say(missing)
            return None
        for name, tasks in self._of_others.items():
            entries = self.ledger.entries(name)
            for task in tasks:
                self._check_same_files(self.stages[name], task, entries)
        return finished(self.kind, self.ledger, self.stages, self.meta)

    def _check_pictures(self, stage: Stage) -> None:
        """Raises ValueError if files of finished chunks hold something else than when measured.

        Each shard checks its own chunks. Those of other shards wait until the result is made.
        """
        if self.ledger is None or stage.samples.files is None:
            return
        entries, self._of_others[stage.name] = self.ledger.entries(stage.name), []
        for task in stage.tasks(self.options.chunk_size) if entries else ():
            if not self.ledger.has(stage.name, task.number, entries):
                continue
            if self._is_mine(stage, task.number, self._chunks):
                self._check_same_files(stage, task, entries)
            else:
                self._of_others[stage.name].append(task)

    def _check_same_files(
        self, stage: Stage, task: Task, entries: Mapping[int, Sequence[Entry]]
    ) -> None:
        files, (start, stop) = stage.samples.files, _ends(task)
        assert self.ledger is not None and files is not None
        table = self.ledger.read(stage.name, task.number, entries).get("pictures")
        changed = [] if table is None else files.changed(table)
        if changed:
            raise ValueError(
                f"{named(changed)} in {quoted(files.folder)}: the content is not what the run in "
                f"{str(self.ledger.out)!r} has measured as samples {start} to {stop - 1}. Put the "
                "earlier content back; or, to start over, give another folder for the result, or "
                "resume=False (--restart)."
            )

    def _is_mine(self, stage: Stage, chunk: int, chunks: int) -> bool:
        """Tells whether a chunk belongs to this shard; chunks: those of earlier stages."""
        # a `whole` stage has one chunk, and the process in charge of that chunk may have ended
        return stage.whole or (chunks + chunk) % self.shard.total == self.shard.place

    def _noting(self, stage: Stage) -> Iterator[Task]:
        """Yields the unfinished tasks of this shard, and records how many chunks the stage has."""
        if self.ledger is not None and not isinstance(stage.samples, Stream):
            self.ledger.begin(stage.name, len(list(stage.tasks(self.options.chunk_size))))
        numbers = count()
        tasks = (task for task, _ in zip(stage.tasks(self.options.chunk_size), numbers))  # noqa: B905
        yield from self._own(stage, tasks, self._chunks)
        total = next(numbers)
        self._chunks += total
        if self.ledger is not None:
            self.ledger.begin(stage.name, total)

    def _own(self, stage: Stage, tasks: Iterable[Task], chunks: int) -> Iterator[Task]:
        """Yields the unfinished tasks of this shard.

        chunks: the number of chunks of earlier stages.
        """
        if self.ledger is None:
            yield from tasks
            return
        entries, last = self.ledger.entries(stage.name), -1
        for task in tasks:
            last = task.number
            mine = self._is_mine(stage, task.number, chunks)
            if mine and not self._has(stage, task.number, entries):
                yield task
            ends = {(entry.start, entry.stop) for entry in entries.get(last, ())}
            if task.rows is not None and ends and _ends(task) not in ends:
                self._refuse_other_data(f"chunk {last} now has {task.samples.n} samples")
        known = max(self.ledger.lengths().get(stage.name, 0), *(n + 1 for n in entries), 0)
        if isinstance(stage.samples, Stream) and last + 1 < known:
            self._refuse_other_data(f"it now ends after {last + 1} of {known} chunks")

    def _refuse_other_data(self, found: str) -> None:
        assert self.ledger is not None
        raise ValueError(
            "the stream differs from the stream with which the run in "
            f"{str(self.ledger.out)!r} began: {found}. Give the earlier stream or another folder, "
            "or start over with resume=False (--restart)."
        )

    def _has(self, stage: Stage, chunk: int, entries: Mapping[int, Sequence[Entry]]) -> bool:
        """Tells whether a chunk is finished and all files that its tables refer to exist."""
        assert self.ledger is not None
        if not self.ledger.has(stage.name, chunk, entries):
            return False
        if stage.intact is None or stage.intact(self.ledger.read(stage.name, chunk, entries)):
            return True
        self.ledger.damaged.add(self.ledger.path(stage.name, chunk).name)
        return False

    def _write(self, stage: Stage, found: Iterator[tuple[Task, Tables]]) -> None:
        assert self.ledger is not None
        try:
            for task, tables in found:
                seconds = float(tables["chunk"]["seconds"].iloc[0])
                self.ledger.write(stage.name, task.number, *_ends(task), tables, seconds)
        except KeyboardInterrupt:
            self._tell("interrupted. Finished chunks are kept; the same call continues from there")
            raise
        if self.ledger.damaged:
            names = ", ".join(sorted(self.ledger.damaged))
            kept = "what such a file held is kept in a file that ends in .damaged"
            self._tell(f"damaged chunks were measured again: {names}; {kept}")
            self.ledger.damaged.clear()

    def _say(self, missing: Mapping[str, list[int] | None], then: str = _THEN) -> None:
        assert self.ledger is not None
        lengths = self.ledger.lengths()
        parts = []
        for name, gone in missing.items():
            total = lengths.get(name)
            done = "?" if gone is None or total is None else total - len(gone)
            parts.append(f"{name} {done} of {total or '?'}")
        self._tell(f"shard {self.shard} is done. Finished chunks: {', '.join(parts)}. {then}")

    def _tell(self, words: str) -> None:
        assert self.ledger is not None
        tqdm.write(f"{self.ledger.out}: {words}.", file=stream())


@contextmanager
def open_job(
    kind: Kind,
    meta: Mapping[str, Any],
    options: RunOptions,
    model: HookedModel,
    *,
    stages: Iterable[str] | None = None,
    read: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Job]:
    """Yields a job; meta: the part of the result's meta that is known before measuring.

    stages: the names of all stages of the job; None means the kind's stages. read: what else the
    chunks depend on, such as the functions of probes. Digests of it and of the hooks on the model
    are kept with the run; they are not part of the result.

    Raises ValueError for an unknown engine, if the folder holds another kind of result or a run
    with other settings, if the folder cannot be written, and for functions that read what cannot be
    compared later, such as an open file, unless the options have a tag.
    """
    engine = ENGINES[checks.one_of("engine", options.engine, tuple(ENGINES))]
    full = {**meta, "chunk_size": options.chunk_size}
    names = list(kind.stages if stages is None else stages)
    if options.out is None or is_dry():
        with engine() as measure:
            yield Job(kind, full, options, measure, planned=len(names))
        return
    place = shard_of(options.shard)
    kind.result.check_folder(options.out)
    plain_meta = json.loads(json.dumps(full, default=lambda value: value.item()))
    settings = {name: value for name, value in plain_meta.items() if name not in _FREE}
    settings["device"] = str(plain_meta["device"]).partition(":")[0]
    run = {"format": 1, "kind": kind.name, "stages": names, "settings": settings}
    run = json.loads(json.dumps(run | {"code": code_of(model, read, options.tag)}))
    full |= {"engine": options.engine, "command": plain(shlex.join(sys.argv), 1000)}
    full |= {"run": files.digest_of_bytes(json.dumps(run, sort_keys=True).encode())}
    opened = ledgers.opened(options.out, run, place, options.resume)
    with opened as ledger, engine() as measure:
        yield Job(kind, full, options, measure, ledger, place, len(names))


def folded_tables(ledger: Ledger, stage: str, rules: Rules, meta: Mapping[str, Any]) -> Tables:
    """Returns the merged tables of a stage whose chunks are all there."""
    entries, chunks = ledger.entries(stage), range(ledger.lengths()[stage])
    tables = folded(
        (ledger.read(stage, chunk, entries) for chunk in chunks),
        lambda one, two: merged(rules, one, two, meta),
    )
    assert tables is not None  # a stage has at least one chunk
    return tables


def finished(kind: Kind, ledger: Ledger, stages: Iterable[str], meta: dict[str, Any]) -> Any:
    """Returns and saves the result of a run whose chunks are all there.

    If several processes finish at once, one of them makes the result and the others load it.
    """
    with writable(ledger.out), alone(ledger.out):
        try:
            saved = kind.result.load(ledger.out)
            if saved.meta.get("run") == meta["run"] and not ledger.fresh:
                return saved
        except ValueError:
            pass  # there is no saved result, or a damaged one
        rules = {name: kind.rules_of(name) or {} for name in stages}
        found = {name: folded_tables(ledger, name, own, meta) for name, own in rules.items()}
        result = _made(kind, found, meta)
        result.save(ledger.out)
        return result


def _made(kind: Kind, found: Mapping[str, Tables], meta: dict[str, Any]) -> Any:
    """Returns the result of the tables of all stages, which must have read the same pictures."""
    assert kind.finish is not None
    check_agree(tables["pictures"] for tables in found.values() if "pictures" in tables)
    return kind.finish(found, meta)


def _ends(task: Task) -> tuple[int, int]:
    """Returns a chunk's (first, last + 1) samples."""
    return task.samples.start, task.samples.start + task.samples.n


def _in_order(found: Iterable[tuple[Task, Tables]]) -> Iterator[tuple[Task, Tables]]:
    """Yields tasks in the order of their chunks, each with its tables.

    A finished task waits until the tasks of all earlier chunks are finished.
    """
    waiting: dict[int, tuple[Task, Tables]] = {}
    following = 0
    for task, tables in found:
        waiting[task.number] = (task, tables)
        while following in waiting:
            yield waiting.pop(following)
            following += 1
