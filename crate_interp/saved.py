"""Reads the folder of a saved result: meta.json, and tables whose digests it holds."""

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from crate_interp import ranges
from crate_interp.folders import differs, listed
from crate_interp.words import is_plain, plain

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

FORMAT, META = 1, "meta.json"
_LONGEST, _MOST_LAYERS = 2**26, 10_000  # bytes of meta.json
_NEEDED = {"n_samples": int, "unit": str, "n_layers": int, "config": dict, "versions": dict}
# What a table may hold: so many values, or so many for each byte of its file.
_VALUES, _PER_BYTE = 2**24, 64


def read_meta(folder: Path, name: str, kind: str, types: Mapping[str, type]) -> dict[str, Any]:
    """Returns the meta of a result of this kind, whose class is called `name`.

    types: the types of some of its entries. Raises ValueError if the folder holds no result, one of
    another kind or of a newer format, or damaged entries.
    """
    path = folder / META
    try:
        if not path.is_file():
            raise ValueError(f"there is no file {META}. A save that was cut short leaves none")
        if path.stat().st_size > _LONGEST:
            raise ValueError(f"{META} has {path.stat().st_size} bytes: no result needs so many")
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(folder)!r} holds no saved {name}: {error}") from None
    if not isinstance(meta, dict) or type(meta.get("format")) is not int or meta["format"] < 1:
        raise ValueError(f"{str(path)!r} was not written by {name}.save.")
    if meta["format"] > FORMAT:
        raise ValueError(
            f"{str(path)!r} has format {meta['format']}, this version reads {FORMAT}: "
            "install a newer crate_interp, or save the result again."
        )
    if meta.get("result") != kind:
        raise ValueError(
            f"{str(folder)!r} holds a result of kind {plain(meta.get('result'))!r}, "
            f"and {name}.load reads {kind!r}."
        )
    needed = _NEEDED | {"counts": dict} if "counts" in meta else _NEEDED
    for entry, wanted in (needed | dict(types)).items():
        if type(meta.get(entry)) is not wanted:
            value = plain(repr(meta.get(entry)), 80)
            raise ValueError(
                f"{str(path)!r} is damaged: {entry} is {value}, not of type {wanted.__name__}. "
                "Save the result again."
            )
    model, n_layers = meta.get("model"), meta["n_layers"]
    named = model is None or (isinstance(model, str) and is_plain(model))
    if not named or not 0 <= n_layers <= _MOST_LAYERS:
        raise ValueError(
            f"{str(path)!r} is damaged: its model is {plain(repr(model), 80)}, of {n_layers} "
            "layers. Save the result again."
        )
    if not ranges.is_valid(meta.get("data")):
        raise ValueError(
            f"{str(path)!r} is damaged: data is not a list of fingerprint, start and stop. "
            "Save the result again."
        )
    return meta


def read_tables(folder: Path, name: str, stored: Collection[str]) -> dict[str, pd.DataFrame]:
    """Returns the stored tables of a folder.

    Warns if another file is not the one that was saved, such as a page that was edited. Raises
    ValueError if a table is missing, is not the one that was saved, or is too large for its file.
    """
    files = listed(folder / META)
    tables = [file for file in files if file.endswith(".parquet")]
    wrong = differs(folder, {file: files[file] for file in tables})
    wrong += [f"{table}.parquet" for table in stored if f"{table}.parquet" not in files]
    if wrong:
        raise ValueError(
            f"{str(folder / wrong[0])!r} does not belong to the saved {name}: its digest is not "
            f"the one in {META}. Save the result again."
        )
    for file in differs(folder, {file: files[file] for file in files if file not in tables}):
        warnings.warn(
            f"{str(folder / file)!r} is not the file that was saved with this {name}.",
            stacklevel=4,
        )
    return {table: _read(folder / f"{table}.parquet", name) for table in stored}


def _read(path: Path, name: str) -> pd.DataFrame:
    try:
        _check_size(path)
        return pd.read_parquet(path)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:  # pyarrow's are these too
        raise ValueError(
            f"{str(path)!r} does not belong to the saved {name}: {plain(error)}. "
            "Save the result again."
        ) from None


def _check_size(path: Path) -> None:
    """Raises ValueError if a parquet file claims far more than its bytes may hold."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        meta = file.metadata
        groups = [meta.row_group(place) for place in range(meta.num_row_groups)]
        claimed = sum(
            group.column(place).num_values for group in groups for place in range(meta.num_columns)
        )
        claimed = max(claimed, meta.num_rows * meta.num_columns)
        most = max(_VALUES, _PER_BYTE * path.stat().st_size)
        if claimed > most:
            raise ValueError(f"it claims {claimed:,} values, more than its size allows")
        texts = _texts(file)
    if texts:
        table = parquet.read_table(path, columns=texts, read_dictionary=texts)
        length = sum(_length(column) for column in table.columns)
        if length > most:
            raise ValueError(f"it claims {length:,} characters, more than its size allows")


def _texts(file: Any) -> list[str]:
    """Returns the columns of a parquet file that hold texts or bytes.

    Raises ValueError if such values are inside of other ones, which no table of ours has.
    """
    leaves = [file.schema.column(place) for place in range(file.metadata.num_columns)]
    texts = [leaf for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    nested = [leaf.path for leaf in texts if leaf.path not in file.schema_arrow.names]
    if nested:
        raise ValueError(f"its column {nested[0]} holds texts inside of lists")
    return [leaf.path for leaf in texts]


def _length(column: "ChunkedArray") -> int:
    """Returns how many bytes the texts of a column have, each as often as it stands there."""
    import pyarrow.compute

    of: Any = pyarrow.compute  # its functions are made when it is imported
    lengths = [
        of.sum(of.take(of.binary_length(chunk.dictionary), chunk.indices))
        for chunk in column.chunks
    ]
    return sum(length.as_py() or 0 for length in lengths)
