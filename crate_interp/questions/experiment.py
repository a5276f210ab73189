"""One experiment under every question: a plan of passes over samples, measured chunk by chunk.

A question is a frozen dataclass whose fields are its settings. Its `plan` yields passes, is sent
their merged tables, and returns the tables of the result. `ask` (asking.py) runs it.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from crate_interp.core.run_options import DEFAULTS, RunOptions
from crate_interp.core.safe_text import plain
from crate_interp.data import Data, Samples, part
from crate_interp.data.samples import Found, Notes, add, contents, noting, table_of
from crate_interp.data.streams import Row, Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.batches import Chunk, Forward, data_of, nobody, run_layers, samples_of
from crate_interp.questions.provenance import digest_of_labels
from crate_interp.questions.untrained_twins import SAMPLES
from crate_interp.results import sample_ranges
from crate_interp.results.result import Merge, Result, by, sums

if TYPE_CHECKING:
    from crate_interp.questions.asking import Experiment

Tables = dict[str, pd.DataFrame]
Rules = Mapping[str, Merge]  # name of a table -> how it merges
Ahead = Callable[[int, int], Found | None]


def _whole(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    both = pd.concat([mine, theirs], ignore_index=True)
    row = {"start": both["start"].min(), "stop": both["stop"].max()}
    return pd.DataFrame([row | {"seconds": both["seconds"].sum()}])


# The tables that every chunk has. chunk: the samples of a chunk, and the seconds that it took.
# counts: sums for the meta. skipped: samples that could not be decoded. pictures: what the files of
# samples held when they were read. groups: the groups of the samples of a stream.
OF_A_CHUNK: dict[str, Merge] = {
    "chunk": _whole, "counts": sums("name"), "skipped": by("sample"), "pictures": by("sample"),
    "groups": by("sample"),
}  # fmt: skip


def with_facts(
    tables: Tables, meta: Mapping[str, Any], *others: Tables
) -> tuple[Tables, dict[str, Any]]:
    """Returns the tables that a result stores, and the meta with samples, counts and seconds added.

    others: the tables of the other passes; their seconds are included.
    Raises ValueError if no sample could be decoded.
    """
    row: Any = tables["chunk"].iloc[0]
    start, stop = int(row["start"]), int(row["stop"])
    skipped = tables["skipped"].to_dict("records") if "skipped" in tables else []
    if len(skipped) == stop - start:
        words = f"{stop - start} samples can be decoded. First error: {skipped[0]['why']}"
        raise ValueError(f"none of the {words}")
    count = stop - start - len(skipped)
    data = meta["data"][0] | {"start": start, "stop": stop}
    if "pictures" in tables:
        data |= contents(tables["pictures"], start, stop, count)
    if "groups" in tables:
        data |= sample_ranges.grouped(tables["groups"]["group"])
    seconds = sum(float(one["chunk"]["seconds"].iloc[0]) for one in (tables, *others))
    facts = {**meta, "data": [data], "n_samples": count, "seconds": round(seconds, 3)}
    if "counts" in tables:
        pairs = zip(tables["counts"]["name"], tables["counts"]["value"], strict=True)
        facts["counts"] = {name: int(v) if float(v).is_integer() else float(v) for name, v in pairs}
    if skipped:
        facts["skipped"] = skipped
    return {name: table for name, table in tables.items() if name not in OF_A_CHUNK}, facts


@dataclass(frozen=True)
class Pass:
    """One pass of a network over samples.

    name: once in a plan. measure(chunk): returns the tables of a chunk, even if the chunk has no
    batches. merge: how each table of two neighbouring chunks merges. made(model): makes the network
    to measure, such as an untrained copy; None measures the model itself. most: only the samples
    with a lower number. whole: whether all samples are one chunk, which any shard measures. masks:
    whether batches have masks. check(tables): refuses what the merged tables of the pass show,
    before the passes after it begin. intact(tables): tells whether files that a chunk's tables
    refer to exist. apart: whether the files of chunks stay apart until the end.

    The functions travel to other processes: give functions of modules and partials of them.
    """

    name: str
    measure: Callable[[Chunk], Tables]
    merge: Rules
    made: Callable[[HookedModel], HookedModel] | None = None
    most: int | None = None
    whole: bool = False
    masks: bool = False
    blocks: str = "blocks"
    forward: Forward = run_layers
    check: Callable[[Tables], object] | None = None
    intact: Callable[[Tables], bool] | None = None
    apart: bool = False

    def merged(self, mine: Tables, theirs: Tables, meta: Mapping[str, Any]) -> Tables:
        """Returns the merged tables of two neighbouring chunks; either may lack some tables."""
        rules = {**self.merge, **OF_A_CHUNK}
        both = {key: rules[key](mine[key], theirs[key], meta) for key in mine if key in theirs}
        return {**theirs, **mine, **both}


def copies(
    step: Pass,
    count: int,
    name: str,
    make: Callable[..., HookedModel],
    samples: Samples | Stream,
    most: int | None = SAMPLES,
) -> list[Pass]:
    """Returns passes NAME-0, NAME-1, ...: the same measurement of copies of the model.

    make(model, seed): makes a copy. most: copies are measured on the samples with a lower number,
    or on all (None); there are no passes if the samples begin later.
    """
    if most is not None and samples.start >= most:
        return []
    return [
        replace(step, name=f"{name}-{seed}", made=partial(make, seed=seed), most=most)
        for seed in range(count)
    ]


@dataclass(frozen=True)
class Task:
    """A chunk to measure: the samples from `start` to `stop` - 1. rows: theirs, of a stream."""

    number: int
    start: int
    stop: int
    rows: Sequence[Row] | None = None


@dataclass
class Work:
    """A pass with everything that a process needs to measure its chunks.

    held: what all chunks of this process share, such as an untrained copy; it is never sent.
    """

    step: Pass
    model: HookedModel
    data: Samples | Stream
    options: RunOptions = DEFAULTS
    held: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # a task brings its rows: the iterator of a stream stays where it is
        data: Any = replace(self.data, rows=None) if isinstance(self.data, Stream) else self.data
        return {**vars(self), "held": {}, "data": data}

    def tasks(self) -> Iterator[Task]:
        """Yields the chunks in order; of a stream, as its rows arrive."""
        data, size = self.data, self.options.chunk_size
        if isinstance(data, Stream):
            for number, (start, rows) in enumerate(data.chunks(size)):
                yield Task(number, start, start + len(rows), rows)
            return
        stop = min(data.start + data.n, self.step.most or data.start + data.n)
        size = max(1, stop - data.start) if self.step.whole else size
        for number, start in enumerate(range(data.start, stop, size)):
            yield Task(number, start, min(start + size, stop))

    def samples(self, task: Task) -> Samples:
        """Returns the samples of a chunk."""
        if isinstance(self.data, Stream):
            return self.data.held(task.rows or (), task.start)
        return part(self.data, task.start, task.stop)

    def network(self) -> HookedModel:
        """Returns the network to measure; a copy is made when it is first needed."""
        if "network" not in self.held:
            self.held["network"] = self.step.made(self.model) if self.step.made else self.model
        return self.held["network"]

    def measured(
        self, task: Task, advance: Callable[[int], Any] = nobody, ahead: Ahead = nobody
    ) -> Tables:
        """Returns the tables of a chunk: the same bits in whatever process it is measured.

        Samples that were left out have no row in a table. If a chunk has no batch, its empty tables
        are removed, since they lack columns. ahead: as in `Chunk`.
        """
        began, notes, step = time.perf_counter(), Notes(), self.step
        samples = noting(self.samples(task), notes)

        def take_noted(start: int, stop: int) -> Found | None:
            found = ahead(start, stop)
            add(notes, found.notes if found else {})
            return found

        chunk = Chunk(
            self.network(), samples, self.options.batch_size, step.blocks, step.forward,
            task.number, self.held, advance, step.masks, self.options.skip_bad, ahead=take_noted,
        )  # fmt: skip
        tables = step.measure(chunk)
        if chunk.bad:
            tables = _without(tables, samples, chunk.bad)
        row = {"start": task.start, "stop": task.stop, "seconds": time.perf_counter() - began}
        more = {"pictures": table_of(notes)} if samples.files else {}
        if isinstance(self.data, Stream) and samples.groups is not None:
            numbers = range(task.start, task.stop)
            more["groups"] = pd.DataFrame({"sample": numbers, "group": samples.groups})
        return {**tables, "chunk": pd.DataFrame([row]), **more}


def _without(tables: Tables, samples: Samples, bad: Mapping[int, str]) -> Tables:
    """Returns tables without the bad samples, and a table "skipped" that lists these samples."""
    kept: Tables = {}
    for name, table in tables.items():
        rows: Any = table[~table["sample"].isin(list(bad))] if "sample" in table else table
        if len(rows) or len(bad) < samples.n:
            kept[name] = rows.reset_index(drop=True) if "sample" in table else table
    name_of = samples.name_of or (lambda number: "")
    skipped = [(number, name_of(number), plain(why, 1000)) for number, why in sorted(bad.items())]
    return kept | {"skipped": pd.DataFrame(skipped, columns=["sample", "name", "why"])}


Answer = Tables | Callable[[], Tables]
Plan = Generator[Pass | Sequence[Pass], Any, Answer]
Opened = tuple["Question", Samples | Stream]  # the settled question, and the samples


@dataclass(frozen=True)
class Question:
    """A question about a model; its fields are the settings that a folder compares.

    result: the class of its result. streams: whether data may have no length, which only a plan of
    one pass can read.
    """

    result: ClassVar[type[Result]]
    streams: ClassVar[bool] = False

    def settled(self, model: HookedModel, samples: Any) -> "Question":
        """Returns the question with what only model and samples decide.

        Raises ValueError, in one sentence, for what cannot be asked of them.
        """
        return self

    def opened(self, model: HookedModel, data: Data, options: RunOptions) -> Opened:
        """Opens the data; returns the settled question and the samples."""
        samples = (data_of if self.streams else samples_of)(model, data, options)
        return self.settled(model, samples), samples

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and the result's meta record of the question, as JSON values.

        Fields with repr=False are not settings: `opened` fills them in.
        """
        return {"settings": {one.name: getattr(self, one.name) for one in fields(self) if one.repr}}

    def read(self) -> Mapping[str, object]:
        """Returns, by name, what else the numbers depend on, such as the user's functions.

        For a question with a `loss`, these are the labels.
        """
        loss: Any = getattr(self, "loss", None)
        return {} if loss is None else {"labels": digest_of_labels(loss.classes)}

    def passes(self, model: HookedModel) -> Pass:
        """Returns the pass of a question that has only one."""
        raise NotImplementedError

    def plan(self, run: "Experiment") -> Plan:
        """Yields a pass, or passes that do not wait for each other; is sent their merged tables.

        Of a list of passes, a list of merged tables is sent. Returns the tables of the result, or a
        function that makes them, which is called unless the folder has the result already.
        """
        return (yield self.passes(run.model))

    def noted(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Returns the meta that the result keeps."""
        return meta
