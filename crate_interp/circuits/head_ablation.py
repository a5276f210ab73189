"""What each head does for the answers, measured by ablating one head at a time."""

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack, cast

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.atlases.atom_effects import Loss, at_once, check_logits, loss_on, losses
from crate_interp.circuits.head_ablation_result import HeadAblation
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Reading
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.questions.provenance import digest_of_labels
from crate_interp.sweeps.moments import added, from_bytes, to_bytes

_Z, _STREAM = "attn.hook_z", "hook_resid_pre"
Means = Float[Tensor, "pos head d_head"]


@in_full_precision
def ablate_heads(
    model: HookedModel, data: Data, *, how: str = "mean", metric: str = "loss", **run: Unpack[Run]
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
            window); or accuracy, the share of right answers.
        run: As in `ci.sweep`. With "mean", a shard returns None while the means of other shards are
            missing; run it again to continue.

    Returns:
        A row for each head: the metric with and without it, the drop, its interval and p.

    Raises:
        ValueError: Before work starts, for a model without logits, for images whose labels are
            missing or not classes of the model, for an unknown how or metric, and as `ci.sweep`
            does.
    """
    return ask(AblateHeads(how, metric), model, data, run_options(ablate_heads, run))


@dataclass(frozen=True)
class AblateHeads(Question):
    """The question of `ablate_heads`. loss: of the samples."""

    how: str = "mean"
    metric: str = "loss"
    loss: Loss = field(default=cast(Loss, None), repr=False)
    result = HeadAblation

    def settled(self, model: HookedModel, samples: Samples) -> "AblateHeads":
        """Refuses what cannot be asked, and fills in what model and samples decide."""
        checks.one_of("how", self.how, ("mean", "zero"))
        checks.one_of("metric", self.metric, ("loss", "accuracy"))
        check_logits(model, "ablate_heads")
        loss = loss_on(model, samples)
        if loss.kind == "answers":
            raise ValueError(
                f"the loss needs the true class of each image: {_unclassed(model, samples)}"
            )
        return replace(self, loss=loss)

    def read(self) -> Mapping[str, object]:
        """Returns what else the numbers depend on, by name."""
        return {"labels": digest_of_labels(self.loss.classes)}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        means = None
        if self.how == "mean":
            sums = yield Pass("means", _sums, {"means": added("sums", "layer", "pos")})
            means = _means(sums["means"], run.model)
        measure = partial(_of_chunk, loss=self.loss, metric=self.metric, means=means)
        return (yield Pass("heads", measure, HeadAblation.STORED))


def _unclassed(model: Any, samples: Samples) -> str:
    """Returns why labels are not classes of the model, and what to type."""
    labels, classes, count = samples.labels, model.cfg.labels, model.W_U.shape[1]
    if not labels or None in labels:
        return (
            'labels are missing: give "imagefolder:DIR" with a folder for each class, or a '
            "datasets.Dataset with a column of labels."
        )
    if samples.names is not None and isinstance(labels[0], int):
        labels = [samples.names[label] for label in labels]
    known = [*(classes or ()), *range(count)]
    wrong = next((label for label in labels if known.count(label) != 1), labels[0])
    where = f"{checks.shown(wrong)} of sample {samples.start + labels.index(wrong)}"
    if classes is None and not checks.is_int(wrong):
        return (
            f"the label {where} does not tell which of {count} classes it is: load the model with "
            f"labels=[...], {count} class names in the order of its outputs (torchvision's "
            "ImageFolder numbers folders in the order of their names)."
        )
    names = f"0 to {count - 1}" if classes is None else checks.shown(classes[:20])
    return (
        f"the label {where} is not one class of the model, whose classes are {names}: give data "
        "with these as labels or folders, or load the model with labels=[...], its own names."
    )


def may_share(model: HookedModel) -> bool:
    """Tells whether a forward from a layer's stream gives the logits of a full forward."""
    takes = "start_at_layer" in inspect.signature(model.forward).parameters
    # with x0_lambdas, later layers add the embedding again, which the stream does not hold
    return takes and not hasattr(model, "x0_lambdas")


def _sums(chunk: Chunk) -> Tables:
    """Returns the table "means": layer, pos, n, sums (the bytes of `[pos, head, d_head]`).

    Texts of several lengths have a row for each layer and length `pos`.
    """
    sums: dict[tuple[int, int], Tensor] = {}
    counts: Counter[int] = Counter()

    def add(layer: int, acts: Mapping[str, Tensor], batch: Batch) -> None:
        part = acts[_Z].double().sum(dim=0)
        sums[layer, len(part)] = sums.get((layer, len(part)), 0) + part
        counts[len(part)] += len(batch.inputs) if not layer else 0

    for batch in chunk.batches():
        chunk.measure(batch, [Reading([_Z], add)])
    rows = [(*key, counts[key[1]], to_bytes(total)) for key, total in sorted(sums.items())]
    return {"means": pd.DataFrame(rows, columns=["layer", "pos", "n", "sums"])}


def _means(table: pd.DataFrame, model: HookedModel) -> dict[int, Means]:
    """Returns the mean of z at each position over the samples that have it, for each layer.

    Raises ValueError for images of several sizes, whose positions are different places.
    """
    if model.unit != "windows" and len(set(table["pos"])) > 1:
        raise ValueError(
            "the samples differ in their number of tokens, so positions have no mean: give images "
            "of one size, or how='zero'."
        )
    means: dict[int, Means] = {}
    for layer in sorted(set(table["layer"])):
        rows: Any = table[table["layer"] == layer]
        longest = max(rows["pos"])
        total, count = torch.zeros(()), torch.zeros(longest, 1, 1, dtype=torch.float64)
        for row in rows.itertuples():
            part = torch.from_numpy(from_bytes(row.sums, row.pos, model.cfg.n_heads, -1))
            total = total + F.pad(part, (0, 0, 0, 0, 0, longest - row.pos))
            count[: row.pos] += row.n
        means[layer] = total / count
    return means


@torch.no_grad()
def _of_chunk(chunk: Chunk, loss: Loss, metric: str, means: Mapping[int, Means] | None) -> Tables:
    """Returns the tables "samples" and "base". means: None means zero ablation."""
    model, bases, samples = chunk.model, [], []
    cfg: Any = model.cfg
    layers, shared = range(len(model.blocks)), may_share(model)
    if means is None:
        means = dict.fromkeys(layers, torch.zeros(1, 1, 1))
    means = {layer: mean.to(cfg.device, cfg.dtype) for layer, mean in means.items()}
    names = [full_name(_STREAM, layer) for layer in layers]
    for batch in chunk.batches():
        size, numbers = at_once(model, batch.inputs), torch.arange(batch.start, batch.last + 1)
        for inputs, own in zip(batch.inputs.split(size), numbers.split(size), strict=True):
            logits, cache = model.run_with_cache(inputs, names_filter=names)
            right = loss.wanted(logits, inputs, own.tolist())
            bases.append(
                pd.DataFrame({"sample": own.numpy(), "base": _metric(metric, logits, right)})
            )
            columns = []
            for layer in layers:
                for head in range(cfg.n_heads):
                    without = partial(_without, mean=means[layer], head=head)
                    hooks: list[Any] = [(full_name(_Z, layer), without)]
                    # the layers below are those of the unchanged model
                    start: dict[str, Any] = {"start_at_layer": layer} if shared else {}
                    first = cache[names[layer]] if shared else inputs
                    logits = model.run_with_hooks(first, fwd_hooks=hooks, **start)
                    columns.append(_metric(metric, logits, right))
            ablated = np.stack(columns, axis=1).reshape(len(own), len(layers), -1)
            sample, layer, head = np.indices(ablated.shape).reshape(3, -1)
            places = {"sample": own.numpy()[sample], "layer": layer, "head": head}
            samples.append(pd.DataFrame(places | {"ablated": ablated.reshape(-1)}))
    if not bases:  # no sample of the chunk can be decoded
        return {}
    both = {"samples": samples, "base": bases}
    return {name: pd.concat(tables, ignore_index=True) for name, tables in both.items()}


def _without(
    z: Float[Tensor, "batch pos head d_head"], hook: object, mean: Tensor, head: int
) -> Float[Tensor, "batch pos head d_head"]:
    changed = z.clone()
    changed[:, :, head] = mean[: z.shape[1], min(head, mean.shape[1] - 1)]
    return changed


def _metric(metric: str, logits: Any, wanted: Tensor) -> Float[np.ndarray, "sample"]:
    if metric == "loss":
        return losses(logits, wanted).double().cpu().numpy()
    if logits.ndim == 3:  # for a window: the share of tokens whose next token is predicted
        right = (logits[:, :-1].argmax(dim=-1) == wanted[:, 1:]).double().mean(dim=-1)
    else:
        right = (logits.argmax(dim=-1) == wanted).double()
    return right.cpu().numpy()
