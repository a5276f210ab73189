"""What every result is: named tables, where they come from, and one folder on the disk."""

import hashlib
import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from crate_interp import checks, ranges
from crate_interp.files import writable, write_parquet, write_text

FORMAT = 1
ENOUGH = (
    32  # samples for intervals with the coverage that tests/benchmarks/bench_coverage.py prints
)
META = "meta.json"
# What may differ between results that merge: it belongs to a run and not to what was measured.
_OF_A_RUN = {"data", "n_samples", "seconds", "counts", "disjoint", "batch_size", "device"}
_LONGEST = 200  # characters of a value that an error quotes

Table = pd.DataFrame
Merge = Callable[[Table, Table, Mapping[str, Any]], Table]  # ours, theirs, the meta of both


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Named tables of numbers and where they come from: what every measurement returns.

    `stored` holds the tables that were measured, `meta` the model, data, settings and versions.
    `table(name)` also gives the tables that are computed from the stored ones. Two results of
    different samples merge into the result of all of them: `a.merge(b)`.

    A kind of result is a subclass with literal tables: MAIN is the table that `table()` returns,
    STORED says how each stored table merges, DERIVED how the others are computed, META which types
    some entries of meta have, and ALONE, if it is not empty, why results of this kind do not merge.

    meta holds `format` (1), `result` (the kind) and `data`, a list of {fingerprint, start, stop}:
    the samples start to stop - 1 of the data with this fingerprint. The fingerprint is None where
    the data is not known, such as for numbers measured on a cache.
    """

    stored: Mapping[str, Table]
    meta: dict[str, Any]
    _computed: dict[str, Table] = field(default_factory=dict, init=False)

    KIND: ClassVar[str] = ""
    MAIN: ClassVar[str] = ""
    STORED: ClassVar[Mapping[str, Merge]] = {}
    DERIVED: ClassVar[Mapping[str, Callable[[Any], Table]]] = {}
    ALONE: ClassVar[str] = ""
    INTERVALS: ClassVar[bool] = False  # whether the tables hold intervals over samples
    META: ClassVar[Mapping[str, type]] = {}

    def __post_init__(self) -> None:
        if set(self.stored) != set(self.STORED):
            raise ValueError(
                f"a result of kind {self.KIND!r} is made of the tables {', '.join(self.STORED)}; "
                f"got {', '.join(self.stored) or 'none'}."
            )
        meta = {"format": FORMAT, "result": self.KIND} | self.meta
        object.__setattr__(
            self, "meta", json.loads(json.dumps(meta, default=_plain))
        )  # in the form that loading gives
        object.__setattr__(self, "stored", {name: self.stored[name] for name in self.STORED})

    @property
    def tables(self) -> dict[str, Table]:
        """Returns every table by its name, stored ones first."""
        return {name: self.table(name) for name in (*self.STORED, *self.DERIVED)}

    def table(self, name: str | None = None) -> Table:
        """Returns a copy of one table; None stands for the main one.

        Raises ValueError if there is no table of this name.
        """
        return self._table(self.MAIN if name is None else name).copy()

    def _table(self, name: str) -> Table:
        if name in self.stored:
            return self.stored[name]
        checks.one_of("name", name, (*self.STORED, *self.DERIVED))
        if name not in self._computed:
            self._computed[name] = self.DERIVED[name](self)
        return self._computed[name]

    @property
    def alone(self) -> str:
        """Returns why this result does not merge, or nothing."""
        return self.ALONE

    def headline(self) -> str:
        """Returns the finding in one sentence."""
        raise NotImplementedError

    def caution(self) -> str:
        """Returns a line of warning if there are too few samples for good intervals, or nothing."""
        n = self.meta["n_samples"]
        if not self.INTERVALS or n >= ENOUGH:
            return ""
        return (
            f"Intervals of fewer than {ENOUGH} samples may be too narrow: here are "
            f"{counted(n, self.meta['unit'])}."
        )

    def _words(self) -> str:
        return f"{self.headline()} {self.caution()}".strip()

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self._words()}"

    def _repr_html_(self) -> str:
        shown = self._shown().to_html(index=False, float_format=lambda value: f"{value:.4g}")
        return f"<p>{html.escape(self._words())}</p>" + shown

    def _shown(self) -> Table:
        """Returns what a notebook shows below the headline."""
        return self._table(self.MAIN).head(20)

    def save(self, folder: str | Path) -> Path:
        """Writes a parquet file for each table and meta.json into a folder, and returns the folder.

        meta.json comes last and holds the digest of each of the other files.
        Raises ValueError if the folder cannot be written.
        """
        folder = writable(folder)
        digests: dict[str, str] = {}
        for name, table in self.tables.items():
            path = folder / f"{name}.parquet"
            write_parquet(path, table)
            digests[path.name] = _digest(path)
        write_text(folder / META, json.dumps(self.meta | {"files": digests}, indent=2) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Any:
        """Returns the result that `save` wrote into a folder.

        Raises ValueError if the folder holds no result, one of another kind or of a newer format,
        or a file that is missing or not the one that was saved.
        """
        folder = Path(folder)
        meta = _read_meta(folder, cls)
        digests = meta.pop("files", None)
        tables: dict[str, Table] = {}
        for name in cls.STORED:
            path = folder / f"{name}.parquet"
            wanted = digests.get(path.name) if isinstance(digests, dict) else None
            try:
                if _digest(path) != wanted:
                    raise ValueError("its digest is not the one in meta.json")
                tables[name] = pd.read_parquet(path)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{str(path)!r} does not belong to the saved {cls.__name__}: {error}. "
                    "Save the result again."
                ) from None
        return cls(tables, meta)

    def merge(self, other: "Result") -> Any:
        """Returns the result over the samples of both.

        If both are of one data set, samples keep their numbers. Else the samples of `other` are
        numbered after ours, and meta says that nobody checked whether the data overlap.

        Raises ValueError if results of this kind do not merge, if the two differ in kind, model,
        settings or versions, or if a sample is in both.
        """
        if self.alone:
            raise ValueError(self.alone)
        if type(other) is not type(self):
            raise ValueError(
                f"cannot merge {type(other).__name__} into {type(self).__name__}: "
                "give a result of the same kind."
            )
        _check_same(self.meta, other.meta)
        shift = ranges.shift(self.meta["data"], other.meta["data"])
        theirs = {name: _renumbered(table, shift) for name, table in other.stored.items()}
        pairs = {name: (self.stored[name], theirs[name]) for name in self.STORED}
        tables = {name: rule(*pairs[name], self.meta) for name, rule in self.STORED.items()}
        return type(self)(tables, _merged_meta(self.meta, other.meta))


def counted(n: int, unit: str) -> str:
    """Returns a number and its unit, such as "1 image" and "1,024 images"."""
    return f"{n:,} {unit.removesuffix('s') if n == 1 else unit}"


def by(*keys: str) -> Merge:
    """Returns a way to merge tables: the rows of both, in the order of these columns."""

    def merge(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
        parts = [table for table in (mine, theirs) if len(table)] or [mine]
        rows = pd.concat(parts, ignore_index=True)
        present = [key for key in keys if key in rows]
        return rows.sort_values(present, kind="stable", ignore_index=True) if present else rows

    return merge


def first(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
    """Merges tables that do not depend on the data: both are the same, and one is kept."""
    return mine if len(mine) else theirs


def sums(*keys: str) -> Merge:
    """Returns a way to merge tables: rows with the same keys are added up, column by column."""

    def merge(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
        both: Any = pd.concat([mine, theirs], ignore_index=True)
        return both.groupby(list(keys), sort=False, dropna=False, as_index=False).sum()

    return merge


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _read_meta(folder: Path, kind: type[Result]) -> dict[str, Any]:
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(folder)!r} holds no saved {kind.__name__}: {error}") from None
    if not isinstance(meta, dict) or type(meta.get("format")) is not int:
        raise ValueError(f"{str(folder / META)!r} was not written by {kind.__name__}.save.")
    if not 1 <= meta["format"] <= FORMAT:
        raise ValueError(
            f"{str(folder / META)!r} has format {meta['format']}, this version reads {FORMAT}: "
            "install a newer crate_interp, or save the result again."
        )
    if meta.get("result") != kind.KIND:
        raise ValueError(
            f"{str(folder)!r} holds a result of kind {meta.get('result')!r}, "
            f"and {kind.__name__}.load reads {kind.KIND!r}."
        )
    needed = {"n_samples": int, "unit": str, "n_layers": int, "config": dict, "versions": dict}
    types = needed | {"counts": dict} if "counts" in meta else needed
    for name, wanted in (types | dict(kind.META)).items():
        if type(meta.get(name)) is not wanted:
            raise ValueError(
                f"{str(folder / META)!r} is damaged: {name} is {meta.get(name)!r:.80}, "
                f"not of type {wanted.__name__}. Save the result again."
            )
    if not ranges.is_valid(meta.get("data")):
        raise ValueError(
            f"{str(folder / META)!r} is damaged: data is not a list of fingerprint, start and "
            "stop. Save the result again."
        )
    return meta


def _plain(value: Any) -> Any:
    """Returns NumPy's numbers as Python's, for JSON."""
    return value.item()


def _check_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in dict.fromkeys([*mine, *theirs]):
        if name not in _OF_A_RUN and mine.get(name) != theirs.get(name):
            values = " and ".join(repr(meta.get(name))[:_LONGEST] for meta in (mine, theirs))
            raise ValueError(
                f"the results differ in {name}: {values}. "
                "Results merge if model, settings and versions are the same."
            )


def _renumbered(table: Table, shift: int) -> Table:
    return table.assign(sample=table["sample"] + shift) if shift and "sample" in table else table


def _merged_meta(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    meta = mine | {"data": ranges.joined(mine["data"], theirs["data"])}
    for name in ("n_samples", "seconds"):
        if name in mine and name in theirs:
            meta[name] = mine[name] + theirs[name]
    if "counts" in mine:
        names = dict.fromkeys([*mine["counts"], *theirs["counts"]])
        meta["counts"] = {
            name: mine["counts"].get(name, 0) + theirs["counts"].get(name, 0) for name in names
        }
    if ranges.different(mine["data"], theirs["data"]):
        meta["disjoint"] = "not checked"
    return meta
