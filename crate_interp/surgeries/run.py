"""ci.surgery: does the network answer better when a layer does its job better?

Another step gives later layers inputs they were not trained on. So a large share of another step
hurts, whatever the step is. We therefore measure the slope of the loss where the other step begins
to replace the layer's own step. One backward pass gives the slope exactly: `<g, step - own>`, where
g is the gradient of the sample's loss.

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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import all_finite, in_full_precision
from crate_interp.models.hooked import HookedModel, check_gradients
from crate_interp.models.runtimes import with_weights
from crate_interp.questions.answers import Loss, check_logits, hits, losses, true_loss
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, last_point
from crate_interp.questions.edited_runs import every_entry, joined, with_gradients
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.surgeries import steps as surgical
from crate_interp.surgeries.norms import mean_norms, norm_sums
from crate_interp.surgeries.result import ALL, LADDER_ONLY, SurgeryResult
from crate_interp.surgeries.steps import Replacement, Step
from crate_interp.sweeps.moments import added

_POINTS = {"hook_attn_out": 0, "mlp.hook_post": 1}  # each point's part of the seed
DEFAULT: tuple[Replacement, ...] = (*surgical.DERIVED, 4, surgical.SOLUTION)


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

    In each layer, and in all layers at once, `(1 - t) own + t step` replaces the output of
    attention or the code of the sparse step (`ci.surgeries.replaced` lists the steps). The loss is
    the cross-entropy in nats of the right class, or of the next token (mean over the window), or of
    the masked tokens (crate-bert).

    The slope d loss / d t at t = 0 is compared with the slopes of random directions that are as
    long and as systematic as the step. crate_interp/surgeries/run.py says why, and how to read
    slopes.

    Args:
        model: A hooked model with logits.
        data: As in `ci.sweep`.
        labels: For images, one per sample, numbers of classes or names in cfg.labels. Default: the
            data's labels.
        replacements: Names, and numbers of proximal steps. Default: those of "gradient", "neumann",
            "plus", "minus", 4 and "solution" that the layers can take. What heads owe to the norms
            of their codes: ["flat_norms", "ladder_only", "permuted_norms", "masked_diagonal"], each
            the control of the others (surgeries/norms.py). "ladder_only" takes the mean norm at
            each position, which a first pass measures.
        mixes: Values of t, in [0, 1], at which the model is run.
        directions: The number of random directions, at least 2.
        eps: The precision of the rates that steps descend, above 0.
        seed: The seed of the random directions, and of the order of permuted norms.
        run: As in `ci.sweep`.

    Returns:
        The slopes and the answers at each mix; None while chunks of other shards are missing.

    Raises:
        ValueError: Before work starts, for replacements that are unknown or that a layer cannot
            take, for mixes outside [0, 1], for missing or wrong labels, for models without logits,
            and as `ci.sweep` does; also under torch.inference_mode(), because slopes need
            gradients. With layer and samples, if a step or a loss is not finite.
    """
    question = Surgery(replacements, mixes, directions, eps, seed, labels)
    return ask(question, model, data, run_options(surgery, run))


@dataclass(frozen=True)
class Surgery(Question):
    """Measures replaced steps. steps: the steps that replace. loss: the loss of each sample."""

    replacements: Sequence[Replacement] | None
    mixes: Sequence[float]
    directions: int
    eps: float
    seed: int
    labels: Sequence[Any] | None = field(default=None, repr=False)
    steps: Sequence[Step] = field(default=(), repr=False)
    loss: Loss = field(default=cast(Loss, None), repr=False)
    result = SurgeryResult

    def settled(self, model: HookedModel, samples: Samples) -> "Surgery":
        """Refuses invalid requests, and fills in what model and samples decide."""
        numbers: Any = {"eps": checks.positive("eps", self.eps)}
        numbers["seed"] = checks.count("seed", self.seed, least=0)
        check_logits(model, "surgery")
        check_gradients("surgery", model)
        steps = _steps(model, self.replacements, numbers["seed"])
        if not isinstance(self.mixes, (list, tuple)):
            raise ValueError(f"mixes={self.mixes!r}: give a list of numbers in [0, 1].")
        numbers["mixes"] = sorted({surgical.check_mix(mix) for mix in self.mixes})
        numbers["directions"] = checks.count("directions", self.directions, least=2)
        numbers["loss"] = true_loss(model, samples, self.labels)
        names = [step.name for step in steps]
        return replace(self, replacements=names, steps=steps, labels=None, **numbers)

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        question = self
        if any(step.name == LADDER_ONLY for step in self.steps):
            sums = yield Pass("norms", norm_sums, {"norms": added("sums", "layer", "pos")})
            means = mean_norms(sums["norms"], run.model)
            steps = [
                replace(step, means=means) if step.name == LADDER_ONLY else step
                for step in self.steps
            ]
            question = replace(self, steps=steps)
        return (yield Pass("surgery", partial(_of_chunk, question=question), SurgeryResult.STORED))


def _steps(model: HookedModel, replacements: Sequence[Replacement] | None, seed: int) -> list[Step]:
    chosen, blocks = DEFAULT if replacements is None else replacements, range(len(model.blocks))
    if not isinstance(chosen, (list, tuple)) or not chosen:
        raise ValueError(f"replacements={replacements!r}: give a list such as ['gradient', 4].")
    steps = [surgical.any_step(one, seed=seed) for one in chosen]
    steps = [*{step.name: step for step in steps}.values()]
    fit = [step for step in steps if not any(step.lacking(block) for block in model.blocks)]  # pyright: ignore
    if replacements is None and fit:
        return fit
    surgical.check_steps(model, steps, blocks)
    return steps


def _of_chunk(chunk: Chunk, question: Surgery) -> Tables:
    rows: dict[str, list[pd.DataFrame]] = {"unchanged": [], "samples": [], "answers": []}
    random: dict[tuple[str, int], Tensor] = {}  # sums of slopes over samples, [direction]
    n = 0
    for batch in chunk.batches():
        n += len(batch.inputs)
        _of_batch(chunk.model, batch, question, rows, random)
    if not n:  # no sample of the chunk could be decoded
        return {}
    if not question.mixes:
        none = dict.fromkeys(("mix", "loss", "right", "change"), 0.0)
        rows["answers"].append(rows["samples"][0].iloc[:0, :3].assign(**none))
    tables = joined(rows)
    for name in ("samples", "answers"):
        merge = SurgeryResult.STORED[name]  # merging sorts the rows
        tables[name] = merge(tables[name], tables[name].iloc[:0], {})
    slopes = [
        every_entry("slope", sums, replacement=[name], layer=[at], direction=range(len(sums)))
        for (name, at), sums in random.items()
    ]
    return tables | {"random": pd.concat(slopes, ignore_index=True).assign(n=n)}


def _of_batch(
    model: HookedModel,
    batch: Batch,
    question: Surgery,
    rows: dict[str, list[pd.DataFrame]],
    random: dict[tuple[str, int], Tensor],
) -> None:
    """Adds the rows of a batch to tables, and the slopes along random directions to their sums."""
    layers, numbers = range(len(model.blocks)), range(batch.start, batch.last + 1)
    where = f"samples {batch.start} to {batch.last}"

    def add(table: str, place: dict[str, Any], **columns: Tensor) -> None:
        values = {name: value.detach().cpu().numpy() for name, value in columns.items()}
        rows[table].append(pd.DataFrame({"sample": numbers, **place, **values}))

    points = [point for step in question.steps for point in (step.point, *step.reads)]
    names = [full_name(point, layer) for point in dict.fromkeys(points) for layer in layers]
    targets = {full_name(step.point, layer) for step in question.steps for layer in layers}
    end: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> None:
        end["stream"] = tensor.detach().double()

    last = (last_point(model), keep)
    with torch.enable_grad():
        logits, acts = with_gradients(model, batch.inputs, names, [last])
        loss, right = _scored(question, batch, logits, f"in {where}")
        found = torch.autograd.grad(loss.sum(), [acts[name] for name in sorted(targets)])
    gradients, stream = dict(zip(sorted(targets), found, strict=True)), end["stream"]
    acts = {name: value.detach() for name, value in acts.items()}

    def add_answers(place: dict[str, Any], mix: float, hooks: list[Any]) -> None:
        with torch.no_grad():
            logits: Any = model.run_with_hooks(batch.inputs, fwd_hooks=[*hooks, last])
        loss, right = _scored(question, batch, logits, f"with {mix} of {place['replacement']!r}")
        size = partial(torch.linalg.vector_norm, dim=(1, 2))
        change = size(end["stream"] - stream) / size(stream)
        add("answers", place | {"mix": mix}, loss=loss, right=right, change=change)

    add("unchanged", {}, loss=loss, right=right)
    for step in question.steps:
        total: list[Tensor] = []
        for layer in layers:
            place, name = {"replacement": step.name, "layer": layer}, full_name(step.point, layer)
            own, gradient = acts[name], gradients[name]
            read = {point: acts[full_name(point, layer)] for point in (step.point, *step.reads)}
            new = surgical.take_step(model, step, layer, read, question.eps)
            _check(new, f"{step.name!r} in layer {layer}, {where}")
            products = [gradient.double() * part.double() for part in (new - own, new)]
            total.append(torch.stack([product.sum(dim=(1, 2)) for product in products]))
            add("samples", place, slope=total[-1][0], added=total[-1][1])
            turns = random_turns(step, layer, own.shape[-1], question.directions, question.seed)
            sums = random_slopes(gradient, new - own, turns).cpu()
            random[step.name, layer] = random.get((step.name, layer), 0.0) + sums
            for mix in question.mixes:
                put = (name, lambda tensor, hook, new=new, mix=mix: torch.lerp(tensor, new, mix))
                add_answers(place, mix, [put])
        place = {"replacement": step.name, "layer": ALL}
        slopes = torch.stack(total).sum(dim=0)
        add("samples", place, slope=slopes[0], added=slopes[1])
        random[step.name, ALL] = torch.as_tensor(sum(random[step.name, layer] for layer in layers))
        for mix in question.mixes:
            hooks = surgical.replacement_hooks(model, [step], layers, mix, question.eps)
            add_answers(place, mix, hooks)


def _scored(question: Surgery, batch: Batch, logits: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Returns loss and right answers of a batch. what: the step that gave them, for an error."""
    wanted = question.loss.right_answers(logits, batch.inputs, range(batch.start, batch.last + 1))
    loss = losses(logits.double(), wanted)
    _check(loss, f"the loss {what}")
    return loss, hits(logits, wanted)


def _check(values: Tensor, what: str) -> None:
    if not all_finite(values):
        raise ValueError(f"{what} is not finite: check the weights, or leave out this step.")


def random_slopes(
    gradient: Float[Tensor, "batch pos width"],
    change: Float[Tensor, "batch pos width"],
    turns: tuple[Tensor, Tensor],
) -> Float[Tensor, "direction"]:
    """Returns the slopes along randomly permuted changes, summed over the batch, in float64.

    A random turn replaces entry j of each token's change by signs[j] times entry order[j]. With M =
    sum change^T gradient `[width, width]` the slope is `sum_j signs_j M[order_j, j]`.
    """
    order, signs = (turn.to(change.device) for turn in turns)  # each is [direction, width]
    products = change.double().flatten(0, 1).T @ gradient.double().flatten(0, 1)
    columns = torch.arange(order.shape[1], device=order.device)
    return (signs * products[order, columns]).sum(dim=-1)


def random_turns(
    step: Step, layer: int, width: int, directions: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns random orders and signs, `[direction, width]` each.

    They depend only on the seed, the layer and the point, not on samples or the step.
    """
    drawn = [
        np.random.default_rng([seed, _POINTS[step.point], layer, direction])
        for direction in range(directions)
    ]
    order = np.stack([one.permutation(width) for one in drawn])
    signs = np.stack([one.choice([-1.0, 1.0], width) for one in drawn])
    return torch.from_numpy(order), torch.from_numpy(signs)
