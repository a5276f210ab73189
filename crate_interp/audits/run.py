"""ci.audit: did each layer do what the papers say it does?"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_interp import checks
from crate_interp.audits import layer as layers
from crate_interp.audits.attention import Cells, Setting
from crate_interp.audits.claims import GRID, NULLS
from crate_interp.audits.result import AuditResult
from crate_interp.audits.tables import Found, table_of, weights_of
from crate_interp.audits.weights import of_heads, of_weights
from crate_interp.bars import stream, tqdm
from crate_interp.data import Data, Samples, part
from crate_interp.measures.checks import all_finite
from crate_interp.models.hooked import HookedModel
from crate_interp.models.offload import with_weights
from crate_interp.results import by, counted
from crate_interp.sweeps.provenance import data_meta
from crate_interp.sweeps.stream import Batch, Chunk, Reading, check_model, fold, samples_of
from crate_interp.sweeps.twins import first_samples, stacked, with_twins

LIMITED = 8  # the first samples: for these ceilings, operators and constructions are computed
DRAWS = 8  # of the shuffled update
_EPS = (1e-4, 1e4)
_TIMED = 5  # samples, to estimate the time


@with_weights
def audit(
    model: HookedModel,
    data: Data,
    *,
    eps: float = 0.1,
    limit: int | None = None,
    batch_size: int = 32,
    lasso_tokens: int = 4,
    untrained: int = 5,
    grid: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> AuditResult:
    """Measures every layer against what the papers claim of it, beside nulls and ceilings.

    Attention: whether it lowered R^c, along which direction, and how far. The sparse step: whether
    it lowered its own lasso from its own start, how far from the solution it stopped, and what made
    the zeros. The weights: whether they are what the derivation assumes. What is compared before
    and after is measured in three frames, at the asked eps and at those of a grid, and at the asked
    eps with orthonormal U and without CLS. The claims, bounds, frames, nulls and limits are literal
    in crate_interp/audits/claims.py.

    data, limit: as in `ci.sweep`. eps: the asked one, as in the paper. lasso_tokens: on how many
    evenly spaced tokens of each sample the sparse step is measured. untrained: how many random
    twins (seeds 0, 1, ...) are audited, on the first 64 samples. grid: False measures the claims
    alone, in the frames at the asked eps, without nulls, ceilings and the rest of the grid. seed:
    that of the nulls. A masked autoencoder sees every patch, and its encoder is audited.

    Raises ValueError as `ci.sweep` does, and if activations are not finite.
    """
    checks.count("batch_size", batch_size)
    untrained = checks.count("untrained", untrained, least=0)
    check_model(model)
    setting = _setting(eps, lasso_tokens, grid, seed, model)
    samples = samples_of(model, data, limit)
    started = time.perf_counter()
    compared = first_samples(samples)
    run = partial(_run, batch_size=batch_size, progress=progress)
    if progress:
        _announce(model, samples, compared, untrained, setting, batch_size)

    def measure(network: HookedModel, twin: int | None) -> Found:
        if twin is None or compared is None:
            return run(network, samples, setting, "audit")
        return run(network, compared, _of_twin(setting), f"untrained {twin}")

    own, others = with_twins(model, untrained if compared else 0, measure, progress)
    settings = {"eps": eps, "lasso_tokens": lasso_tokens, "grid": grid, "seed": seed}
    meta = data_meta(model, samples, batch_size) | {
        "seconds": round(time.perf_counter() - started, 3),
        "settings": settings,
        "untrained": untrained,
        "reasons": [layers.why_not(block) for block in model.blocks],
    }
    return AuditResult(_tables(own, others), meta)


def _tables(own: Found, others: list[Found]) -> dict[str, pd.DataFrame]:
    return {
        "numbers": own.numbers,
        "weights": own.weights,
        "heads": own.heads,
        "untrained": stacked([found.numbers for found in others], "sample", "layer"),
        "untrained_weights": stacked([found.weights for found in others], "layer"),
    }


def _run(
    network: HookedModel,
    samples: Samples,
    setting: Setting,
    what: str,
    batch_size: int,
    progress: bool,
) -> Found:
    of_chunk = partial(_of_chunk, setting=setting)
    options: dict[str, Any] = dict(batch_size=batch_size, what=what, progress=progress)
    return fold(network, samples, of_chunk, _joined, **options)


def _setting(eps: float, tokens: int, grid: bool, seed: int, model: Any) -> Setting:
    """Returns what is measured of the model. Raises ValueError for arguments that are wrong."""
    asked = checks.positive("eps", eps)
    if not _EPS[0] <= asked <= _EPS[1]:
        raise ValueError(
            f"eps={eps!r}: rates lose their digits there, give a number from {_EPS[0]:g} to "
            f"{_EPS[1]:g}."
        )
    return Setting(
        eps=asked,
        grid=tuple(sorted({*GRID, asked})) if checks.flag("grid", grid) else (asked,),
        nulls=tuple(NULLS) if grid else (),
        draws=DRAWS,
        limited=LIMITED if grid else 0,
        has_cls=model.has_cls,
        causal=model.unit == "windows",
        star=grid,
        tokens=checks.count("lasso_tokens", tokens),
        seed=checks.count("seed", seed, least=0),
    )


def _of_twin(setting: Setting) -> Setting:
    """Returns what is measured of an untrained twin: no nulls and no limits."""
    return replace(setting, nulls=(), limited=0)


def _announce(
    model: HookedModel,
    samples: Samples,
    compared: Samples | None,
    twins: int,
    setting: Setting,
    batch_size: int,
) -> None:
    """Prints about how long it will take, from the time that a few samples take.

    A twin's sample costs less by the nulls, which are not measured there.
    """
    taken: list[float] = []
    for count in (1, min(_TIMED, samples.n)):
        begin = time.perf_counter()
        few = part(samples, samples.start, samples.start + count)
        _run(model, few, replace(setting, limited=0), "", batch_size, progress=False)
        taken.append(time.perf_counter() - begin)
    each = max(0.0, taken[1] - taken[0]) / max(1, min(_TIMED, samples.n) - 1)
    others = twins * (compared.n if compared else 0)
    seconds = each * (samples.n + others / (1 + DRAWS)) + taken[0] * (1 + twins)
    also = counted(twins, "untrained twins")
    words = f", and {also} on {compared.n} each" if compared and twins else ""
    tqdm.write(f"audit: {samples.n} {model.unit}{words}, about {seconds:.0f} s", file=stream())


def _of_chunk(chunk: Chunk, setting: Setting) -> Found:
    blocks: list[Any] = list(chunk.model.blocks)
    names = set(dict(blocks[0].named_modules()))
    points = [point for point in layers.POINTS if point in names]
    known = [layers.audited(block, index, setting) for index, block in enumerate(blocks)]
    rows: list[tuple[int, int, Cells]] = []  # layer, first sample, numbers

    def measure(layer: int, acts: dict[str, Tensor], batch: Batch, count: int) -> None:
        for point, value in acts.items():
            if not all_finite(value):
                raise ValueError(
                    f"{point} of layer {layer} holds NaN or Inf in samples "
                    f"{batch.start} to {batch.start + count - 1}."
                )
        found = layers.of_layer(known[layer], acts, batch.start, count, setting)
        rows.extend((layer, start, cells) for start, cells in found)

    for batch in chunk.batches():
        more = Batch(_with_next(chunk, batch, setting), batch.start)
        reading = Reading(points, partial(measure, count=len(batch.inputs)))
        chunk.measure(more, [reading])
    weights = [(index, of_weights(block)) for index, block in enumerate(blocks)]
    heads = [of_heads(block).assign(layer=index) for index, block in enumerate(blocks)]
    return Found(table_of(rows), weights_of(weights), pd.concat(heads, ignore_index=True))


def _with_next(chunk: Chunk, batch: Batch, setting: Setting) -> Tensor:
    """Returns the inputs of a batch and of the sample after it, the first one after the last."""
    samples = chunk.samples
    whole = samples.of or samples.n
    if "next sample" not in setting.nulls or whole < 2:
        return batch.inputs
    after = (batch.last + 1) % whole
    return torch.cat([batch.inputs, samples.read(after, after + 1).to(batch.inputs.device)])


def _joined(mine: Found, theirs: Found) -> Found:
    numbers = by("sample", "layer")(mine.numbers, theirs.numbers, {})
    return Found(numbers, mine.weights, mine.heads)
