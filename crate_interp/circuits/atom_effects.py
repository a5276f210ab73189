"""Effects of atoms on the loss if their code is 0: from gradients, and by running without them."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core.run_options import tqdm
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.questions import edited_runs
from crate_interp.questions.answers import Loss, losses
from crate_interp.questions.batches import Chunk
from crate_interp.questions.edited_runs import every_entry, pieces
from crate_interp.questions.experiment import Tables
from crate_interp.stats.contrasts import MOST_GROUPS, by_group, columns_of_sums
from crate_interp.stats.intervals import mean_interval
from crate_interp.sweeps.atom_statistics import CODE

PER_LAYER = 6  # atoms of each layer to set to 0
_ABLATIONS = ["sample", "layer", "atom", "first_order", "ablation"]
_KEYS = ["layer", "atom"]
_TOKENS = 2**15  # the most tokens in one forward, with a copy of the inputs for each atom set to 0
Groups = Int[np.ndarray, "row"] | None  # of the sample of each row; None: they are independent


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
    for piece, own in pieces(model, inputs, numbers):
        with torch.enable_grad():
            logits, codes = edited_runs.with_gradients(model, piece, code_points(model))
            value = losses(logits, loss.right_answers(logits, piece, own))
            effects.append(-code_times_gradient(value.sum(), codes.values()))
        values.append(value.detach().double().cpu())
    return torch.cat(effects), torch.cat(values)


def code_points(model: HookedModel) -> list[str]:
    """Returns the points of the codes, from the lowest layer up."""
    return [full_name(CODE, layer) for layer in range(model.cfg.n_layers)]


def code_times_gradient(
    output: Tensor, codes: Collection[Tensor], retain_graph: bool = False
) -> Float[Tensor, "batch layer atom"]:
    """Returns code times gradient of a sum over samples, summed over the tokens of each sample."""
    gradients = torch.autograd.grad(output, [*codes], retain_graph=retain_graph)
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
    return {"effects": sums.table("layer", "atom", n=n, loss=value)}


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

    def table(self, *axes: str, **facts: Any) -> pd.DataFrame:
        """Returns a row per place: axes, facts, total, squares; and those of `columns_of_sums`."""
        sizes = [range(count) for count in self.total.shape]
        table = every_entry("total", self.total, **dict(zip(axes, sizes, strict=True)))
        squares = self.squares.flatten().numpy()
        table = table[[*axes]].assign(**facts, total=table["total"], squares=squares)
        if not self.totals:
            return table
        total = torch.stack(list(self.totals.values())).numpy()
        return table.assign(**columns_of_sums(total, np.array(list(self.counts.values()))))


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
    layers, places = map(range, chosen.shape)
    table: Any = every_entry("ablation", exact, sample=numbers, layer=layers, place=places)
    atoms = chosen.expand(len(exact), -1, -1)
    first_order = first.gather(2, atoms).flatten().numpy()
    table = table.assign(atom=atoms.numpy().ravel(), first_order=first_order)
    return table[_ABLATIONS].sort_values(["sample", *_KEYS], ignore_index=True)


def ablated(table: pd.DataFrame, groups: Groups = None) -> pd.DataFrame:
    """Returns a row per chosen atom.

    Columns: layer, atom, ablation (the mean over samples), ablation_low and ablation_high (the 95 %
    interval of this mean, by resampling the samples), ablated (the number of samples). The atom
    that is `strongest` in its layer has the numbers of the samples that did not choose it.
    """
    tried: Any = table.assign(group=table["sample"] if groups is None else groups)
    names = ["ablation", "ablation_low", "ablation_high", "ablated"]
    rows: dict[Any, Any] = {place: _mean_and_ends(own) for place, own in tried.groupby(_KEYS)}
    for _, own in tried.groupby("layer"):
        lead = strongest(own, own["group"].to_numpy())
        if lead is not None:
            rows[lead["layer"], lead["atom"]] = [lead[it] for it in ("effect", "low", "high", "n")]
    found = pd.DataFrame([(*place, *ends) for place, ends in rows.items()], columns=_KEYS + names)
    return found.sort_values(_KEYS, ignore_index=True)


def _mean_and_ends(rows: pd.DataFrame) -> tuple[float, float, float, int]:
    """Returns the mean effect of an atom, its 95 % interval, and the number of samples."""
    values = rows["ablation"].to_numpy(float)
    (low,), (high,) = mean_interval(by_group(values[:, None], rows["group"].to_numpy()))
    return values.mean(), low, high, len(values)


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
    ordered: Any = table.assign(group=table["sample"] if groups is None else groups)
    ordered = ordered.sort_values("sample", kind="stable")
    judging = ordered.groupby(_KEYS)["group"].rank("dense") % 2 == 0
    judges, choosers = (ordered[rows].set_index(_KEYS) for rows in (judging, ~judging))
    if not len(judges):
        return None
    means = choosers["ablation"][choosers.index.isin(judges.index)].groupby(_KEYS).mean()
    layer, atom = place = means.abs().idxmax()
    effect, low, high, n = _mean_and_ends(judges.loc[[place]])
    ends = {"effect": effect, "low": low, "high": high, "n": n}
    return {"layer": int(layer), "atom": int(atom)} | ends


def _exact(
    model: Any, inputs: Tensor, numbers: Sequence[int], loss: Loss, chosen: Tensor, progress: bool
) -> Float[Tensor, "sample layer place"]:
    layers, found = range(len(model.blocks)), []
    names = [full_name(point, layer) for point in (CODE, "hook_resid_post") for layer in layers]
    with tqdm(total=len(inputs) * len(layers), desc="ablations", disable=not progress) as bar:
        for piece, own in pieces(model, inputs, numbers):
            logits, cache = model.run_with_cache(piece, names_filter=names)
            right = loss.right_answers(logits, piece, own)
            before, changes = losses(logits, right).double(), []
            for layer in layers:
                after = _without(model, piece, right, layer, cache, chosen[layer])
                changes.append((after - before).T.cpu())
                bar.update(len(piece))
            found.append(torch.stack(changes, dim=1))
    return torch.cat(found)


def _without(
    model: Any, inputs: Tensor, right: Tensor, layer: int, cache: Any, atoms: Tensor
) -> Float[Tensor, "atom batch"]:
    """Returns, for each atom, the loss of each sample if this atom is 0 at every token."""
    codes, stream = cache.at(CODE, layer), cache.at("hook_resid_post", layer)
    directions = model.blocks[layer].mlp.written()
    copies = _TOKENS // (len(inputs) * codes.shape[1])
    if model.cfg.kind == "text":
        copies = min(copies, edited_runs.at_once(model, inputs) // len(inputs))
    after = []
    for group in atoms.to(codes.device).split(max(1, copies)):
        gone = einsum(codes[..., group], directions[group], "b n atom, atom d -> atom b n d")
        many, wanted = (one.repeat(len(group), *[1] * (one.ndim - 1)) for one in (inputs, right))
        logits = edited_runs.after_layer(model, layer, (stream - gone).flatten(0, 1), many)
        after.append(losses(logits, wanted).unflatten(0, (len(group), -1)).double())
    return torch.cat(after)
