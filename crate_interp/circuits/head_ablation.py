"""What each head does for the answers, measured by ablating one head at a time."""

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.atlases.atom_effects import Loss, at_once, loss_on, losses
from crate_interp.circuits.head_ablation_result import HeadAblation
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.results.kinds import Kind, Tables
from crate_interp.sweeps.array_cells import added, from_bytes, to_bytes
from crate_interp.sweeps.runs.batches import Batch, Chunk, Reading, check_model, samples_of
from crate_interp.sweeps.runs.chunked_pass import Stage, with_facts
from crate_interp.sweeps.runs.chunked_run import Job, Perhaps, open_job
from crate_interp.sweeps.runs.provenance import data_meta, digest_of_labels

HOW = ("mean", "zero")
METRICS = ("loss", "accuracy")
_Z, _STREAM = "attn.hook_z", "hook_resid_pre"
Means = Float[Tensor, "pos head d_head"]


@dataclass(frozen=True)
class Ablating:
    """How heads are ablated, and which metric is measured.

    means: for each layer, the tensor that replaces z of the ablated heads. shared: whether a run
    may start at the layer of the ablated head, from the stream of the unchanged model.
    """

    model: HookedModel
    loss: Loss
    metric: str
    means: Mapping[int, Means]
    shared: bool


@in_full_precision
def ablate_heads(
    model: HookedModel, data: Data, *, how: str = "mean", metric: str = "loss", **run: Unpack[Run]
) -> Perhaps[HeadAblation]:
    """Returns how much worse a model answers if one head at a time is ablated.

    how: "mean" replaces the head's output (hook_z) at each position by its mean over all samples at
    that position, which a first pass measures; "zero" replaces it by 0. metric: "loss" is the
    cross-entropy in nats, of the label or of the next token (mean over a window); "accuracy" is
    the share of right answers. run: as in `ci.sweep`. With "mean", a shard returns None while the
    means of other shards are missing; run it again to continue.

    The layers below the head run once for all heads, so the cost is about layers * heads / 2
    forwards of the data, half the cost of full runs. (Full runs are needed if a layer reads more
    than the stream, and for a black box behind a bridge.) Drops are paired by sample.
    Their intervals come from resamples, which all use the same mean in place of an output.

    Raises ValueError, before work starts, for a model without logits, for images whose labels are
    missing or not classes of the model, for an unknown how or metric, and as `ci.sweep` does.
    """
    options = run_options(ablate_heads, run)
    checks.one_of("how", how, HOW)
    checks.one_of("metric", metric, METRICS)
    check_model(model)
    if not model.has_logits:
        raise ValueError(
            f"this {type(model).__name__} of family {model.cfg.family!r} has no logits, and so no "
            "loss: give a classifier of images or a language model."
        )
    samples = samples_of(model, data, options)
    loss = _loss(model, samples)
    meta = data_meta(model, samples, options.batch_size)
    meta |= {"settings": {"how": how, "metric": metric}}
    stages = ["means", "heads"] if how == "mean" else ["heads"]
    read = {"labels": digest_of_labels(loss.classes)}
    with open_job(HEAD_ABLATION, meta, options, model, stages=stages, read=read) as job:
        return _measured(job, model, samples, meta, loss)


def _measured(
    job: Job, model: HookedModel, samples: Samples, meta: Mapping[str, Any], loss: Loss
) -> Any:
    """Runs the stages; returns the result, or None while chunks of other shards are missing."""
    settings, means = meta["settings"], None
    if settings["how"] == "mean":
        job.run(Stage("means", model, samples, _sums))
        found = job.before("means")
        if found is None:
            return None
        means = _means(found["means"]["means"], model)
    of_chunk = partial(_of_chunk, loss=loss, metric=settings["metric"], means=means)
    job.run(Stage("heads", model, samples, of_chunk))
    return job.result()


def head_result(found: Mapping[str, Tables], meta: dict[str, Any]) -> HeadAblation:
    """Returns the result of the stage "heads", and of the stage "means" if there was one."""
    others = [own for name, own in found.items() if name != "heads"]
    return HeadAblation(*with_facts(found["heads"], meta, *others))


def _loss(model: HookedModel, samples: Samples) -> Loss:
    """Returns the loss of the samples. Raises ValueError for images without true classes."""
    loss = loss_on(model, samples)
    if loss.kind == "answers":
        raise ValueError(
            f"the loss needs the true class of each image, and {_unclassed(samples, model)}"
        )
    return loss


def _unclassed(samples: Samples, model: Any) -> str:
    """Returns why labels are not classes of the model, and what to type."""
    if not samples.labels:
        return (
            'the data has no labels: give "imagefolder:DIR" with a folder for each class, or a '
            "datasets.Dataset with a column of labels."
        )
    if None in samples.labels:
        return f"sample {samples.start + samples.labels.index(None)} has no label: leave it out."
    count, known = model.W_U.shape[1], model.cfg.labels
    named = [
        samples.names[label] if samples.names is not None and isinstance(label, int) else label
        for label in samples.labels
    ]
    twice = next((label for label in named if (known or ()).count(label) > 1), None)
    if twice is not None:
        return (
            f"several classes of the model have the name {twice!r}: load the model with "
            "labels=[...], a different name for each class."
        )
    there = (*(known or ()), *range(count))
    label = next((label for label in named if label not in there), named[0])
    number = samples.start + named.index(label)
    if known is None and checks.is_int(label):
        return (
            f"the label of sample {number} is {label}, but the model has {count} classes: give "
            f"numbers from 0 to {count - 1}."
        )
    if known is None:
        return (
            f"labels such as {label!r} do not tell which of the model's {count} classes they are: "
            f"load the model with labels=[...], {count} class names in the order of its outputs "
            "(torchvision's ImageFolder numbers folders in the order of their names)."
        )
    there = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "")
    return (
        f"the label {label!r} of sample {number} is not a class of the model, whose classes are "
        f"{there}: give data "
        "with these names as labels or folders, or load the model with other labels=[...]."
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


HEAD_ABLATION = Kind(
    HeadAblation,
    {"means": {"means": added("sums", "layer", "pos")}, "heads": HeadAblation.STORED},
    head_result,
)


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


def _of_chunk(chunk: Chunk, loss: Loss, metric: str, means: Mapping[int, Means] | None) -> Tables:
    """Returns the tables "samples" and "base". means: None means zero ablation."""
    cfg: Any = chunk.model.cfg
    if means is None:
        means = dict.fromkeys(range(len(chunk.model.blocks)), torch.zeros(1, 1, 1))
    here = {layer: mean.to(cfg.device, cfg.dtype) for layer, mean in means.items()}
    given = Ablating(chunk.model, loss, metric, here, may_share(chunk.model))
    with torch.no_grad():
        parts = [(batch.start, *_of_batch(given, batch)) for batch in chunk.batches()]
    if not parts:  # no sample of the chunk can be decoded
        return {}
    tables = [_tables(base, ablated, start) for start, base, ablated in parts]
    return {
        name: pd.concat([own[name] for own in tables], ignore_index=True)
        for name in ("samples", "base")
    }


def _of_batch(
    given: Ablating, batch: Batch
) -> tuple[Float[np.ndarray, "sample"], Float[np.ndarray, "sample layer head"]]:
    """Returns the metric of each sample, and the metric with each head ablated."""
    model, size = given.model, at_once(given.model, batch.inputs)
    numbers = torch.arange(batch.start, batch.last + 1)
    bases, tables = [], []
    for inputs, own in zip(batch.inputs.split(size), numbers.split(size), strict=True):
        layers = range(len(model.blocks))
        names = [full_name(_STREAM, layer) for layer in layers]
        logits, cache = model.run_with_cache(inputs, names_filter=names)
        wanted = given.loss.wanted(logits, inputs, own.tolist())
        bases.append(_metric(given, logits, wanted))
        rows = [_of_layer(given, inputs, cache[names[at]], wanted, at) for at in layers]
        tables.append(np.stack(rows, axis=1))
    return np.concatenate(bases), np.concatenate(tables)


def _of_layer(
    given: Ablating, inputs: Tensor, stream: Tensor, wanted: Tensor, layer: int
) -> Float[np.ndarray, "sample head"]:
    """Returns the metric with each head of a layer ablated. stream: the stream before the layer."""
    point, mean, columns = full_name(_Z, layer), given.means[layer], []
    for head in range(given.model.cfg.n_heads):
        hooks: list[Any] = [(point, partial(_without, mean=mean, head=head))]
        if given.shared:
            logits = given.model.run_with_hooks(stream, fwd_hooks=hooks, start_at_layer=layer)
        else:
            logits = given.model.run_with_hooks(inputs, fwd_hooks=hooks)
        columns.append(_metric(given, logits, wanted))
    return np.stack(columns, axis=1)


def _without(
    z: Float[Tensor, "batch pos head d_head"], hook: object, mean: Tensor, head: int
) -> Float[Tensor, "batch pos head d_head"]:
    changed = z.clone()
    changed[:, :, head] = mean[: z.shape[1], min(head, mean.shape[1] - 1)]
    return changed


def _metric(given: Ablating, logits: Any, wanted: Tensor) -> Float[np.ndarray, "sample"]:
    if given.metric == "loss":
        return losses(logits, wanted).double().cpu().numpy()
    if logits.ndim == 3:  # for a window: the share of tokens whose next token is predicted
        right = (logits[:, :-1].argmax(dim=-1) == wanted[:, 1:]).double().mean(dim=-1)
    else:
        right = (logits.argmax(dim=-1) == wanted).double()
    return right.cpu().numpy()


def _tables(base: np.ndarray, ablated: np.ndarray, start: int) -> Tables:
    sample, layer, head = np.indices(ablated.shape).reshape(3, -1)
    places = {"sample": sample + start, "layer": layer, "head": head}
    return {
        "base": pd.DataFrame({"sample": np.arange(len(base)) + start, "base": base}),
        "samples": pd.DataFrame(places | {"ablated": ablated.reshape(-1)}),
    }
