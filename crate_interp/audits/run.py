"""ci.audit: did each layer do what the papers say it does?"""

import time
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_hooks import read
from crate_interp.audits import layer as audit_layer
from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.audits.result import AuditResult
from crate_interp.measures.checks import all_finite
from crate_interp.models.step import Lasso
from crate_interp.sweeps.provenance import sweep_meta
from crate_interp.sweeps.stream import batches, check_batch_size, check_model, run, samples_of, twin


def audit(
    model: Any,
    data: Any,
    *,
    eps: float = 0.1,
    limit: int | None = None,
    batch_size: int = 32,
    lasso_tokens: int = 4,
    untrained: int = 1,
    progress: bool = True,
) -> AuditResult:
    """Measures every layer of a model against what the papers claim of it, sample by sample, and of the network untrained.

    Attention: whether it lowered R^c, along which direction and how far against the exact gradient step and its Neumann form.
    The sparse step: whether it lowered its own lasso from its own start, how far from the solution it stopped, what made the
    zeros. The weights: whether they are what the derivation assumes. The claims and their bounds: crate_interp/audits/claims.py.

    data, limit: as in `ci.sweep`. eps: of the rates, as in the paper. lasso_tokens: how many evenly spaced tokens of each
    sample the lasso is solved for. untrained: random twins (seeds 0, 1, ...) audited on the same data. Streams are taken
    as they are, all tokens, U as stored; a masked autoencoder sees every patch, and its encoder is audited. Raises ValueError
    as `ci.sweep` does, and for activations that are not finite.
    """
    _check(eps, lasso_tokens, untrained)
    check_batch_size(batch_size)
    check_model(model)
    samples = samples_of(model, data, limit)
    started = time.perf_counter()
    numbers, weights = _measured(model, samples, eps, batch_size, lasso_tokens, "audit", progress)
    others = [
        _measured(
            twin(model, seed), samples, eps, batch_size, lasso_tokens, f"untrained {seed}", progress
        )
        for seed in range(untrained)
    ]
    empty = pd.DataFrame({"layer": []})
    meta = sweep_meta(model, [], samples, batch_size, time.perf_counter() - started) | {
        "settings": {
            "eps": eps,
            "lasso_tokens": lasso_tokens,
            "tokens": "all",
            "norm": False,
            "basis": "stored",
        },
        "untrained_seeds": untrained,
        "reasons": [audit_layer.why_not(block) for block in model.blocks],
    }
    return AuditResult(
        numbers,
        weights,
        pd.concat([found[0] for found in others], ignore_index=True) if others else empty,
        pd.concat([found[1] for found in others], ignore_index=True) if others else empty,
        meta,
    )


def _check(eps: Any, lasso_tokens: Any, untrained: Any) -> None:
    if not eps > 0:
        raise ValueError(f"eps={eps}: give a number above 0, such as 0.1.")
    if not isinstance(lasso_tokens, int) or lasso_tokens < 1:
        raise ValueError(f"lasso_tokens={lasso_tokens!r}: give a whole number of at least 1.")
    if not isinstance(untrained, int) or untrained < 0:
        raise ValueError(f"untrained={untrained!r}: give a whole number of at least 0.")


def _measured(
    model: Any, samples: Any, eps: float, batch_size: int, tokens: int, what: str, progress: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row per sample and layer, and a row per layer of the weights."""
    names = set(dict(model.blocks[0].named_modules()))
    points = [point for point in audit_layer.POINTS if point in names]
    lassos = [block.mlp.lasso() for block in model.blocks]
    rows: list[tuple[int, int, dict[str, Tensor]]] = []  # layer, first sample, numbers
    first = 0

    def measure(layer: int, acts: dict[str, Tensor]) -> None:
        for point, value in acts.items():
            if not all_finite(value):
                raise ValueError(
                    f"{point} of layer {layer} holds NaN or Inf in samples {first} to {first + len(value) - 1}."
                )
        lasso = lassos[layer]
        found = audit_layer.of_attention(model.blocks[layer], acts, eps)
        if isinstance(lasso, Lasso):
            found |= audit_layer.of_sparse_step(lasso, acts, eps, tokens)
        rows.append((layer, first, {name: value.cpu() for name, value in found.items()}))

    with torch.no_grad(), read(model, points, measure):
        for first, batch in batches(model, samples, batch_size, what, progress):  # noqa: B007  # measure reads it
            run(model, batch)
    weights = pd.DataFrame(
        [
            {"layer": layer, **audit_layer.of_weights(block)}
            for layer, block in enumerate(model.blocks)
        ]
    )
    return _table(rows), weights


def _table(rows: list[tuple[int, int, dict[str, Tensor]]]) -> pd.DataFrame:
    order = [name for name in (*CLAIMS, *NUMBERS) if any(name in found for _, _, found in rows)]
    parts: list[pd.DataFrame] = []
    for layer, start, found in rows:
        count = (
            len(next(iter(found.values()))) if found else 0
        )  # a plain transformer's layer has none
        values = {name: value.numpy() for name, value in found.items()}
        parts.append(
            pd.DataFrame({"sample": range(start, start + count), "layer": layer, **values})
        )
    table: Any = pd.concat(parts, ignore_index=True)
    return table[["sample", "layer", *order]].sort_values(["sample", "layer"], ignore_index=True)
