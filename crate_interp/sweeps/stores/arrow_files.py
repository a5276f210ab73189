"""Files of activations: Arrow streams that datasets maps into memory, one row per sample."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

SAMPLE, LABEL, INPUT = "sample", "label", "input"  # the columns that are not hook points
DTYPES = {"float32": torch.float32, "float16": torch.float16}
_MOST = 2**30  # the most values of a point in a batch of rows, since Arrow counts in 32 bits


def features_of(
    shapes: Mapping[str, Sequence[int]], dtype: str, labels: Sequence[Any] | None
) -> "datasets.Features":
    """Returns the columns of a file of activations; shapes: point -> shape of one sample.

    Raises ValueError for labels of several types, and for more axes than datasets supports.
    """
    import datasets
    import pyarrow as pa

    columns: dict[str, Any] = {SAMPLE: datasets.Value("int64"), INPUT: datasets.Value("string")}
    if labels is not None and any(label is not None for label in labels):
        try:
            kind = pa.array(labels, from_pandas=True).type
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(
                f"the labels are of several types ({error}): give labels of one type."
            ) from None
        columns |= datasets.Features.from_arrow_schema(pa.schema({LABEL: kind}))
    arrays = {2: datasets.Array2D, 3: datasets.Array3D, 4: datasets.Array4D, 5: datasets.Array5D}
    for name, shape in shapes.items():
        if len(shape) < 2:
            value = datasets.Value(dtype)
            columns[name] = datasets.List(value, length=shape[0]) if shape else value
        elif len(shape) in arrays:
            columns[name] = arrays[len(shape)](shape=tuple(shape), dtype=dtype)
        else:
            raise ValueError(f"{name!r} has the shape {list(shape)}: at most 5 axes are stored.")
    return datasets.Features(columns)


def bytes_of(shape: Sequence[int], width: int) -> int:
    """Returns how many bytes one sample of a point takes; width: bytes per number.

    For each row of an array, Arrow also stores in 4 bytes where the row begins.
    """
    starts = sum(4 * prod(shape[:axis]) for axis in range(len(shape))) if len(shape) > 1 else 0
    return prod(shape) * width + starts


def write_rows(
    path: Path, features: "datasets.Features", batches: Iterable[Mapping[str, Any]]
) -> None:
    """Writes batches of rows, `{column: tensor [rows, ...] or list}`, one after the other."""
    import pyarrow as pa

    schema = features.arrow_schema
    with open(path, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            for rows in _pieces(batch):
                columns = [_column(rows[field.name], field.type) for field in schema]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _pieces(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    most = max(1, _MOST // max(prod(value.shape[1:]) for value in tensors))
    for start in range(0, len(batch[SAMPLE]), most):
        yield {name: value[start : start + most] for name, value in batch.items()}


def _column(values: Any, kind: "pa.DataType") -> "pa.Array":
    """Returns the rows of a column as an Arrow array; the values of a tensor are not copied."""
    import pyarrow as pa

    if not isinstance(values, Tensor):
        return pa.array(values, type=kind, from_pandas=True)
    array = values.numpy()
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if array.ndim == 1:
        return flat
    if array.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(flat, array.shape[1])
    for axis in reversed(range(1, array.ndim)):
        width = array.shape[axis]
        ends = np.arange(prod(array.shape[:axis]) + 1, dtype=np.int64) * width
        flat = pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), flat)
    return pa.ExtensionArray.from_storage(kind, flat)


def mapped(paths: Sequence[Path], description: str, fingerprint: str) -> "datasets.Dataset":
    """Returns files with equal columns as one datasets.Dataset, mapped into memory."""
    import datasets
    from datasets.table import MemoryMappedTable, concat_tables

    tables: list[Any] = [MemoryMappedTable.from_file(str(path)) for path in paths]
    features = datasets.Features.from_arrow_schema(tables[0].schema)
    info = datasets.DatasetInfo(description=description, features=features)
    return datasets.Dataset(concat_tables(tables), info=info, fingerprint=fingerprint)


def rows_of(
    data: "datasets.Dataset", start: int, stop: int, names: Sequence[str]
) -> "dict[str, pa.ChunkedArray]":
    """Returns the columns `names` of the rows from `start` to `stop` - 1, without copying them."""
    table: Any = data.with_format("arrow", columns=list(names))[start:stop]
    return {name: table[name] for name in names}


def tensor_of(column: "pa.ChunkedArray", shape: Sequence[int]) -> Tensor:
    """Copies a column into a tensor `[rows, *shape]`; shape: the shape of each row."""
    parts = []
    for chunk in column.chunks:
        flat = getattr(chunk, "storage", chunk)
        for _ in shape:
            flat = flat.flatten()
        values = flat.to_numpy(zero_copy_only=True).reshape(len(chunk), *shape)
        # a copy, because memory mapped from the file cannot be written
        parts.append(torch.from_numpy(values.copy()))
    return torch.cat(parts) if parts[1:] else parts[0]


def input_digests(inputs: Tensor) -> Iterator[str]:
    """Yields the SHA-256 of the bytes of each sample."""
    for sample in inputs.cpu():
        values = sample.contiguous().view(torch.uint8).numpy().data
        yield hashlib.sha256(values).hexdigest()
