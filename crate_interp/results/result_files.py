"""The files of a saved result: how they are read, their hash, and what the hash leaves out."""

import hashlib
import io
import json
import struct
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.core.files import digest_of_bytes, open_regular
from crate_interp.core.folders import differs, named
from crate_interp.core.safe_text import plain

FORMAT, META = 1, "meta.json"


def read_meta(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """Returns the meta of a result of this kind, whose class is called `name`.

    Raises ValueError if the folder holds no result, or one of another kind or a newer format.
    """
    path = folder / META
    try:
        with open_regular(path) as file:
            meta = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        given = f"{str(folder)!r} does not hold a saved {name}: {error}"
        raise ValueError(f"{given}. An interrupted save leaves no {META}.") from None
    found = (meta.get("result"), meta.get("format")) if isinstance(meta, dict) else (None, None)
    if found != (kind, FORMAT):
        raise ValueError(
            f"{str(folder)!r} holds a result of kind {plain(found[0])!r} in format "
            f"{plain(found[1])}, but {name}.load of this version reads {kind!r} in format {FORMAT}."
        )
    return meta


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
    read = [f"{table}.parquet" for table in tables]
    for file in differs(folder, {file: digests[file] for file in digests if file not in read}):
        if file.endswith(".parquet"):
            raise _foreign(folder / file, name, f"its digest is not the one in {META}")
        warnings.warn(f"{str(folder / file)!r} changed since this {name} was saved.", stacklevel=4)
    return tables


def _foreign(path: Path, name: str, why: object) -> ValueError:
    words = f"{str(path)!r} does not belong to the saved {name}"
    return ValueError(f"{words}: {plain(why)}. Save the result again.")


def table_from(content: bytes) -> pd.DataFrame:
    """Returns the table in the bytes of a parquet file; raises ValueError if they hold none."""
    try:
        return pd.read_parquet(io.BytesIO(content))
    except Exception as error:  # pyarrow and pandas raise errors of many types
        raise ValueError(plain(error) or type(error).__name__) from None


# entries of meta that describe the run, not the measurement
OF_A_RUN = ("engine", "command", "host", "time", "seconds", "device", "run")
_BESIDE = ("files", "hash")  # entries of meta.json that are not part of the meta
_EXACT = 2**53  # float64 holds every whole number up to this one


def digest_of_result(tables: Mapping[str, pd.DataFrame], meta: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of tables and meta, as "sha256:" and 64 hexadecimal digits.

    The order of tables, columns and rows counts. A number counts by its value: 3, 3.0 and a float32
    of 3 are the same. NaN, None and pandas' NA are all "missing". Entries of meta in `OF_A_RUN` are
    left out.
    """
    digest = hashlib.sha256(b"crate_interp result 1\n")
    kept = {name: value for name, value in meta.items() if name not in (*OF_A_RUN, *_BESIDE)}
    digest.update(_text(json.dumps(kept, sort_keys=True)))
    for name, table in tables.items():
        digest.update(b"table" + _text(name) + _number(len(table)))
        for place, column in enumerate(table.columns):
            digest.update(b"column" + _text(str(column)))
            for part in _column(table.iloc[:, place]):
                digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _column(column: pd.Series) -> Iterator[bytes]:
    """Yields the bytes of a column, by its values alone."""
    if column.isna().all():  # such as labels, which most data lacks
        column = pd.Series(np.full(len(column), np.nan))
    if not isinstance(column.dtype, np.dtype) or column.dtype.kind not in "iuf":
        yield from map(_value, column.tolist())
        return
    values = column.to_numpy()
    if values.dtype.kind in "iu" and _EXACT < max(int(values.max()), -int(values.min())):
        yield from map(_value, values.tolist())
        return
    # the bytes that _value writes
    rows = np.zeros(len(values), dtype=[("tag", "S1"), ("value", "<f8")])
    rows["tag"], rows["value"] = b"f", values
    missing = np.isnan(rows["value"])
    rows["tag"][missing], rows["value"][missing] = b"n", 0
    yield rows.tobytes()


def _value(value: Any) -> bytes:
    """Returns a tag and the bytes of a value. A missing value takes as many bytes as a number."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return b"n" + bytes(8)
    if isinstance(value, bool):
        return b"t" if value else b"u"
    if isinstance(value, int) and abs(value) > _EXACT:
        return b"i" + _text(str(value))
    if isinstance(value, (int, float)):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + _text(value)
    if isinstance(value, bytes):
        return b"y" + _number(len(value)) + value
    if isinstance(value, (list, tuple)):
        return b"l" + _number(len(value)) + b"".join(map(_value, value))
    if isinstance(value, dict):
        return b"d" + _value([*value.keys(), *value.values()])
    return b"o" + _text(str(value))  # such as a date


def _text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return _number(len(content)) + content


def _number(number: int) -> bytes:
    return struct.pack("<q", number)


def assumed(meta: Mapping[str, Any]) -> str:
    """Returns a sentence on eta and lambd if only a default gave them to a result's model, or "".

    A wrong eta or lambd gives other numbers, and no tensor of a file can tell.
    """
    config = meta.get("config", {})
    sides = {"": config} if "family" in config else {f" of {side}": config[side] for side in config}
    words = [
        f"{name}{side} {one[name]:g}"
        for side, one in sides.items()
        if isinstance(one, Mapping)
        for name in one.get("assumed", ())
        if name in ("eta", "lambd")
    ]
    return f"Assumed: {', '.join(words)}." if words else ""


def near_chance(meta: Mapping[str, Any], accuracy: float) -> str:
    """Returns a warning if answers are little better than chance while settings are assumed.

    accuracy: of the model's own answers. Twice chance counts as little; with two answers that is 1.
    """
    config = meta["config"]
    choices, names = config.get("n_classes") or config.get("d_vocab") or 1, config.get("assumed")
    if not names or choices <= 2 or choices * accuracy >= 2:
        return ""
    return (
        f"The model is right in {100 * accuracy:.1f}\u00a0% of its answers "
        f"({100 / choices:.1f}\u00a0% by chance), and {', '.join(names)} were assumed: load the "
        "model with the values of its training."
    )
