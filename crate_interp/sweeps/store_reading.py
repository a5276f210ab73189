"""Stores of activations: a folder's index, how to open it, and how to measure it like a model."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core import files, folders, run_options, safe_text
from crate_interp.data import Data, Samples
from crate_interp.data.samples import first
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.models.weights import model_digest
from crate_interp.probes import Probe
from crate_interp.questions.batches import Forward, is_store, run_layers, samples_of, with_groups
from crate_interp.questions.chunks import CHUNKS, RUN
from crate_interp.results.result import Result, by
from crate_interp.results.sample_ranges import counted, groups_of

if TYPE_CHECKING:
    import datasets

SAMPLE, LABEL, INPUT = "sample", "label", "input"  # the columns that are not hook points


class ActivationStore(Result):
    """The index of stored activations: `files` has a row per Arrow file, with its digest.

    meta: points (point -> shape of one sample), stored (the dtype on the disk), model, data.
    """

    KIND = "store"
    MAIN = "files"
    STORED = {"files": by("chunk")}
    ALONE = "stores do not merge: join results of ci.open_store with datasets.concatenate_datasets."

    def finding(self) -> str:
        """Returns the number of samples, the number of points, and the size of the activations."""
        table: Any = self._table("files")
        samples = self.counted_samples()
        points = counted(len(self.meta["points"]), "points")
        size = size_of(int(table["bytes"].sum()))
        return f"{samples} of {points} in {self.meta['stored']}: {size}."


def open_store(folder: str | Path) -> "datasets.Dataset":
    """Returns the activations that `ci.store` wrote, mapped into memory and not read yet.

    Each row is a sample. The columns are `sample` (its number in the data), `label` if the data has
    labels, `input` (the SHA-256 of the model's input), and one column per hook point, in the shape
    of the point's activation. `.with_format("torch")` gives float32 tensors, which a torch
    DataLoader takes. `.info.description` is JSON: model, model_digest, points with shapes, dtype,
    data. `ci.sweep` and `ci.linear_probe` take the store in place of data. Several processes may
    read the store at once.

    Raises ValueError if the folder holds no store, if the store is not finished, or if a file is
    missing or has changed: all are read once for their digests.
    """
    import datasets
    from datasets.table import MemoryMappedTable, concat_tables

    out, tables = Path(folder), []
    if folders.read_index(out / RUN).get("kind") == "store" and not (out / "meta.json").exists():
        raise ValueError(f"the store in {str(out)!r} is not finished: repeat the ci.store call.")
    index = ActivationStore.load(out)
    meta, hashed = index.meta, index.digest()
    try:
        for row in index.table().itertuples():
            path = out / CHUNKS / str(row.file)
            if files.digest(path) != row.sha256:
                raise ValueError(f"{path.name!r} has changed since it was written")
            tables.append(MemoryMappedTable.from_file(str(path)))
        features = datasets.Features.from_arrow_schema(tables[0].schema)
    except (OSError, ValueError) as error:  # these include pyarrow's errors
        words = f"damaged: {safe_text.plain(error, 300)}. Repeat the same ci.store call"
        raise ValueError(f"the store in {str(out)!r} is {words}.") from None
    names = ("model", "model_digest", "points", "stored", "dtype", "data", "unit")
    facts = {"crate_interp": "store", **{name: meta[name] for name in names}, "hash": hashed}
    info = datasets.DatasetInfo(description=json.dumps(facts, indent=1), features=features)
    fingerprint = hashed.removeprefix("sha256:")[:16]
    return datasets.Dataset(concat_tables(tables), info=info, fingerprint=fingerprint)


def features_of(
    shapes: Mapping[str, Sequence[int]], dtype: str, labels: Sequence[Any] | None
) -> "datasets.Features":
    """Returns the columns of a file of activations; shapes: point -> shape of one sample."""
    import datasets
    import pyarrow as pa

    columns: dict[str, Any] = {SAMPLE: datasets.Value("int64"), INPUT: datasets.Value("string")}
    if labels is not None and any(label is not None for label in labels):
        kind = pa.array(labels, from_pandas=True).type
        columns |= datasets.Features.from_arrow_schema(pa.schema({LABEL: kind}))
    arrays = {2: datasets.Array2D, 3: datasets.Array3D, 4: datasets.Array4D, 5: datasets.Array5D}
    for name, shape in shapes.items():
        if len(shape) < 2:
            value = datasets.Value(dtype)
            columns[name] = datasets.List(value, length=shape[0]) if shape else value
        else:
            columns[name] = arrays[len(shape)](shape=tuple(shape), dtype=dtype)
    return datasets.Features(columns)


def size_of(count: int) -> str:
    """Returns a number of bytes in words, such as "1.2 GB"."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


@dataclass(frozen=True)
class Replay:
    """A forward that hands stored activations to the model's hook points; no layer runs.

    The input of this forward is a tensor of sample numbers. stored: the result of
    `ci.open_store`. shapes: point -> shape of one sample, in the order in which points fire. start:
    the number of the store's first sample. meta: the store's entry in a result's meta.
    """

    stored: "datasets.Dataset"
    shapes: dict[str, tuple[int, ...]]
    start: int
    meta: dict[str, Any]

    def __call__(self, model: HookedModel, numbers: Tensor) -> None:
        """Passes the stored activations of samples to the hooks, as a forward would."""
        for name in self.shapes:
            values = self.column(name, numbers, "torch")
            model.hook_dict[name](values.to(model.cfg.device, model.cfg.dtype))

    def column(self, name: str, numbers: Tensor, kind: str | None = None) -> Any:
        """Returns a column of samples with these numbers, in a format of datasets."""
        begin, rows = int(numbers[0]) - self.start, self.stored.with_format(kind, columns=[name])
        return rows[begin : begin + len(numbers)][name]

    def check_points(self, names: Sequence[str]) -> None:
        """Raises KeyError if the store lacks one of the points with these full names."""
        missing = [name for name in dict.fromkeys(names) if name not in self.shapes]
        if missing:
            names = f"{len(missing)} hook points that are needed: {', '.join(missing[:4])}"
            raise KeyError(f"the store lacks {names}.")


def input_digests(forward: Forward, inputs: Tensor) -> list[str]:
    """Returns the SHA-256 of the bytes of the model's input for each sample of a batch."""
    if isinstance(forward, Replay):
        return forward.column(INPUT, inputs)
    views = (sample.contiguous().view(torch.uint8).numpy().data for sample in inputs.cpu())
    return [hashlib.sha256(view).hexdigest() for view in views]


def readable(
    probes: list[Probe], forward: Forward, model: HookedModel, blocks: str, *, some: bool = False
) -> list[Probe]:
    """Returns the probes that can be measured with a forward; a store may lack some points.

    some: whether to leave out probes that read a missing point; if every probe reads a missing
    point, all probes are kept. Raises KeyError if the store lacks a point of a probe that is kept.
    """
    if not isinstance(forward, Replay):
        return probes
    layers = range(len(getattr(model, blocks)))

    def full_names(probe: Probe, points: Sequence[str]) -> list[str]:
        names = [full_name(point, layer, blocks) for layer in layers for point in points]
        last = [full_name("hook_resid_post", layers[-1], blocks)] if probe.final else []
        return names + last

    if some:
        kept = [one for one in probes if forward.shapes.keys() >= {*full_names(one, one.points)}]
        probes = kept or probes
    forward.check_points([name for one in probes for name in full_names(one, one.points)])

    there = forward.shapes.keys()
    return [
        replace(one, optional=[p for p in one.optional if there >= {*full_names(one, [p])}])
        for one in probes
    ]


def opened(
    model: HookedModel,
    data: Data,
    options: run_options.RunOptions,
    forward: Forward = run_layers,
    find: Callable[[HookedModel, Data, run_options.RunOptions], Samples | Stream] = samples_of,
) -> tuple[Samples | Stream, Forward]:
    """Returns the samples of `data`, and the forward that passes activations to the model's hooks.

    For the result of `ci.open_store`, the forward is a `Replay`. Other data is opened by `find`,
    and its forward is `forward`.

    Raises ValueError for a store of another model, for a part of a store, and for a store together
    with a user's forward.
    """
    if not is_store(data):
        return find(model, data, options), forward
    stored: Any = data
    facts = json.loads(stored.info.description)
    if forward is not run_layers:
        raise ValueError("a store is not run through the model. Leave out forward=.")
    if facts["model_digest"] != model_digest(model):
        raise ValueError(f"the store is of {facts['model']!r} with other weights or config.")
    ours = facts["data"][0]
    numbers = stored.with_format("numpy", columns=[SAMPLE])[:][SAMPLE]
    if not np.array_equal(numbers, np.arange(ours["start"], ours["stop"])):
        raise ValueError("the data is a part of a store: give the whole result of ci.open_store.")
    labels = stored.with_format(None)[LABEL][:] if LABEL in stored.features else None
    known = groups_of([ours])
    samples = Samples(
        len(stored), labels, ours["fingerprint"], torch.arange, start=ours["start"],
        groups=None if known is None else tuple(known[:, 1].tolist()),
    )  # fmt: skip
    shapes = {name: tuple(shape) for name, shape in facts["points"].items()}
    meta = {"store": {"hash": facts["hash"], "dtype": facts["stored"]}}
    chosen = with_groups(first(samples, options.limit), data, options)
    return chosen, Replay(stored, shapes, ours["start"], meta)
