"""A folder of activations: its index, and how to open it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from crate_interp.core.files import digest
from crate_interp.core.folders import read_index
from crate_interp.core.safe_text import plain
from crate_interp.results import json_schemas
from crate_interp.results.grouped_samples import counted
from crate_interp.results.json_schemas import fault_of_file
from crate_interp.results.kinds import Tables
from crate_interp.results.result import Result, by
from crate_interp.sweeps.ledgers.chunk_tables import check_table
from crate_interp.sweeps.ledgers.ledger import Ledger
from crate_interp.sweeps.ledgers.own_files import CHUNKS, RUN
from crate_interp.sweeps.stores import arrow_files

if TYPE_CHECKING:
    import datasets

STAGE = "activations"
_NAME = re.compile(rf"{STAGE}-\d{{6,9}}\.arrow")


class ActivationStore(Result):
    """The index of stored activations: `files` has a row per Arrow file, with its digest.

    meta: points (point -> shape of one sample), stored (the dtype on the disk), model, data.
    """

    KIND = "store"
    META = json_schemas.STORE
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

    def _check_readable(self) -> None:
        super()._check_readable()
        table: Any = self._table("files")
        check_table("files", table)
        names = list(table["file"])
        if not names or not all(_NAME.fullmatch(name) for name in names):
            raise ValueError("it names files that do not belong to a store")
        ends = [(int(row.start), int(row.stop)) for row in table.itertuples()]
        ours = self.meta["data"][0]
        gaps = [one[1] != two[0] for one, two in zip(ends, ends[1:], strict=False)]
        if any(gaps) or (ends[0][0], ends[-1][1]) != (ours["start"], ours["stop"]):
            raise ValueError("its files do not hold the samples that it names")


def open_store(folder: str | Path) -> "datasets.Dataset":
    """Returns the activations that `ci.store` wrote, mapped into memory and not read yet.

    Each row is a sample. The columns are `sample` (its number in the data), `label` if the data has
    labels, `input` (the SHA-256 of the model's input), and one column per hook point, in the shape
    of the point's activation. `.with_format("torch")` gives float32 tensors, which a torch
    DataLoader takes. `.info.description` is JSON: model, model_digest, points with shapes, dtype,
    data. `ci.sweep` and `ci.linear_probe` take the store in place of data. Several processes may
    read the store at once.

    Raises ValueError if the folder holds no store, if the store is not finished, or if a file is
    missing, has another size, or does not hold whole rows. The digests of the Arrow files are not
    checked. That each file holds whole rows is checked in another process, once for files that this
    process did not write; for 200 MB this takes 0.4 s.
    """
    out = Path(folder)
    _check_finished(out)
    index = ActivationStore.load(out)
    paths = index.paths(out)
    try:
        for path, row in zip(paths, index.stored["files"].itertuples(), strict=True):
            if not path.is_file():
                raise ValueError(f"there is no file {path.name!r}")
            size: Any = row.bytes
            if path.stat().st_size != size:
                raise ValueError(f"{path.name!r} has {path.stat().st_size} bytes, not {size}")
        arrow_files.check(paths, index.meta["points"], index.meta["stored"])
        data = arrow_files.mapped(
            paths, index.description(), index.digest().removeprefix("sha256:")[:16]
        )
        check_columns(data, index.meta)
        if len(data) != index.meta["n_samples"]:
            raise ValueError("its files hold other points or samples than its index says")
    except (OSError, ValueError) as error:  # these include pyarrow's errors
        raise ValueError(
            f"the store in {str(out)!r} is damaged: {plain(error, 300)}. Repeat the same "
            "ci.store call: it writes damaged files again."
        ) from None
    return data


def facts_of(data: object) -> dict[str, Any] | None:
    """Returns the facts in the description of a dataset from `open_store`; None for other data.

    Raises ValueError for data that calls itself a store and lacks what a store has.
    """
    given: Any = data
    text = getattr(getattr(data, "info", None), "description", None)
    if not isinstance(text, str) or '"crate_interp"' not in text[:30]:
        return None
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("crate_interp") != ActivationStore.KIND:
        return None
    try:
        damage = fault_of_file(facts, json_schemas.DESCRIPTION)
        if damage:
            raise ValueError(damage)
        check_columns(given, facts)
    except ValueError as error:
        raise ValueError(
            f"the data calls itself a store of activations, but is none: {error}. Give the result "
            "of ci.open_store unchanged."
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
    except (OSError, ValueError):  # ValueError: a name that no file can have
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
    ledger = Ledger(out)
    total, missing = ledger.lengths().get(STAGE), ledger.missing(STAGE)
    done = (
        "some"
        if total is None or missing is None
        else f"{total - sum(map(len, missing))} of {total}"
    )
    raise ValueError(
        f"the store in {str(out)!r} is not finished: {done} chunks are there. Other shards may "
        "still be running. If none is running, repeat the same ci.store call to continue the run."
    )
