"""ci.audit: did each layer do what the papers say it does?"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack, cast

import pandas as pd
import torch
from torch import Tensor

from crate_interp.audits import layer as layers
from crate_interp.audits.claims import GRID, IN_VERDICTS, NULLS
from crate_interp.audits.result import AuditResult
from crate_interp.audits.setting import Cells, Setting, table_of
from crate_interp.core import checks
from crate_interp.core.device_waits import fetched, hoping
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import all_finite, in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Reading, check_one_length
from crate_interp.questions.experiment import Pass, Plan, Question, Tables, copies
from crate_interp.questions.untrained_twins import FEW, SAMPLES, shuffled, stacked, twin
from crate_interp.results.result import by, first
from crate_interp.stats.contrasts import FEWEST

LIMITED = 8  # how many samples, from the first on, have ceilings, operators and constructions


@with_weights
@in_full_precision
def audit(
    model: HookedModel,
    data: Data,
    *,
    eps: float = 0.1,
    lasso_tokens: int = 4,
    untrained: int = 5,
    grid: bool = True,
    seed: int = 0,
    **run: Unpack[Run],
) -> Perhaps[AuditResult]:
    """Measures every layer against the claims of the papers, beside baselines and upper limits.

    Of attention, the audit measures whether it lowered its objective, along which direction, and
    how far. The objective is R^c for MSSA. For TSSA it is the variational bound at the memberships
    of the forward pass, and for CBSA the rate of the representatives at its contraction. Of the
    sparse step, the audit measures whether it lowered the layer's lasso, how far from the solution
    it stopped, and what caused the zeros in its code. Of the weights, it measures whether they
    satisfy the assumptions of the derivation. Changes are measured under three scalings of the
    tokens (frames), at the main eps and at a grid of eps; at the main eps also with orthonormal U
    and without CLS. All claims, bounds and baselines are listed in crate_interp/audits/claims.toml.

    Baselines and the grid are measured on the first 64 samples, upper limits on the first 8 (for
    texts 10). The other samples only add to the values at the main eps. If samples are windows of
    texts, the first window of each text comes first. In a masked autoencoder, the audit measures
    the encoder, which sees every patch.

    Args:
        model: A hooked model.
        data: As in `ci.sweep`.
        eps: The main eps of the rates, as in the paper.
        lasso_tokens: On how many evenly spaced tokens of each sample the lasso is solved. Only
            "share" and "converged", which need its solution, are measured on these tokens alone.
        untrained: How many untrained copies (seeds 0, 1, ...) are audited, on the first 64 samples.
        grid: Measure at a grid of eps and with orthonormal U too. Without it, the claims are
            measured at the main eps only, under all scalings, beside the baselines of verdicts.
        seed: The seed of the random baselines.
        run: As in `ci.sweep`.

    Returns:
        The verdict of each claim in each layer, and every number and baseline behind it.

    Raises:
        ValueError: As `ci.sweep` does, and if activations are not finite.
    """
    question = Audit(eps, lasso_tokens, grid, seed, untrained)
    return ask(question, model, data, run_options(audit, run))


@dataclass(frozen=True)
class Audit(Question):
    """Measures layers against claims. setting: what a layer's audit needs to know."""

    eps: float
    lasso_tokens: int
    grid: bool
    seed: int
    untrained: int = field(repr=False)
    setting: Setting = field(default=cast(Setting, None), repr=False)
    result = AuditResult

    def settled(self, model: HookedModel, samples: Samples) -> "Audit":
        """Refuses invalid requests, and fills in what model and samples decide."""
        checks.count("untrained", self.untrained, least=0)
        eps, grid = checks.positive("eps", self.eps), checks.flag("grid", self.grid)
        part, limited = _compared(samples)
        setting = Setting(
            eps=eps,
            grid=tuple(sorted({*GRID, eps})) if grid else (eps,),
            nulls=tuple(name for name in NULLS if grid or name in IN_VERDICTS),
            part=part,
            limited=limited,
            has_cls=model.has_cls,
            causal=bool(model.cfg.causal),
            star=grid,
            tokens=checks.count("lasso_tokens", self.lasso_tokens),
            seed=checks.count("seed", self.seed, least=0),
        )
        if "next sample" in setting.nulls:
            check_one_length(samples, "audit with grid=True")
        return replace(self, setting=setting)

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        reasons = [layers.why_not(block) for block in model.blocks]
        return super().facts(model) | {"untrained": self.untrained, "reasons": reasons}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        own = Pass("audit", partial(_of_chunk, setting=self.setting), _OF_A_NETWORK)
        less = replace(self.setting, nulls=(), limited=frozenset())
        of_copies = replace(own, measure=partial(_of_chunk, setting=less))
        steps, samples = [own], run.samples
        steps += copies(of_copies, self.untrained, "untrained", twin, samples)
        few = FEW if samples.start < FEW else SAMPLES
        steps += copies(of_copies, self.untrained, "shuffled", shuffled, samples, few)
        tables, *others = yield steps
        named = zip((step.name for step in steps[1:]), others, strict=True)
        # a copy has no numbers if none of its samples could be decoded
        known = {name: one for name, one in named if "numbers" in one}
        return tables | {
            "untrained": _of_copies(known, "numbers", "sample", "layer"),
            "untrained_weights": _of_copies(known, "weights", "layer"),
        }


def _compared(samples: Samples) -> tuple[frozenset[int], frozenset[int]]:
    """Returns which samples have nulls and the grid, and which of these have limits too.

    They are the first 64 and the first 8. Samples with groups, such as windows of texts, are taken
    one from each group in turn. Then at least 10 have limits, because fewer groups give no
    interval.
    """
    if samples.groups is None:
        return frozenset(range(SAMPLES)), frozenset(range(LIMITED))
    groups = pd.Series(samples.groups)
    ranks = groups.groupby(groups).cumcount()  # how many samples of its group come before each
    order = (ranks.sort_values(kind="stable").index + samples.start).tolist()
    return frozenset(order[:SAMPLES]), frozenset(order[: max(LIMITED, FEWEST)])


def _of_copies(tables: Mapping[str, Tables], table: str, *keys: str) -> pd.DataFrame:
    """Returns a table of all random networks; its column `weights` says how each was made."""
    parts = [
        stacked([own[table] for name, own in tables.items() if name.startswith(start)], *keys)
        for start in WEIGHTS.values()
    ]
    made = zip(parts, WEIGHTS, strict=True)
    whole = [part.assign(weights=weights) for part, weights in made if len(part)]
    return pd.concat(whole, ignore_index=True) if whole else parts[0].assign(weights=[])


# how the weights of untrained networks were made -> the start of the names of their passes
WEIGHTS = {"drawn": "untrained-", "shuffled": "shuffled-"}
_OF_A_NETWORK = {"numbers": by("sample", "layer"), "weights": first, "heads": first}


def _of_chunk(chunk: Chunk, setting: Setting) -> Tables:
    blocks: list[Any] = list(chunk.model.blocks)
    names = set(dict(blocks[0].named_modules()))
    points = [point for point in layers.POINTS if point in names]
    if "audited" not in chunk.once:
        chunk.once["audited"] = layers.audited(blocks, setting)
    known = chunk.once["audited"]
    rows: list[tuple[int, int, Cells]] = []  # layer, first sample, numbers

    def measure(layer: int, acts: dict[str, Tensor], batch: Batch, count: int) -> None:
        sums = torch.stack([value.sum() for value in acts.values()])  # one question for a GPU
        for point, value in () if bool(sums.isfinite().all()) else acts.items():
            if not all_finite(value):
                where = f"samples {batch.start} to {batch.start + count - 1}"
                raise ValueError(f"{point} of layer {layer} holds NaN or Inf in {where}.")
        how = (known[layer], acts, batch.start, count, setting)
        found = hoping(partial(layers.of_layer, *how), batch.inputs)
        every = [numbers for _, cells in found for numbers in cells.values()]
        # to the CPU at once
        moved = iter(fetched([value for numbers in every for value in numbers.values()]))
        for start, cells in found:
            on_cpu = {key: {name: next(moved) for name in own} for key, own in cells.items()}
            rows.append((layer, start, on_cpu))

    samples = chunk.samples
    for batch in chunk.batches():
        inputs = batch.inputs
        if "next sample" in setting.nulls and (samples.of or samples.n) > 1:
            # after the last sample comes the first
            inputs = torch.cat([inputs, chunk.after(batch.last, samples.read).to(inputs.device)])
        more = Batch(inputs, batch.start)
        chunk.measure(more, [Reading(points, partial(measure, count=len(batch.inputs)))])
    tables = {"numbers": table_of(rows)}
    if not chunk.number:  # weights are measured once for all chunks
        heads = [layers.of_heads(block).assign(layer=index) for index, block in enumerate(blocks)]
        weights = [
            (index, name, value, null)
            for index, block in enumerate(blocks)
            for name, (value, null) in layers.of_weights(block, heads[index]).items()
        ]
        tables["weights"] = pd.DataFrame(weights, columns=["layer", "number", "value", "null"])
        tables["heads"] = pd.concat(heads, ignore_index=True)
    return tables
