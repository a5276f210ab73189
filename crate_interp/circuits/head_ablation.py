"""What each head does for the answers: the model with one head at a time put out of action."""

import inspect
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import full_name
from crate_interp import checks
from crate_interp.bars import tqdm
from crate_interp.circuits.effects import Loss, at_once, loss_on, losses
from crate_interp.circuits.heads_ablated import HeadAblation
from crate_interp.data import Data, Samples
from crate_interp.folders import locked
from crate_interp.models.hooked import HookedModel
from crate_interp.sweeps.provenance import data_meta
from crate_interp.sweeps.stream import Batch, Chunk, Reading, check_model, samples_of

HOW = ("mean", "zero")
METRICS = ("loss", "accuracy")
_Z, _STREAM = "attn.hook_z", "hook_resid_pre"
Means = Float[Tensor, "pos head d_head"]


@dataclass(frozen=True)
class Ablating:
    """How heads are ablated and judged. means: of each layer, what takes the place of a head's z.

    shared: whether a run may begin at the layer of the head, with the stream of the whole model.
    """

    model: HookedModel
    loss: Loss
    metric: str
    means: Mapping[int, Means]
    shared: bool


def ablate_heads(
    model: HookedModel,
    data: Data,
    *,
    how: str = "mean",
    metric: str = "loss",
    limit: int | None = None,
    batch_size: int = 32,
    out: str | Path | None = None,
    progress: bool = True,
) -> HeadAblation:
    """Returns how much worse a model answers if one head at a time is ablated.

    how: "mean" puts the head's mean output (hook_z) over all samples in its place, at each position
    its own, which a first pass measures; "zero" puts 0 there. metric: "loss" is the cross-entropy
    with the labels, or of the next token, mean over a window, in nats; "accuracy" the share of
    right answers. limit: the first n samples. out: a folder for the result.

    The layers below the head run once for all heads, so that the cost is about half of that of
    whole runs, layers * heads / 2 forwards of the data. (Whole runs are made where a layer reads
    more than the stream, and of a black box behind a bridge.) A drop pairs the sample with itself;
    the mean stays the same for all resamples of its interval.

    Raises ValueError, before work starts, for a model without logits, for images without labels
    that are classes of the model, for another how or metric, and as `ci.sweep` does.
    """
    checks.one_of("how", how, HOW)
    checks.one_of("metric", metric, METRICS)
    checks.count("batch_size", batch_size)
    check_model(model)
    _check_logits(model)
    samples = samples_of(model, data, limit)
    loss = _loss(model, samples)
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(locked(out))
            HeadAblation.check_folder(out)
        started = time.perf_counter()
        total = samples.n * (1 + (how == "mean"))
        with torch.no_grad(), tqdm(total=total, desc="heads", disable=not progress) as bar:
            chunk = Chunk(model, samples, batch_size, bar)
            means = _means(chunk) if how == "mean" else _zeros(chunk)
            given = Ablating(model, loss, metric, means, _may_share(model))
            parts = [_of_batch(given, batch) for batch in chunk.batches()]
        base, ablated = (np.concatenate(each) for each in zip(*parts, strict=True))
        settings = {"how": how, "metric": metric}
        meta = data_meta(model, samples, batch_size) | {"settings": settings}
        meta["seconds"] = round(time.perf_counter() - started, 3)
        result = HeadAblation(_tables(base, ablated, samples.start), meta)
        if out is not None:
            result.save(out)
    return result


def _check_logits(model: HookedModel) -> None:
    if not model.has_logits:
        raise ValueError(
            f"this {type(model).__name__} of family {model.cfg.family!r} has no logits, and so no "
            "loss: give a classifier of images or a language model."
        )


def _loss(model: HookedModel, samples: Samples) -> Loss:
    """Returns the loss of the samples. Raises ValueError for images without true classes."""
    loss = loss_on(model, samples)
    if loss.kind == "answers":
        found = "has no labels" if not samples.labels else "has labels that are no classes of it"
        raise ValueError(
            f"the loss needs the true class of each image, and the data {found}: give data with "
            'the classes of the model, such as "embedded:fashion" for crate-tiny-fashion, '
            '"imagefolder:DIR" or a datasets.Dataset with a column of labels.'
        )
    return loss


def _may_share(model: Any) -> bool:
    """Whether a forward from a layer's stream is that of the model from there on."""
    takes = "start_at_layer" in inspect.signature(model.forward).parameters
    return takes and not hasattr(model, "x0_lambdas")  # else later layers add the embedding again


def _means(chunk: Chunk) -> dict[int, Means]:
    """Returns the mean of z over all samples, `[pos, head, d_head]` of each layer."""
    sums: dict[int, Tensor] = {}

    def add(layer: int, acts: Mapping[str, Tensor], batch: Batch) -> None:
        part = acts[_Z].double().sum(dim=0)
        if layer in sums and sums[layer].shape != part.shape:
            raise ValueError(
                "the samples differ in their numbers of tokens, so that no position has a mean: "
                "give images of one size, or how='zero'."
            )
        sums[layer] = sums.get(layer, 0) + part

    chunk.measure_all(Reading([_Z], add))
    dtype = chunk.model.cfg.dtype
    return {layer: (total / chunk.samples.n).to(dtype) for layer, total in sums.items()}


def _zeros(chunk: Chunk) -> dict[int, Means]:
    cfg = chunk.model.cfg
    zero = torch.zeros(1, 1, 1, device=cfg.device, dtype=cfg.dtype)
    return dict.fromkeys(range(len(chunk.model.blocks)), zero)


def _of_batch(
    given: Ablating, batch: Batch
) -> tuple[Float[np.ndarray, "sample"], Float[np.ndarray, "sample layer head"]]:
    """Returns the metric of each sample, and that with each head ablated."""
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
    """Returns the metric with each head of a layer ablated, from the stream before the layer."""
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
    changed[:, :, head] = mean[:, min(head, mean.shape[1] - 1)]
    return changed


def _metric(given: Ablating, logits: Any, wanted: Tensor) -> Float[np.ndarray, "sample"]:
    if given.metric == "loss":
        return losses(logits, wanted).double().cpu().numpy()
    if logits.ndim == 3:  # a window: the share of its tokens whose next one is foretold
        right = (logits[:, :-1].argmax(dim=-1) == wanted[:, 1:]).double().mean(dim=-1)
    else:
        right = (logits.argmax(dim=-1) == wanted).double()
    return right.cpu().numpy()


def _tables(base: np.ndarray, ablated: np.ndarray, start: int) -> dict[str, pd.DataFrame]:
    sample, layer, head = np.indices(ablated.shape).reshape(3, -1)
    places = {"sample": sample + start, "layer": layer, "head": head}
    return {
        "base": pd.DataFrame({"sample": np.arange(len(base)) + start, "base": base}),
        "samples": pd.DataFrame(places | {"ablated": ablated.reshape(-1)}),
    }
