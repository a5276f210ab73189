"""A folder of activations: its index, and how to open it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from crate_interp.core.files import digest
from crate_interp.core.folders import read_index
from crate_interp.core.safe_text import plain
from crate_interp.questions.batches import is_store
from crate_interp.questions.chunks import CHUNKS, RUN
from crate_interp.questions.experiment import Tables
from crate_interp.results.result import Result, by
from crate_interp.results.sample_ranges import counted
from crate_interp.sweeps.stores import arrow_files

if TYPE_CHECKING:
    import datasets

STAGE = "activations"


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

    def paths(self, folder: Path) -> list[Path]:
        """Returns the Arrow files, in the order of their samples."""
        return [folder / CHUNKS / name for name in self._table("files")["file"]]

    def description(self) -> str:
        """Returns the description of a datasets.Dataset: JSON of model, points and data."""
        names = ("model", "model_digest", "points", "stored", "dtype", "data", "unit")
        facts = {name: self.meta[name] for name in names}
        return json.dumps({"crate_interp": self.KIND, **facts, "hash": self.digest()}, indent=1)


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
    out = Path(folder)
    _check_finished(out)
    index = ActivationStore.load(out)
    paths = index.paths(out)
    try:
        for path, row in zip(paths, index.stored["files"].itertuples(), strict=True):
            if digest(path) != row.sha256:
                raise ValueError(f"{path.name!r} has changed since it was written")
        data = arrow_files.mapped(
            paths, index.description(), index.digest().removeprefix("sha256:")[:16]
        )
        check_columns(data, index.meta)
    except (OSError, ValueError) as error:  # these include pyarrow's errors
        raise ValueError(
            f"the store in {str(out)!r} is damaged: {plain(error, 300)}. Repeat the same "
            "ci.store call: it writes damaged files again."
        ) from None
    return data


def facts_of(data: object) -> dict[str, Any] | None:
    """Returns the facts in the description of a dataset from `open_store`; None for other data.

    Raises ValueError for a store whose columns were changed.
    """
    if not is_store(data):
        return None
    dataset: Any = data
    facts = json.loads(dataset.info.description)
    try:
        check_columns(dataset, facts)
    except ValueError as error:
        raise ValueError(
            f"the data is a store of activations that was changed: {error}. Give the result of "
            "ci.open_store unchanged."
        ) from None
    return facts


def check_columns(data: "datasets.Dataset", meta: Mapping[str, Any]) -> None:
    """Raises ValueError unless a datasets.Dataset has the columns of a store with this meta."""
    wanted = arrow_files.features_of(meta["points"], meta["stored"], None)
    found = data.features or {}
    wrong = [name for name, kind in wanted.items() if found.get(name) != kind]
    if wrong:
        raise ValueError(f"the column {plain(wrong[0])!r} is missing, or has another shape or type")


def intact(out: Path, tables: Tables) -> bool:
    """Tells whether a chunk's Arrow files have the digests listed in its table "files"."""
    table = tables.get("files", pd.DataFrame())
    try:
        return len(table) > 0 and all(
            digest(out / CHUNKS / name) == sha256
            for name, sha256 in zip(table["file"], table["sha256"], strict=True)
        )
    except OSError:
        return False


def size_of(count: int) -> str:
    """Returns a number of bytes in words, such as "1.2 GB"."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _check_finished(out: Path) -> None:
    """Raises ValueError if a folder holds a run of `ci.store` that has not finished."""
    run = read_index(out / RUN)
    if run.get("kind") != ActivationStore.KIND or (out / "meta.json").exists():
        return
    done = len(list((out / CHUNKS).glob(f"{STAGE}-*.parquet")))
    raise ValueError(
        f"the store in {str(out)!r} is not finished: {done} chunks are there. Other shards may "
        "still be running. If none is running, repeat the same ci.store call to continue the run."
    )
