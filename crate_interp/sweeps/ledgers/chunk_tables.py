"""The file of a chunk: its tables as bytes, and what tables that all kinds share must hold."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.core.safe_text import plain
from crate_interp.results.kinds import Tables
from crate_interp.results.result_reading import table_from, tables_from

_TEXT, _BYTES, _WHOLE = "texts", "bytes", "whole numbers of at least 0"
_NUMBER, _ANY_WHOLE, _FLAG = "numbers", "whole numbers", "flags"
# table -> column -> what it must hold; a table that stands here has all of these columns
_SCHEMA = {
    "chunk": {"start": _WHOLE, "stop": _WHOLE, "seconds": _NUMBER},
    "counts": {"name": _TEXT, "value": _NUMBER},
    "skipped": {"sample": _WHOLE, "name": _TEXT, "why": _TEXT},
    "files": {
        "chunk": _WHOLE, "file": _TEXT, "sha256": _TEXT, "bytes": _WHOLE, "start": _WHOLE,
        "stop": _WHOLE,
    },
    "pictures": {
        "sample": _WHOLE, "mask": _FLAG, "file": _BYTES, "sha256": _BYTES, "size": _WHOLE,
        "mtime_ns": _ANY_WHOLE, "ctime_ns": _ANY_WHOLE,
    },
}  # fmt: skip


def packed(tables: Mapping[str, pd.DataFrame]) -> bytes:
    """Returns the bytes of a file that holds tables."""
    contents = [(name, _bytes(table)) for name, table in tables.items()]
    return _bytes(pd.DataFrame(contents, columns=["table", "content"]))


def unpacked(content: bytes) -> Tables:
    """Returns the tables that `packed` turned into bytes.

    Raises ValueError if the bytes hold anything else, or far more data than their size allows.
    """
    outer = table_from(content)
    if list(outer.columns) != ["table", "content"]:
        raise ValueError(f"its columns are {plain(', '.join(map(str, outer.columns)))}")
    cells = list(zip(outer["table"], outer["content"], strict=True))
    if not all(isinstance(name, str) and isinstance(inner, bytes) for name, inner in cells):
        raise ValueError("it holds something other than named tables")
    tables = tables_from([inner for _, inner in cells], len(content))
    found: Tables = dict(zip([name for name, _ in cells], tables, strict=True))
    for name, table in found.items():
        check_table(name, table)
    return found


def check_table(name: str, table: pd.DataFrame) -> None:
    """Raises ValueError if a table of the chunk, or of a store's index, lacks what it must hold."""
    columns = _SCHEMA.get(name, {})
    for column, wanted in columns.items():
        if column not in table or not _holds(table[column], wanted):
            raise ValueError(f"the column {column} of its table {name} must hold {wanted}")
    if name == "chunk" and len(table) != 1:
        raise ValueError(f"its table chunk has {len(table)} rows, not 1")


def _holds(column: Any, wanted: str) -> bool:
    if not len(column):
        return True
    if wanted in (_TEXT, _BYTES):
        kind = pd.api.types.infer_dtype(column, skipna=False)
        return kind == {_TEXT: "string", _BYTES: "bytes"}[wanted]
    if not isinstance(column.dtype, np.dtype):
        return False
    kinds = {_NUMBER: "iuf", _FLAG: "b"}.get(wanted, "iu")
    return column.dtype.kind in kinds and (wanted != _WHOLE or bool((column >= 0).all()))


def _bytes(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()
