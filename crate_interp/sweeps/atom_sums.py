"""Sums over tokens for each dictionary atom, and the tables made from these sums."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.core.device_waits import fetched

_ADDED = ["n_tokens", "on", "total", "squares"]
# a value lies in octave k if it is from 2^k to 2^{k+1}; the ends hold all that is beyond them
OCTAVES = range(-7, 5)
_BINS = [f"octave_{k}" for k in OCTAVES]
TOP = ["layer", "atom", "rank", "value", "sample", "token"]


# Sums over the tokens of one layer, by name, as arrays `[atom]`. value, sample and token of the
# largest values are `[rank, atom]`, octaves `[octave, atom]`: at how many tokens the atom's value
# lies in each octave. together is `[atom, atom]`, or empty if pairs are not counted.
LayerSums = dict[str, Any]


def both_sums(mine: LayerSums, theirs: LayerSums, top: int) -> LayerSums:
    """Returns the sums over the tokens of both together."""
    added = {name: mine[name] + theirs[name] for name in (*_ADDED, "octaves", "together")}
    ranked = {name: np.concatenate([mine[name], theirs[name]]) for name in TOP[3:]}
    # largest value first; equal values are sorted by sample, then by token
    order = np.lexsort((ranked["token"], ranked["sample"], -ranked["value"]), axis=0)[:top]
    ranked = {name: np.take_along_axis(array, order, axis=0) for name, array in ranked.items()}
    return added | ranked | {"largest": np.maximum(mine["largest"], theirs["largest"])}


def layer_sums(
    code: Float[Tensor, "batch pos atom"], first: int, top: int, together: bool
) -> LayerSums:
    """Returns the sums of one batch, whose first sample has the number `first`."""
    _, pos, width = code.shape
    flat = code.reshape(-1, width)  # [batch * pos, atom]
    on = flat > 0
    values, indices = _largest(flat, min(top, len(flat)))
    sums = {
        "on": on.sum(dim=0),
        "total": flat.clamp(min=0).sum(dim=0, dtype=torch.float64),
        "squares": flat.float().square().sum(dim=0, dtype=torch.float64),
        "octaves": _octaves(flat),
        "largest": flat.amax(dim=0).clamp(min=0),
        "value": values.clamp(min=0),
        "token": indices,
        "together": on.float().T @ on.float() if together else flat.new_zeros(0),
    }
    arrays = (part.numpy() for part in fetched(list(sums.values())))
    found = dict(zip(sums, arrays, strict=True))
    samples, tokens = np.divmod(found["token"].astype(np.int64), pos)
    return found | {"n_tokens": len(flat), "sample": samples + first, "token": tokens}


def _octaves(flat: Float[Tensor, "token atom"]) -> Int[Tensor, "octave atom"]:
    """Returns at how many tokens each atom's value lies in each octave."""
    power = torch.frexp(flat.float()).exponent - 1  # of 2, for the largest one that is not above
    power = power.clamp(OCTAVES[0], OCTAVES[-1]).masked_fill(flat <= 0, OCTAVES[0] - 1)
    power = power.to(torch.int8)
    return torch.stack([(power == k).sum(dim=0) for k in OCTAVES])


def _largest(
    flat: Float[Tensor, "token atom"], count: int
) -> tuple[Float[Tensor, "rank atom"], Int[Tensor, "rank atom"]]:
    """Returns the largest values of each atom and their tokens; equal values are in token order.

    torch.topk may take any of several equal values, so the values of atoms with ties are sorted.
    """
    values, indices = flat.topk(count, dim=0)
    least = values[-1]
    tied = (values[1:] == values[:-1]).any(dim=0)
    tied |= (flat == least).sum(dim=0) > (values == least).sum(dim=0)
    tied &= values[0] > 0
    atoms = tied.nonzero()[:, 0]
    if len(atoms):
        ordered = flat[:, atoms].sort(dim=0, descending=True, stable=True)
        values[:, atoms], indices[:, atoms] = ordered.values[:count], ordered.indices[:count]
    return values, indices


def tables_of_sums(sums: Mapping[int, LayerSums]) -> dict[str, pd.DataFrame]:
    """Returns the stored tables of the sums of each layer.

    sums has a row per layer and atom, top a row per layer, atom and rank: the token at which the
    atom's value has this rank, if the atom was on there. pairs has a row per layer and atom: how
    often the atom was on together with each atom.
    """
    tables: dict[str, list[pd.DataFrame]] = {"sums": [], "top": []}
    pairs: list[tuple] = []
    for layer, own in sorted(sums.items()):
        columns: dict[str, Any] = {"layer": layer, "atom": np.arange(len(own["on"]))}
        columns |= {name: own[name] for name in (*_ADDED, "largest")}
        bins = dict(zip(_BINS, own["octaves"], strict=True))
        tables["sums"].append(pd.DataFrame(columns | bins))
        rank, atom = np.indices(own["value"].shape)
        columns = {"layer": layer, "atom": atom.T.ravel(), "rank": rank.T.ravel()}
        top: Any = pd.DataFrame(columns | {name: own[name].T.ravel() for name in TOP[3:]})
        tables["top"].append(top[top["value"] > 0])
        pairs += [(layer, atom, counts) for atom, counts in enumerate(own["together"])]
    whole = {
        name: pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
        for name, parts in tables.items()
    }
    return whole | {"pairs": pd.DataFrame(pairs, columns=["layer", "atom", "counts"])}


def histograms(sums: pd.DataFrame) -> dict[tuple[int, int], list[int]]:
    """Returns (layer, atom) -> its counts by octave; empty if an older result has none."""
    if not set(_BINS) <= set(sums):
        return {}
    counts = sums[_BINS].to_numpy(int).tolist()
    return dict(zip(zip(sums["layer"], sums["atom"], strict=True), counts, strict=True))


def merged_sums(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the sums and the largest value of each atom over the tokens of both tables."""
    # older saved results have no octaves
    bins = [name for name in _BINS if name in mine and name in theirs]
    added = {name: mine[name] + theirs[name] for name in (*_ADDED, *bins)}
    mine = mine.drop(columns=[name for name in _BINS if name in mine and name not in bins])
    return mine.assign(**added, largest=np.maximum(mine["largest"], theirs["largest"]))


def merged_pairs(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the counts over the tokens of both tables."""
    if not len(mine):
        return mine
    pairs = zip(mine["counts"], theirs["counts"], strict=True)
    return mine.assign(counts=[np.asarray(one) + np.asarray(two) for one, two in pairs])


def merged_top(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns each atom's largest values over both tables; meta says how many are kept."""
    both = pd.concat([mine, theirs], ignore_index=True).assign(least=lambda t: -t["value"])
    order = ["layer", "atom", "least", "sample", "token"]
    both = both.sort_values(order, kind="stable", ignore_index=True)
    both["rank"] = both.groupby(["layer", "atom"]).cumcount()
    kept: Any = both[both["rank"] < meta["settings"]["top"]]
    return kept[TOP].reset_index(drop=True)
