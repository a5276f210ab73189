"""The hash of a result: of its numbers and their origin, not of how they are stored.

A table that was saved and loaded has the hash that it had in memory, although parquet and pandas
may have changed the types of its columns on the way: only values count.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

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
    if isinstance(value, int):
        exact = abs(value) <= _EXACT
        return b"f" + struct.pack("<d", value) if exact else b"i" + _text(str(value))
    if isinstance(value, float):
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
