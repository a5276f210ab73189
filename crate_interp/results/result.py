"""Results: named tables, where they come from, and the folder that holds them."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from crate_interp.core import checks, folders, safe_text
from crate_interp.results import result_files, sample_ranges
from crate_interp.stats.contrasts import FEWEST

# from this many samples on, intervals have the coverage that tests/test_coverage.py asks for
ENOUGH = 32
ENOUGH_GROUPS = 20  # the same for groups
# Entries of meta that may differ between results that merge: they describe the run, not the
# measurement.
_OF_A_RUN = {
    "data", "n_samples", "seconds", "counts", "disjoint", "batch_size", "device", "chunk_size",
    "threads", "engine", "command", "run", "skipped", "titles", "headings",
}  # fmt: skip

Table = pd.DataFrame
Merge = Callable[[Table, Table, Mapping[str, Any]], Table]  # (ours, theirs, meta of both) -> merged
Cells = tuple[list[str], list[list[str]]]  # a header, and rows under it


@dataclass(frozen=True, eq=False, repr=False)
class Result(sample_ranges.GroupedSamples):
    """The result of a measurement: named tables of numbers, and where they come from.

    `stored` holds the tables that were measured, `meta` the model, data, settings and versions.
    `table(name)` also gives the tables that are computed from the stored ones. Two results of
    different samples merge into one result of all the samples: `a.merge(b)`.

    A kind of result is a subclass with these class attributes. MAIN: the table that `table()`
    returns. STORED: how each stored table merges. DERIVED: how each other table is computed. ALONE:
    if not empty, why results of this kind do not merge.

    meta holds `format` (1), `result` (the kind) and `data`, a list of {fingerprint, start, stop}:
    the samples from `start` up to, not including, `stop`, of the data with this fingerprint. The
    fingerprint is None if the data is unknown, as for numbers measured on a cache.
    """

    stored: Mapping[str, Table]
    meta: dict[str, Any]
    _computed: dict[str, Any] = field(default_factory=dict, init=False)

    KIND: ClassVar[str] = ""
    MAIN: ClassVar[str] = ""
    STORED: ClassVar[Mapping[str, Merge]] = {}
    DERIVED: ClassVar[Mapping[str, Callable[[Any], Table]]] = {}
    ALONE: ClassVar[str] = ""
    INTERVALS: ClassVar[bool] = False  # whether the tables hold intervals over samples

    def __post_init__(self) -> None:
        meta = {"format": result_files.FORMAT, "result": self.KIND} | self.meta
        # meta goes through JSON, so that it equals the meta of a loaded result, which holds
        # Python's numbers, not NumPy's
        plain_meta = json.loads(json.dumps(meta, default=lambda value: value.item()))
        object.__setattr__(self, "meta", plain_meta)
        object.__setattr__(self, "stored", {name: self.stored[name] for name in self.STORED})

    @property
    def tables(self) -> dict[str, Table]:
        """Returns every table by its name, stored ones first."""
        return {name: self.table(name) for name in (*self.STORED, *self.DERIVED)}

    def table(self, name: str | None = None) -> Table:
        """Returns a copy of one table; None means the main table.

        Raises ValueError if there is no table of this name.
        """
        return self._table(name).copy()

    def _table(self, name: str | None) -> Any:
        name = self.MAIN if name is None else name
        if name in self.stored:
            return self.stored[name]
        checks.one_of("name", name, (*self.STORED, *self.DERIVED))
        if name not in self._computed:
            self._computed[name] = self.DERIVED[name](self)
        return self._computed[name]

    @property
    def alone(self) -> str:
        """Returns why this result does not merge, or "" if it does."""
        return self.ALONE

    def sentences(self) -> list[str]:
        """Returns the finding: the answer, in at most 20 words, then the doubt, then the rest.

        A class defines this method or `finding`.
        """
        return [self.finding()]

    def finding(self) -> str:
        """Returns the finding, the answer first."""
        return " ".join(self.sentences())

    def headline(self) -> str:
        """Returns the finding, and which of the model's eta and lambd only a default gave."""
        return f"{self.finding()} {result_files.assumed(self.meta)}".strip()

    def caution(self) -> str:
        """Returns a one-line warning about edits of the model and too few samples, or ""."""
        (n, what), edits, few = self.independent, self.meta.get("edits"), ""
        grouped, samples = what != self.meta["unit"], self.counted_samples()
        enough, of = (ENOUGH_GROUPS, what) if grouped else (ENOUGH, "samples")
        if self.INTERVALS and grouped and n < FEWEST:
            few = f"{samples} are too few for an interval: give {FEWEST} {what} or more."
        elif self.INTERVALS and n < enough:
            few = f"Intervals of fewer than {enough} {of} may be too narrow: this result has "
            few += f"{samples}."
        return (f"Measured with edits: {', '.join([*edits][:4])}. " if edits else "") + few

    def _words(self) -> str:
        words = f"{self.headline()} {self.caution()}"  # headlines quote names
        return safe_text.plain(words, longest=2000)

    def __repr__(self) -> str:
        others = [name for name in (*self.STORED, *self.DERIVED) if name != self.MAIN]
        names = [safe_text.plain(name) for name in self.meta.get("statistics", {})]
        return (
            f"{type(self).__name__}: {self._words()}\n"
            f"  table(): {self.MAIN}. table(name): {', '.join(others) or 'there is no other'}."
            + (f"\n  {len(names)} statistics: {', '.join(names[:8])} ..." if names else "")
            + "\n  save(folder), to_csv(), to_markdown(), to_latex()."
        )

    def _written(self, name: str | None) -> pd.DataFrame:
        """Returns the table to write as text; None means the main table."""
        return self._table(name)

    def to_csv(self, name: str | None = None) -> str:
        """Returns a table as CSV; None means the main table.

        Text that a spreadsheet would run as a formula begins with an apostrophe.
        """
        return self._written(name).map(safe_text.cell).to_csv(index=False)

    def to_markdown(self, name: str | None = None) -> str:
        """Returns a table in Markdown, numbers with four digits; None means the main table."""
        table = self._written(name)
        rows = (
            [safe_text.markdown(value) if isinstance(value, str) else _cell(value) for value in row]
            for row in table.itertuples(index=False)
        )
        return safe_text.in_markdown(map(_cell, table.columns), rows) + "\n"

    def to_latex(self, name: str | None = None) -> str:
        """Returns a table in LaTeX, numbers with four digits; None means the main table.

        The LaTeX document needs the package booktabs.
        """
        return self._written(name).astype(object).map(_cell).to_latex(index=False, escape=True)

    def _repr_html_(self) -> str:
        table = safe_text.table_in_html(self._notebook_table())
        return safe_text.notebook_view(self._words(), table)

    def _notebook_table(self) -> Table:
        """Returns the table that a notebook shows below the headline."""
        return self._table(self.MAIN).head(20)

    def digest(self) -> str:
        """Returns "sha256:" and the SHA-256 of the stored tables and of meta.

        It is the same for two results with the same numbers, of the same model, data, settings and
        versions. It does not depend on who computed them, on which device, how long it took, or
        whether the result was loaded from a folder (crate_interp/results/result_files.py).
        """
        return result_files.digest_of_result(self.stored, self.meta)

    @classmethod
    def check_folder(cls, folder: str | Path) -> None:
        """Raises ValueError if `save` would refuse a folder because of the files in it."""
        path = Path(folder) / result_files.META
        found = folders.read_index(path).get("result")
        if os.path.lexists(path) and found != cls.KIND:
            found = safe_text.plain(found)
            what = f"the {result_files.META} of a result of kind {found!r}, which would be lost"
            raise ValueError(f"{str(folder)!r} holds {what}: give another folder.")

    def save(self, folder: str | Path) -> Path:
        """Writes a parquet file for each table and meta.json into a folder, and returns the folder.

        meta.json is written last. It holds the digests of the other files as "files", and the
        digest of the result as "hash"; `load` checks both. An older result in the folder and its
        pages are replaced; other files stay. Raises ValueError if the folder cannot be written, if
        another process is writing it, or if something would be lost: another kind of result, or a
        meta.json of another program.
        """
        self.check_folder(folder)
        with folders.replacing(folder, result_files.META, self._index()) as stage:
            for name in (*self.STORED, *self.DERIVED):
                path = stage / f"{name}.parquet"
                self._table(name).to_parquet(path, index=False, compression="zstd")
        return Path(folder)

    @contextmanager
    def saved_with_pages(self, folder: str | Path) -> Iterator[Path]:
        """Saves the result, then yields an empty folder whose files are added to the saved result.

        If adding the files fails, the saved result stays. Raises ValueError as `save` does.
        """
        with folders.locked(folder):
            self.save(folder)
            tables = [f"{name}.parquet" for name in self.tables]
            with folders.replacing(folder, result_files.META, self._index(), names=tables) as stage:
                yield stage

    def _index(self) -> dict[str, Any]:
        """Returns the content of meta.json without the digests of the other files."""
        return {**self.meta, "hash": self.digest()}

    @classmethod
    def load(cls, folder: str | Path) -> Any:
        """Returns the result that `save` wrote into a folder.

        Warns if a page that was saved with it has changed. Raises ValueError if the folder holds no
        result, or a result of another kind or of a newer format, if a table is missing, or if a
        table or meta.json has changed since it was saved.
        """
        folder = Path(folder)
        meta = result_files.read_meta(folder, cls.__name__, cls.KIND)
        tables = result_files.read_tables(folder, cls.__name__, cls.STORED, meta.pop("files", None))
        saved = meta.pop("hash", None)  # early versions wrote none
        result = cls(tables, meta)
        try:
            if saved not in (None, result.digest()):
                raise ValueError("it has changed since it was saved")
            result._repr_html_()  # raises for tables that no page could show
        except Exception as error:  # caused by a table or a setting of unknown origin
            why = f"{type(error).__name__}, {safe_text.plain(error)}. Measure it again"
            words = f"{str(folder)!r} is not a saved {cls.__name__} of this version: {why}."
            raise ValueError(words) from error
        return result

    def merge(self, other: "Result") -> Any:
        """Returns the result over the samples of both results.

        If both results are of the same data set, samples keep their numbers. Otherwise the samples
        of `other` are numbered after those of this result, and meta says that the data was not
        checked for overlap.

        Raises ValueError if results of this kind do not merge, if the two differ in kind, model,
        settings or versions, or if a sample is in both.
        """
        if self.alone:
            raise ValueError(self.alone)
        if type(other) is not type(self):
            raise ValueError(f"cannot merge {type(other).__name__} into {type(self).__name__}.")
        mine, theirs = (  # an assumed setting and the same when given are one
            one.meta | {"config": one.meta.get("config", {}) | {"assumed": None}}
            for one in (self, other)
        )
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in _OF_A_RUN and mine.get(name) != theirs.get(name):
                both = f"{checks.quote(mine.get(name))} and {checks.quote(theirs.get(name))}"
                raise ValueError(f"the results differ in {name}: {both}, and do not merge.")
        if (self._group_of is None) != (other._group_of is None):
            raise ValueError("only one result has groups: measure both with groups=, or neither.")
        shift, tables = sample_ranges.shift(self.meta["data"], other.meta["data"]), {}
        for name, rule in self.STORED.items():
            rows = other.stored[name]
            if shift and "sample" in rows:
                rows = rows.assign(sample=rows["sample"] + shift)
            tables[name] = rule(self.stored[name], rows, self.meta)
        mine, theirs = self.meta, other.meta
        meta = mine | {"data": sample_ranges.joined(mine["data"], theirs["data"])}
        for name in ("n_samples", "seconds"):
            if name in mine and name in theirs:
                meta[name] = mine[name] + theirs[name]
        if "counts" in mine:
            one, two = mine["counts"], theirs["counts"]
            meta["counts"] = {name: one.get(name, 0) + two.get(name, 0) for name in one | two}
        if sample_ranges.different(mine["data"], theirs["data"]):
            meta["disjoint"] = "not checked"
        return type(self)(tables, meta)


def _cell(value: Any) -> str:
    """Returns a value as a table shows it: a float with four digits, a missing value as ""."""
    if value is None or value is pd.NA or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else safe_text.plain(value)


def as_text(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table as text with aligned columns; long cells are cut to one line."""
    cells = [[safe_text.plain(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join("  ".join(line) for line in lines)


def model_name(meta: Mapping[str, Any]) -> str:
    """Returns the name that pages and commands use for a model; its family if it has no name."""
    return safe_text.plain(meta["model"] or f"{meta['config']['family']} model")


def by(*keys: str) -> Merge:
    """Returns a merge rule for tables: all rows of both, sorted by these columns."""

    def merge(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
        parts = [table for table in (mine, theirs) if len(table)] or [mine]
        rows = pd.concat(parts, ignore_index=True)
        present = [key for key in keys if key in rows]
        return rows.sort_values(present, kind="stable", ignore_index=True) if present else rows

    return merge


def first(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
    """Merges tables that do not depend on the data: both are equal, so the first is kept."""
    return mine if len(mine) else theirs


def sums(*keys: str) -> Merge:
    """Returns a merge rule for tables: rows with the same keys are summed, column by column."""

    def merge(mine: Table, theirs: Table, meta: Mapping[str, Any]) -> Table:
        both: Any = pd.concat([mine, theirs], ignore_index=True)
        return both.groupby(list(keys), sort=False, dropna=False, as_index=False).sum()

    return merge
