"""What heads do for the answers: ablate each head over data, or switch off parts on one input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from typing import Any, Unpack, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.circuit import head_name
from crate_interp.circuits.graphs.question import one_sample
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hook_points import check_causal
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.answers import Loss, check_logits, hits, losses, true_loss
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Chunk
from crate_interp.questions.edited_runs import (
    every_entry,
    joined,
    pieces,
    with_gradients,
    with_head,
)
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.results.result import Result, by
from crate_interp.results.result_files import near_chance
from crate_interp.stats.bootstrap import RESAMPLES
from crate_interp.stats.contrasts import paired
from crate_interp.stats.intervals import LEVEL, holm, max_t, signs
from crate_interp.sweeps.measuring import position_sums
from crate_interp.sweeps.moments import added, from_bytes

_Z, _STREAM = "attn.hook_z", "hook_resid_mid"
_UNITS = {"loss": "nats of loss", "accuracy": "of accuracy"}
Means = Float[Tensor, "places head d_head"]


def _heads(result: Result) -> pd.DataFrame:
    base, table = result.table("base").set_index("sample")["base"], result.table("samples")
    exact: Any = table["exact"] if "exact" in table else table["sample"] >= 0
    wide: Any = table.pivot(index="sample", columns=["layer", "head"], values="ablated")
    worse = 1 if result.meta["settings"]["metric"] == "loss" else -1
    ablated, whole = wide.to_numpy(float), base.loc[wide.index].to_numpy(float)[:, None]
    drops = worse * (ablated - whole)
    found = result.mean_change(drops, wide.index, result.meta["settings"]["metric"])
    values = result.by_group(drops, wide.index)
    adjusted = holm(found.p) if _one_answer(result) else max_t(values, found.p)
    places = pd.DataFrame(wide.columns.tolist(), columns=["layer", "head"])
    means = {"base": whole.mean(), "ablated": ablated.mean(axis=0), "drop": drops.mean(axis=0)}
    tests = {"low": found.low, "high": found.high, "p_alone": found.p, "p": adjusted}
    heads = places.assign(**means, **tests, n=len(wide))
    if exact.all():
        return heads
    measured = exact.groupby([table["layer"], table["head"]]).all().to_numpy()
    heads.loc[~measured, [*tests]] = np.nan
    return heads.assign(exact=measured)


def _one_answer(result: Result) -> bool:
    """Tells whether each independent sample has one right answer; a text has one per token."""
    accuracy = result.meta["settings"]["metric"] == "accuracy"
    return accuracy and result.independent[1] == "images"


class HeadAblation(Result):
    """How much worse a model answers without each head.

    `table()` has a row per layer and head. base and ablated: the mean of the metric without and
    with the ablation. drop: how much worse the metric becomes (ablated - base for a loss, base -
    ablated for an accuracy); it is above 0 for a head that helps. low, high: the 95 % interval of
    the drop. p_alone: the p of this head by itself, twice the smaller tail. p: the p adjusted
    over all heads. n: the number of samples. Intervals and p_alone come from the bootstrap-t of the
    drops, paired by sample, and p from the largest t of all heads (`max_t` in
    crate_interp/stats/intervals.py). For the accuracy of images, where an answer flips or does
    not, they are Tango's score interval, the exact sign test and Holm's adjustment
    (`paired_shares` in crate_interp/stats/intervals.py). Intervals and p are NaN for a single
    sample, and from the bootstrap for a head whose drops are all equal. With `screen` there is a
    column exact: False for a head whose drop is its first-order estimate, without an interval.

    Stored tables: `samples` (sample, layer, head, ablated) and `base` (sample, base).
    """

    KIND = "head_ablation"
    MAIN = "heads"
    STORED = {"samples": by("sample", "layer", "head"), "base": by("sample")}
    DERIVED = {"heads": _heads}
    INTERVALS = True

    @property
    def alone(self) -> str:
        """Returns why this result does not merge, or "" if it does."""
        if self.meta["settings"]["how"] == "zero":
            return ""
        return (
            "mean ablation takes the mean over all samples: use all samples at once, or how='zero'."
        )

    def heads(self) -> pd.DataFrame:
        """Returns a row per layer and head.

        Its columns: layer, head, base, ablated, drop, low, high, p_alone, p, n.
        """
        return self.table("heads")

    def legend(self) -> str:
        """Returns the meaning of the columns of `heads()`."""
        settings = self.meta["settings"]
        test = f"the bootstrap-t over {self.independent[1]}, {RESAMPLES:,} resamples"
        way = "the largest effect of all heads in these resamples"
        if _one_answer(self):
            test, way = "Tango's score and the exact sign test of the changed answers", "Holm"
        return (
            f"base, ablated: the mean {settings['metric']} of n samples, with the whole model and "
            f"without the head ({settings['how']} ablation). drop: how much worse ablated is; "
            "below 0 the head harms.\nlow, high, p_alone: the 95 % interval and p of the drop of "
            f"each head by itself ({test}). Read them for a head that you chose before you saw any "
            f"drop.\np: the same, adjusted for all heads ({way}). Read it for a head that you "
            f"chose for its drop. A p above {LEVEL} does not show that a head has no effect."
        )

    def sentences(self) -> list[str]:
        """Returns which head matters most, how many do, and by how much."""
        every: Any = self._table("heads")
        table = every[every["exact"]] if "exact" in every else every
        settings, shown = self.meta["settings"], table[table["p"] <= LEVEL]
        among = shown if len(shown) else table
        best = among.loc[among["drop"].abs().idxmax()]
        head, drop = head_name(int(best["layer"]), int(best["head"])), best["drop"]
        unit, metric = _UNITS[settings["metric"]], settings["metric"]
        verb = "rises" if (drop > 0) == (metric == "loss") else "falls"
        counted = self.counted_samples()
        others = table[(table["drop"] * drop > 0) & (table.index != best.name)]
        base, guess = (self._size(value, "%") for value in (best["base"], self.guessing()))
        said = [
            f"Without head {head} the {metric} {verb} most, by {self._size(drop)} from {base}.",
            *(self._rival(others, best) if len(others) else []),
            f"Of {len(table)} heads{' that were ablated' * ('exact' in every)} of "
            f"{self.meta['model'] or 'the model'} on {counted}, {(shown['drop'] > 0).sum()} are "
            f"shown to help and {(shown['drop'] < 0).sum()} to harm.",
        ]
        if not len(shown):
            said = [
                f"No head of {self.meta['model'] or 'the model'} is shown to matter on {counted} "
                f"({metric} {base}).",
                f"The effect of {head} is the largest, but may be chance (p {best['p']:.2g} over "
                "all heads).",
            ]
        ends = self.interval_words(best["low"], best["high"], before="by itself ")
        said += [
            f"The effect of {head} ({settings['how']} ablation) is {drop:+.3g} {unit} ({ends}). "
            f"Equally likely answers would have {guess}."
        ]
        return [*self._worse(), *said]

    def _rival(self, heads: Any, best: Any) -> list[str]:
        """Returns which effect comes next, if it may be as large (paired by sample)."""
        other = heads.loc[heads["drop"].abs().idxmax()]
        samples = self._table("samples").pivot(index="sample", columns=["layer", "head"])["ablated"]
        gap = samples[best["layer"], best["head"]] - samples[other["layer"], other["head"]]
        test = paired(self.by_group(gap.to_numpy(float)[:, None], gap.index))
        name, size = head_name(int(other["layer"]), int(other["head"])), self._size(other["drop"])
        return [] if signs(*test.ends)[0] else [f"We can't tell it from {name} ({size})."]

    def _size(self, value: float, share: str = "points") -> str:
        by_loss = self.meta["settings"]["metric"] == "loss"
        return f"{abs(value):.2f} nats" if by_loss else f"{100 * abs(value):.0f} {share}"

    def guessing(self) -> float:
        """Returns the metric of equally likely answers."""
        choices = self.meta["config"].get("n_classes") or self.meta["config"].get("d_vocab") or 1
        return math.log(choices) if self.meta["settings"]["metric"] == "loss" else 1 / choices

    def _worse(self) -> list[str]:
        """Returns a warning and what to check if answers are worse than by chance, else nothing."""
        metric, even = self.meta["settings"]["metric"], self.guessing()
        base = self._table("heads")["base"].to_numpy().mean()
        if even in (0, 1) or (base <= even if metric == "loss" else base >= even):
            return []
        return [
            f"The model answers worse than by chance: its {metric} is {base:.3g} (by chance "
            f"{even:.3g}).",
            "Check the order of the labels and how inputs are prepared.",
        ]

    def caution(self) -> str:
        """Returns `Result.caution`, and whether an accuracy near chance may be that of settings."""
        if self.meta["settings"]["metric"] == "loss":
            return super().caution()
        base: Any = self._table("base")["base"]
        return f"{super().caution()} {near_chance(self.meta, float(base.mean()))}".strip()

    def _notebook_table(self) -> pd.DataFrame:
        table: Any = self._table("heads")
        return table.sort_values("drop", key=abs, ascending=False, kind="stable").head(20)


@in_full_precision
def ablate_heads(
    model: HookedModel,
    data: Data,
    *,
    how: str = "mean",
    metric: str = "loss",
    screen: int | None = None,
    **run: Unpack[Run],
) -> Perhaps[HeadAblation]:
    """Returns how much worse a model answers if one head at a time is ablated.

    The layers below the head run once for all heads, so the cost is about layers * heads / 2
    forwards of the data, half the cost of full runs. (Full runs are needed if a layer reads more
    than the stream, and for a black box behind a bridge.) Drops are paired by sample.
    Their intervals come from resamples, which all use the same mean in place of an output.

    Args:
        model: A hooked model with logits.
        data: As in `ci.sweep`.
        how: What replaces a head's output (hook_z): mean, its mean over all samples at each
            position, which a first pass measures; or zero.
        metric: loss, the cross-entropy in nats, of the label or of the next token (mean over a
            window) or of the masked tokens (crate-bert); or accuracy, the share of right answers.
        screen: How many heads to ablate: those with the largest first-order effect on the loss, the
            derivative with respect to the head's output times its change. Default: all.
        run: As in `ci.sweep`. With "mean", a shard returns None while the means of other shards are
            missing; run it again to continue.

    Returns:
        A row for each head: the metric with and without it, the drop, its interval and p.

    Raises:
        ValueError: Before work starts, for a model without logits, for images whose labels are
            missing or not classes of the model, for an unknown how or metric, and as `ci.sweep`
            does.
    """
    return ask(AblateHeads(how, metric, screen), model, data, run_options(ablate_heads, run))


@dataclass(frozen=True)
class AblateHeads(Question):
    """Ablates heads one by one. loss: the loss of each sample."""

    how: str = "mean"
    metric: str = "loss"
    screen: int | None = None
    loss: Loss = field(default=cast(Loss, None), repr=False)
    result = HeadAblation

    def settled(self, model: HookedModel, samples: Samples) -> "AblateHeads":
        """Refuses invalid requests, and fills in what model and samples decide."""
        checks.one_of("how", self.how, ("mean", "zero"))
        checks.one_of("metric", self.metric, ("loss", "accuracy"))
        if self.screen is not None:
            checks.count("screen", self.screen)
            if self.metric == "accuracy":
                raise ValueError("accuracy has no first order: give screen=None, or metric='loss'.")
        check_logits(model, "ablate_heads")
        return replace(self, loss=true_loss(model, samples))

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        means = None
        if self.how == "mean":
            of_z = partial(
                position_sums, name="means", points=[_Z], of=lambda acts: acts[_Z].double()
            )
            sums = yield Pass("means", of_z, {"means": added("sums", "layer", "pos")})
            means = _means(sums["means"], run.model)
        heads = list(product(range(run.model.cfg.n_layers), range(run.model.cfg.n_heads)))
        measure = partial(_of_chunk, loss=self.loss, metric=self.metric, means=means)
        if self.screen is None:
            return (yield Pass("heads", partial(measure, heads=heads), HeadAblation.STORED))
        slopes = partial(_slopes, loss=self.loss, means=means)
        first = (yield Pass("slopes", slopes, HeadAblation.STORED))["samples"]
        mean_slope = first.groupby(["layer", "head"])["ablated"].mean().abs()
        chosen = sorted(mean_slope.nlargest(self.screen).index)
        tables = yield Pass("heads", partial(measure, heads=chosen), HeadAblation.STORED)
        base = tables["base"].set_index("sample")["base"]
        first["ablated"] += first["sample"].map(base)
        first = first[~pd.MultiIndex.from_frame(first[["layer", "head"]]).isin(chosen)]
        rows = pd.concat([tables["samples"].assign(exact=True), first.assign(exact=False)])
        return tables | {
            "samples": rows.sort_values(["sample", "layer", "head"], ignore_index=True)
        }


def _means(table: Any, model: HookedModel) -> list[Means]:
    """Returns the mean of z at each position over the samples that have it, for each layer.

    Raises ValueError for images of several sizes, whose positions are different places.
    """
    if model.unit != "windows" and table["pos"].nunique() > 1:
        raise ValueError("positions of images of several sizes have no mean: give how='zero'.")
    means: list[Means] = []
    for _, rows in table.groupby("layer"):
        parts = [from_bytes(row.sums, row.pos, model.cfg.n_heads, -1) for row in rows.itertuples()]
        total = np.zeros_like(max(parts, key=len))
        count = np.zeros((len(total), 1, 1))
        for part, n in zip(parts, rows["n"], strict=True):
            total[: len(part)] += part
            count[: len(part)] += n
        means.append(torch.from_numpy(total / count).to(model.cfg.device, model.cfg.dtype))
    return means


@torch.no_grad()
def _of_chunk(
    chunk: Chunk,
    loss: Loss,
    metric: str,
    means: Sequence[Means] | None,
    heads: Sequence[tuple[int, int]],
) -> Tables:
    """Returns the tables "samples" and "base" of some heads. means: None means zero ablation."""
    model, parts = chunk.model, {"samples": [], "base": []}
    layers = sorted({layer for layer, _ in heads})
    names = [full_name(point, layer) for layer in layers for point in (_Z, _STREAM)]
    for batch in chunk.batches():
        for inputs, own in pieces(model, batch.inputs, range(batch.start, batch.last + 1)):
            logits, cache = model.run_with_cache(inputs, names_filter=names)
            right, ablated = loss.right_answers(logits, inputs, own), []
            parts["base"].append(every_entry("base", _metric(metric, logits, right), sample=own))
            for layer, head in heads:
                z, stream = (cache[full_name(point, layer)] for point in (_Z, _STREAM))
                output = 0.0 if means is None else means[layer][: z.shape[1], head]
                logits = with_head(model, layer, head, output, z, stream, inputs)
                ablated.append(_metric(metric, logits, right))
            rows = every_entry("ablated", np.stack(ablated, axis=1), sample=own, place=heads)
            places = pd.DataFrame(rows.pop("place").tolist(), columns=["layer", "head"])
            parts["samples"].append(
                pd.concat([rows[["sample"]], places, rows[["ablated"]]], axis=1)
            )
    return joined(parts)


def _slopes(chunk: Chunk, loss: Loss, means: Sequence[Means] | None) -> Tables:
    """Returns what each head's ablation adds to the loss to first order, as the table "samples"."""
    model, parts = chunk.model, {"samples": []}
    layers, heads = range(model.cfg.n_layers), range(model.cfg.n_heads)
    for batch in chunk.batches():
        for inputs, own in pieces(model, batch.inputs, range(batch.start, batch.last + 1)):
            points = [full_name(_Z, layer) for layer in layers]
            logits, held = with_gradients(model, inputs, points)
            right = loss.right_answers(logits, inputs, own)
            outputs = [held[point] for point in points]
            found = torch.autograd.grad(losses(logits, right).sum(), outputs)
            steps = [
                (slope * _change(z.detach(), layer, means)).sum(dim=(1, 3))  # [sample, head]
                for layer, (z, slope) in enumerate(zip(outputs, found, strict=True))
            ]
            table = torch.stack(steps, dim=1).double().cpu()
            axes = {"sample": own, "layer": layers, "head": heads}
            parts["samples"].append(every_entry("ablated", table, **axes))
    return joined(parts)


def _change(
    z: Float[Tensor, "sample pos head d_head"], layer: int, means: Sequence[Means] | None
) -> Float[Tensor, "sample pos head d_head"]:
    """Returns how ablation changes the output of the heads of a layer."""
    return -z if means is None else means[layer][: z.shape[1]] - z


def _metric(metric: str, logits: Tensor, answers: Tensor) -> Float[np.ndarray, "sample"]:
    score = losses if metric == "loss" else hits
    return score(logits, answers).double().cpu().numpy()


ATOMS = 40  # how many of the largest atoms of all layers are switched off
OF_ANSWER = 8  # and in each layer how many of those at the token that answers
# of copies of the input in one forward: how many, and how many pairs of tokens
_BATCH, _PAIRS = 64, 2**22


@torch.no_grad()
@in_full_precision
def switched_off(model: HookedModel, sample: Shaped[Tensor, "*sample"]) -> pd.DataFrame:
    """Returns the likeliest answer to one input, with each part switched off in turn.

    sample: an image `[channels, height, width]` or token ids `[pos]`, or a batch of one of them; a
    text's answer is the token after its last one. The first row, of kind "nothing", is the model as
    it is. Each other row has one part off. "head": the head's output z is 0 at every token. "atom":
    the atom's code is 0 at every token. These rows are for the 40 atoms with the largest share of
    their layer's codes over all tokens, and for each layer's 8 largest atoms at the token that
    answers (CLS, or a text's last token). "patch": the patch has the mean colour of the image.
    Columns: kind; layer and number of the part (-1 if it has none); probability, of the answer of
    the first row; answer, the likeliest class or token, and answer_probability. The effects of two
    parts do not add up.

    `ci.viz.explore(cache, inputs, without=table)` shows them on a page.

    Raises ValueError for several samples, and if the model is training, or answers with features
    instead of logits.
    """
    if model.training or not getattr(model, "has_logits", True):
        why = "it is training: call model.eval()" if model.training else "it has no logits"
        raise ValueError(f"switched_off needs the model's answers, but {why}.")
    check_causal(model.cfg, "switched_off")
    net, given = model, one_sample(model, sample)
    shares = _answers(net(given))[0]
    parts = [("head", n, h) for n in range(len(net.blocks)) for h in range(net.cfg.n_heads)]
    parts += [("atom", *place) for place in sorted(_largest_atoms(net, given))]
    count = given.shape[1]
    if net.cfg.kind != "text":
        sides = zip(given.shape[2:], net.cfg.patch_size, strict=True)
        count = math.prod(side // patch for side, patch in sides)
        parts += [("patch", -1, number) for number in range(count)]
    found, size = [shares[None]], max(1, min(_BATCH, _PAIRS // count**2))
    for (kind, layer), group in groupby(parts, lambda part: part[:2]):
        numbers = [number for _, _, number in group]
        for start in range(0, len(numbers), size):
            some = numbers[start : start + size]
            found.append(_answers(_without(net, given, kind, layer, some)))
    every = torch.cat(found).cpu()
    best = every.max(dim=-1)
    table = pd.DataFrame([("nothing", -1, -1), *parts], columns=["kind", "layer", "number"])
    table["probability"] = every[:, int(shares.argmax())].double().numpy()
    answers = {"answer": best.indices.numpy(), "answer_probability": best.values.double().numpy()}
    return table.assign(**answers)


def _answers(logits: Tensor) -> Float[Tensor, "copy answer"]:
    """Returns the probabilities of classes, or of the token after the last one."""
    logits = logits[:, -1] if logits.ndim == 3 else logits
    return logits.float().softmax(dim=-1)


def _without(net: Any, inputs: Tensor, kind: str, layer: int, numbers: list[int]) -> Tensor:
    """Returns the logits of copies of the input, each without one head, atom or patch."""
    copies = inputs.repeat(len(numbers), *[1] * (inputs.ndim - 1))
    if kind == "patch":
        height, width = net.cfg.patch_size
        columns = inputs.shape[3] // width
        for copy, place in enumerate(numbers):
            y, x = place // columns * height, place % columns * width
            copies[copy, :, y : y + height, x : x + width] = inputs[0].mean((1, 2))[:, None, None]
        return net(copies)

    def off(value: Tensor, hook: object) -> Tensor:
        # of one input, hook_z is [pos, head, d_head] and hook_post [pos, atom]
        value = value.clone()
        for copy, number in enumerate(numbers):
            value[copy, :, number] = 0
        return value

    point = "attn.hook_z" if kind == "head" else "mlp.hook_post"
    return net.run_with_hooks(copies, fwd_hooks=[(full_name(point, layer), off)])


def _largest_atoms(net: Any, inputs: Tensor) -> set[tuple[int, int]]:
    """Returns layer and number of the largest atoms; none where attention is the layer."""
    if net.cfg.attn_only:
        return set()
    _, cache = net.run_with_cache(inputs, names_filter=lambda name: name.endswith("mlp.hook_post"))
    answers = [-1] if net.cfg.kind == "text" else [0] if net.cfg.n_special else []
    shares: list[tuple[float, int, int]] = []
    chosen: set[tuple[int, int]] = set()
    for layer in range(len(net.blocks)):
        code = cache[f"blocks.{layer}.mlp.hook_post"][0].float().abs()  # [pos, atom]
        size = code.sum(dim=0)
        size = (size / size.sum().clamp(min=1e-30)).tolist()
        shares += [(share, layer, atom) for atom, share in enumerate(size)]
        for own in code[answers]:
            largest = own.topk(min(OF_ANSWER, len(own)))
            chosen |= {(layer, atom) for atom in largest.indices[largest.values > 0].tolist()}
    return chosen | {(layer, atom) for _, layer, atom in sorted(shares, reverse=True)[:ATOMS]}
