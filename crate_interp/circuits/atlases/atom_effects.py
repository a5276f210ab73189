"""Effects of atoms on the loss if their code is 0: from gradients, and by running without them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core.progress import tqdm
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.losses import next_token_loss
from crate_interp.questions.batches import Chunk
from crate_interp.questions.experiment import Tables
from crate_interp.stats.contrasts import MOST_GROUPS, by_group, columns_of_sums
from crate_interp.stats.intervals import mean_interval
from crate_interp.sweeps.atom_statistics import CODE

LOSSES = {  # kind -> the name of the loss on pages
    "labels": "the cross-entropy with the true class",
    "answers": "the cross-entropy with the class that the unchanged model answers",
    "tokens": "the cross-entropy of the next token, mean over the window",
}
PER_LAYER = 6  # atoms of each layer to set to 0
_ABLATIONS = ["sample", "layer", "atom", "first_order", "ablation"]
_KEYS = ["layer", "atom"]
_TOKENS = 2**15  # the most tokens in one forward, with a copy of the inputs for each atom set to 0
_LOGITS = 2**25  # the most logits in one forward of a piece of a batch: 128 MB
_STREAM = 2**20  # the most numbers in the stream of images whose graph is kept: 1 GB in 12 layers
Groups = Int[np.ndarray, "row"] | None  # of the sample of each row; None: they are independent


@dataclass(frozen=True)
class Loss:
    """The loss, a number for each sample, in nats. Effects are changes of this loss.

    kind: a key of LOSSES. classes: for kind "labels" only, the class of each sample; the first
    class belongs to sample number `start`.
    """

    kind: str
    classes: Tensor | None = None
    start: int = 0

    def wanted(self, logits: Tensor, inputs: Tensor, numbers: Sequence[int]) -> Int[Tensor, "..."]:
        """Returns the right answers to some samples: classes `[batch]` or tokens `[batch, pos]`.

        logits: the unchanged model's. numbers: the samples' numbers in the whole data set.
        """
        if self.kind == "tokens":
            return inputs
        if self.classes is None:
            return logits.detach().argmax(dim=-1)
        return self.classes[torch.as_tensor(numbers) - self.start].to(logits.device)


def check_logits(model: HookedModel, what: str) -> None:
    """Raises ValueError if a model has no answers, which `what` needs."""
    if model.cfg.kind not in ("vision", "text") or not model.has_logits:
        raise ValueError(f"this {type(model).__name__} has no logits, which {what} needs.")


def loss_on(model: HookedModel, samples: Samples) -> Loss:
    """Returns the loss for a data set. It uses labels if every label is a class of the model.

    Labels with names (folders, or a ClassLabel column) are matched by name. If the model's classes
    have no names, a ClassLabel column is matched by number, provided that it has as many classes as
    the model. Folders are never matched by number, because the numbers that they had in the
    training are unknown. Labels that are numbers without names are matched by number. If a label
    has no match, the loss is that of the model's answers.

    Raises ValueError for windows of one token: they have no next token.
    """
    if model.cfg.kind == "text":
        pos = samples.lengths or samples.read(samples.start, samples.start + 1).shape[1:]
        if min(pos) < 2:
            raise ValueError("the windows have one token, and the loss needs a next one: give two.")
        return Loss("tokens")
    net: Any = model
    labels, names, count = samples.labels, model.cfg.labels, net.W_U.shape[1]
    if not labels or None in labels:
        return Loss("answers")
    if samples.names is not None and not isinstance(labels[0], str):
        if names is None and len(samples.names) != count:
            return Loss("answers")
        labels = labels if names is None else [samples.names[label] for label in labels]
    if all(isinstance(label, str) for label in labels):
        # two classes of ImageNet are called crane: such a name does not identify a class
        once = Counter(names or ())
        numbers = {name: n for n, name in enumerate(names or ()) if once[name] == 1}
        classes = [numbers.get(label, -1) for label in labels]
    else:
        classes = [int(label) if isinstance(label, (int, np.integer)) else -1 for label in labels]
    if not all(0 <= one < count for one in classes):
        return Loss("answers")
    return Loss("labels", torch.tensor(classes), samples.start)


def losses(logits: Tensor, wanted: Int[Tensor, "..."]) -> Float[Tensor, "batch"]:
    """Returns the loss of each sample, in nats; for a window, the mean over its tokens."""
    logits = logits.float() if logits.element_size() < 4 else logits
    if logits.ndim == 3:
        return next_token_loss(logits, wanted, per_token=True).mean(dim=1)
    return F.cross_entropy(logits, wanted, reduction="none")


def at_once(model: Any, inputs: Tensor) -> int:
    """Returns how many of the inputs one forward may take, so that its gradients fit in memory."""
    if model.cfg.kind != "text":
        patches = inputs[0, 0].numel() // math.prod(model.cfg.patch_size)
        return max(1, _STREAM // (patches * model.cfg.d_model))
    return max(1, _LOGITS // (inputs.shape[1] * model.W_U.shape[1]))


def loss_effects(
    model: HookedModel, inputs: Tensor, numbers: Sequence[int], loss: Loss
) -> tuple[Float[Tensor, "batch layer atom"], Float[Tensor, "batch"]]:
    """Returns the first-order effect of each atom on each sample's loss, and this loss.

    The effect of atom j is `sum_t (0 - z_tj) d loss / d z_tj` in nats, where z_tj is the atom's
    code at token t. This is the derivative of the loss in the direction that takes the code to 0.
    One forward and one backward give the effects of all atoms of all layers. An atom whose code is
    0 has no effect.
    """
    effects, values = [], []
    size = at_once(model, inputs)
    for piece, own in zip(inputs.split(size), torch.as_tensor(numbers).split(size), strict=True):
        with torch.enable_grad():
            codes, logits = codes_and_logits(model, piece)
            value = losses(logits, loss.wanted(logits, piece, own.tolist()))
            gradients = torch.autograd.grad(value.sum(), codes)
        effects.append(-sums_over_tokens(codes, gradients))
        values.append(value.detach().double().cpu())
    return torch.cat(effects), torch.cat(values)


def codes_and_logits(
    model: HookedModel, inputs: Tensor, point: str = CODE, streams: list[Tensor] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Returns the code of each layer `[batch, pos, atom]`, with a gradient, and the logits.

    point: another point of the layers whose activations are returned in place of codes. streams: a
    list to which the stream before each layer is added.
    """
    codes: list[Tensor] = []

    def keep(code: Tensor, hook: Any) -> Tensor:
        # the first code is a leaf, so neither weights nor earlier values need a gradient
        codes.append(code if code.requires_grad and codes else code.detach().requires_grad_())
        return codes[-1]

    layers = range(model.cfg.n_layers)
    hooks: list[Any] = [(full_name(point, layer), keep) for layer in layers]
    if streams is not None:

        def note(stream: Tensor, hook: Any) -> None:
            streams.append(stream.detach())

        hooks += [(full_name("hook_resid_pre", layer), note) for layer in layers]
    return codes, model.run_with_hooks(inputs, fwd_hooks=hooks)


def sums_over_tokens(
    codes: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Float[Tensor, "batch layer atom"]:
    """Returns code times gradient, summed over the tokens of each sample."""
    products = zip(codes, gradients, strict=True)
    sums = [(code.detach().double() * grad.double()).sum(dim=1) for code, grad in products]
    return torch.stack(sums, dim=1).cpu()


def effect_sums(chunk: Chunk, loss: Loss) -> Tables:
    """Returns the table "effects", a row per layer and atom: layer, atom, n, loss, total, squares.

    n: the number of samples. loss: the sum of their losses. total, squares: the sums of the
    first-order effects and of their squares. For samples with groups, also the columns of
    `stats.contrasts.columns_of_sums`.
    """
    sums, value, n = EffectSums(chunk.samples), 0.0, 0
    for batch in chunk.batches():
        numbers = range(batch.start, batch.last + 1)
        effects, of_each = loss_effects(chunk.model, batch.inputs, numbers, loss)
        sums.add(effects, numbers)
        value, n = value + float(of_each.sum()), n + len(of_each)
    if not n:  # no sample of the chunk can be decoded
        return {}
    layer, atom = np.indices(sums.total.shape).reshape(2, -1)
    table = pd.DataFrame({"layer": layer, "atom": atom, "n": n, "loss": value})
    return {"effects": table.assign(**sums.columns())}


class EffectSums:
    """Sums of effects and of their squares over samples, and sums by group of samples."""

    def __init__(self, samples: Samples) -> None:
        self.start, self.groups = samples.start, samples.groups
        self.total = self.squares = torch.zeros(())
        self.totals: dict[int, Tensor] = {}
        self.counts: Counter[int] = Counter()

    def add(self, values: Float[Tensor, "batch ..."], numbers: Sequence[int]) -> None:
        """Adds the values of the samples with these numbers."""
        self.total = self.total + values.sum(dim=0)
        self.squares = self.squares + values.square().sum(dim=0)
        if self.groups is None:
            return
        for value, number in zip(values, numbers, strict=True):
            group = self.groups[number - self.start] % MOST_GROUPS
            self.totals[group] = self.totals.get(group, 0) + value.flatten().double()
            self.counts[group] += 1

    def columns(self) -> dict[str, Any]:
        """Returns total and squares, and the columns of `stats.contrasts.columns_of_sums`."""
        both = {"total": self.total.flatten().numpy(), "squares": self.squares.flatten().numpy()}
        if not self.totals:
            return both
        total = torch.stack(list(self.totals.values())).numpy()
        return both | columns_of_sums(total, np.array(list(self.counts.values())))


def ablations(
    model: HookedModel,
    inputs: Tensor | None,
    numbers: Sequence[int],
    loss: Loss,
    effects: pd.DataFrame,
    progress: bool,
) -> pd.DataFrame:
    """Returns a row per sample and chosen atom: sample, layer, atom, first_order, ablation.

    Both effects are changes of the sample's loss, in nats, if the code of the atom is 0 at every
    token: first_order to first order, ablation exactly, by running the layers above again. The
    chosen atoms are the 6 of each layer with the largest first-order effects, by their root mean
    square, on the *other* samples of `effects`, so that the choice does not depend on the samples
    that judge it. (The mean is a worse guide, because effects of both signs cancel in it. In a
    CRATE-LM of 6 layers, on 64 windows, atoms chosen by the mean had no larger exact effects than
    random atoms.) numbers: the sample numbers of the inputs. The table is empty without inputs.
    """
    if inputs is None:
        return pd.DataFrame({name: [] for name in _ABLATIONS})
    with torch.no_grad():
        first, _ = loss_effects(model, inputs, numbers, loss)  # [sample, layer, atom]
        squares = torch.tensor(effects["squares"].to_numpy()).view(first.shape[1:])
        others = squares - first.square().sum(dim=0)
        chosen = others.topk(min(PER_LAYER, others.shape[1]), dim=1).indices  # [layer, place]
        exact = _exact(model, inputs, numbers, loss, chosen, progress)  # [sample, layer, place]
    sample, layer, place = np.indices(exact.shape).reshape(3, -1)
    atom = chosen.numpy()[layer, place]
    columns = (np.asarray(numbers)[sample], layer, atom, first.numpy()[sample, layer, atom])
    table = pd.DataFrame(dict(zip(_ABLATIONS, (*columns, exact.flatten().numpy()), strict=True)))
    return table.sort_values(["sample", *_KEYS], ignore_index=True)


def ablated(table: pd.DataFrame, groups: Groups = None) -> pd.DataFrame:
    """Returns a row per chosen atom.

    Columns: layer, atom, ablation (the mean over samples), ablation_low and ablation_high (the 95 %
    interval of this mean, by resampling the samples), ablated (the number of samples). The atom
    that is `strongest` in its layer has the numbers of the samples that did not choose it.
    """
    wide: Any = table.pivot(index="sample", columns=_KEYS, values="ablation")
    every: Any = table["sample"] if groups is None else pd.Series(groups, table.index)
    of_sample = every.groupby(table["sample"]).first()
    there = wide.notna().to_numpy()
    # atoms ablated on the same samples are resampled together
    together: dict[bytes, list[int]] = {}
    for place in range(wide.shape[1]):
        together.setdefault(there[:, place].tobytes(), []).append(place)
    rows: list[tuple] = []
    for places in together.values():
        rows_there = there[:, places[0]]
        values = wide.to_numpy()[rows_there][:, places]
        low, high = mean_interval(by_group(values, of_sample.to_numpy()[rows_there]))
        means = values.mean(axis=0)
        for at, place in enumerate(places):
            rows.append((*wide.columns[place], means[at], low[at], high[at], len(values)))
    names = [*_KEYS, "ablation", "ablation_low", "ablation_high", "ablated"]
    found = pd.DataFrame(rows, columns=names).sort_values(_KEYS, ignore_index=True)
    by_layer: Any = table.groupby("layer")
    for layer, layer_rows in by_layer:
        lead = strongest(layer_rows, every[layer_rows.index].to_numpy())
        if lead is not None:
            row = (found["layer"] == layer) & (found["atom"] == lead["atom"])
            found.loc[row, names[2:]] = [lead[name] for name in ("effect", "low", "high", "n")]
    return found


def agreement(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per layer: layer, atoms, samples, rank_correlation.

    rank_correlation: Spearman's, between the first-order and the exact effects of the layer's
    chosen atoms, both averaged over the same samples; NaN if the effects of either kind are all
    equal.
    """
    rows: list[tuple] = []
    grouped: Any = table.groupby("layer")
    for layer, own in grouped:
        means = own.groupby("atom")[["first_order", "ablation"]].mean().rank().to_numpy().T
        alike = np.nan
        if (means.std(axis=1) > 0).all():
            alike = float(np.corrcoef(means)[0, 1])
        rows.append((int(layer), means.shape[1], own["sample"].nunique(), alike))
    return pd.DataFrame(rows, columns=["layer", "atoms", "samples", "rank_correlation"])


def strongest(table: pd.DataFrame, groups: Groups = None) -> dict[str, Any] | None:
    """Returns the atom with the largest exact effect: layer, atom, effect, low, high, n.

    Every second sample, from the first on, chooses the atom, by the absolute mean of its effect.
    effect, low, high, n: the mean over the other samples, its 95 % interval, and their number.
    groups: every second group, instead of every second sample. Returns None if no atom was measured
    on two samples, or on samples of two groups.
    """
    ordered = table.assign(group=table["sample"] if groups is None else groups)
    ordered = ordered.sort_values("sample", kind="stable")
    judging = (ordered.groupby(_KEYS)["group"].rank("dense") % 2 == 0).to_numpy()
    effects: Any = ordered.set_index(_KEYS)[["ablation", "group"]]
    judges, choosers = effects[judging], effects["ablation"][~judging]
    if not len(judges):
        return None
    means = choosers[choosers.index.isin(judges.index)].groupby(_KEYS).mean()
    layer, atom = place = means.abs().idxmax()
    values, whose = (judges.loc[[place]][name].to_numpy() for name in ("ablation", "group"))
    (low,), (high,) = mean_interval(by_group(values[:, None], whose))
    ends = {"effect": values.mean(), "low": low, "high": high, "n": len(values)}
    return {"layer": int(layer), "atom": int(atom)} | ends


def _exact(
    model: Any, inputs: Tensor, numbers: Sequence[int], loss: Loss, chosen: Tensor, progress: bool
) -> Float[Tensor, "sample layer place"]:
    layers = range(len(model.blocks))
    names = [full_name(point, layer) for point in (CODE, "hook_resid_post") for layer in layers]
    size = at_once(model, inputs)
    found: list[Tensor] = []
    bar = tqdm(total=len(inputs) * len(layers), desc="ablations", disable=not progress)
    for piece, own in zip(inputs.split(size), torch.as_tensor(numbers).split(size), strict=True):
        logits, cache = model.run_with_cache(piece, names_filter=names)
        right = loss.wanted(logits, piece, own.tolist())
        before = losses(logits, right).double()
        changes = []
        for layer in layers:
            after = _without(model, piece, right, layer, cache, chosen[layer])
            changes.append((after - before).T.cpu())
            bar.update(len(piece))
        found.append(torch.stack(changes, dim=1))
    bar.close()
    return torch.cat(found)


def _without(
    model: Any, inputs: Tensor, right: Tensor, layer: int, cache: Any, atoms: Tensor
) -> Float[Tensor, "atom batch"]:
    """Returns, for each atom, the loss of each sample if this atom is 0 at every token."""
    codes, stream = cache.at(CODE, layer), cache.at("hook_resid_post", layer)
    directions = model.blocks[layer].mlp.written()
    copies = _TOKENS // (len(inputs) * codes.shape[1])
    if model.cfg.kind == "text":
        copies = min(copies, at_once(model, inputs) // len(inputs))
    after = []
    for group in atoms.to(codes.device).split(max(1, copies)):
        gone = einsum(codes[..., group], directions[group], "b n atom, atom d -> atom b n d")
        changed = (stream - gone).flatten(0, 1)
        if not hasattr(model, "x0_lambdas"):
            logits = model(changed, start_at_layer=layer + 1)
        else:  # later layers add the embedding again, so the layers below have to run too
            hook = (full_name("hook_resid_post", layer), lambda post, hook, new=changed: new)
            logits = model.run_with_hooks(inputs.repeat(len(group), 1), fwd_hooks=[hook])
        many = right.repeat(len(group), *[1] * (right.ndim - 1))
        after.append(losses(logits, many).unflatten(0, (len(group), -1)).double())
    return torch.cat(after)
