"""ci.audit: did each layer do what the papers say it does?"""

import time
from functools import partial
from typing import Any

import pandas as pd
from torch import Tensor

from crate_interp import checks
from crate_interp.audits import layer as audit_layer
from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.audits.result import AuditResult
from crate_interp.data import Data
from crate_interp.measures.checks import all_finite
from crate_interp.models.hooked import HookedModel
from crate_interp.models.step import Lasso
from crate_interp.results import by
from crate_interp.sweeps.provenance import data_meta
from crate_interp.sweeps.stream import Batch, Chunk, Reading, check_model, fold, samples_of
from crate_interp.sweeps.twins import stacked, with_twins

Tables = tuple[
    pd.DataFrame, pd.DataFrame
]  # numbers: a row per sample and layer; weights: per layer


def audit(
    model: HookedModel,
    data: Data,
    *,
    eps: float = 0.1,
    limit: int | None = None,
    batch_size: int = 32,
    lasso_tokens: int = 4,
    untrained: int = 1,
    progress: bool = True,
) -> AuditResult:
    """Measures every layer against what the papers claim of it, beside the untrained network.

    Attention: whether it lowered R^c, along which direction, and how far against the exact gradient
    step and its Neumann form. The sparse step: whether it lowered its own lasso from its own start,
    how far from the solution it stopped, and what made the zeros. The weights: whether they are
    what the derivation assumes. The claims and their bounds are in crate_interp/audits/claims.py.

    data, limit: as in `ci.sweep`. eps: that of the rates, as in the paper. lasso_tokens: for how
    many evenly spaced tokens of each sample the lasso is solved. untrained: how many random twins
    (seeds 0, 1, ...) are audited on the same data. The streams are taken as they are, with all
    tokens and U as stored. A masked autoencoder sees every patch, and its encoder is audited.

    Raises ValueError as `ci.sweep` does, and if activations are not finite.
    """
    eps = checks.positive("eps", eps)
    lasso_tokens = checks.count("lasso_tokens", lasso_tokens)
    untrained = checks.count("untrained", untrained, least=0)
    checks.count("batch_size", batch_size)
    check_model(model)
    samples = samples_of(model, data, limit)
    started = time.perf_counter()

    def measure(network: HookedModel, seed: int | None) -> Tables:
        what = "audit" if seed is None else f"untrained {seed}"
        of_chunk = partial(_of_chunk, eps=eps, tokens=lasso_tokens)
        options: dict[str, Any] = dict(batch_size=batch_size, what=what, progress=progress)
        return fold(network, samples, of_chunk, _joined, **options)

    own, others = with_twins(model, untrained, measure, progress)
    settings = {"eps": eps, "lasso_tokens": lasso_tokens}
    meta = data_meta(model, samples, batch_size) | {
        "seconds": round(time.perf_counter() - started, 3),
        "settings": settings | {"tokens": "all", "norm": False, "basis": "stored"},
        "untrained": untrained,
        "reasons": [audit_layer.why_not(block) for block in _blocks(model)],
    }
    tables = {
        "numbers": own[0],
        "weights": own[1],
        "untrained": stacked([numbers for numbers, _ in others], "layer"),
        "untrained_weights": stacked([weights for _, weights in others], "layer"),
    }
    return AuditResult(tables, meta)


def _of_chunk(chunk: Chunk, eps: float, tokens: int) -> Tables:
    blocks = _blocks(chunk.model)
    names = set(dict(blocks[0].named_modules()))
    points = [point for point in audit_layer.POINTS if point in names]
    lassos = [block.mlp.lasso() for block in blocks]
    rows: list[tuple[int, int, dict[str, Tensor]]] = []  # layer, first sample, numbers

    def measure(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        for point, value in acts.items():
            if not all_finite(value):
                raise ValueError(
                    f"{point} of layer {layer} holds NaN or Inf in samples "
                    f"{batch.start} to {batch.last}."
                )
        lasso = lassos[layer]
        numbers = audit_layer.of_attention(blocks[layer], acts, eps)
        if isinstance(lasso, Lasso):
            numbers |= audit_layer.of_sparse_step(lasso, acts, eps, tokens)
        rows.append((layer, batch.start, {name: value.cpu() for name, value in numbers.items()}))

    chunk.measure_all(Reading(points, measure))
    weights = [
        {"layer": layer, **audit_layer.of_weights(block)} for layer, block in enumerate(blocks)
    ]
    return _table(rows), pd.DataFrame(weights)


def _blocks(model: HookedModel) -> list[Any]:
    return list(model.blocks)


def _joined(mine: Tables, theirs: Tables) -> Tables:
    return by("sample", "layer")(mine[0], theirs[0], {}), mine[1]


def _table(rows: list[tuple[int, int, dict[str, Tensor]]]) -> pd.DataFrame:
    names = (*CLAIMS, *NUMBERS)
    order = [name for name in names if any(name in numbers for _, _, numbers in rows)]
    parts: list[pd.DataFrame] = []
    for layer, start, numbers in rows:
        count = len(next(iter(numbers.values()))) if numbers else 0  # a plain transformer has none
        values = {name: value.numpy() for name, value in numbers.items()}
        samples = range(start, start + count)
        parts.append(pd.DataFrame({"sample": samples, "layer": layer, **values}))
    table: Any = pd.concat(parts, ignore_index=True)
    return table[["sample", "layer", *order]].sort_values(["sample", "layer"], ignore_index=True)
