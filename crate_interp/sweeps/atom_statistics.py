"""ci.atoms: what each dictionary atom does over a data set, in one stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.config.families import entry_word
from crate_interp.core import checks, device_waits
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.data.streams import Stream
from crate_interp.measures import condition_number, mutual_coherence
from crate_interp.models.hook_points import check_atoms
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.probes.layer_reading import dictionary
from crate_interp.questions.asking import Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Reading
from crate_interp.questions.experiment import Pass, Question, Tables
from crate_interp.results.result import Result, first

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
    sides = (on if k == OCTAVES[0] else flat >= 2.0**k for k in OCTAVES)
    # int32 takes half the time of int64
    above = torch.stack([side.sum(dim=0, dtype=torch.int32) for side in sides]).long()
    sums = {
        "on": above[0],
        "total": flat.clamp(min=0).sum(dim=0, dtype=torch.float64),
        "squares": flat.float().square().sum(dim=0, dtype=torch.float64),
        "octaves": -above.diff(dim=0, append=torch.zeros_like(above[:1])),
        "largest": flat.amax(dim=0).clamp(min=0),
        "value": values.clamp(min=0),
        "token": indices,
        "together": on.float().T @ on.float() if together else flat.new_zeros(0),
    }
    arrays = (part.numpy() for part in device_waits.fetched(list(sums.values())))
    found = dict(zip(sums, arrays, strict=True))
    samples, tokens = np.divmod(found["token"].astype(np.int64), pos)
    return found | {"n_tokens": len(flat), "sample": samples + first, "token": tokens}


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
        tables["sums"].append(pd.DataFrame(columns | dict(zip(_BINS, own["octaves"], strict=True))))
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
    """Returns (layer, atom) -> its counts by octave."""
    counts = sums[_BINS].to_numpy(int).tolist()
    return dict(zip(zip(sums["layer"], sums["atom"], strict=True), counts, strict=True))


def merged_sums(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the sums and the largest value of each atom over the tokens of both tables."""
    added = {name: mine[name] + theirs[name] for name in (*_ADDED, *_BINS)}
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


CODE = "mlp.hook_post"


def _atoms(result: Result) -> pd.DataFrame:
    sums: Any = result.table("sums")
    by_layer = {layer: own["squares"].to_numpy().sum() for layer, own in sums.groupby("layer")}
    energy = sums["layer"].map(by_layer)
    rate = sums["on"] / sums["n_tokens"]
    dense = np.where(rate > result.meta["settings"]["dense"], "dense", "")
    columns = {
        "layer": sums["layer"],
        "atom": sums["atom"],
        "firing_rate": rate,
        "mean": sums["total"] / sums["n_tokens"],
        "mean_on": (sums["total"] / sums["on"]).where(sums["on"] > 0, 0.0),
        "max": sums["largest"],
        "energy_share": (sums["squares"] / energy).where(energy > 0, sums["squares"]),
        "state": np.where(sums["on"] == 0, "dead", dense),
    }
    return pd.DataFrame(columns)


def _layers(result: Result) -> pd.DataFrame:
    sums: Any = result.table("sums").groupby("layer")
    rows: list[dict[str, Any]] = []
    grouped: Any = result.table("atoms").groupby("layer")
    for layer, atoms_ in grouped:
        own = sums.get_group(layer)
        tokens = int(own["n_tokens"].iloc[0])
        states = {state: int((atoms_["state"] == state).sum()) for state in ("dead", "dense")}
        rate, energy = atoms_["firing_rate"].mean(), own["squares"].to_numpy().sum() / tokens
        row = {"layer": layer, "atoms": len(atoms_), **states, "firing_rate": rate}
        rows.append(row | {"energy": energy, "n_tokens": tokens})
    return pd.DataFrame(rows).merge(result.table("weights"), on="layer")


class AtomResult(Result):
    """The result of `ci.atoms`: what the atoms of each layer did over a data set.

    `table()` has a row per layer and atom: layer, atom, firing_rate (the share of tokens at which
    the code is above 0), mean (over tokens), mean_on (over tokens at which the atom is on), max,
    energy_share (the atom's share of the layer's sum of squares), state. The state is "dead" if the
    atom is never on, "dense" if its firing rate is above `dense`, else "".

    Stored tables: `sums` (octave_k: at how many tokens a value is from 2^k to 2^{k+1}), `top`,
    `pairs` (empty without coactivation=True), `weights`.
    """

    KIND = "atoms"
    MAIN = "atoms"
    STORED = {"sums": merged_sums, "top": merged_top, "pairs": merged_pairs, "weights": first}
    DERIVED = {"atoms": _atoms, "layers": _layers}

    def layers(self) -> pd.DataFrame:
        """Returns a row per layer.

        Columns: atoms, dead, dense, firing_rate, energy, n_tokens, coherence, condition.

        energy: the mean of |z|^2 over tokens. coherence: the largest cosine between two atoms.
        condition: the condition number of the dictionary. coherence and condition are NaN for an
        MLP.
        """
        return self.table("layers")

    def legend(self) -> str:
        """Returns the meaning of the columns of `layers()`."""
        word = self.word()
        one = "an atom" if word == "atom" else f"a {word}"
        return (
            f"dead: {word}s that are never on. dense: {word}s that are on at more than "
            f"{self.meta['settings']['dense']:.0%} of the tokens.\n"
            f"firing_rate: share of the tokens at which {one} is on, mean over {word}s. energy: "
            "|z|^2 of a token's code, mean over tokens.\n"
            f"coherence: the largest cosine between two {word}s. condition: largest over smallest "
            "singular value of D."
        )

    def top(self, layer: int, atom: int) -> pd.DataFrame:
        """Returns the tokens at which an atom was largest: value, sample, and position (token).

        There are as many rows as the `top` given to `ci.atoms`, or fewer if the atom was on at
        fewer tokens. Raises ValueError if the layer or the atom does not exist.
        """
        width = self._width(layer)
        if not checks.is_int(atom) or not 0 <= atom < width:
            raise ValueError(f"atom={atom}: layer {layer} has the atoms 0 to {width - 1}.")
        table: Any = self._table("top")
        rows = table[(table["layer"] == layer) & (table["atom"] == atom)]
        return rows[["value", "sample", "token"]].reset_index(drop=True)

    def coactivation(self, layer: int) -> Float[np.ndarray, "atom atom"]:
        """Returns the share of tokens at which two atoms are on together.

        The diagonal has the firing rates. For two independent atoms, the share is the product of
        their firing rates.
        Raises ValueError if pairs were not counted.
        """
        self._width(layer)
        pairs: Any = self._table("pairs")
        if not len(pairs):
            raise ValueError("co-activation was not counted: give ci.atoms coactivation=True.")
        sums: Any = self._table("sums")
        tokens = sums.loc[sums["layer"] == layer, "n_tokens"].iloc[0]
        return np.stack(pairs.loc[pairs["layer"] == layer, "counts"].tolist()) / tokens

    def word(self) -> str:
        """Returns what an entry of the code is called: "atom", or "neuron" of an MLP."""
        return entry_word(self.meta["config"].get("sparse_step"))

    def sentences(self) -> list[str]:
        """Returns how many atoms are on at some tokens only, and how many are dense or dead."""
        layers: Any = self._table("layers")
        total, dead, dense = (int(layers[name].sum()) for name in ("atoms", "dead", "dense"))
        where = f"{self.meta['model'] or 'a model'}, {self.counted_samples()}"
        most = self.meta["settings"]["dense"]
        some = total - dead - dense
        return [
            f"{'Most' if some > total / 2 else 'Few'} {self.word()}s are on at some tokens, but at "
            f"no more than {most:.0%} of them: {some:,} of {total:,}.",
            f"{dense:,} are on at more, and {dead or 'none'} never ({where}).",
        ]

    def _notebook_table(self) -> pd.DataFrame:
        return self._table("layers")

    def _width(self, layer: int) -> int:
        sums: Any = self._table("sums")
        width = int((sums["layer"] == layer).sum())
        if not width:
            known = ", ".join(map(str, dict.fromkeys(sums["layer"])))
            raise ValueError(f"layer={layer}: the result has the layers {known}.")
        return width


@with_weights
def atoms(
    model: HookedModel,
    data: Data,
    *,
    top: int = 16,
    coactivation: bool = False,
    layers: Sequence[int] | None = None,
    dense: float = 0.5,
    **run: Unpack[Run],
) -> Perhaps[AtomResult]:
    """Measures every atom of the code `mlp.hook_post`: firing rate, energy and top activations.

    Memory does not grow with the number of samples. Results of parts of a data set can be merged.

    Args:
        model: A hooked model.
        data: As in `ci.sweep`; all tokens are counted.
        top: How many of the strongest tokens of each atom to keep.
        coactivation: Count how often each pair of atoms is on together, `[atom, atom]` a layer.
        layers: Numbers of the layers to measure. Default: all.
        dense: The firing rate above which an atom is "dense".
        run: As in `ci.sweep`.

    Returns:
        The statistics of each atom and layer, and each atom's strongest tokens.

    Raises:
        ValueError: As `ci.sweep` does, and for a layer that does not exist.
    """
    return ask(Atoms(top, coactivation, layers, dense), model, data, run_options(atoms, run))


@dataclass(frozen=True)
class Atoms(Question):
    """Measures the statistics of atoms."""

    top: int
    coactivation: bool = False
    layers: Sequence[int] | None = None
    dense: float = 0.5
    result, streams = AtomResult, True

    def settled(self, model: HookedModel, samples: Samples | Stream) -> "Atoms":
        """Refuses invalid requests, and fills in what model and samples decide."""
        top = checks.count("top", self.top)
        checks.flag("coactivation", self.coactivation)
        if not checks.is_number(self.dense) or not 0 <= self.dense <= 1:
            raise ValueError(f"dense={self.dense!r}: give a share from 0 to 1.")
        check_atoms(model.cfg, "atoms")
        layers = checks.numbers("layers", self.layers, len(model.blocks))
        return replace(self, top=top, layers=layers, dense=float(self.dense))

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        chosen = checks.numbers("layers", self.layers, len(model.blocks))
        return {"settings": super().facts(model)["settings"] | {"point": CODE, "layers": chosen}}

    def passes(self, model: HookedModel) -> Pass:
        """Returns the pass that measures the atoms."""
        measure = partial(atom_tables, settings=self.facts(model)["settings"])
        return Pass("atoms", measure, AtomResult.STORED)


def atom_tables(chunk: Chunk, settings: Mapping[str, Any]) -> Tables:
    """Returns the stored tables of a chunk; "weights" has rows only in the first chunk."""
    chosen, top, together = (settings[name] for name in ("layers", "top", "coactivation"))
    sums: dict[int, LayerSums] = {}

    def measure(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        new = layer_sums(acts[CODE], batch.start, top, together)
        sums[layer] = both_sums(sums[layer], new, top) if layer in sums else new

    chunk.measure_all(Reading(CODE, measure, chosen))
    weights: list[tuple] = []
    for layer in [] if chunk.number else chosen:
        block: Any = chunk.model.blocks[layer]
        d = dictionary(block)
        measures = (mutual_coherence, condition_number)
        facts = [np.nan if d is None else float(one(d.detach())) for one in measures]
        weights.append((layer, *facts))
    table = pd.DataFrame(weights, columns=["layer", "coherence", "condition"])
    return {**tables_of_sums(sums), "weights": table}
