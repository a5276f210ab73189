"""The effect on the loss of setting an atom to 0 everywhere, by running the model without it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.atlases.atom_effects import Loss, at_once, loss_effects, losses
from crate_interp.core.progress import tqdm
from crate_interp.models.hooked import HookedModel
from crate_interp.stats.contrasts import by_group
from crate_interp.stats.intervals import mean_interval
from crate_interp.sweeps.atom_statistics import CODE

PER_LAYER = 6  # atoms of each layer to set to 0
COLUMNS = ["sample", "layer", "atom", "first_order", "ablation"]
_TOKENS = 2**15  # the most tokens in one forward, with a copy of the inputs for each atom set to 0
_KEYS = ["layer", "atom"]


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
        return pd.DataFrame({name: [] for name in COLUMNS})
    with torch.no_grad():
        first, _ = loss_effects(model, inputs, numbers, loss)  # [sample, layer, atom]
        squares = torch.tensor(effects["squares"].to_numpy()).view(first.shape[1:])
        others = squares - first.square().sum(dim=0)
        chosen = others.topk(min(PER_LAYER, others.shape[1]), dim=1).indices  # [layer, place]
        exact = _exact(model, inputs, numbers, loss, chosen, progress)  # [sample, layer, place]
    sample, layer, place = np.indices(exact.shape).reshape(3, -1)
    atom = chosen.numpy()[layer, place]
    columns = (np.asarray(numbers)[sample], layer, atom, first.numpy()[sample, layer, atom])
    table = pd.DataFrame(dict(zip(COLUMNS, (*columns, exact.flatten().numpy()), strict=True)))
    return table.sort_values(["sample", *_KEYS], ignore_index=True)


Groups = Int[np.ndarray, "row"] | None  # of the sample of each row; None: they are independent


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


def predicted(table: pd.DataFrame) -> float:
    """Returns Pearson's correlation of first-order and exact effects over the chosen atoms.

    Both effects are averaged over the same samples. The correlation is NaN if the effects of either
    kind are all equal.
    """
    means: Any = table.groupby(_KEYS)[["first_order", "ablation"]].mean()
    return float(means.corr().loc["first_order", "ablation"])


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
