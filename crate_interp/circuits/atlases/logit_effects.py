"""Which logits an atom raises or lowers, to first order, measured on data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_interp.circuits.atlases import atom_directions, atom_effects
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.stats.intervals import interval_of_sums
from crate_interp.stats.significance import signs

# each logit takes its own backward: with more than MANY, the model's FEW most frequent answers
MANY, FEW = 16, 8
COLUMNS = ["layer", "atom", "logit", "name", "n", "total", "squares"]


def logit_effects(
    model: HookedModel, inputs: Tensor | None, numbers: Sequence[int], samples: Samples
) -> pd.DataFrame:
    """Returns a row per layer, atom and logit: layer, atom, logit, name, n, total, squares.

    total, squares: the sums over samples of `sum_t z_tj d logit / d z_tj` and of its square, with
    z_tj the code of atom j at token t. Here `logit` is the logit less the mean of all logits; for
    text, it is averaged over tokens. A positive sum means that the atom raises the logit, to first
    order. Each logit takes its own backward. So if there are more than 16 classes or tokens, only
    the 8 that the model answers most often on these samples are measured. The table is empty
    without inputs. numbers: those of the inputs among the samples. For samples with groups it
    also has the columns of `stats.contrasts.columns_of_sums`.
    """
    if inputs is None:
        return pd.DataFrame({name: [] for name in COLUMNS})
    chosen = _chosen(model, inputs)
    total = squares = torch.zeros(())
    size, groups = atom_effects.at_once(model, inputs), atom_effects.SumsOfGroups(samples)
    for start, piece in zip(range(0, len(inputs), size), inputs.split(size), strict=True):
        effects = _effects(model, piece, chosen)  # [logit, batch, layer, atom]
        groups.add(effects.transpose(0, 1), numbers[start : start + size])
        total, squares = total + effects.sum(dim=1), squares + effects.square().sum(dim=1)
    layers, width = total.shape[1:]
    names = atom_directions.answer_names(model)
    logit, layer, atom = np.indices((len(chosen), layers, width)).reshape(3, -1)
    columns: dict[str, Any] = {
        "layer": layer,
        "atom": atom,
        "logit": np.array(chosen)[logit],
        "name": np.array([names[one] for one in chosen], dtype=object)[logit],
        "n": len(inputs),
        "total": total.flatten().numpy(),
        "squares": squares.flatten().numpy(),
    }
    return pd.DataFrame(columns | groups.columns())


def named(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per layer and atom: layer, atom, raises, lowers.

    raises, lowers: the names of up to three logits whose interval excludes 0, each with its mean
    effect and half the width of its 95 % interval.
    """
    mean, low, high = interval_of_sums(table)
    known: Any = table.assign(mean=mean, high=high)
    clear = known[signs(low, high) != 0]
    keys = ["layer", "atom"]
    every = known[keys].drop_duplicates().sort_values(keys, ignore_index=True)
    for word, ascending in (("raises", False), ("lowers", True)):
        side = clear[(clear["mean"] > 0) != ascending]
        side = side.sort_values([*keys, "mean"], ascending=[True, True, ascending])
        side = side.groupby(keys).head(atom_directions.NAMED)
        texts = [_text(row) for row in side.to_dict("records")]
        texts = pd.Series(texts, index=side.index, dtype=str)  # text type even for an empty table
        joined = side[keys].assign(**{word: texts}).groupby(keys)[word].agg(", ".join)
        every = every.merge(joined.reset_index(), on=keys, how="left")
    return every.fillna({"raises": "", "lowers": ""})


def _text(row: Mapping[str, Any]) -> str:
    return f"{row['name']!r} {row['mean']:+.2g} ± {row['high'] - row['mean']:.1g}"


def _chosen(model: Any, inputs: Tensor) -> list[int]:
    """Returns the numbers of the logits to measure."""
    count = model.W_U.shape[1]
    if count <= MANY:
        return list(range(count))
    answers = torch.zeros(count, dtype=torch.long)
    with torch.no_grad():
        for piece in inputs.split(atom_effects.at_once(model, inputs)):
            answers += model(piece).argmax(dim=-1).flatten().cpu().bincount(minlength=count)
    return sorted(answers.topk(FEW).indices.tolist())


def _effects(model: HookedModel, inputs: Tensor, chosen: list[int]) -> Tensor:
    """Returns the effect of each atom on each chosen logit, `[logit, batch, layer, atom]`."""
    found = []
    with torch.enable_grad():
        codes, logits = atom_effects.codes_and_logits(model, inputs)
        centred = logits - logits.mean(dim=-1, keepdim=True)
        centred = centred.mean(dim=1) if centred.ndim == 3 else centred
        for place in chosen:
            gradients = torch.autograd.grad(centred[:, place].sum(), codes, retain_graph=True)
            found.append(atom_effects.sums_over_tokens(codes, gradients))
    return torch.stack(found)
