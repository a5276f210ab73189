"""ci.store: writes activations to the disk."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.core import checks, folders
from crate_interp.core.files import check_regular, digest, flush, write
from crate_interp.core.run_options import Run, note, run_options
from crate_interp.data import Data, Samples
from crate_interp.models.hook_points import NamesFilter
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.questions import batches, chunks, provenance
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.results.result_files import META
from crate_interp.results.sample_ranges import counted
from crate_interp.sweeps import store_reading, sweep_tables

if TYPE_CHECKING:
    import datasets

DTYPES = {"float32": torch.float32, "float16": torch.float16}
_HIGHEST = 65504  # the largest finite number of float16
_STAGE = "activations"
Shapes = dict[str, tuple[int, ...]]  # point -> shape of one sample


@with_weights
def store(
    model: HookedModel,
    data: Data,
    *,
    points: NamesFilter,
    dtype: torch.dtype | str | None = None,
    **run: Unpack[Run],
) -> "Perhaps[datasets.Dataset]":
    """Writes the activations of hook points for every sample, and returns `ci.open_store(out)`.

    Each chunk of chunk_size samples becomes an Arrow file, and the folder keeps the file's digest.
    The size is estimated from one sample and shown before anything is written. Repeating the call
    continues where an earlier call stopped, and writes missing or damaged files again. Memory holds
    one batch. Several machines must share the folder under the same path.

    Sweeps do not need a store: `ci.sweep` keeps only numbers, and its memory does not grow.

    Args:
        model: A hooked model.
        data: As in `ci.sweep`.
        points: Names of hook points, a function of a name, or a compiled regular expression, as
            `run_with_cache(names_filter=)` takes them; None for all points.
        dtype: torch.float32 (also for None), or torch.float16 for half the size. float16 rounds
            each number to 11 significant bits: an error of at most 1/2048 of the number, or of 3e-8
            for a number below 6e-5. Activations of other types become float32.
        run: As in `ci.sweep`, but `out` is required and skip_bad is refused.

    Returns:
        A row per sample, with a column per point; None while chunks of other shards are missing.

    Raises:
        KeyError: For points that the model lacks or that do not fire.
        ValueError: Before work starts, if the folder holds something else; with point and samples,
            for NaN and for numbers that float16 cannot hold.
    """
    options = run_options(store, run)
    if options.out is None:
        raise ValueError("ci.store writes files and needs a folder. Give out=DIR.")
    if options.skip_bad:
        raise ValueError("skip_bad=True is refused: a store holds a row for every sample.")
    question = Store(points, str(dtype or torch.float32).removeprefix("torch."))
    index = ask(question, model, data, replace(options, out=options.out.absolute()))
    stored: Any = None if index is None else store_reading.open_store(options.out)
    return stored


@dataclass(frozen=True)
class Store(Question):
    """Stores activations. shapes: one sample's at each point. forward: options of a run."""

    points: NamesFilter
    stored: str
    shapes: Shapes = field(default_factory=dict)
    forward: Mapping[str, Any] = field(default_factory=dict)
    features: "datasets.Features" = cast("datasets.Features", None)
    result = store_reading.ActivationStore

    def settled(self, model: HookedModel, samples: Samples) -> "Store":
        """Refuses invalid requests, and fills in what model and samples decide."""
        checks.one_of("dtype", self.stored, tuple(DTYPES))
        shapes, forward = _tried(model, samples, model.matching_points(self.points))
        features = store_reading.features_of(shapes, self.stored, samples.labels)
        return replace(self, shapes=shapes, forward=forward, features=features)

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        versions = provenance.model_meta(model, 0)["versions"]
        versions |= {name: version(name) for name in ("pyarrow", "datasets")}
        return {"points": self.shapes, "stored": self.stored, "versions": versions}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        if run.chunks.out is None:
            raise ValueError("ci.store has no dry run: it says what it will write before it does.")
        if not run.options.resume:
            folders.discard(run.chunks.out, META)  # removes the index of files that no longer exist
        if run.options.progress:
            free = store_reading.size_of(shutil.disk_usage(run.chunks.out).free)
            note(f"{run.chunks.out}: {_size(run, self)}; {free} are free.")
        measure = partial(_written, folder=run.chunks.out / chunks.CHUNKS, store=self)
        check = partial(_intact, run.chunks.out / chunks.CHUNKS)
        rules = store_reading.ActivationStore.STORED
        return (yield Pass(_STAGE, measure, rules, intact=check, apart=True))


def _tried(model: HookedModel, samples: Samples, names: list[str]) -> tuple[Shapes, dict[str, Any]]:
    """Returns each point's shape for the first sample, and options with which all points fire.

    A forward through the layers is enough for most points; later points need the full forward.
    """
    first = samples.read(samples.start, samples.start + 1).to(model.cfg.device)
    ways = [model.full_options, {}] if model.cfg.kind == "text" else [model.full_options]
    found: dict[str, Tensor] = {}
    for options in ways:
        found = _cached(model, first, names, options)
        if len(found) == len(names):
            return {name: tuple(found[name].shape[1:]) for name in names}, options
    missing = next(name for name in names if name not in found)
    raise KeyError(f"the point {missing!r} does not fire in a run of this model: leave it out.")


def _cached(
    model: HookedModel, inputs: Tensor, names: Sequence[str], options: Mapping[str, Any]
) -> dict[str, Tensor]:
    with torch.no_grad():
        return model.run_with_cache(
            inputs, names_filter=names, return_cache_object=False, **options
        )[1]


def _size(run: Experiment, store: Store) -> str:
    """Says about how much will be written: Arrow also stores where the rows of arrays begin."""
    n, numbers = run.samples.n or 0, sum(map(prod, store.shapes.values()))
    each = numbers * DTYPES[store.stored].itemsize
    points, samples = counted(len(store.shapes), "points"), counted(n, run.meta["unit"])
    one, all_ = store_reading.size_of(each), store_reading.size_of(each * n)
    return f"{points} of {samples}, {one} each: {all_} in {store.stored}"


def _intact(folder: Path, tables: Tables) -> bool:
    """Tells whether a chunk's Arrow files have the digests listed in its table "files"."""
    table: Any = tables.get("files", pd.DataFrame(columns=["file", "sha256"]))
    try:
        found = [digest(folder / row.file) == row.sha256 for row in table.itertuples()]
    except OSError:
        return False
    return bool(found) and all(found)


def _written(chunk: batches.Chunk, folder: Path, store: Store) -> Tables:
    """Writes the Arrow file of a chunk, a batch of rows after the other."""
    from datasets.arrow_writer import ArrowWriter

    path, samples = folder / f"{_STAGE}-{chunk.number:06d}.arrow", chunk.samples

    def writer(part: Path) -> None:
        with ArrowWriter(features=store.features, path=str(part)) as stream:
            for batch in chunk.batches():
                stream.write_batch(_rows(chunk, batch, store))
            stream.finalize()
        flush(part)

    check_regular(path)
    with folders.writable(folder.parent):
        if path.exists() and not chunks.is_ours(path):
            os.replace(path, path.with_name(f"{path.name}.{digest(path)[7:19]}.damaged"))
        write(path, writer)
    row = {"chunk": chunk.number, "file": path.name, "sha256": digest(path)}
    row |= {"bytes": path.stat().st_size, "start": samples.start, "stop": samples.start + samples.n}
    return {"files": pd.DataFrame([row])}


def _rows(chunk: batches.Chunk, batch: batches.Batch, store: Store) -> dict[str, Any]:
    """Returns the rows of a batch, by column.

    Raises ValueError for samples of another size than the first, for NaN, and for finite numbers
    that become infinite in float16.
    """
    rows: dict[str, Any] = {store_reading.SAMPLE: np.arange(batch.start, batch.last + 1)}
    rows[store_reading.INPUT] = store_reading.input_digests(batches.run_layers, batch.inputs)
    if chunk.samples.labels is not None:
        first = batch.start - chunk.samples.start
        rows[store_reading.LABEL] = chunk.samples.labels[first : first + len(batch.inputs)]
    acts = _cached(chunk.model, batch.inputs, list(store.shapes), store.forward)
    for name, shape in store.shapes.items():
        value = acts.pop(name).float()
        if tuple(value.shape[1:]) != tuple(shape):
            sizes = f"{list(value.shape[1:])}, but {list(shape)} in the first sample"
            raise ValueError(f"{name} has in sample {batch.start} the shape {sizes}.")
        high = (value.abs() > _HIGHEST) & value.isfinite() & (store.stored == "float16")
        wrong = value.isnan() | high
        if wrong.any():
            bad = sweep_tables.numbered(wrong.cpu().numpy(), batch.start)
            raise ValueError(f"{name} is NaN or too large for {store.stored} in samples {bad}.")
        rows[name] = value.to(DTYPES[store.stored]).cpu().numpy()
    return rows
