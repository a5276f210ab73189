"""Reads the folder of a saved result: meta.json and the tables whose digests it holds."""

import io
import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from crate_interp.core.files import digest_of_bytes, open_regular
from crate_interp.core.folders import differs, named, read_index
from crate_interp.core.safe_text import plain

FORMAT, META = 1, "meta.json"


def read_meta(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """Returns the meta of a result of this kind, whose class is called `name`.

    Raises ValueError if the folder holds no result, or one of another kind or a newer format.
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
            meta = json.load(file)
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
        content = (
            f"a result of kind {plain(found)!r}" if isinstance(found, str) else f"another {META}"
        )
        raise ValueError(
            f"{str(folder)!r} holds {content}, which would be lost: give another folder, or empty "
            "this one."
        )


def read_tables(
    folder: Path, name: str, stored: Collection[str], files: object
) -> dict[str, pd.DataFrame]:
    """Returns the stored tables of a folder.

    files: the digests in its meta.json. Warns if other files have changed since they were saved,
    such as an edited page. Raises ValueError if a table is missing or is not the one that was
    saved. The bytes of a table are read once, because another process may replace its file.
    """
    digests, tables = named(files), {}
    for table in stored:
        path = folder / f"{table}.parquet"
        try:
            with open_regular(path) as file:
                content = file.read()
            if digests.get(path.name) != digest_of_bytes(content):
                raise ValueError(f"its digest is not the one in {META}")
            tables[table] = table_from(content)
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError)
            raise _foreign(path, name, "there is no such file" if missing else error) from None
    beside = {
        file: digests[file] for file in digests if file.removesuffix(".parquet") not in tables
    }
    wrong = differs(folder, beside)
    for file in wrong:
        if file.endswith(".parquet"):
            raise _foreign(folder / file, name, f"its digest is not the one in {META}")
    if wrong:
        others = f" and {len(wrong) - 1} others" if wrong[1:] else ""
        warnings.warn(
            f"{str(folder / wrong[0])!r}{others} changed since this {name} was saved.", stacklevel=4
        )
    return tables


def _foreign(path: Path, name: str, why: object) -> ValueError:
    return ValueError(
        f"{str(path)!r} does not belong to the saved {name}: {plain(why)}. Save the result again."
    )


def table_from(content: bytes) -> pd.DataFrame:
    """Returns the table in the bytes of a parquet file; raises ValueError if they hold none."""
    try:
        return pd.read_parquet(io.BytesIO(content))
    except Exception as error:  # pyarrow and pandas raise errors of many types
        raise ValueError(plain(error) or type(error).__name__) from None
