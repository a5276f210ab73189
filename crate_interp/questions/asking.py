"""Asks a question: opens the folder, runs the plan's passes, and makes the result."""

import json
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

from crate_interp.core import checks, files
from crate_interp.core.folders import read_index
from crate_interp.core.pictures import quoted
from crate_interp.core.progress import note, tqdm
from crate_interp.core.run_options import RunOptions
from crate_interp.core.safe_text import plain
from crate_interp.data import Data, Samples
from crate_interp.data.picture_contents import check_agree, named
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.batches import check_model
from crate_interp.questions.chunk_facts import OF_A_CHUNK, with_facts
from crate_interp.questions.chunks import Block, InFolder, InMemory, check_places, discard, is_run
from crate_interp.questions.engines import ENGINES, Engine
from crate_interp.questions.experiment import Answer, Pass, Question, Tables, Task, Work
from crate_interp.questions.folder_access import (
    CHUNKS,
    RUN,
    WHOLE,
    Shard,
    alone,
    check_alone,
    check_same,
    remove_leftovers,
    shard_of,
    working,
    writable,
)
from crate_interp.questions.forecast import is_dry, stop_dry, timed
from crate_interp.questions.provenance import code_of, data_meta
from crate_interp.results.result import Result

if TYPE_CHECKING:
    T = TypeVar("T")
    # A shard of a run returns None while chunks of other shards are missing. If type checkers saw
    # this None, every caller would have to test for it.
    Perhaps = Annotated[T, "or None, in a shard"]
else:
    Perhaps = Optional

# entries of meta that may differ between the runs of a folder, as they do not change numbers
_FREE = ("seconds", "command", "engine", "counts")
FORMAT = 2  # of run.json


class Missing(Exception):
    """Chunks of other shards are missing, so the plan cannot go on in this process."""


def ask(question: Question, model: HookedModel, data: Data, options: RunOptions) -> Any:
    """Returns the result of a question; None in a shard while chunks of others are missing.

    Raises ValueError for an unknown engine, for what cannot be asked, if the folder holds another
    kind of result or a run with other settings, if it cannot be written, and for functions that
    read what cannot be compared later, such as an open file, unless the options have a tag.
    """
    engine = ENGINES[checks.one_of("engine", options.engine, tuple(ENGINES))]
    check_model(model, getattr(question, "blocks", "blocks"))
    question, samples = question.opened(model, data, options)
    meta = data_meta(model, samples, options.batch_size) | question.facts(model)
    meta |= {"chunk_size": options.chunk_size}
    with _chunks_of(question, meta, options, model) as chunks, engine() as measure:
        if chunks.out is not None:
            meta |= {"engine": options.engine, "command": plain(shlex.join(sys.argv), 1000)}
            meta |= {"run": chunks.run}
        kind = question.result.KIND
        run = Experiment(model, samples, options, meta, chunks, measure, kind)
        try:
            tables = _answered(question, run)
        except Missing as missing:
            words = f"{options.out}: shard {chunks.shard} is done. Finished chunks: {missing}."
            note(f"{words} Run the other shards, then the same command again.")
            return None
        if is_dry():
            stop_dry(kind)
        return _saved(question, tables, run)


def _answered(question: Question, run: "Experiment") -> Answer:
    """Returns the tables of the result, or a function that makes them."""
    with closing(question.plan(run)) as plan:
        tables = None
        while True:
            try:
                wanted = plan.send(tables)
            except StopIteration as end:
                return end.value
            # outside the `try`: a StopIteration of a probe is not the end of the plan
            tables = run.measured(wanted)


def _saved(question: Question, tables: Answer, run: "Experiment") -> Result:
    """Returns the result, and saves it if there is a folder.

    If several processes finish at once, one of them makes the result and the others load it.
    """
    out = run.chunks.out
    if out is None:
        return _result(question, tables, run)
    with writable(out), alone(out):
        with suppress(ValueError):  # there is no saved result, or a damaged one
            saved = question.result.load(out)
            if saved.meta.get("run") == run.meta["run"]:
                return saved
        result = _result(question, tables, run)
        result.save(out)
        return result


def _result(question: Question, tables: Answer, run: "Experiment") -> Result:
    check_agree(one["pictures"] for one in run.facts.values() if "pictures" in one)
    main, *others = [one for one in run.facts.values() if one]
    tables = tables() if callable(tables) else tables
    stored, meta = with_facts(tables | main, run.meta, *others)
    return question.result(stored, question.noted(meta))


@dataclass
class Experiment:
    """One call: the model, the samples, the options, and what the passes so far have found.

    facts: the tables that every chunk has (`OF_A_CHUNK`), merged, of each pass. dealt: how many
    blocks of chunks were dealt to shards in the passes so far. length: of the blocks of this pass.
    """

    model: HookedModel
    samples: Samples | Stream
    options: RunOptions
    meta: dict[str, Any]
    chunks: InMemory
    engine: Engine
    kind: str
    facts: dict[str, Tables] = field(default_factory=dict)
    dealt: int = 0
    length: int = 1

    def measured(self, wanted: Pass | Sequence[Pass]) -> Any:
        """Returns the merged tables of a pass, or of each of several.

        Raises Missing, once this process has done its part of all of them, if other parts miss.
        """
        steps = [wanted] if isinstance(wanted, Pass) else list(wanted)
        if is_dry() and all(step.whole for step in steps) and self.facts:
            stop_dry(self.kind, steps[0].name)
        totals, found = {}, {}
        for place, step in enumerate(steps, 1):
            label = f"{step.name} ({place} of {len(steps)})" if len(steps) > 1 else step.name
            totals[step.name] = self._measure(step, label)
            if step.check and not is_dry():
                found[step.name] = self.chunks.merged(step, totals[step.name])
                if found[step.name] is not None:
                    step.check(found[step.name])
        for step in steps:
            if found.get(step.name) is None:
                found[step.name] = self.chunks.merged(step, totals[step.name])
        if any(tables is None for tables in found.values()):
            raise Missing(self._progress(totals))
        for step in steps:
            tables = found[step.name] or {}
            self.facts[step.name] = {name: t for name, t in tables.items() if name in OF_A_CHUNK}
            if self.chunks.shard.total > 1:
                self._check_pictures(tables)
            if step.most is None:
                self.facts_of(step.name)  # raises if no sample can be decoded
        answers = [
            {name: t for name, t in (found[step.name] or {}).items() if name not in OF_A_CHUNK}
            for step in steps
        ]
        return answers[0] if isinstance(wanted, Pass) else answers

    def facts_of(self, name: str) -> dict[str, Any]:
        """Returns the meta with the samples, counts and seconds of a pass.

        Raises ValueError if none of its samples could be decoded.
        """
        return with_facts(self.facts[name], self.meta)[1]

    def _progress(self, totals: Mapping[str, int]) -> str:
        blocks = self.chunks.blocks
        done = {name: sum(one.count for one in blocks[name].values()) for name in totals}
        return ", ".join(f"{name} {done[name]} of {total}" for name, total in totals.items())

    def _measure(self, step: Pass, label: str) -> int:
        """Measures this shard's missing chunks of a pass; returns how many chunks the pass has."""
        if step.name in self.facts:
            raise ValueError(f"the plan has two passes {step.name!r}.")  # would share chunks
        self.facts[step.name] = {}
        work = Work(step, self.model, self.samples, self.options)
        streamed = isinstance(self.samples, Stream)
        tasks = work.tasks() if streamed else list(work.tasks())
        total = 0

        def left() -> Iterator[Task]:
            nonlocal total
            for task in tasks:
                total = task.number + 1
                block = self.chunks.finished(step, task.number)
                if block is not None:
                    self._check_stream(task, block)
                elif self._is_mine(step, task.number):
                    yield task

        if isinstance(tasks, list):  # a shard has blocks of neighbours, which merge by themselves
            each = len(tasks) // (4 * self.chunks.shard.total)
            self.length = max(1, 1 << each.bit_length() >> 1)
        look = partial(self._check_pictures, mine=step) if self.samples.files else None
        self.chunks.open(step, look)
        todo = None if streamed else sum(task.stop - task.start for task in left())
        bar = tqdm(
            total=todo, desc=label, unit=self.model.unit.removesuffix("s"),
            disable=not self.options.progress, leave=False,
        )  # fmt: skip
        with bar:
            measured = self.engine(work, left(), bar.update)
            try:
                for task, tables in timed(measured, work, todo, self.chunks.out is not None):
                    self.chunks.put(step, task, tables)
            except KeyboardInterrupt:
                if self.chunks.out is not None:
                    note(f"{self.chunks.out}: interrupted. The same call continues from there.")
                raise
        if is_dry():
            return sum(block.count for block in self.chunks.blocks[step.name].values())
        self.chunks.ended(step, total)
        self.dealt += -(-total // self.length)
        return total

    def _is_mine(self, step: Pass, number: int) -> bool:
        # the process in charge of the one chunk of a `whole` pass may have ended
        place, total = self.chunks.shard
        return step.whole or (self.dealt + number // self.length) % total == place

    def _check_stream(self, task: Task, block: Block) -> None:
        """Raises ValueError if a stream does not hold the samples that were measured before."""
        if task.number == block.first + block.count - 1 and task.stop != block.stop:
            raise ValueError(
                f"the stream differs from the one with which the run in {str(self.chunks.out)!r} "
                f"began: its chunk {task.number} has other samples. Give the earlier stream or "
                "another folder, or start over with resume=False (--restart)."
            )

    def _check_pictures(self, tables: Tables, mine: Pass | None = None) -> None:
        """Raises ValueError if files hold something else than when they were measured.

        mine: checks only the chunks of this pass that are dealt to this shard.
        """
        held = self.samples.files
        if held is None or self.chunks.out is None or "pictures" not in tables:
            return
        rows: Any = tables["pictures"]
        if mine is not None:
            numbers = (rows["sample"] - self.samples.start) // self.options.chunk_size
            rows = rows[[self._is_mine(mine, number) for number in numbers]]
        changed = held.changed(rows)
        if changed:
            raise ValueError(
                f"{named(changed)} in {quoted(held.folder)}: the content is not what the run in "
                f"{str(self.chunks.out)!r} has measured. Put the earlier content back; or, to "
                "start over, give another folder for the result, or resume=False (--restart)."
            )


@contextmanager
def _chunks_of(
    question: Question, meta: Mapping[str, Any], options: RunOptions, model: HookedModel
) -> Iterator[Any]:
    """Yields the chunks of a run; in a folder, no other process can work on the same shard."""
    if options.out is None or is_dry():
        yield InMemory(meta)
        return
    out, shard = options.out, shard_of(options.shard)
    if not options.resume and shard.total > 1:
        raise ValueError(
            f"resume=False in shard {shard} would remove the chunks of other shards. Remove "
            f"{str(out)!r} yourself before you start the shards, or give another folder."
        )
    code = code_of(model, {"question": type(question), **question.read()}, options.tag)
    settings = dict(meta) | {"device": str(meta["device"]).partition(":")[0]}
    with in_folder(out, question.result, settings, code, shard, options.resume) as chunks:
        chunks.meta = meta
        yield chunks


@contextmanager
def in_folder(
    out: Path,
    result: type[Result],
    settings: Mapping[str, Any],
    code: Mapping[str, Any],
    shard: Shard = WHOLE,
    resume: bool = True,
) -> Iterator[InFolder]:
    """Yields the chunks of a run in a folder, while no other process can work on the same shard.

    settings, code: what the numbers depend on. Raises ValueError if the folder cannot be written,
    if it holds another kind of result or a run with other settings, and if files that are not ours
    would be lost, or a link would be followed.
    """
    result.check_folder(out)
    kept = {name: value for name, value in settings.items() if name not in _FREE}
    run: dict[str, Any] = {"format": FORMAT, "kind": result.KIND, "settings": kept, "code": code}
    run = json.loads(json.dumps(run, default=lambda value: value.item()))
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        check_places(out)
        (out / CHUNKS).mkdir(exist_ok=True)
    with working(out, shard):
        with writable(out):
            check_alone(out, shard, every=not resume)
            remove_leftovers(out)
            if not resume:
                discard(out)
            with alone(out):
                began = _agree(out, run)
        digest = files.digest_of_bytes(json.dumps(run | began, sort_keys=True).encode())
        yield InFolder(settings, shard, out=out, run=digest)


def _agree(out: Path, run: Mapping[str, Any]) -> dict[str, str]:
    """Writes the settings of a run, or raises ValueError if the folder has others.

    Returns what tells this run from one that started over with the same settings.
    """
    path = out / RUN
    if not path.exists():
        if any((out / CHUNKS).glob("*.parquet")):
            raise ValueError(
                f"{str(path)!r} is missing, although the folder has chunks. Start over with "
                "resume=False (--restart), or give another folder."
            )
        began = {"began": secrets.token_hex(8)}
        files.write_text(path, json.dumps({**run, **began}, indent=2) + "\n")
        return began
    there = read_index(path)
    if not is_run(there):
        raise ValueError(
            f"{str(path)!r} holds no settings of a run. Move it to another place and start over "
            "with resume=False (--restart), or give another folder."
        )
    began = {"began": str(there.pop("began", ""))}
    check_same(there, run, str(out))
    return began
