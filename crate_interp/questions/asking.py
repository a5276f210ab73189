"""Asks a question: opens the folder, says what the run takes, runs its passes, makes the result."""

import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

from crate_interp.core import checks
from crate_interp.core.pictures import quoted
from crate_interp.core.run_options import RunOptions, note, tqdm
from crate_interp.core.safe_text import plain
from crate_interp.data import Data, Samples
from crate_interp.data.samples import check_agree
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.questions import batches, engines, experiment, provenance, run_folder
from crate_interp.questions.chunks import InMemory, shard_of
from crate_interp.questions.experiment import Tables, Task, Work
from crate_interp.results.result import Result

if TYPE_CHECKING:
    T = TypeVar("T")
    # A shard of a run returns None while chunks of other shards are missing. If type checkers saw
    # this None, every caller would have to test for it.
    Perhaps = Annotated[T, "or None, in a shard"]
else:
    Perhaps = Optional


_LONG = 60.0  # seconds from which a run says what is left of it
# the seconds that each pass would take, in a dry run
_dry: ContextVar[list[float] | None] = ContextVar("dry run", default=None)


class Forecasted(Exception):
    """Raised in a dry run when one chunk of each pass has been measured."""


@contextmanager
def dry_run() -> Iterator[None]:
    """Inside this context a measurement stops after the first chunk of each pass."""
    token = _dry.set([])
    try:
        yield
    except Forecasted:
        pass
    finally:
        _dry.reset(token)


def is_dry() -> bool:
    """Tells whether a dry run is open."""
    return _dry.get() is not None


def stop_dry(kind: str, also: str = "") -> None:
    """Says what all passes of a dry run take together, and raises Forecasted.

    also: the name of a pass that was not measured, if any.
    """
    words = f"{kind.replace('_', ' ')}: about {_short(sum(_dry.get() or ()))} in all"
    note(f"{words}{f', and the time of {also!r}' if also else ''}. Nothing was written.")
    raise Forecasted


def timed(
    chunks: Iterable[tuple[Task, Tables]], work: Work, todo: int | None, keeps: bool
) -> Iterator[tuple[Task, Tables]]:
    """Yields what an engine yields; after the first chunk says what is left, if that is long.

    todo: how many samples are left of the pass, or None for a stream. keeps: whether a folder
    keeps finished chunks. In a dry run, says what the pass takes and stops after this chunk.
    """
    begin = time.perf_counter()
    first = work.options.progress and work.options.engine == "local"  # Ray's first is one of many
    for task, tables in chunks:
        done, took = task.stop - task.start, time.perf_counter() - begin
        count, whole = math.ceil((todo or done) / done), took * (todo or done) / done
        plan = _dry.get()
        if plan is not None:
            plan.append(whole)
            million = _short(1e6 * took / done)
            all_take = f"all {todo:,} take about {_short(whole)}, and " if todo else ""
            note(
                f"{work.step.name}: {done} {work.model.unit} took {_short(took)}, so "
                f"{all_take}a million would take about {million}."
            )
        elif first and whole - took > _LONG:
            words = f"{work.step.name}: {count - 1} more chunks, about {_short(whole - took)}."
            words += " If it stops, the same command continues it." * keeps
            note(words)
        first = False
        yield task, tables
        if plan is not None:
            return


def _short(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class Missing(Exception):
    """Chunks of other shards are missing, so the plan cannot go on in this process."""


def ask(question: experiment.Question, model: HookedModel, data: Data, options: RunOptions) -> Any:
    """Returns the result of a question; None in a shard while chunks of others are missing.

    Raises ValueError for an unknown engine, for what cannot be asked, if the folder holds another
    kind of result or a run with other settings, if it cannot be written, and for functions that
    read what cannot be compared later, such as an open file, unless the options have a tag.
    """
    engine = engines.ENGINES[checks.one_of("engine", options.engine, tuple(engines.ENGINES))]
    batches.check_model(model, getattr(question, "blocks", "blocks"))
    question, samples = question.opened(model, data, options)
    meta = provenance.data_meta(model, samples, options.batch_size) | question.facts(model)
    meta |= {"chunk_size": options.chunk_size}
    with ExitStack() as stack:
        chunks = InMemory(meta)
        if options.out is not None and not is_dry():
            shard = shard_of(options.shard)
            if not options.resume and shard.total > 1:
                raise ValueError("resume=False removes other shards' chunks: give another out=.")
            read = {"question": type(question), **question.read()}
            code = provenance.code_of(model, read, options.tag)
            settings = meta | {"device": str(meta["device"]).partition(":")[0]}
            folder = options.out, question.result, settings, code, shard, options.resume
            chunks = stack.enter_context(run_folder.in_folder(*folder))
            meta |= {"engine": options.engine, "command": plain(shlex.join(sys.argv), 1000)}
            meta |= {"run": chunks.run}
        measure, kind = stack.enter_context(engine()), question.result.KIND
        run = Experiment(model, samples, options, meta, chunks, measure, kind)
        plan = question.plan(run)
        try:
            wanted = next(plan)
            while True:  # a StopIteration of a probe becomes a RuntimeError on its way here
                tables = run.measured(wanted)
                try:
                    wanted = plan.send(tables)
                except ValueError:  # one chunk may be too few for what follows
                    if is_dry():
                        stop_dry(kind, "what follows")
                    raise
        except StopIteration as end:
            answer = end.value
        except Missing as missing:
            words = f"{options.out}: shard {chunks.shard} is done. Finished chunks: {missing}."
            note(f"{words} Run the other shards, then the same command again.")
            return None
        if is_dry():
            stop_dry(kind)
        return _result(question, answer, run)


def _result(question: experiment.Question, answer: experiment.Answer, run: "Experiment") -> Result:
    """Returns the result, and saves it if there is a folder.

    If several processes finish at once, one of them makes the result and the others load it.
    """
    out = run.chunks.out
    with nullcontext() if out is None else run_folder.alone(out):
        with suppress(ValueError):  # there is no saved result, or a damaged one
            saved = None if out is None else question.result.load(out)
            if saved is not None and saved.meta.get("run") == run.meta["run"]:
                return saved
        check_agree(one["pictures"] for one in run.facts.values() if "pictures" in one)
        main, *others = [one for one in run.facts.values() if one]
        tables = answer() if callable(answer) else answer
        stored, meta = experiment.with_facts(tables | main, run.meta, *others)
        result = question.result(stored, question.noted(meta))
        if out is not None:
            result.save(out)
        return result


@dataclass
class Experiment:
    """One call: the model, the samples, the options, and what the passes so far have found.

    facts: the tables that every chunk has (`OF_A_CHUNK`), merged, of each pass. dealt: how many
    blocks of chunks were dealt to shards in the passes so far.
    """

    model: HookedModel
    samples: Samples | Stream
    options: RunOptions
    meta: dict[str, Any]
    chunks: InMemory
    engine: engines.Engine
    kind: str
    facts: dict[str, experiment.Tables] = field(default_factory=dict)
    dealt: int = 0

    def measured(self, passes: experiment.Pass | Sequence[experiment.Pass]) -> Any:
        """Returns the merged tables of a pass, or of each of several.

        Raises Missing if other processes still lack parts, after this process has done its own.
        """
        steps = [passes] if isinstance(passes, experiment.Pass) else list(passes)
        if is_dry() and all(step.whole for step in steps) and self.facts:
            stop_dry(self.kind, steps[0].name)
        totals: dict[str, int] = {}
        found: dict[str, experiment.Tables | None] = {}
        for place, step in enumerate(steps, 1):
            label = f"{step.name} ({place} of {len(steps)})" if len(steps) > 1 else step.name
            totals[step.name] = self._measure(step, label)
            if step.check and not is_dry():
                found[step.name] = tables = self.chunks.merged(step, totals[step.name])
                if tables is not None:
                    step.check(tables)
        answers = []
        for step in steps:  # other shards may have ended meanwhile
            tables = found.get(step.name) or self.chunks.merged(step, totals[step.name])
            if tables is None:
                blocks = self.chunks.blocks
                done = {name: sum(one.count for one in blocks[name].values()) for name in totals}
                words = [f"{name} {done[name]} of {total}" for name, total in totals.items()]
                raise Missing(", ".join(words))
            kept = {name: tables[name] for name in tables if name in experiment.OF_A_CHUNK}
            self.facts[step.name] = kept
            if self.chunks.shard.total > 1:
                self._check_pictures(tables)
            if step.most is None:
                self.facts_of(step.name)  # raises if no sample can be decoded
            answers.append({name: tables[name] for name in tables if name not in kept})
        return answers[0] if isinstance(passes, experiment.Pass) else answers

    def facts_of(self, name: str) -> dict[str, Any]:
        """Returns the meta with the samples, counts and seconds of a pass.

        Raises ValueError if none of its samples could be decoded.
        """
        return experiment.with_facts(self.facts[name], self.meta)[1]

    def _measure(self, step: experiment.Pass, label: str) -> int:
        """Measures this shard's missing chunks of a pass; returns how many chunks the pass has."""
        self.facts[step.name] = {}
        work = experiment.Work(step, self.model, self.samples, self.options)
        streamed, (place, shards) = isinstance(self.samples, Stream), self.chunks.shard
        tasks = work.tasks() if streamed else list(work.tasks())
        total, length = 0, 1
        if isinstance(tasks, list):  # a shard has blocks of neighbours, which merge by themselves
            length = max(1, 1 << (len(tasks) // (4 * shards)).bit_length() >> 1)

        def open_tasks() -> Iterator[experiment.Task]:
            nonlocal total
            for task in tasks:
                total = task.number + 1
                block = self.chunks.finished(step, task.number)
                mine = (self.dealt + task.number // length) % shards == place
                # the process in charge of the one chunk of a `whole` pass may have ended
                if block is None and (step.whole or mine):
                    yield task
                if block and total == block.first + block.count and task.stop != block.stop:
                    where = f"{str(self.chunks.out)!r} began, in chunk {task.number}"
                    words = f"the stream differs from the one with which the run in {where}"
                    raise ValueError(f"{words}. Give the earlier one, or resume=False (--restart).")

        self.chunks.open(step, self._check_pictures if self.samples.files else None)
        todo = None if streamed else sum(task.stop - task.start for task in open_tasks())
        bar = tqdm(
            total=todo, desc=label, unit=self.model.unit.removesuffix("s"),
            disable=not self.options.progress, leave=False,
        )  # fmt: skip
        if is_dry() and todo and not step.whole:  # the first sample of all waits for imports
            first = next(open_tasks())
            list(self.engine(work, [replace(first, stop=first.start + 1)], lambda _: None))
        with bar:
            measured = self.engine(work, open_tasks(), bar.update)
            try:
                for task, tables in timed(measured, work, todo, self.chunks.out is not None):
                    self.chunks.put(step, task, tables)
            except KeyboardInterrupt as stop:
                if self.chunks.out is not None:
                    stop.add_note(f"The same call continues in {self.chunks.out}.")
                raise
        if is_dry():
            return sum(block.count for block in self.chunks.blocks[step.name].values())
        self.chunks.ended(step, total)
        self.dealt += -(-total // length)
        return total

    def _check_pictures(self, tables: experiment.Tables) -> None:
        """Raises ValueError if files hold something else than when they were measured."""
        held = self.samples.files
        if held is None or self.chunks.out is None or "pictures" not in tables:
            return
        changed = held.changed(tables["pictures"])
        if changed:
            names = f"{', '.join(map(quoted, changed[:4]))} in {quoted(held.folder)}"
            words = f"is not what the run in {str(self.chunks.out)!r} has measured: put it back"
            raise ValueError(f"{names}: the content {words}, or give resume=False (--restart).")
