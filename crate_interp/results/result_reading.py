"""Reads the folder of a saved result: meta.json and the tables whose digests it holds."""

import io
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from crate_interp.core.files import digest_of_bytes, open_regular
from crate_interp.core.folders import differs, named, read_index
from crate_interp.core.safe_text import is_harmless, plain
from crate_interp.results import json_schemas
from crate_interp.results.json_schemas import fault_of_file
from crate_interp.results.parquet_limits import allowed, check_size

FORMAT, META = 1, "meta.json"
_LONGEST = 2**26  # the most bytes of meta.json
_KEYS = ("sample", "layer", "token", "atom", "rank", "seed")  # columns that must hold whole numbers


def read_meta(folder: Path, name: str, kind: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta of a result of this kind, whose class is called `name`.

    schema: what this kind adds to `json_schemas.META`. Raises ValueError if the folder holds no
    result, a result of another kind or of a newer format, or damaged entries.
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
        with open_regular(path) as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"{META} has over {_LONGEST} bytes, more than any result needs")
        meta = json.loads(content)
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
    damage = fault_of_file(meta, json_schemas.META | dict(schema))
    if damage:
        raise ValueError(f"{str(path)!r} is damaged: {damage}. Save the result again.")
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
        with open_regular(path) as file:
            content = file.read()
        if known.get(path.name) != digest_of_bytes(content):
            raise ValueError(_DIFFERS)
        return table_from(content)
    except FileNotFoundError:
        raise _foreign(path, name, "there is no such file") from None
    except (OSError, ValueError) as error:
        raise _foreign(path, name, error) from None


def table_from(content: bytes) -> pd.DataFrame:
    """Returns the table in the bytes of a parquet file; errors are those of `tables_from`."""
    return tables_from([content], len(content))[0]


def tables_from(contents: Collection[bytes], size: int) -> list[pd.DataFrame]:
    """Returns the tables in the bytes of parquet files, which together came in `size` bytes.

    Raises ValueError if the bytes are not saved tables, or if they claim to hold more values than
    they can.
    """
    left = allowed(size)
    try:
        for content in contents:
            left -= check_size(content, left)
        tables = [pd.read_parquet(io.BytesIO(content)) for content in contents]
    except Exception as error:  # pyarrow and pandas raise errors of many types
        raise ValueError(plain(error) or type(error).__name__) from None
    for table in tables:
        _check_columns(table)
    return tables


def _check_columns(table: pd.DataFrame) -> None:
    for column in table.columns:
        if not isinstance(column, str) or not is_harmless(column):
            odd = "unprintable " if isinstance(column, str) else ""
            raise ValueError(f"it has the {odd}column name {plain(column, 80)}")
        if column in _KEYS and len(table) and not pd.api.types.is_numeric_dtype(table[column]):
            raise ValueError(f"its column {column} holds something other than numbers")
