"""The first pass of an evaluation: mean and covariance of what points hold."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch

from crate_interp.measures.checks import all_finite
from crate_interp.results.kinds import Rules, Tables
from crate_interp.saes.baselines import Moments
from crate_interp.saes.coders import active, encoded, flat, matched
from crate_interp.saes.sae_points import Plan, vectors_of, weights_of
from crate_interp.sweeps.array_cells import from_bytes, to_bytes
from crate_interp.sweeps.runs.batches import Chunk

_COLUMNS = ["point", "tokens", "features", "mean", "products"]


def means(chunk: Chunk, plan: Plan) -> Tables:
    """Returns the table "moments", a row per point: the fields of `Moments`, arrays as bytes.

    Raises ValueError, with the point, if it holds NaN or Inf.
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
            raise ValueError(f"{point} holds NaN or Inf: nothing can be measured.")
    if not seen:  # no sample of the chunk can be decoded
        return {}
    return {"moments": _table({point: seen[point] for point in plan.saes})}


def moments_in(table: pd.DataFrame, device: str | torch.device = "cpu") -> dict[str, Moments]:
    """Returns the moments of each point from such a table."""
    rows: Any = table.itertuples()
    found: dict[str, Moments] = {}
    for row in rows:
        mean = torch.from_numpy(from_bytes(row.mean, -1)).to(device)
        products = torch.from_numpy(from_bytes(row.products, len(mean), len(mean))).to(device)
        found[row.point] = Moments(int(row.tokens), mean, products, int(row.features))
    return found


def _merged(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the moments of the tokens of both."""
    one, two = moments_in(mine), moments_in(theirs)
    return _table({point: one[point].merged(two[point]) for point in one})


def _table(moments: Mapping[str, Moments]) -> pd.DataFrame:
    rows = [
        (point, own.tokens, own.features, to_bytes(own.mean), to_bytes(own.products))
        for point, own in moments.items()
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


MEANS: Rules = {"moments": _merged}
