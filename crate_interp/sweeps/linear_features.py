"""What a linear probe reads: one token of each layer for each sample, and the input alone."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from crate_interp.questions.batches import Batch, Chunk, Reading
from crate_interp.questions.experiment import Rules, Tables
from crate_interp.results.result import by
from crate_interp.sweeps.store_reading import Replay, input_digests

# "features" has one array per chunk. Small arrays kept from every batch would lie between the
# activations and fragment the memory. The memory would then grow by more than the kept numbers.
POOLED: Rules = {"samples": by("sample"), "features": by("sample")}


def pooled(chunk: Chunk, pool: str, classes: Sequence[str], first: int) -> Tables:
    """Returns the tables "samples" and "features" of a chunk.

    Columns of samples: sample, label (from the data), named (from `classes`), digest (of the
    input). The first entry of `classes` belongs to sample number `first`. Columns of features:
    sample (the number of the first sample), n (the number of samples), values (the bytes of
    `[n, n_layers + 2, d_model]` in float32: Z^l, then `input_features`).

    Raises ValueError, with the layer and the samples, if the stream holds NaN or Inf.
    """
    labels, begin = chunk.samples.labels, chunk.samples.start
    shape = (chunk.samples.n, len(chunk.model.blocks) + 2, chunk.model.cfg.d_model)
    values = np.zeros(shape, dtype=np.float32)
    rows: list[tuple[int, Any, str, int]] = []
    for batch in chunk.batches():
        _fill(values[len(rows) : len(rows) + len(batch.inputs)], chunk, batch, pool)
        digests = input_digests(chunk.forward, batch.inputs)
        for number, digest in enumerate(digests, start=batch.start):
            label = None if labels is None else labels[number - begin]
            # of a million samples, two have the same first 64 bits with a probability of 3e-8
            bits = int.from_bytes(bytes.fromhex(digest)[:8], signed=True)
            rows.append((number, label, classes[number - first], bits))
    first_row = rows[0][0] if rows else begin  # the first sample that was not left out
    features = [(first_row, len(rows), values[: len(rows)].tobytes())]
    return {
        "samples": pd.DataFrame(rows, columns=["sample", "label", "named", "digest"]),
        "features": pd.DataFrame(features, columns=["sample", "n", "values"]),
    }


def _fill(
    values: Float[np.ndarray, "batch layer d_model"], chunk: Chunk, batch: Batch, pool: str
) -> None:
    """Writes Z^l of one token of each sample, for l = 0 to n_layers, and the input's features.

    A store of activations has no inputs; their place stays 0.
    """

    def keep(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        ((point, z),) = acts.items()
        layer += point == "hook_resid_post"  # hook_resid_post of the last layer is Z^L
        token = z[:, 0] if pool == "cls" else z[:, -1] if pool == "last" else z.mean(dim=1)
        values[:, layer] = token.float().cpu().numpy()
        if not np.isfinite(values[:, layer]).all():
            raise ValueError(
                f"the stream of layer {layer} holds NaN or Inf in samples {batch.start} to "
                f"{batch.last}: nothing can be learned from it."
            )

    last = [len(chunk.model.blocks) - 1]
    readings = [Reading("hook_resid_pre", keep), Reading("hook_resid_post", keep, last)]
    chunk.measure(batch, readings)
    if not isinstance(chunk.forward, Replay):
        alone = input_features(batch.inputs, pool, values.shape[2]).cpu().numpy()
        values[:, -1, : alone.shape[1]] = alone


def input_features(
    inputs: Shaped[Tensor, "batch ..."], pool: str, width: int
) -> Float[Tensor, "batch feature"]:
    """Returns at most `width` features of the model's input, without the network.

    Images `[batch, channels, height, width]`: the means of colours over the largest square grid
    that fits. Token ids `[batch, pos]`: the last token with pool "last", else how often each token
    occurs; ids that are equal modulo `width` share a feature.
    """
    if inputs.is_floating_point():
        side = max(1, math.isqrt(width // inputs.shape[1]))
        grid = (min(side, inputs.shape[2]), min(side, inputs.shape[3]))
        means = torch.nn.functional.adaptive_avg_pool2d(inputs.float(), grid)
        return means.flatten(1)[:, :width]
    ids = inputs[:, -1:] if pool == "last" else inputs
    return torch.nn.functional.one_hot(ids.long() % width, width).float().mean(dim=1)


def by_layer(
    table: pd.DataFrame, n_layers: int, width: int, first: Bool[np.ndarray, "sample"]
) -> list[Float[np.ndarray, "sample d_model"]]:
    """Returns the features of each layer from the table "features", then those of the input.

    The samples marked in `first` come before the other samples. Values are removed from the table
    chunk by chunk as they are copied, so that memory never holds both copies in full.
    """
    chunks = table.pop("values").tolist()[::-1]
    place = np.empty(len(first), dtype=np.int64)  # the row of each sample
    place[np.argsort(~first, kind="stable")] = np.arange(len(first))
    layers: list[np.ndarray] = []
    start = 0
    for count in table["n"]:
        values = np.frombuffer(chunks.pop(), dtype=np.float32).reshape(count, n_layers + 2, width)
        if not layers:
            shape = (len(first), width)
            # allocated by torch, since NumPy would take huge pages wherever rows are written
            layers = [torch.empty(shape, dtype=torch.float32).numpy() for _ in range(n_layers + 2)]
        for layer, rows in enumerate(layers):
            rows[place[start : start + count]] = values[:, layer]
        start += count
    return layers
