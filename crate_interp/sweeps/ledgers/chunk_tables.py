"""The file of a chunk: its tables as bytes."""

import io
from collections.abc import Mapping

import pandas as pd

from crate_interp.results.kinds import Tables
from crate_interp.results.result_reading import table_from


def packed(tables: Mapping[str, pd.DataFrame]) -> bytes:
    """Returns the bytes of a file that holds tables."""
    contents = [(name, _bytes(table)) for name, table in tables.items()]
    return _bytes(pd.DataFrame(contents, columns=["table", "content"]))


def unpacked(content: bytes) -> Tables:
    """Returns the tables that `packed` turned into bytes; raises ValueError for other bytes."""
    outer = table_from(content)
    if list(outer.columns) != ["table", "content"]:
        raise ValueError("it is not a chunk of a run")
    return {name: table_from(inner) for name, inner in outer.itertuples(index=False)}


def _bytes(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()
