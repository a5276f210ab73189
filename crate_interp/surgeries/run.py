"""ci.surgery: does the network answer better when a layer does its job better?

Another step gives later layers inputs they were not trained on. So a large share of another step
hurts, whatever the step is. The measure is therefore the slope of the loss where the step begins to
replace the layer's own. One backward pass gives the slope exactly: `<g, step - own>`, where g is
the gradient of the sample's loss.

The slope is compared with the slopes of random directions. Each direction is made from the same
change: the entries of every token's change are put in a random order with random signs, the same
for all tokens and samples. So a direction is as long as the change, token by token, and as
systematic over tokens and samples; only its relation to the weights is random. Changes drawn
separately for each sample would have a mean slope of about 0 whatever the layer does, and any
systematic step would differ from these changes.

Two things matter when you read slopes. Training may move W_O towards U_k^T or away from it, so if
training has converged, "plus" and "minus" have slopes near 0 on the training data by construction.
And each step also removes a part of the layer's own step; `added`, `<g, step>`, is the slope if
nothing is removed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data
from crate_interp.measures.checks import all_finite, in_full_precision
from crate_interp.models.compat.offload import with_weights
from crate_interp.models.gradients import check_gradients
from crate_interp.models.hooked import HookedModel
from crate_interp.results.kinds import Kind, Tables
from crate_interp.surgeries import answers
from crate_interp.surgeries.replacement import Hook, check_mix, check_step, mixed, replacement_hooks
from crate_interp.surgeries.result import ALL, SurgeryResult
from crate_interp.surgeries.steps import Replacement, Step, any_step, visible_tokens
from crate_interp.sweeps.runs.batches import Batch, Chunk, check_model, samples_of
from crate_interp.sweeps.runs.chunked_pass import Stage, with_facts
from crate_interp.sweeps.runs.chunked_run import Perhaps, open_job
from crate_interp.sweeps.runs.provenance import data_meta, digest_of_labels

DEFAULT: tuple[Replacement, ...] = ("gradient", "neumann", "plus", "minus", 4, "solution")


@dataclass(frozen=True)
class _Plan:
    """The settings for measuring a batch."""

    steps: list[Step]
    mixes: list[float]
    classes: Tensor | None  # classes of all samples
    first: int  # the number of the first sample
    directions: int
    eps: float
    seed: int


@dataclass
class _Rows:
    """The parts of a chunk's tables; `random` holds sums over samples."""

    unchanged: list[pd.DataFrame] = field(default_factory=list)
    samples: list[pd.DataFrame] = field(default_factory=list)
    mixes: list[pd.DataFrame] = field(default_factory=list)
    random: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # value: [direction]
    n: int = 0


@with_weights
@in_full_precision
def surgery(
    model: HookedModel,
    data: Data,
    *,
    labels: Sequence[Any] | None = None,
    replacements: Sequence[Replacement] | None = None,
    mixes: Sequence[float] = (0.05, 0.1, 0.25, 0.5, 1.0),
    directions: int = 20,
    eps: float = 0.1,
    seed: int = 0,
    **run: Unpack[Run],
) -> Perhaps[SurgeryResult]:
    """Measures how answers change when layers take the steps that they were derived from.

    In each layer, and in all at once, `(1 - t) own + t step` replaces the output of attention or
    the code of the sparse step (`ci.surgeries.replaced` lists the steps). The loss is the
    cross-entropy in nats of the right class, or of the next token (mean over the window).

    The slope d loss / d t at t = 0 is compared with the slopes of random directions that are as
    long and as systematic as the step. crate_interp/surgeries/run.py says why, and how to read
    slopes.

    data, run: as in `ci.sweep`. labels: for images, one per sample, numbers of classes or names in
    cfg.labels; None takes the data's labels. replacements: names, and numbers of proximal steps;
    None takes those of "gradient", "neumann", "plus", "minus", 4 and "solution" that the layers can
    take. mixes: values of t at which the model is run. directions: the number of random directions.

    Raises ValueError, before work starts, for replacements that are unknown or that a layer cannot
    take, for mixes outside [0, 1], for missing or wrong labels, for models without logits, and as
    `ci.sweep` does; also under torch.inference_mode(), because slopes need gradients. Raises
    ValueError, with layer and samples, if a step or a loss is not finite.
    """
    options = run_options(surgery, run)
    eps, seed = checks.positive("eps", eps), checks.count("seed", seed, least=0)
    check_model(model)
    answers.check_answers(model)
    check_gradients("surgery", model)
    steps = _steps(model, replacements)
    values = _mixes(mixes)
    directions = checks.count("directions", directions, least=2)
    samples = samples_of(model, data, options)
    classes = answers.classes_of(model, samples, labels)
    settings = {"replacements": [step.name for step in steps], "mixes": values, "eps": eps}
    settings |= {"directions": directions, "seed": seed}
    meta = data_meta(model, samples, options.batch_size) | {"settings": settings}
    plan = _Plan(steps, values, classes, samples.start, directions, eps, seed)
    with open_job(SURGERY, meta, options, model, read={"labels": digest_of_labels(classes)}) as job:
        job.run(Stage("surgery", model, samples, partial(_of_chunk, plan=plan)))
        return job.result()


def surgery_result(found: Mapping[str, Tables], meta: dict[str, Any]) -> SurgeryResult:
    """Returns the result of the stage "surgery"."""
    return SurgeryResult(*with_facts(found["surgery"], meta))


SURGERY = Kind(SurgeryResult, {"surgery": SurgeryResult.STORED}, surgery_result)


def _steps(model: HookedModel, given: Sequence[Replacement] | None) -> list[Step]:
    layers = range(len(model.blocks))
    if given is None:
        blocks: list[Any] = list(model.blocks)
        steps = [any_step(what) for what in DEFAULT]
        fit = [step for step in steps if not any(step.lacking(block) for block in blocks)]
        if not fit:
            check_step(model, steps[0], layers)  # raises with the reason
        return fit
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ValueError(f"replacements={given!r}: give a list such as ['gradient', 4], or None.")
    steps = [any_step(what) for what in given]
    if len({step.name for step in steps}) < len(steps):
        raise ValueError(f"replacements={list(given)!r} names a replacement twice: give each once.")
    for step in steps:
        check_step(model, step, layers)
    return steps


def _mixes(mixes: Sequence[float]) -> list[float]:
    if isinstance(mixes, str) or not isinstance(mixes, Sequence):
        raise ValueError(f"mixes={mixes!r}: give a list of numbers in [0, 1], such as [0.1, 1.0].")
    return sorted({check_mix(mix) for mix in mixes})


def _of_chunk(chunk: Chunk, plan: _Plan) -> Tables:
    rows = _Rows()
    for batch in chunk.batches():
        _of_batch(chunk.model, batch, plan, rows)
    if not rows.n:  # no sample of the chunk could be decoded
        return {}
    random = [
        {"replacement": name, "layer": layer, "direction": direction, "slope": value, "n": rows.n}
        for (name, layer), sums in rows.random.items()
        for direction, value in enumerate(sums.tolist())
    ]
    tables: dict[str, pd.DataFrame] = {
        "unchanged": pd.concat(rows.unchanged, ignore_index=True),
        "samples": pd.concat(rows.samples, ignore_index=True),
        "answers": pd.concat(rows.mixes, ignore_index=True) if rows.mixes else _no_answers(),
        "random": pd.DataFrame(random),
    }
    for name in ("samples", "answers"):
        merge = SurgeryResult.STORED[name]  # merging sorts the rows
        tables[name] = merge(tables[name], tables[name].iloc[:0], {})
    return tables


def _no_answers() -> pd.DataFrame:
    kinds = {"sample": int, "replacement": str, "layer": int}
    kinds |= dict.fromkeys(("mix", "loss", "right", "change"), float)
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in kinds.items()})


@dataclass(frozen=True)
class _BatchPass:
    """The measurement of one batch; it adds to the rows of its chunk."""

    model: HookedModel
    batch: Batch
    classes: Tensor | None
    base: answers.Unchanged
    plan: _Plan
    rows: _Rows

    def measure(self, step: Step) -> None:
        """Adds the slopes and answers of a step, in each layer and in all layers at once."""
        layers = range(len(self.model.blocks))
        total: list[Tensor] = []
        for layer in layers:
            new = self._computed(step, layer)
            total.append(self._slopes(step, layer, new))
            name = full_name(step.point, layer)
            for mix in self.plan.mixes:
                self._answers(step, layer, mix, [(name, partial(_mix, step=new, mix=mix))])
        slopes = torch.stack(total).sum(dim=0)
        self.rows.samples.append(_table(self.batch, step, ALL, slope=slopes[0], added=slopes[1]))
        together = sum(self.rows.random[step.name, layer] for layer in layers)
        self.rows.random[step.name, ALL] = torch.as_tensor(together)
        for mix in self.plan.mixes:
            hooks = replacement_hooks(self.model, [step], layers, mix, self.plan.eps)
            self._answers(step, ALL, mix, hooks)

    def _computed(self, step: Step, layer: int) -> Tensor:
        """Returns the step that would replace the layer's own, computed on the unchanged stream."""
        block: Any = self.model.blocks[layer]
        with torch.no_grad():
            acts = self.base.layer(step, layer)
            visible = visible_tokens(self.model, layer, acts[step.point].shape[1])
            new = step.make(block, acts, visible, self.plan.eps).to(acts[step.point])
        where = f"samples {self.batch.start} to {self.batch.last}"
        _check(new, f"{step.name!r} in layer {layer}, {where}")
        return new

    def _slopes(self, step: Step, layer: int, new: Tensor) -> Tensor:
        """Adds a layer's slopes to the rows, and returns `slope` and `added`, `[2, batch]`."""
        name, plan = full_name(step.point, layer), self.plan
        own, gradient = self.base.acts[name], self.base.gradients[name]
        slopes = torch.stack([answers.slope(gradient, new - own), answers.slope(gradient, new)])
        self.rows.samples.append(_table(self.batch, step, layer, slope=slopes[0], added=slopes[1]))
        turns = answers.random_turns(step, layer, own.shape[-1], plan.directions, plan.seed)
        order, signs = (part.to(own.device) for part in turns)
        sums = answers.random_slopes(gradient, new - own, (order, signs)).cpu()
        self.rows.random[step.name, layer] = self.rows.random.get((step.name, layer), 0.0) + sums
        return slopes

    def _answers(self, step: Step, layer: int, mix: float, hooks: list[Hook]) -> None:
        """Runs the model with hooks that change it, and adds the answers to the rows."""
        with torch.no_grad():
            got = answers.answer(self.model, self.batch.inputs, self.classes, hooks)
        _check(got.loss, f"the loss with {mix} of {step.name!r} in layer {layer}")
        numbers = {"loss": got.loss, "right": got.right, "change": self.base.answers.change(got)}
        self.rows.mixes.append(_table(self.batch, step, layer, mix=mix, **numbers))


def _of_batch(model: HookedModel, batch: Batch, plan: _Plan, rows: _Rows) -> None:
    first = batch.start - plan.first
    classes = None if plan.classes is None else plan.classes[first : first + len(batch.inputs)]
    rows.n += len(batch.inputs)
    base = answers.unchanged(model, batch.inputs, classes, plan.steps)
    _check(base.answers.loss, f"the loss in samples {batch.start} to {batch.last}")
    rows.unchanged.append(_table(batch, loss=base.answers.loss, right=base.answers.right))
    batch_pass = _BatchPass(model, batch, classes, base, plan, rows)
    for step in plan.steps:
        batch_pass.measure(step)


def _mix(tensor: Tensor, hook: Any, step: Tensor, mix: float) -> Tensor:
    return mixed(tensor, step, mix)


def _table(
    batch: Batch, step: Step | None = None, layer: int = 0, **numbers: Tensor | float
) -> pd.DataFrame:
    where = {} if step is None else {"replacement": step.name, "layer": layer}
    values = {
        name: value.cpu().numpy() if isinstance(value, Tensor) else value
        for name, value in numbers.items()
    }
    samples = range(batch.start, batch.start + len(batch.inputs))
    return pd.DataFrame({"sample": samples, **where, **values})


def _check(values: Tensor, what: str) -> None:
    if not all_finite(values):
        raise ValueError(f"{what} is not finite: check the weights, or leave out this step.")
