"""The first pass of an evaluation: mean and covariance of the activations at points."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_interp.measures.checks import all_finite
from crate_interp.results.kinds import Rules, Tables
from crate_interp.saes.baselines import Moments
from crate_interp.saes.coders import Coder, active, encoded, flat, matched
from crate_interp.sweeps.array_cells import from_bytes, to_bytes
from crate_interp.sweeps.runs.batches import Batch, Chunk


@dataclass(frozen=True)
class Plan:
    """The settings that both passes need.

    kind: the kind of loss, a key of LOSSES. classes `[n]` and mask `[n, pos]` are for all samples,
    or None. first: the number of the first sample.
    """

    saes: Mapping[str, Coder]
    kind: str
    classes: Tensor | None
    mask: Tensor | None
    first: int

    def part(self, values: Tensor | None, batch: Batch) -> Tensor | None:
        """Returns the rows of classes or mask that belong to a batch."""
        start = batch.start - self.first
        return None if values is None else values[start : start + len(batch.inputs)]


def vectors_of(sae: Coder, x: Tensor, point: str) -> Tensor:
    """Returns a point's activations in the model's dtype, one row for each row of features."""
    read = flat(sae, x, point)
    matched(sae, read)  # raises if the autoencoder is on another device
    return read.flatten(-2) if getattr(sae, "hook_z_reshaping_mode", False) is True else read


def weights_of(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Returns weights `[batch, ...]` in float64: 1 for rows of tokens that count, 0 for padding."""
    weight = torch.ones(vectors.shape[:-1], dtype=torch.float64, device=vectors.device)
    if mask is None or weight.ndim < 2:
        return weight
    return weight * mask.reshape(*mask.shape, *[1] * (weight.ndim - 2))


_COLUMNS = ["point", "tokens", "features", "mean", "products"]


def means(chunk: Chunk, plan: Plan) -> Tables:
    """Returns the table "moments", a row per point: the fields of `Moments`, arrays as bytes.

    Raises ValueError, with the name of the point, if its activations hold NaN or Inf.
    """
    seen: dict[str, Moments] = {}

    def add(x: torch.Tensor, hook: Any, mask: torch.Tensor | None) -> None:
        point, sae = hook.name, plan.saes[hook.name]
        vectors = vectors_of(sae, x, point)
        acts = encoded(sae, matched(sae, flat(sae, x, point)), point)
        weight = weights_of(vectors, mask).flatten() > 0
        rows = vectors.flatten(0, -2)[weight]
        own = Moments.of(rows, int(active(acts).flatten(0, -2)[weight].sum()))
        seen[point] = seen[point].merged(own) if point in seen else own

    for batch in chunk.batches():
        keep = partial(add, mask=plan.part(plan.mask, batch))
        with torch.no_grad(), chunk.model.hooks([(point, keep) for point in plan.saes]):
            chunk.model.full_forward(batch.inputs)
    for point, own in seen.items():
        if not all_finite(own.mean):
            raise ValueError(f"{point} holds NaN or Inf, so nothing can be measured there.")
    if not seen:  # no sample of the chunk could be decoded
        return {}
    return {"moments": _table({point: seen[point] for point in plan.saes})}


def moments_in(table: pd.DataFrame, device: str | torch.device = "cpu") -> dict[str, Moments]:
    """Returns the moments of each point from a table "moments"."""
    rows: Any = table.itertuples()
    found: dict[str, Moments] = {}
    for row in rows:
        mean = torch.from_numpy(from_bytes(row.mean, -1)).to(device)
        products = torch.from_numpy(from_bytes(row.products, len(mean), len(mean))).to(device)
        found[row.point] = Moments(int(row.tokens), mean, products, int(row.features))
    return found


def _merged(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the moments of two sets of tokens together."""
    one, two = moments_in(mine), moments_in(theirs)
    return _table({point: one[point].merged(two[point]) for point in one})


def _table(moments: Mapping[str, Moments]) -> pd.DataFrame:
    rows = [
        (point, own.tokens, own.features, to_bytes(own.mean), to_bytes(own.products))
        for point, own in moments.items()
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


MEANS: Rules = {"moments": _merged}
