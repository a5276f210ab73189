"""ci.unroll: layers that take more, fewer or smaller steps of their own objective."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp import measures
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import all_finite, in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.context import contexts
from crate_interp.models.layers.sparse_steps import Lasso
from crate_interp.models.runtimes import with_weights
from crate_interp.questions.answers import Loss, check_logits, hits, losses, true_loss
from crate_interp.questions.asking import Perhaps, ask
from crate_interp.questions.batches import Chunk
from crate_interp.questions.edited_runs import joined
from crate_interp.questions.experiment import Pass, Question, Tables
from crate_interp.results.result import Result, by
from crate_interp.surgeries.steps import Hook, no_lasso, no_subspaces

OBJECTIVES = {  # step -> its objective, and the hook point of what it gives
    "sparse": ("lasso", "mlp.hook_post"),
    "attention": ("R^c", "hook_attn_out"),
}
UNROLLED, RANDOM = "unrolled", "random"
_CASE = ["steps", "eta", "lambd"]


def _curve(result: Result) -> pd.DataFrame:
    base: Any = result.table("unchanged").set_index("sample")
    every: Any = result.table("answers").groupby(["kind", *_CASE], dropna=False)
    rows = []
    for (kind, *case), part in every:
        answers: Any = part.set_index("sample")
        row: dict[str, Any] = {"kind": kind, **dict(zip(_CASE, case, strict=True))}
        for stored, name in (("loss", "loss"), ("right", "accuracy")):
            change = (answers[stored] - base[stored]).to_numpy()[:, None]
            ends = result.mean_change(change, base.index, name).ends
            row |= {name: answers[stored].mean(), f"{name}_change": change.mean()}
            row |= {f"{name}_low": ends[0][0], f"{name}_high": ends[1][0]}
        rows.append(row | {"n": len(answers)})
    ascending, by_what = [False] + 3 * [True], ["kind", *_CASE]
    return pd.DataFrame(rows).sort_values(by_what, ascending=ascending, ignore_index=True)


class Unrolling(Result):
    """What a model answers if its layers take other steps of their own objective.

    `table()` has a row for each number of steps, eta and lambda, and for each a row of the random
    baseline: steps as long, in a random direction. loss, accuracy: means over samples; _change,
    _low, _high: how they change, with the 95 % interval, paired by sample. eta and lambd are NaN
    where the layers keep their own.

    `table("layers")`: objective and zeros after the steps, by sample, layer and case. objective:
    the lasso `|y - D z|^2 / 2 + lambd |z|_1`, mean over tokens, at the layer's own lambda; or R^c
    at eps, in nats per token. zeros: the share of zeros in the code. layer_change: how far the
    result is from the layer's own, relative to that.

    Stored tables: `unchanged` (loss, right), `answers` (loss, right by kind and case), `layers`.
    """

    KIND = "unrolling"
    MAIN = "curve"
    INTERVALS = True
    STORED = {
        "unchanged": by("sample"),
        "answers": by("sample", "kind", *_CASE),
        "layers": by("sample", "layer", *_CASE),
    }
    DERIVED = {"curve": _curve}

    def sentences(self) -> list[str]:
        """Returns what most steps do to the accuracy, and to the objective."""
        curve: Any = self._table("curve")
        last = curve[curve["kind"] == UNROLLED].iloc[-1]
        random: Any = curve[(curve["kind"] == RANDOM) & (curve["steps"] == last["steps"])].iloc[-1]
        base = self._table("unchanged")["right"].to_numpy().mean()
        layers: Any = self._table("layers")
        depth = layers.groupby("steps")["objective"].mean()
        name = OBJECTIVES[self.meta["settings"]["of"]][0]
        return [
            f"With {last['steps']} {self.meta['settings']['of']} steps a layer the accuracy goes "
            f"from {base:.3f} to {last['accuracy']:.3f}.",
            f"Random steps as long give {random['accuracy']:.3f}.",
            f"From {depth.index[0]} to {depth.index[-1]} steps the objective ({name}) goes from "
            f"{depth.iloc[0]:.3g} to {depth.iloc[-1]:.3g}.",
        ]


@with_weights
@in_full_precision
def unroll(
    model: HookedModel,
    data: Data,
    *,
    steps: Sequence[int] = (1, 2, 4, 16),
    of: str = "sparse",
    eta: float | Sequence[float] | None = None,
    lambd: float | Sequence[float] | None = None,
    eps: float = 0.1,
    seed: int = 0,
    labels: Sequence[Any] | None = None,
    **run: Unpack[Run],
) -> Perhaps[Unrolling]:
    """Returns what a model answers if its layers take more or other steps of their objective.

    A CRATE layer is one step of an optimisation. If that were all it is for, more steps would do
    its job better. With of="sparse" each layer takes n proximal steps `z <- relu(z - eta D^T (D z -
    y) - eta lambd)` on its lasso (arXiv 2306.01129, eq. 17), from where it starts itself. With
    of="attention" each layer takes n steps `Z <- Z + eta MSSA(LN(Z))` (eq. 11). Later layers read
    what comes of it.

    The baseline takes, from what the layer itself would give there, a step as long in a random
    direction: the entries of every token's change in a random order with random signs. It may leave
    the non-negative codes.

    Args:
        model: A hooked model with logits.
        data: As in `ci.sweep`.
        steps: Numbers of steps, from 0.
        of: "sparse" or "attention".
        eta: Lengths of a step, above 0. Default: the layer's own; of attention 1.
        lambd: Thresholds of the sparse step, at least 0. Default: the layer's own.
        eps: The precision of R^c, the objective of attention, above 0.
        seed: The seed of the random directions.
        labels: As in `ci.surgery`.
        run: As in `ci.sweep`.

    Returns:
        Loss and accuracy for each case and for random steps, and the objective and the zeros by
        layer; None while chunks of other shards are missing.

    Raises:
        ValueError: Before work starts, for steps, eta or lambd out of range, for lambd with
            of="attention", for a layer without a lasso or without U, for missing labels, and as
            `ci.sweep` does.
    """
    question = Unroll(steps, of, eta, lambd, eps, seed, labels)
    return ask(question, model, data, run_options(unroll, run))


class Case(NamedTuple):
    """How many steps of which length and threshold; None keeps the layer's own."""

    steps: int
    eta: float | None
    lambd: float | None


@dataclass(frozen=True)
class Unroll(Question):
    """Takes other numbers of steps. loss: the loss of each sample."""

    steps: Sequence[int]
    of: str
    eta: float | Sequence[float] | None
    lambd: float | Sequence[float] | None
    eps: float
    seed: int
    labels: Sequence[Any] | None = field(default=None, repr=False)
    loss: Loss = field(default=cast(Loss, None), repr=False)
    result = Unrolling

    def settled(self, model: HookedModel, samples: Samples) -> "Unroll":
        """Refuses invalid requests, and fills in what model and samples decide."""
        checks.one_of("of", self.of, OBJECTIVES)
        if not isinstance(self.steps, (list, tuple, range)) or not self.steps:
            raise ValueError(f"steps={self.steps!r}: give a list such as (1, 2, 4).")
        check_logits(model, "unroll")
        if self.of == "attention" and self.lambd is not None:
            raise ValueError("attention has no threshold: leave out lambd=.")
        lacking = no_lasso if self.of == "sparse" else no_subspaces
        for layer, block in enumerate(model.blocks):
            if reason := lacking(cast(Any, block)):
                raise ValueError(f"layer {layer} has no {self.of} steps to unroll: {reason}.")
        numbers: Any = {
            "steps": sorted({checks.count("steps", one, least=0) for one in self.steps}),
            "eta": _all("eta", self.eta, checks.positive),
            "lambd": _all("lambd", self.lambd, checks.non_negative),
            "eps": checks.positive("eps", self.eps),
            "seed": checks.count("seed", self.seed, least=0),
        }
        return replace(self, labels=None, loss=true_loss(model, samples, self.labels), **numbers)

    def cases(self) -> list[Case]:
        """Returns the cases, in the order of steps, eta and lambda."""
        each: Any = (self.steps, self.eta or [None], self.lambd or [None])
        return [Case(*case) for case in product(*each)]

    def passes(self, model: HookedModel) -> Pass:
        """Returns the pass of the question."""
        return Pass("unroll", partial(_of_chunk, question=self), Unrolling.STORED)


def _all(name: str, value: Any, check: Any) -> list[float] | None:
    """Returns one or several numbers as a list, each checked; None stays."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return [check(name, value)]
    if not value:
        raise ValueError(f"{name}=[]: give a number or several, or leave it out.")
    return sorted({check(name, one) for one in value})


@torch.no_grad()
def _of_chunk(chunk: Chunk, question: Unroll) -> Tables:
    rows: dict[str, list[pd.DataFrame]] = {"unchanged": [], "answers": [], "layers": []}
    for batch in chunk.batches():
        numbers = range(batch.start, batch.last + 1)
        clean: Any = chunk.model(batch.inputs)
        targets = question.loss.right_answers(clean, batch.inputs, numbers)

        def scored(
            logits: Any, numbers: Any = numbers, targets: Tensor = targets
        ) -> dict[str, Any]:
            loss = losses(logits.double(), targets)
            if not all_finite(loss):
                raise ValueError(
                    f"a loss of samples {numbers} is not finite: take fewer steps, or a "
                    "smaller eta."
                )
            return {"sample": numbers, "loss": loss.cpu(), "right": hits(logits, targets).cpu()}

        rows["unchanged"].append(pd.DataFrame(scored(clean)))
        for kind, case in product((UNROLLED, RANDOM), question.cases()):
            hooks, found = _hooks(chunk.model, question, case, kind)
            answers = scored(chunk.model.run_with_hooks(batch.inputs, fwd_hooks=hooks))
            rows["answers"].append(pd.DataFrame({**answers, "kind": kind, **_named(case)}))
            if kind == UNROLLED:
                parts = [
                    pd.DataFrame({"sample": numbers, "layer": layer, **_named(case), **values})
                    for layer, values in found.items()
                ]
                rows["layers"] += parts
    return joined(rows)


def _named(case: Case) -> dict[str, Any]:
    return {name: np.nan if value is None else value for name, value in case._asdict().items()}


def _hooks(
    model: HookedModel, question: Unroll, case: Case, kind: str
) -> tuple[list[Hook], dict[int, dict[str, Any]]]:
    """Returns hooks that take the steps of a case, and where they put numbers of each layer."""
    found: dict[int, dict[str, Any]] = {}
    acts: dict[int, Tensor] = {}
    point = OBJECTIVES[question.of][1]
    reads = "ln2.hook_normalized" if question.of == "sparse" else "hook_resid_pre"
    take = partial(_sparse if question.of == "sparse" else _attention, model, question, case)

    def keep(value: Tensor, hook: Any, layer: int) -> None:
        acts[layer] = value.detach()

    def put(output: Tensor, hook: Any, layer: int) -> Tensor:
        new, numbers = take(layer, acts.pop(layer))
        change = new - output
        size = partial(torch.linalg.vector_norm, dim=(1, 2))
        numbers["layer_change"] = size(change.double()) / size(output.double())
        found[layer] = {name: value.double().cpu().numpy() for name, value in numbers.items()}
        if kind == UNROLLED:
            return new
        draw = np.random.default_rng([question.seed, layer])
        order = torch.from_numpy(draw.permutation(output.shape[-1])).to(output.device)
        signs = torch.from_numpy(draw.choice([-1.0, 1.0], output.shape[-1])).to(output)
        return output + change[..., order] * signs

    layers = range(len(model.blocks))
    hooks: list[Hook] = [(full_name(reads, n), partial(keep, layer=n)) for n in layers]
    return hooks + [(full_name(point, n), partial(put, layer=n)) for n in layers], found


def _sparse(
    model: HookedModel, question: Unroll, case: Case, layer: int, y: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the code after the steps, and its objective and zeros."""
    block: Any = model.blocks[layer]
    lasso: Lasso = block.mlp.lasso()
    lambd = lasso.lambd if case.lambd is None else lasso.d.new_tensor(case.lambd)
    steps = replace(lasso, count=case.steps, eta=case.eta or lasso.eta)
    code = steps.run(y, lambd)[0] if case.steps else lasso.start(y)
    cost = measures.lasso_objective(code, y, lasso.d, lasso.lambd)
    zeros = measures.zero_fraction(code)
    return code, {"objective": cost.mean(dim=-1), "zeros": zeros.mean(dim=-1)}


def _attention(
    model: HookedModel, question: Unroll, case: Case, layer: int, z: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns what the steps add to the stream, and R^c of the stream after them."""
    block: Any = model.blocks[layer]
    context = None
    if model.cfg.causal:
        context = contexts(model.cfg, z.shape[1], None, z.device)[layer]
    end = z
    for _ in range(case.steps):
        end = end + (case.eta or 1.0) * block.attn.of_stream(end, block.ln1, context)
    rate = measures.subspace_coding_rate(end, block.attn.U.detach(), question.eps).sum(dim=-1)
    return end - z, {"objective": rate, "zeros": torch.full_like(rate, torch.nan)}
