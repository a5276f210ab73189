"""The file of a chunk: one parquet file, in which a row holds a table."""

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
    """Returns the tables in the bytes of such a file.

    Raises ValueError if they hold anything else, or far more than their size allows.
    """
    outer = table_from(content)
    if list(outer.columns) != ["table", "content"]:
        raise ValueError(f"it has the columns {', '.join(map(str, outer.columns))}")
    pairs = zip(outer["table"], outer["content"], strict=True)
    return {name: table_from(inner) for name, inner in pairs}


def _bytes(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()
