"""ci.saes.evaluate: what is lost when autoencoders replace activations.

The evaluation passes over the data twice. The first pass measures means and covariances, for mean
ablation and PCA. The second pass puts each coder in place of the activation, one point at a time,
and measures the loss.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack, cast

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import all_finite, in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.losses import IGNORED, token_loss
from crate_interp.questions.answers import Loss, check_logits, loss_on, losses, true_loss
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk
from crate_interp.questions.edited_runs import joined
from crate_interp.questions.experiment import Pass, Plan, Question, Rules, Tables
from crate_interp.questions.provenance import digest_of_labels
from crate_interp.results.result import Merge, by
from crate_interp.saes.coders import Coder, active, check_saes, decoded, encoded, flat, prepared
from crate_interp.saes.result import MEAN, PCA, RANDOM, SAE, ZERO, SaeResult
from crate_interp.sweeps.moments import added, from_bytes, to_bytes


def shuffled(sae: Coder, seed: int) -> Coder | None:
    """Returns a copy of a module with the numbers of each matrix in random order.

    Architecture, biases, thresholds and the distribution of weights stay; the learned directions
    are lost. Returns None for an autoencoder that is not a module, since its weights are unknown.
    """
    if not isinstance(sae, nn.Module):
        return None
    random = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(sae)
    with torch.no_grad():
        for value in other.parameters():
            if value.ndim > 1:
                order = torch.randperm(value.numel(), generator=random).to(value.device)
                value.copy_(value.flatten()[order].view_as(value))
    return other


@dataclass(frozen=True)
class Components:
    """PCA as an autoencoder: `acts = (x - mean) V`, `x' = acts V^T + mean`.

    directions V `[d_in, k]`: the orthonormal directions of largest variance. Without directions,
    every token becomes the mean, as in mean ablation.
    """

    mean: Float[Tensor, "d_in"]
    directions: Float[Tensor, "d_in k"]

    def encode(self, x: Tensor, /) -> Tensor:
        """Returns the components of activations, all of them active."""
        return ((x.double() - self.mean) @ self.directions).to(x.dtype)

    def decode(self, acts: Tensor, /) -> Tensor:
        """Returns the activations reconstructed from components."""
        return (acts.double() @ self.directions.T + self.mean).to(acts.dtype)


@dataclass(frozen=True)
class Moments:
    """Sums over the tokens at a hook point, in float64; they give the mean and the covariance.

    tokens: the number of tokens. mean `[d_in]`. products `[d_in, d_in]`: the sum of products of
    centred activations (without centring, a large mean would make the variances inexact).
    features: the number of active features, summed over tokens.
    """

    tokens: int
    mean: Float[Tensor, "d_in"]
    products: Float[Tensor, "d_in d_in"]
    features: int

    @classmethod
    def of(cls, x: Float[Tensor, "token d_in"], features: int) -> "Moments":
        """Returns the moments of tokens; features: the number of active features of all tokens."""
        wide = x.double()
        mean = wide.mean(dim=0)
        off = wide - mean
        return cls(len(wide), mean, off.T @ off, features)

    def merged(self, other: "Moments") -> "Moments":
        """Returns the moments of both sets of tokens (Chan, Golub, LeVeque 1979)."""
        tokens, step = self.tokens + other.tokens, other.mean - self.mean
        apart = (self.tokens * other.tokens / tokens) * step[:, None] * step
        mean = self.mean + step * (other.tokens / tokens)
        products = self.products + other.products + apart
        return Moments(tokens, mean, products, self.features + other.features)

    def components(self) -> Components:
        """Returns PCA with as many components as a token has active features on average.

        There is at least one component.
        """
        width = len(self.mean)
        k = min(max(round(self.features / self.tokens), 1), width)
        directions = torch.linalg.eigh(self.products / self.tokens).eigenvectors[:, width - k :]
        return Components(self.mean, directions)


def moments_in(table: pd.DataFrame, device: str | torch.device = "cpu") -> dict[str, Moments]:
    """Returns the moments of each point from a table "moments"."""
    found: dict[str, Moments] = {}
    rows: Any = table.itertuples()
    for row in rows:
        arrays = from_bytes(row.mean, -1), from_bytes(row.products, len(row.mean) // 8, -1)
        mean, products = (torch.from_numpy(array).to(device) for array in arrays)
        found[row.point] = Moments(int(row.tokens), mean, products, int(row.features))
    return found


def _merged(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the moments of two sets of tokens together."""
    one, two = moments_in(mine), moments_in(theirs)
    return table_of({point: one[point].merged(two[point]) for point in one})


def table_of(moments: Mapping[str, Moments]) -> pd.DataFrame:
    """Returns the table "moments", a row per point: the fields of `Moments`, arrays as bytes."""
    rows = [(point, *vars(own).values()) for point, own in moments.items()]
    table: Any = pd.DataFrame(rows, columns=["point", *Moments.__dataclass_fields__])
    return table.assign(**{name: [*map(to_bytes, table[name])] for name in ("mean", "products")})


MEANS: Rules = {"moments": _merged}


# keys of result.LOSSES
_KINDS = {
    "tokens": "next token", "masked": "masked tokens", "labels": "labels", "answers": "kl",
}  # fmt: skip
_WHOLE = (SAE, RANDOM)  # coders that read the activation; PCA and constants read `vectors_of`
_SUMS = ("tokens", "active", "error", "variance", "cosine")
Key = tuple[str, str]  # (point, name of the coder)


@in_full_precision
def evaluate(
    model: HookedModel,
    data: Data,
    saes: Mapping[str, Coder],
    *,
    labels: Sequence[object] | None = None,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    **run: Unpack[Run],
) -> Perhaps[SaeResult]:
    """Measures how well autoencoders replace the activations that they read.

    The baselines of an autoencoder are its copy with shuffled weights, PCA with as many components
    as the autoencoder has active features per token, and ablation to zero and to the mean. The loss
    of a language model is that of the next token. The loss of images is the cross-entropy of
    `labels`; without labels it is the divergence KL(own answers || answers with the autoencoder).

    Args:
        model: A hooked model with logits.
        data: As in `ci.sweep`.
        saes: Autoencoders by the names of points, as in `ci.saes.spliced`; each is evaluated alone.
        labels: Numbers of classes, or names in cfg.labels. Default: the data's labels, if any.
        attention_mask: For a language model, a mask `[n, pos]`: 1 for tokens, 0 for padding after
            the tokens; padding is never counted.
        seed: The seed of the shuffled weights.
        run: As in `ci.sweep`.

    Returns:
        The losses and reconstruction errors that `SaeResult` lists. A shard returns None while the
            means of other shards are missing; run it again to continue.

    Raises:
        ValueError: Before work starts, for a model without logits, for wrong labels or masks, and
            as `ci.saes.spliced` and `ci.sweep` do.
        KeyError: For a point that does not exist.
    """
    question = EvaluateSaes(saes, seed, labels, attention_mask)
    return ask(question, model, data, run_options(evaluate, run))


@dataclass(frozen=True)
class EvaluateSaes(Question):
    """Measures what autoencoders lose.

    loss: the loss of each sample. mask: the mask of all samples `[n, pos]`, from number `first` on.
    """

    saes: Mapping[str, Coder]
    seed: int
    labels: Sequence[object] | None = None
    attention_mask: Tensor | None = None
    loss: Loss = field(default=cast(Loss, None), repr=False)
    mask: Tensor | None = None
    first: int = 0
    result = SaeResult

    def settled(self, model: HookedModel, samples: Samples) -> "EvaluateSaes":
        """Refuses invalid requests, and fills in what model and samples decide."""
        checks.count("seed", self.seed, least=0)
        check_logits(model, "an evaluation of autoencoders")
        check_saes(model, self.saes)
        given = self.labels is not None
        loss = true_loss(model, samples, self.labels) if given else loss_on(model, samples)
        mask = _checked_mask(model, samples, self.attention_mask)
        return replace(self, loss=loss, mask=mask, first=samples.start)

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        names = {point: type(sae).__name__ for point, sae in self.saes.items()}
        return {"settings": {"saes": names, "loss": _KINDS[self.loss.kind], "seed": self.seed}}

    def read(self) -> Mapping[str, object]:
        """Returns what else the numbers depend on, by name."""
        named = {f"the autoencoder at {point}": sae for point, sae in self.saes.items()}
        labels, mask = map(digest_of_labels, (self.loss.classes, self.mask))
        return {**named, "labels": labels, "attention_mask": mask}

    def masked(self, batch: Batch) -> Tensor | None:
        """Returns the rows of the mask that belong to a batch."""
        start = batch.start - self.first
        return None if self.mask is None else self.mask[start : start + len(batch.inputs)]

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        sums = yield Pass("means", partial(_means, question=self), MEANS)
        moments = moments_in(sums["moments"], run.model.cfg.device)
        coders: dict[Key, Coder] = {}
        for point, sae in self.saes.items():
            coders[point, SAE] = sae
            other, mean = shuffled(sae, self.seed), moments[point].mean
            if other is not None:
                coders[point, RANDOM] = other
            coders[point, PCA] = moments[point].components()
            for name, value in ((ZERO, torch.zeros_like(mean)), (MEAN, mean)):
                coders[point, name] = Components(value, value.new_zeros(len(value), 0))
        effects = partial(_effects, question=self, coders=coders, moments=moments)
        own: Any = yield Pass("autoencoders", effects, _EFFECTS)
        features = own["features"][["point", "coder"]]
        # features, and those that no token activates; ablation has none
        counts = [from_bytes(cell, -1) for cell in own["features"]["active"]]
        features = features.assign(
            features=[len(tokens) for tokens in counts],
            dead=[int((tokens == 0).sum()) for tokens in counts],
        )
        features.loc[features["coder"].isin((ZERO, MEAN)), ["features", "dead"]] = 0
        columns = ["point", "coder", "sample", "loss", *_SUMS]
        return {**own, "samples": own["samples"][columns], "features": features}


_EFFECTS: dict[str, Merge] = {  # place: an autoencoder's index, from 0, in the result
    "clean": by("sample"),
    "samples": by("place", "sample"),
    "features": added("active", "place", "point", "coder"),
}


def _checked_mask(model: HookedModel, samples: Samples, mask: Tensor | None) -> Tensor | None:
    """Returns which tokens count, as bool; raises ValueError unless padding follows the tokens."""
    if mask is None:
        return None
    wanted = [samples.n, *samples.read(samples.start, samples.start + 1).shape[1:]]
    got = list(getattr(mask, "shape", []))
    if model.unit != "windows" or got != wanted:
        raise ValueError(f"attention_mask has the shape {got}: give a tensor of 1 and 0, {wanted}.")
    kept = mask.to(model.cfg.device) != 0
    if not bool((kept[:, 1:] <= kept[:, :-1]).all() & kept[:, :2].all()):
        raise ValueError("attention_mask: give two tokens a row, and padding only after tokens.")
    return kept


def vectors_of(sae: Coder, x: Tensor, point: str) -> Tensor:
    """Returns a point's activations in the model's dtype, one row for each row of features."""
    read = flat(sae, x, point)
    return read.flatten(-2) if getattr(sae, "hook_z_reshaping_mode", False) else read


def weights_of(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Returns weights `[batch, ...]` in float64: 1 for rows of tokens that count, 0 for padding."""
    weight = torch.ones(vectors.shape[:-1], dtype=torch.float64, device=vectors.device)
    if mask is None or weight.ndim < 2:
        return weight
    return weight * mask.reshape(*mask.shape, *[1] * (weight.ndim - 2))


def _means(chunk: Chunk, question: EvaluateSaes) -> Tables:
    """Returns the table "moments".

    Raises ValueError, with the name of the point, if its activations hold NaN or Inf.
    """
    seen: dict[str, Moments] = {}

    def add(x: Tensor, hook: Any, mask: Tensor | None) -> None:
        point, sae = hook.name, question.saes[hook.name]
        vectors = vectors_of(sae, x, point)
        acts = encoded(sae, prepared(sae, x, point), point)
        weight = weights_of(vectors, mask).flatten() > 0
        rows = vectors.flatten(0, -2)[weight]
        own = Moments.of(rows, int(active(acts).flatten(0, -2)[weight].sum()))
        seen[point] = seen[point].merged(own) if point in seen else own

    for batch in chunk.batches():
        keep = partial(add, mask=question.masked(batch))
        with torch.no_grad(), chunk.model.hooks([(point, keep) for point in question.saes]):
            chunk.model.full_forward(batch.inputs)
    for point, own in seen.items():
        if not all_finite(own.mean):
            raise ValueError(f"{point} holds NaN or Inf, so nothing can be measured there.")
    if not seen:  # no sample of the chunk could be decoded
        return {}
    return {"moments": table_of({point: seen[point] for point in question.saes})}


def _effects(
    chunk: Chunk, question: EvaluateSaes, coders: dict[Key, Coder], moments: dict[str, Moments]
) -> Tables:
    """Runs the second pass: each coder's loss, and how well it reconstructs each token."""
    model, rows = chunk.model, {"clean": [], "samples": []}
    seen: dict[Key, Tensor] = {}  # the number of tokens at which each feature is active
    for batch in chunk.batches():
        mask, numbers = question.masked(batch), range(batch.start, batch.last + 1)
        with torch.no_grad():
            clean: Any = model(batch.inputs)
            answers = question.loss.right_answers(clean, batch.inputs, numbers)
            loss = partial(_loss, question.loss.kind, clean=clean, answers=answers, mask=mask)
            rows["clean"].append(_table(numbers, loss=loss(clean)))
            for place, (key, coder) in enumerate(coders.items()):
                sums: dict[str, Tensor] = {}
                whole = question.saes[key[0]], moments[key[0]].mean
                put = partial(_put, whole=whole, coder=coder, key=key, mask=mask, sums=sums)
                value = loss(model.run_with_hooks(batch.inputs, fwd_hooks=[(key[0], put)]))
                if not all_finite(value):
                    where = f"{key[0]}, samples {batch.start} to {batch.last}, is not finite"
                    raise ValueError(f"the loss with {key[1]!r} at {where}: check its weights.")
                seen[key] = seen.get(key, 0) + sums.pop("features")
                table = _table(numbers, loss=value, **sums)
                rows["samples"].append(table.assign(point=key[0], coder=key[1], place=place))
    tables = joined(rows)
    if not tables:
        return {}
    order = tables["samples"].sort_values(["place", "sample"], kind="stable", ignore_index=True)
    features = [(place, *key, to_bytes(seen[key])) for place, key in enumerate(coders)]
    features = pd.DataFrame(features, columns=["place", "point", "coder", "active"])
    return tables | {"samples": order, "features": features}


def _put(
    x: Tensor,
    hook: Any,
    whole: tuple[Coder, Tensor],
    coder: Coder,
    key: Key,
    mask: Tensor | None,
    sums: dict[str, Tensor],
) -> Tensor:
    """Returns a coder's reconstruction of x, and adds its effect on each sample to `sums`.

    whole: a pair of the autoencoder at the point and the mean of all tokens there. For each
    feature, sums["features"] has the number of the batch's tokens at which it is active.
    """
    (sae, mean), (point, name) = whole, key
    vectors = vectors_of(sae, x, point)
    if name in _WHOLE:
        read = prepared(coder, x, point)
        acts = encoded(coder, read, point)
        recons = decoded(coder, acts, read, point).reshape(x.shape).to(x.dtype)
    else:  # constants and PCA do not have the weights' dtype
        acts = coder.encode(vectors)
        recons = coder.decode(acts).to(x.dtype)
    weight = weights_of(vectors, mask)
    here, there = vectors.double(), recons.reshape(vectors.shape).double()
    lengths = here.norm(dim=-1) * there.norm(dim=-1)
    cosine = (here * there).sum(dim=-1) / torch.where(lengths > 0, lengths, 1.0)
    is_active = active(acts)
    of_tokens = {
        "tokens": torch.ones_like(weight),
        "active": is_active.sum(dim=-1),
        "error": (here - there).square().sum(dim=-1),
        "variance": (here - mean).square().sum(dim=-1),
        "cosine": cosine,
    }
    sums |= {what: (value * weight).flatten(1).sum(dim=1) for what, value in of_tokens.items()}
    sums["features"] = is_active.flatten(0, -2)[weight.flatten() > 0].sum(dim=0)
    return recons.reshape(x.shape)


def _loss(kind: str, logits: Tensor, clean: Tensor, answers: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the loss of each sample, in nats, in float64."""
    if kind == "answers":
        own, other = clean.double().log_softmax(dim=-1), logits.double().log_softmax(dim=-1)
        return (own.exp() * (own - other)).sum(dim=-1)
    if mask is None:
        return losses(logits.double(), answers)
    values = token_loss(logits[:, : answers.shape[1]].double(), answers, per_token=True)
    weight = (mask[:, -answers.shape[1] :] & (answers != IGNORED)).to(values)
    return (values * weight).sum(dim=-1) / weight.sum(dim=-1)


def _table(numbers: Sequence[int], **values: Tensor) -> pd.DataFrame:
    cells = {name: value.cpu().numpy() for name, value in values.items()}
    return pd.DataFrame({"sample": numbers, **cells})
