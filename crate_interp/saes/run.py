"""ci.saes.evaluate: what is lost where autoencoders take the place of activations.

Two passes over the data. The first takes means and covariances, for mean ablation and PCA; the
second puts each coder in its place, one point at a time, and looks at the loss.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from crate_interp import checks
from crate_interp.circuits.effects import loss_on
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import all_finite
from crate_interp.models.hooked import HookedModel
from crate_interp.models.language import next_token_loss
from crate_interp.saes.baselines import Constant, Moments, shuffled
from crate_interp.saes.coders import (
    Coder,
    active,
    check_coder,
    encoded,
    flat,
    matched,
    reconstructed,
)
from crate_interp.saes.result import MEAN, PCA, RANDOM, SAE, ZERO, SaeResult
from crate_interp.saes.splicing import check_point
from crate_interp.surgeries.answers import check_answers, classes_of
from crate_interp.sweeps.provenance import data_meta
from crate_interp.sweeps.stream import Batch, Chunk, check_model, fold, samples_of

_WHOLE = (SAE, RANDOM)  # what reads the activation itself; the others read `_vectors`
_SUMS = ("tokens", "active", "error", "variance", "cosine")


@dataclass
class _Seen:
    """What the passes gather: moments by point; rows; which features were ever active."""

    moments: dict[str, Moments] = field(default_factory=dict)
    clean: list[pd.DataFrame] = field(default_factory=list)
    samples: list[pd.DataFrame] = field(default_factory=list)
    alive: dict[tuple[str, str], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Plan:
    saes: Mapping[str, Coder]
    kind: str  # of the loss, a key of LOSSES
    classes: Tensor | None  # of all samples
    mask: Tensor | None  # of all samples, [n, pos]
    first: int  # the number of the first sample
    seen: _Seen = field(default_factory=_Seen)
    coders: dict[tuple[str, str], Coder] = field(default_factory=dict)

    def part(self, values: Tensor | None, batch: Batch) -> Tensor | None:
        """Returns the rows of a batch."""
        start = batch.start - self.first
        return None if values is None else values[start : start + len(batch.inputs)]


def evaluate(
    model: HookedModel,
    data: Data,
    saes: Mapping[str, Coder],
    *,
    labels: Sequence[object] | None = None,
    attention_mask: Tensor | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
    progress: bool = True,
) -> SaeResult:
    """Measures how well autoencoders stand for the activations that they read.

    saes: autoencoders by the names of points, as in `ci.saes.spliced`; each is evaluated alone.
    `SaeResult` says what is measured. Beside each stand the same autoencoder with shuffled weights,
    PCA with as many components as it has features a token, and ablation to zero and to the mean.

    The loss of a language model is that of the next token; of images the cross-entropy of `labels`
    (numbers of classes, or names in cfg.labels; None takes those of the data), and without labels
    the divergence KL(own answers || answers with the autoencoder). attention_mask `[n, pos]` of a
    language model: 1 for tokens, 0 for padding after them; padding counts nowhere. data, limit: as
    in `ci.sweep`. seed: of the shuffled weights.

    Raises ValueError, before work starts, for a model without logits, wrong labels and masks, and
    as `ci.saes.spliced` and `ci.sweep` do; KeyError for a point that does not exist.
    """
    checks.count("batch_size", batch_size)
    seed = checks.count("seed", seed, least=0)
    check_model(model)
    check_answers(model, "an evaluation of autoencoders")
    if not isinstance(saes, Mapping) or not saes:
        raise ValueError(
            f"saes is {checks.shown(saes)}: give autoencoders by the names of points, "
            "{'blocks.0.hook_resid_post': sae}."
        )
    for point, sae in saes.items():
        check_point(model, point)
        check_coder(sae, point)
    samples = samples_of(model, data, limit)
    kind, classes = _loss_of(model, samples, labels)
    plan = _Plan(saes, kind, classes, _checked_mask(model, samples, attention_mask), samples.start)
    started = time.perf_counter()
    options: dict[str, Any] = dict(batch_size=batch_size, progress=progress)
    for what, of_chunk in (("means", _means), ("autoencoders", _effects)):
        if what == "autoencoders":
            plan.coders.update(_coders(plan, seed))
        fold(model, samples, partial(of_chunk, plan=plan), _neither, what=what, **options)
    names = {point: type(sae).__name__ for point, sae in saes.items()}
    meta = data_meta(model, samples, batch_size)
    meta |= {"settings": {"saes": names, "loss": kind, "seed": seed}}
    meta["seconds"] = round(time.perf_counter() - started, 3)
    return SaeResult(_tables(plan), meta)


def _loss_of(
    model: HookedModel, samples: Samples, labels: Sequence[object] | None
) -> tuple[str, Tensor | None]:
    """Returns the kind of loss, and the class of each sample where it is that of labels."""
    if model.unit == "windows" or labels is not None:
        classes = classes_of(model, samples, labels)
        loss_on(model, samples)  # raises for windows of one token
        return ("next token", None) if classes is None else ("labels", classes)
    found = loss_on(model, samples)
    if found.classes is None:
        return "kl", None
    return "labels", found.classes.to(model.cfg.device)


def _checked_mask(model: HookedModel, samples: Samples, mask: Tensor | None) -> Tensor | None:
    """Returns which tokens count, as bool; raises ValueError unless padding follows the tokens."""
    if mask is None:
        return None
    shape = list(samples.read(samples.start, samples.start + 1).shape)
    wanted = [samples.n, *shape[1:]]
    fits = isinstance(mask, Tensor) and list(mask.shape) == wanted
    if model.unit != "windows" or not fits:
        came = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {came}: give 1 and 0 for the tokens of a language model, "
            f"{wanted if model.unit == 'windows' else '[n, pos]'}."
        )
    kept = mask.to(model.cfg.device) != 0
    ordered = bool((kept[:, 1:] <= kept[:, :-1]).all())
    if not ordered or not bool(kept[:, :2].all()):
        raise ValueError(
            "attention_mask: give at least two tokens in each row, and padding only after them "
            "(padding before them moves positions)."
        )
    return kept


def _neither(one: None, other: None) -> None:
    """Merges chunks, whose numbers are all in the plan."""


def _means(chunk: Chunk, plan: _Plan) -> None:
    """First pass: moments of what each point holds, and how many features are active."""
    for batch in chunk.batches():
        keep = partial(_add, plan=plan, mask=plan.part(plan.mask, batch))
        with torch.no_grad(), chunk.model.hooks([(point, keep) for point in plan.saes]):
            chunk.model.full_forward(batch.inputs)


def _add(x: Tensor, hook: Any, plan: _Plan, mask: Tensor | None) -> None:
    point, sae = hook.name, plan.saes[hook.name]
    vectors = _vectors(sae, x, point)
    acts = encoded(sae, matched(sae, flat(sae, x, point)), point)
    weight = _weights(vectors, mask).flatten() > 0
    rows = vectors.flatten(0, -2)[weight]
    number = int(active(acts).flatten(0, -2)[weight].sum())
    if point not in plan.seen.moments:
        plan.seen.moments[point] = Moments(rows.double().mean(dim=0))
    plan.seen.moments[point].add(rows, number)


def _coders(plan: _Plan, seed: int) -> dict[tuple[str, str], Coder]:
    """Returns what takes the place of each point, by point and name."""
    coders: dict[tuple[str, str], Coder] = {}
    for point, sae in plan.saes.items():
        moments = plan.seen.moments[point]
        if not all_finite(torch.as_tensor(moments.total)):
            raise ValueError(f"{point} holds NaN or Inf: nothing can be measured.")
        coders[point, SAE] = sae
        other = shuffled(sae, seed)
        if other is not None:
            coders[point, RANDOM] = other
        coders[point, PCA] = moments.components()
        mean = moments.mean()
        coders[point, ZERO], coders[point, MEAN] = Constant(torch.zeros_like(mean)), Constant(mean)
    return coders


def _effects(chunk: Chunk, plan: _Plan) -> None:
    """Second pass: the loss with each coder in its place, and what it makes of each token."""
    model, seen = chunk.model, plan.seen
    for batch in chunk.batches():
        mask, classes = plan.part(plan.mask, batch), plan.part(plan.classes, batch)
        loss = partial(_loss, plan.kind, inputs=batch.inputs, classes=classes, mask=mask)
        with torch.no_grad():
            clean: Any = model(batch.inputs)
            seen.clean.append(_table(batch, loss=loss(clean, clean)))
            for (point, name), coder in plan.coders.items():
                sums: dict[str, Tensor] = {}
                put = partial(_put, plan=plan, coder=coder, name=name, mask=mask, sums=sums)
                logits: Any = model.run_with_hooks(batch.inputs, fwd_hooks=[(point, put)])
                value = loss(logits, clean)
                if not all_finite(value):
                    raise ValueError(
                        f"the loss with {name!r} at {point}, samples {batch.start} to "
                        f"{batch.last}, is not finite: look at its weights."
                    )
                table = _table(batch, loss=value, **sums)
                seen.samples.append(table.assign(point=point, coder=name))


def _put(
    x: Tensor,
    hook: Any,
    plan: _Plan,
    coder: Coder,
    name: str,
    mask: Tensor | None,
    sums: dict[str, Tensor],
) -> Tensor:
    """Returns what a coder makes of x, and adds up what it does to each sample."""
    sae, point = plan.saes[hook.name], hook.name
    vectors = _vectors(sae, x, point)
    if name in _WHOLE:
        acts, recons = reconstructed(coder, x, point)
    else:  # constants and PCA, whose dtype is not that of the weights
        acts = coder.encode(vectors)
        recons = coder.decode(acts).to(x.dtype)
    weight = _weights(vectors, mask)
    here, there = vectors.double(), recons.reshape(vectors.shape).double()
    lengths = here.norm(dim=-1) * there.norm(dim=-1)
    cosine = (here * there).sum(dim=-1) / torch.where(lengths > 0, lengths, 1.0)
    is_active = active(acts)
    of_tokens = {
        "tokens": torch.ones_like(weight),
        "active": is_active.sum(dim=-1),
        "error": (here - there).square().sum(dim=-1),
        "variance": (here - plan.seen.moments[point].mean()).square().sum(dim=-1),
        "cosine": cosine,
    }
    sums |= {what: (value * weight).flatten(1).sum(dim=1) for what, value in of_tokens.items()}
    ever = is_active.flatten(0, -2)[weight.flatten() > 0].any(dim=0)
    known = plan.seen.alive.get((point, name))
    plan.seen.alive[point, name] = ever if known is None else known | ever
    return recons.reshape(x.shape)


def _vectors(sae: Coder, x: Tensor, point: str) -> Tensor:
    """Returns what a point holds with one row for each row of features, in the model's dtype."""
    read = flat(sae, x, point)
    matched(sae, read)  # raises for another device
    return read.flatten(-2) if getattr(sae, "hook_z_reshaping_mode", False) is True else read


def _weights(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Returns 1 for rows of tokens that count and 0 for padding, `[batch, ...]`, in float64."""
    weight = torch.ones(vectors.shape[:-1], dtype=torch.float64, device=vectors.device)
    if mask is None or weight.ndim < 2:
        return weight
    return weight * mask.reshape(*mask.shape, *[1] * (weight.ndim - 2))


def _loss(
    kind: str,
    logits: Tensor,
    clean: Tensor,
    inputs: Tensor,
    classes: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Returns the loss of each sample, in nats and in float64."""
    if kind == "next token":
        losses = next_token_loss(logits.double(), inputs, per_token=True)
        weight = torch.ones_like(losses) if mask is None else mask[:, 1:].to(losses)
        return (losses * weight).sum(dim=-1) / weight.sum(dim=-1)
    if classes is not None:
        return F.cross_entropy(logits.double(), classes, reduction="none")
    own, other = clean.double().log_softmax(dim=-1), logits.double().log_softmax(dim=-1)
    return (own.exp() * (own - other)).sum(dim=-1)


def _table(batch: Batch, **numbers: Tensor) -> pd.DataFrame:
    values = {name: value.cpu().numpy() for name, value in numbers.items()}
    return pd.DataFrame({"sample": np.arange(batch.start, batch.last + 1), **values})


def _tables(plan: _Plan) -> dict[str, pd.DataFrame]:
    seen, order = plan.seen, list(plan.coders)
    samples: Any = pd.concat(seen.samples, ignore_index=True)
    places = [order.index(key) for key in zip(samples["point"], samples["coder"], strict=True)]
    samples = samples.assign(place=places).sort_values(["place", "sample"], ignore_index=True)
    columns = ["point", "coder", "sample", "loss", *_SUMS]
    features = [
        {"point": point, "coder": name, **_counts(name, seen.alive[point, name])}
        for point, name in order
    ]
    return {
        "clean": pd.concat(seen.clean, ignore_index=True),
        "samples": samples[columns],
        "features": pd.DataFrame(features),
    }


def _counts(name: str, alive: Tensor) -> dict[str, int]:
    """Returns the number of features and how many of them no token activates."""
    if name in (ZERO, MEAN):  # ablation has none
        return {"features": 0, "dead": 0}
    return {"features": len(alive), "dead": int((~alive).sum())}
