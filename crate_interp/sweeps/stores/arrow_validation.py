"""Checks the Arrow files of a store before a value is read. Runs as a script of its own.

A damaged file may end the process that reads it, even the process that checks it, so
`arrow_files.check` starts another one. It imports only pyarrow and numpy, because importing
crate_interp takes seconds.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

_MEMORY = 2**31  # bytes; the check itself takes far less, as it copies nothing
_BLOCK = 2**20  # the most starts of rows that are compared at once
_DIGEST = 64  # letters of the SHA-256 of an input
_VALUES = {"float32": pa.float32(), "float16": pa.float16()}


def main() -> None:
    """Reads {"paths", "points", "stored"} as JSON; writes what is wrong, or nothing."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    asked = json.load(sys.stdin)
    for path in asked["paths"]:
        try:
            check(path, asked["points"], asked["stored"])
        except Exception as error:  # pyarrow raises errors of many types
            words = f"{os.path.basename(path)!r}: {error or type(error).__name__}"
            sys.stdout.write(ascii(words)[1:-1])
            return


def check(path: str, points: Mapping[str, Sequence[int]], stored: str) -> None:
    """Raises an error, of any type, unless a file holds rows as `arrow_files.write_rows` writes.

    points: the shape of each point in a row. stored: the type of their values.
    """
    with pa.memory_map(path) as file:
        whole = file.read_buffer()
        with pa.ipc.open_stream(whole) as stream:
            _check_columns(stream.schema, points, stored)
            for batch in stream:
                batch.validate(full=True)
                _check_buffers(batch, whole)
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if name != "label":
                        _check_lists(name, column, points.get(name, ()))


def _check_columns(schema: pa.Schema, points: Mapping[str, Sequence[int]], stored: str) -> None:
    wanted: dict[str, Any] = {"sample": pa.int64(), "input": pa.string()}
    for name, shape in points.items():
        wanted[name] = _VALUES[stored]
        for size in reversed(shape):
            size = size if len(shape) == 1 else -1  # arrays are lists without a fixed length
            wanted[name] = pa.list_(wanted[name], size)
    names = [name for name in schema.names if name != "label"]
    if sorted(names) != sorted(wanted) or len(schema.names) - len(names) > 1:
        raise ValueError("it holds other points or samples than its index says")
    for name in names:
        if schema.field(name).type != wanted[name]:
            found = schema.field(name).type
            raise ValueError(f"the column {name!r} is of type {found}, not {wanted[name]}")
    if len(schema.names) > len(names) and not _is_label(schema.field("label").type):
        raise ValueError(f"the labels are of type {schema.field('label').type}")


def _is_label(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        return all(_is_label(kind.field(place).type) for place in range(kind.num_fields))
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
    return texts or pa.types.is_primitive(kind)


def _check_buffers(batch: pa.RecordBatch, whole: pa.Buffer) -> None:
    """Raises ValueError unless the buffers of a batch follow each other in the file.

    Otherwise two columns could share bytes, or a compressed buffer could take any memory.
    """
    place = None
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is None or not buffer.size:
                continue
            start = buffer.address - whole.address
            if start < 0 or start + buffer.size > whole.size:
                raise ValueError("it holds compressed values")
            if place is not None and start != place:
                raise ValueError("its columns overlap, or leave gaps")
            place = start + buffer.size + -(start + buffer.size) % 8


def _check_lists(name: str, column: pa.Array, shape: Sequence[int]) -> None:
    """Raises ValueError unless each row of a column holds a whole array of this shape."""
    if name == "input" and len(column):
        _check_starts(name, np.frombuffer(column.buffers()[1], np.int32), len(column), _DIGEST)
    for size in shape:
        if column.null_count:
            break
        count, values = len(column), column.values
        if isinstance(column, pa.ListArray) and count:
            _check_starts(name, np.frombuffer(column.buffers()[1], np.int32), count, size)
        if len(values) != count * size:
            raise ValueError(f"{name!r} has {len(values)} values, not {count * size}")
        column = values
    if column.null_count:
        raise ValueError(f"{name!r} lacks values")


def _check_starts(name: str, starts: np.ndarray, count: int, size: int) -> None:
    """Raises ValueError unless `count` rows of this size follow each other from the first value."""
    for place in range(0, count, _BLOCK):
        steps = np.diff(starts[place : min(place + _BLOCK, count) + 1])
        if starts[0] or (steps != size).any():
            raise ValueError(f"the rows of {name!r} do not begin where they should")


if __name__ == "__main__":
    main()
