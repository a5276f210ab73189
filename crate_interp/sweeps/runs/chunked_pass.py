"""A stage: one pass of a network over samples, in chunks whose tables merge."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import pandas as pd

from crate_interp.core.run_options import DEFAULTS, RunOptions
from crate_interp.core.safe_text import plain
from crate_interp.data import Samples, part
from crate_interp.data.picture_contents import Notes, add, contents, noting, table_of
from crate_interp.data.samples import Found
from crate_interp.data.streams import Row, Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.results import sample_ranges
from crate_interp.results.kinds import Kind, Rules, Tables
from crate_interp.results.result import Merge, Result, by, sums
from crate_interp.sweeps.runs.batches import Chunk, Forward, nobody, run_layers
from crate_interp.sweeps.runs.untrained_twins import shuffled, twin

Ahead = Callable[[int, int], Found | None]


@dataclass(frozen=True)
class Task:
    """A chunk to measure; rows: the chunk's rows, if the data is a stream."""

    number: int
    samples: Samples
    rows: Sequence[Row] | None = None


@dataclass(frozen=True)
class Stage:
    """A pass of a network over samples.

    of_chunk: returns the tables of a chunk, even if the chunk has no batches. whole: whether all
    samples form one chunk, whatever the job's chunk_size; the first process that reaches this chunk
    measures it. made: makes the network to measure of the model, such as an untrained twin; None
    measures the model itself. masks: whether batches have masks. intact(tables): tells whether the
    files that a chunk's tables refer to exist. The job sets two fields: rules (how each table
    merges) and options (how samples are read).
    """

    name: str
    model: HookedModel
    samples: Samples | Stream
    of_chunk: Callable[[Chunk], Tables]
    blocks: str = "blocks"
    forward: Forward = run_layers
    once: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    made: Callable[[HookedModel], HookedModel] | None = None
    masks: bool = False
    intact: Callable[[Tables], bool] | None = None
    rules: Rules = field(default_factory=dict)
    options: RunOptions = DEFAULTS

    def tasks(self, chunk_size: int) -> Iterator[Task]:
        """Yields the chunks in order: the first chunk_size samples, the next, ..."""
        if isinstance(self.samples, Stream):
            for number, (start, rows) in enumerate(self.samples.chunks(chunk_size)):
                yield self.task(number, start, start + len(rows), rows)
            return
        first, stop = self.samples.start, self.samples.start + self.samples.n
        chunk_size = self.samples.n if self.whole else chunk_size
        for number, start in enumerate(range(first, stop, chunk_size)):
            yield self.task(number, start, min(start + chunk_size, stop))

    def task(self, number: int, start: int, stop: int, rows: Sequence[Row] = ()) -> Task:
        """Returns chunk `number`, which has the samples from `start` to `stop` - 1.

        rows: the rows of these samples, if the data is a stream.
        """
        if isinstance(self.samples, Stream):
            return Task(number, self.samples.held(rows, start), rows)
        return Task(number, part(self.samples, start, stop))

    def measured(self, task: Task, advance: Callable[[int], Any], ahead: Ahead = nobody) -> Tables:
        """Returns the tables of a chunk, including the tables that every stage has (`OF_A_CHUNK`).

        Samples that were left out have no row in a table. If a chunk has no batch, its empty tables
        are removed, since they lack columns. ahead: as in `Chunk`.
        """
        started, notes = time.perf_counter(), Notes()
        samples = noting(task.samples, notes)

        def taken(start: int, stop: int) -> Found | None:
            found = ahead(start, stop)
            add(notes, found.notes if found else {})
            return found

        chunk = Chunk(
            self.network(), samples, self.options.batch_size, self.blocks, self.forward,
            task.number, self.once, advance, self.masks, self.options.skip_bad, ahead=taken,
        )  # fmt: skip
        tables = self.of_chunk(chunk)
        if chunk.bad:
            tables = _without(tables, samples, chunk.bad)
        row = {"start": samples.start, "stop": samples.start + samples.n}
        row |= {"seconds": time.perf_counter() - started}
        more = {"pictures": table_of(notes)} if samples.files else {}
        if isinstance(self.samples, Stream) and samples.groups is not None:
            number = range(samples.start, samples.start + samples.n)
            more["groups"] = pd.DataFrame({"sample": number, "group": samples.groups})
        return {**tables, "chunk": pd.DataFrame([row]), **more}

    def network(self) -> HookedModel:
        """Returns the network to measure; a twin is made when it is first needed."""
        if self.made is None:
            return self.model
        if "twin" not in self.once:
            self.once["twin"] = self.made(self.model)
        return self.once["twin"]

    def merged(self, mine: Tables, theirs: Tables, meta: Mapping[str, Any]) -> Tables:
        """Returns the merged tables of neighbouring chunks; either chunk may lack some tables."""
        return merged(self.rules, mine, theirs, meta)


def twins_of(stage: Stage, count: int) -> list[Stage]:
    """Returns stages "untrained-0", ..., which measure twins as `stage` measures the model."""
    return _made(stage, count, "untrained", twin)


def shuffled_of(stage: Stage, count: int) -> list[Stage]:
    """Returns stages "shuffled-0", ..., which measure the model with its weights shuffled."""
    return _made(stage, count, "shuffled", shuffled)


def _made(stage: Stage, count: int, name: str, make: Callable[..., HookedModel]) -> list[Stage]:
    return [
        replace(stage, name=f"{name}-{seed}", made=partial(make, seed=seed), once={})
        for seed in range(count)
    ]


def _without(tables: Tables, samples: Samples, bad: Mapping[int, str]) -> Tables:
    """Returns tables without the bad samples, and a table "skipped" that lists these samples."""
    kept: dict[str, Any] = {
        name: table[~table["sample"].isin(list(bad))].reset_index(drop=True)
        if "sample" in table
        else table
        for name, table in tables.items()
    }
    if len(bad) == samples.n:
        kept = {name: table for name, table in kept.items() if len(table)}
    name_of = samples.name_of or (lambda number: "")
    rows = [(number, name_of(number), plain(why, 1000)) for number, why in sorted(bad.items())]
    return kept | {"skipped": pd.DataFrame(rows, columns=["sample", "name", "why"])}


def merged(rules: Rules, mine: Tables, theirs: Tables, meta: Mapping[str, Any]) -> Tables:
    """Returns the merged tables of two neighbouring chunks, by rules and `OF_A_CHUNK`."""
    every = {**rules, **OF_A_CHUNK}
    both = {name: every[name](mine[name], theirs[name], meta) for name in mine if name in theirs}
    return {**theirs, **mine, **both}


def _whole(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    both = pd.concat([mine, theirs], ignore_index=True)
    row = {"start": both["start"].min(), "stop": both["stop"].max()}
    return pd.DataFrame([row | {"seconds": both["seconds"].sum()}])


# The tables that every stage has. chunk: the samples of a chunk, and the seconds that it took.
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

    others: the tables of other stages of the same job; the seconds of these stages are included.
    Raises ValueError if no sample could be decoded.
    """
    own = {name: table for name, table in tables.items() if name not in OF_A_CHUNK}
    every = (tables, *others)
    row: Any = tables["chunk"].iloc[0]
    start, stop = int(row["start"]), int(row["stop"])
    skipped = tables["skipped"].to_dict("records") if "skipped" in tables else []
    if len(skipped) == stop - start:
        raise ValueError(
            f"none of the {stop - start} samples can be decoded. First error: {skipped[0]['why']}"
        )
    count = stop - start - len(skipped)
    known = contents(tables["pictures"], start, stop, count) if "pictures" in tables else {}
    if "groups" in tables:
        known |= sample_ranges.grouped(tables["groups"]["group"])
    facts = {
        "data": [meta["data"][0] | {"start": start, "stop": stop} | known],
        "n_samples": count,
        "seconds": round(sum(float(one["chunk"]["seconds"].iloc[0]) for one in every), 3),
    }
    if "counts" in tables:
        pairs = zip(tables["counts"]["name"], tables["counts"]["value"], strict=True)
        facts["counts"] = {name: int(v) if float(v).is_integer() else float(v) for name, v in pairs}
    return own, {**meta, **facts} | ({"skipped": skipped} if skipped else {})


def kind_of_one_stage(result: type[Result], stage: str | None = None) -> Kind:
    """Returns the kind of a result that stores the tables of one stage.

    stage: the name of the stage; None means the name of the result's kind.
    """
    name = stage or result.KIND

    def finish(found: Mapping[str, Tables], meta: dict[str, Any]) -> Result:
        return result(*with_facts(found[name], meta))

    return Kind(result, {name: result.STORED}, finish)


T = TypeVar("T")


def folded(parts: Iterable[T], merge: Callable[[T, T], T]) -> T | None:
    """Returns parts merged pairwise in their order, like a tournament: ((0 1) (2 3)) 4.

    The pairs depend only on the number of parts. Rows are copied log2 n times for n parts; if the
    parts were merged one after the other, rows would be copied up to n times. Returns None if there
    are no parts.
    """
    waiting: list[tuple[int, Any]] = []  # (levels of merging, piece), most levels first
    for piece in parts:
        depth = 0
        while waiting and waiting[-1][0] == depth:
            piece, depth = merge(waiting.pop()[1], piece), depth + 1
        waiting.append((depth, piece))
    if not waiting:
        return None
    result = waiting.pop()[1]
    while waiting:
        result = merge(waiting.pop()[1], result)
    return result
