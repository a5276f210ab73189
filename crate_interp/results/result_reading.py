"""Reads the folder of a saved result: meta.json and the tables whose digests it holds."""

import io
import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from crate_interp.core.files import digest_of_bytes
from crate_interp.core.folders import differs, named, read_index
from crate_interp.core.safe_text import is_harmless, is_plain, plain
from crate_interp.results import sample_ranges

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

FORMAT, META = 1, "meta.json"
_LONGEST, _MOST_LAYERS = 2**26, 10_000  # the most bytes of meta.json, the most layers
_NEEDED = {
    "n_samples": int, "unit": str, "n_layers": int, "config": dict, "versions": dict,
    "model_digest": str, "dtype": str, "device": str,
}  # fmt: skip
_KEYS = ("sample", "layer", "token", "atom", "rank", "seed")  # columns that must hold whole numbers
# A table may hold _VALUES values, or _PER_BYTE values per byte of its file if that is more.
_VALUES, _PER_BYTE = 2**24, 64


def read_meta(folder: Path, name: str, kind: str, types: Mapping[str, type]) -> dict[str, Any]:
    """Returns the meta of a result of this kind, whose class is called `name`.

    types: the types of some of its entries. Raises ValueError if the folder holds no result, a
    result of another kind or of a newer format, or damaged entries.
    """
    path = folder / META
    try:
        if not folder.is_dir():
            raise ValueError("there is no such folder")
        if not path.is_file():
            raise ValueError(
                f"there is no file {META}. A save that was interrupted, or is still running, "
                "leaves none"
            )
        if path.stat().st_size > _LONGEST:
            raise ValueError(f"{META} has {path.stat().st_size} bytes, more than any result needs")
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(folder)!r} does not hold a saved {name}: {error}") from None
    if not isinstance(meta, dict) or type(meta.get("format")) is not int or meta["format"] < 1:
        raise ValueError(f"{str(path)!r} was not written by {name}.save.")
    if meta["format"] > FORMAT:
        raise ValueError(
            f"{str(path)!r} has format {meta['format']}, but this version reads {FORMAT}: "
            "install a newer crate_interp, or save the result again."
        )
    if meta.get("result") != kind:
        raise ValueError(
            f"{str(folder)!r} holds a result of kind {plain(meta.get('result'))!r}, "
            f"but {name}.load reads {kind!r}."
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
            f"{str(path)!r} is damaged: model is {plain(repr(model), 80)} and n_layers is "
            f"{n_layers}. Save the result again."
        )
    odd = next((text for text in _texts_in(meta) if not is_harmless(text)), None)
    if odd is not None:
        raise ValueError(
            f"{str(path)!r} is damaged: it holds the unprintable text {plain(odd, 80)}."
        )
    if not sample_ranges.is_valid(meta.get("data")):
        raise ValueError(
            f"{str(path)!r} is damaged: data is not a list of fingerprint, start and stop. "
            "Save the result again."
        )
    return meta


def check_place(folder: Path, kind: str) -> None:
    """Raises ValueError if saving a result of this kind would overwrite something else.

    It would overwrite a result of another kind, or a meta.json of another program.
    """
    path = folder / META
    if not path.exists() and not path.is_symlink():
        return
    found = read_index(path).get("result")
    if found != kind:
        held = f"a result of kind {plain(found)!r}" if isinstance(found, str) else f"another {META}"
        raise ValueError(
            f"{str(folder)!r} holds {held}, which would be lost: give another folder, or empty "
            "this one."
        )


def read_tables(
    folder: Path, name: str, stored: Collection[str], files: object
) -> dict[str, pd.DataFrame]:
    """Returns the stored tables of a folder.

    files: the digests in its meta.json. Warns if other files have changed since they were saved,
    such as an edited page. Raises ValueError if a table is missing, is not the one that was saved,
    or is too large for its file.
    """
    known = named(files)
    tables = {table: _read(folder, table, name, known) for table in stored}
    beside = {file: known[file] for file in known if file.removesuffix(".parquet") not in tables}
    wrong = differs(folder, beside)
    for file in wrong:
        if file.endswith(".parquet"):
            raise _foreign(folder / file, name, _DIFFERS)
    if wrong:
        more = (
            f" and {len(wrong) - 1} more differ from the files"
            if wrong[1:]
            else " differs from the file"
        )
        warnings.warn(f"{str(folder / wrong[0])!r}{more} saved with this {name}.", stacklevel=4)
    return tables


_DIFFERS = f"its digest is not the one in {META}"


def _foreign(path: Path, name: str, why: object) -> ValueError:
    return ValueError(
        f"{str(path)!r} does not belong to the saved {name}: {plain(why)}. Save the result again."
    )


def _read(folder: Path, table: str, name: str, known: Mapping[str, str]) -> pd.DataFrame:
    """Returns a table. Its bytes are read once, because another process may replace the file."""
    path = folder / f"{table}.parquet"
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        content = path.read_bytes()
        if known.get(path.name) != digest_of_bytes(content):
            raise ValueError(_DIFFERS)
        return table_from(content)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:  # pyarrow raises these
        raise _foreign(path, name, error) from None


def table_from(content: bytes) -> pd.DataFrame:
    """Returns the table in the bytes of a parquet file.

    Raises ValueError, or an error of pyarrow, if the bytes are not a saved table, or if they claim
    to hold more values than they can.
    """
    _check_size(content)
    table = pd.read_parquet(io.BytesIO(content))
    for column in map(str, table.columns):
        if not is_harmless(column):
            raise ValueError(f"it has the unprintable column name {plain(column, 80)}")
        if column in _KEYS and len(table) and not pd.api.types.is_numeric_dtype(table[column]):
            raise ValueError(f"its column {column} holds something other than numbers")
    return table


def _texts_in(meta: object) -> Iterator[str]:
    """Yields every text in a JSON value, including keys."""
    left = [meta]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value


def _check_size(content: bytes) -> None:
    """Raises ValueError if a parquet file claims far more values than its bytes can hold."""
    import pyarrow.parquet as parquet

    most = max(_VALUES, _PER_BYTE * len(content))
    with parquet.ParquetFile(io.BytesIO(content)) as file:
        meta = file.metadata
        groups = [meta.row_group(place) for place in range(meta.num_row_groups)]
        claimed = sum(
            group.column(place).num_values for group in groups for place in range(meta.num_columns)
        )
        claimed = max(claimed, meta.num_rows * meta.num_columns)
        if claimed > most:
            raise ValueError(f"it claims {claimed:,} values, more than its size allows")
        texts = _texts(file)
    if texts:
        table = parquet.read_table(io.BytesIO(content), columns=texts, read_dictionary=texts)
        length = sum(_length(column) for column in table.columns)
        if length > most:
            raise ValueError(f"it claims {length:,} characters, more than its size allows")


def _texts(file: Any) -> list[str]:
    """Returns the columns of a parquet file that hold texts or bytes.

    Raises ValueError if texts are nested in other values, which no saved table has.
    """
    leaves = [file.schema.column(place) for place in range(file.metadata.num_columns)]
    texts = [leaf for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    nested = [leaf.path for leaf in texts if leaf.path not in file.schema_arrow.names]
    if nested:
        raise ValueError(f"its column {nested[0]} holds texts inside lists")
    return [leaf.path for leaf in texts]


def _length(column: "ChunkedArray") -> int:
    """Returns how many bytes the texts of a column take, counting repeated texts each time."""
    import pyarrow.compute

    of: Any = pyarrow.compute  # pyarrow creates its functions on import, unseen by a type checker
    lengths = [
        of.sum(of.take(of.binary_length(chunk.dictionary), chunk.indices))
        for chunk in column.chunks
    ]
    return sum(length.as_py() or 0 for length in lengths)
