"""The stream at one token of each sample, in each layer, for linear probes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp.results.kinds import Rules, Tables
from crate_interp.results.result import by
from crate_interp.sweeps.runs.batches import Batch, Chunk, Reading
from crate_interp.sweeps.stores.replay import digests_of

POOLS = ("cls", "mean", "last")
# features: one array for a chunk. Small arrays kept from every batch would fragment the memory
# between activations, so that it would grow by more than the numbers.
POOLED: Rules = {"samples": by("sample"), "features": by("sample")}


def pooled(chunk: Chunk, pool: str, classes: Sequence[str], first: int) -> Tables:
    """Returns the tables "samples" and "features" of a chunk.

    samples: sample, label (from the data), named (from `classes`, which begin with sample number
    `first`), digest (of the input). features: sample (the first), n, values (the bytes of `[n,
    n_layers + 1, d_model]` in float32).

    Raises ValueError, with the layer and the samples, if the stream holds NaN or Inf.
    """
    labels, begin = chunk.samples.labels, chunk.samples.start
    shape = (chunk.samples.n, len(chunk.model.blocks) + 1, chunk.model.cfg.d_model)
    values = np.empty(shape, dtype=np.float32)
    rows: list[tuple[int, Any, str, int]] = []
    for batch in chunk.batches():
        _fill(values[len(rows) : len(rows) + len(batch.inputs)], chunk, batch, pool)
        digests = digests_of(chunk.forward, batch.inputs)
        for number, digest in enumerate(digests, start=batch.start):
            label = None if labels is None else labels[number - begin]
            rows.append((number, label, classes[number - first], _short(digest)))
    first_row = rows[0][0] if rows else begin  # the first sample that was not left out
    features = [(first_row, len(rows), values[: len(rows)].tobytes())]
    return {
        "samples": pd.DataFrame(rows, columns=["sample", "label", "named", "digest"]),
        "features": pd.DataFrame(features, columns=["sample", "n", "values"]),
    }


def _fill(
    values: Float[np.ndarray, "batch layer d_model"], chunk: Chunk, batch: Batch, pool: str
) -> None:
    """Writes Z^l of one token of each sample, for l = 0 to n_layers."""

    def keep(layer: int, z: Tensor) -> None:
        token = z[:, 0] if pool == "cls" else z[:, -1] if pool == "last" else z.mean(dim=1)
        values[:, layer] = token.float().cpu().numpy()
        if not np.isfinite(values[:, layer]).all():
            raise ValueError(
                f"the stream of layer {layer} holds NaN or Inf in samples {batch.start} to "
                f"{batch.last}: nothing can be learned from it."
            )

    def before(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        keep(layer, acts["hook_resid_pre"])

    def after(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        keep(layer + 1, acts["hook_resid_post"])

    last = [len(chunk.model.blocks) - 1]
    readings = [Reading("hook_resid_pre", before), Reading("hook_resid_post", after, last)]
    chunk.measure(batch, readings)


def _short(digest: str) -> int:
    """Returns the first 64 bits of a digest; of a million samples two agree with p = 3e-8."""
    return int.from_bytes(bytes.fromhex(digest)[:8], signed=True)


def by_layer(
    table: pd.DataFrame, n_layers: int, first: Bool[np.ndarray, "sample"]
) -> list[Float[np.ndarray, "sample d_model"]]:
    """Returns the features of each layer from the table "features", the `first` samples first.

    Values are removed from the table chunk by chunk as they are copied, so that memory never holds
    both.
    """
    chunks = table.pop("values").tolist()[::-1]
    place = np.empty(len(first), dtype=np.int64)  # the row of each sample
    place[np.argsort(~first, kind="stable")] = np.arange(len(first))
    layers: list[np.ndarray] = []
    start = 0
    for count in table["n"]:
        values = np.frombuffer(chunks.pop(), dtype=np.float32).reshape(count, n_layers + 1, -1)
        if not layers:
            shape = (len(first), values.shape[-1])
            # torch's memory: NumPy's would take huge pages wherever the first rows are written
            layers = [torch.empty(shape).numpy() for _ in range(n_layers + 1)]
        for layer, rows in enumerate(layers):
            rows[place[start : start + count]] = values[:, layer]
        start += count
    return layers
