"""ci.atoms: what each dictionary atom does over a data set, in one stream; parts of a data set can be merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import read
from crate_interp.measures import condition_number, mutual_coherence
from crate_interp.models.digest import model_digest
from crate_interp.probes.shared import dictionary
from crate_interp.sweeps.stream import batches, check_batch_size, check_model, run, samples_of

CODE = "mlp.hook_post"


@dataclass
class LayerAtoms:
    """Sums over tokens of one layer, `[atom]` each; top_* `[rank, atom]`; together `[atom, atom]` or empty."""

    n_tokens: int
    on: np.ndarray
    total: np.ndarray
    squares: np.ndarray
    largest: np.ndarray
    top_values: np.ndarray
    top_samples: np.ndarray
    top_tokens: np.ndarray
    together: np.ndarray

    def merged(self, other: "LayerAtoms", top: int) -> "LayerAtoms":
        """The sums over both sets of tokens."""
        values, samples, tokens = (
            np.concatenate([getattr(self, name), getattr(other, name)])
            for name in ("top_values", "top_samples", "top_tokens")
        )
        # largest first; of equal values the earlier sample, then the earlier token
        order = np.lexsort((tokens, samples, -values), axis=0)[:top]
        values, samples, tokens = (
            np.take_along_axis(array, order, axis=0) for array in (values, samples, tokens)
        )
        return LayerAtoms(
            self.n_tokens + other.n_tokens,
            self.on + other.on,
            self.total + other.total,
            self.squares + other.squares,
            np.maximum(self.largest, other.largest),
            values,
            samples,
            tokens,
            self.together + other.together,
        )


@dataclass(frozen=True)
class AtomResult:
    """What atoms did: `sums` of each layer, `weights` of the dictionaries, `meta` with model, samples and settings."""

    sums: dict[int, LayerAtoms]
    weights: pd.DataFrame
    meta: dict[str, Any]

    def _repr_html_(self) -> str:
        return self.layers().to_html(index=False, float_format=lambda value: f"{value:.3g}")

    def table(self, dense: float = 0.5) -> pd.DataFrame:
        """One row per layer and atom: layer, atom, firing_rate, mean, mean_on, max, energy_share, state.

        firing_rate: share of tokens in which the code is above 0; mean over tokens, mean_on over those; energy_share: of the
        layer's sum of squares. state: "dead" (never on), "dense" (on in more than `dense` of the tokens), or "".
        """
        tables: list[pd.DataFrame] = []
        for layer, sums in self.sums.items():
            rate = sums.on / sums.n_tokens
            energy = sums.squares.sum()
            columns = {
                "layer": layer,
                "atom": np.arange(len(rate)),
                "firing_rate": rate,
                "mean": sums.total / sums.n_tokens,
                "mean_on": np.divide(
                    sums.total, sums.on, out=np.zeros_like(sums.total), where=sums.on > 0
                ),
                "max": sums.largest,
                "energy_share": sums.squares / energy if energy else sums.squares,
                "state": np.where(sums.on == 0, "dead", np.where(rate > dense, "dense", "")),
            }
            tables.append(pd.DataFrame(columns))
        return pd.concat(tables, ignore_index=True)

    def layers(self, dense: float = 0.5) -> pd.DataFrame:
        """One row per layer: atoms, dead, dense, firing_rate, energy (mean |z|^2 of a token), coherence, condition, n_tokens.

        coherence: the largest cosine between two atoms; condition: of the dictionary's singular values; NaN for an MLP.
        """
        rows: list[dict[str, Any]] = []
        grouped: Any = self.table(dense).groupby("layer")
        for layer, atoms in grouped:
            sums = self.sums[int(str(layer))]
            row = {
                "layer": layer,
                "atoms": len(atoms),
                "dead": int((atoms["state"] == "dead").sum()),
            }
            row |= {
                "dense": int((atoms["state"] == "dense").sum()),
                "firing_rate": atoms["firing_rate"].mean(),
            }
            rows.append(
                row | {"energy": sums.squares.sum() / sums.n_tokens, "n_tokens": sums.n_tokens}
            )
        return pd.DataFrame(rows).merge(self.weights, on="layer")

    def top(self, layer: int, atom: int) -> pd.DataFrame:
        """The tokens in which an atom was largest: value, sample, token (position); fewer where it was on in fewer."""
        sums = self._layer(layer)
        if not 0 <= atom < len(sums.on):
            raise ValueError(f"atom={atom}: layer {layer} has the atoms 0 to {len(sums.on) - 1}.")
        columns = {
            "value": sums.top_values[:, atom],
            "sample": sums.top_samples[:, atom],
            "token": sums.top_tokens[:, atom],
        }
        table: Any = pd.DataFrame(columns)
        return table[table["value"] > 0].reset_index(drop=True)

    def coactivation(self, layer: int) -> Float[np.ndarray, "atom atom"]:
        """The share of tokens in which two atoms are on together; the diagonal is the firing rate.

        Independent atoms would have the product of their rates. Raises ValueError where it was not asked for.
        """
        sums = self._layer(layer)
        if not sums.together.size:
            raise ValueError("co-activation was not counted: ci.atoms(..., coactivation=True).")
        return sums.together / sums.n_tokens

    def merge(self, other: "AtomResult") -> "AtomResult":
        """The result over both sets of samples; ValueError unless model and settings agree and no sample is in both."""
        for name in ("model_digest", "settings"):
            if self.meta[name] != other.meta[name]:
                raise ValueError(
                    f"the results differ in {name}: {self.meta[name]} and {other.meta[name]}."
                )
        taken = [range(*pair) for pair in self.meta["samples"]]
        again = [
            pair
            for pair in other.meta["samples"]
            for mine in taken
            if max(pair[0], mine[0]) < min(pair[1], mine.stop)
        ]
        if again:
            raise ValueError(
                f"samples {again[0][0]} to {again[0][1] - 1} are in both: number them apart with first_sample, or do not add them twice."
            )
        top = self.meta["settings"]["top"]
        sums = {layer: mine.merged(other.sums[layer], top) for layer, mine in self.sums.items()}
        meta = self.meta | {"samples": sorted([*self.meta["samples"], *other.meta["samples"]])}
        return AtomResult(
            sums,
            self.weights,
            meta | {"n_samples": self.meta["n_samples"] + other.meta["n_samples"]},
        )

    def _layer(self, layer: int) -> LayerAtoms:
        if layer not in self.sums:
            raise ValueError(
                f"layer={layer}: the result has the layers {', '.join(map(str, self.sums))}."
            )
        return self.sums[layer]


def atoms(
    model: Any,
    data: Any,
    *,
    top: int = 16,
    coactivation: bool = False,
    layers: Sequence[int] | None = None,
    first_sample: int = 0,
    batch_size: int = 32,
    limit: int | None = None,
    progress: bool = True,
) -> AtomResult:
    """Statistics of every atom of the code `mlp.hook_post`: firing rate, energy, top activations, and what fires together.

    data, limit: as in `ci.sweep`; all tokens count. top: how many (sample, token) pairs to keep for each atom. coactivation:
    count pairs of atoms too, `[atom, atom]` numbers for each layer. first_sample: the number of the first sample, so that
    results over parts of a data set can be merged: `a.merge(b)`. Memory does not grow with the number of samples. Raises
    ValueError as `ci.sweep` does.
    """
    check_batch_size(batch_size)
    if not isinstance(top, int) or top < 1:
        raise ValueError(f"top={top!r}: give a whole number of at least 1.")
    check_model(model)
    count = len(model.blocks)
    chosen = list(range(count)) if layers is None else list(layers)
    if not chosen or not all(isinstance(layer, int) and 0 <= layer < count for layer in chosen):
        raise ValueError(f"layers={layers!r}: give some of 0 to {count - 1}.")
    samples = samples_of(model, data, limit)
    sums: dict[int, LayerAtoms] = {}
    first = 0

    def measure(layer: int, acts: dict[str, Tensor]) -> None:
        found = layer_sums(acts[CODE], first + first_sample, top, coactivation)
        sums[layer] = sums[layer].merged(found, top) if layer in sums else found

    with torch.no_grad(), read(model, CODE, measure, layers=chosen):
        for first, batch in batches(model, samples, batch_size, "atoms", progress):  # noqa: B007  # measure reads it
            run(model, batch)
    meta = {
        "model": model.cfg.model_name,
        "model_digest": model_digest(model),
        "data_fingerprint": samples.fingerprint,
        "settings": {"top": top, "coactivation": coactivation, "layers": chosen, "point": CODE},
        "samples": [[first_sample, first_sample + samples.n]],
        "n_samples": samples.n,
    }
    return AtomResult(dict(sorted(sums.items())), _weights(model, chosen), meta)


def layer_sums(
    code: Float[Tensor, "batch pos atom"], first: int, top: int, together: bool
) -> LayerAtoms:
    """The sums of one batch, whose first sample has the number `first`."""
    batch, pos, width = code.shape
    flat = code.reshape(-1, width)
    on = flat > 0
    best = flat.topk(min(top, len(flat)), dim=0)
    pairs = on.float().T @ on.float() if together else flat.new_zeros(0)
    return LayerAtoms(
        len(flat),
        _numpy(on.sum(dim=0)),
        _numpy(flat.clamp(min=0).sum(dim=0, dtype=torch.float64)),
        _numpy(flat.float().square().sum(dim=0, dtype=torch.float64)),
        _numpy(flat.amax(dim=0).clamp(min=0)),
        _numpy(best.values.clamp(min=0)),
        _numpy(best.indices // pos).astype(np.int64) + first,
        _numpy(best.indices % pos).astype(np.int64),
        _numpy(pairs),
    )


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()  # bfloat16 has no numpy of its own


def _weights(model: Any, layers: list[int]) -> pd.DataFrame:
    rows: list[tuple] = []
    for layer in layers:
        d = dictionary(model.blocks[layer])
        facts = (
            (np.nan, np.nan)
            if d is None
            else (float(mutual_coherence(d.detach())), float(condition_number(d.detach())))
        )
        rows.append((layer, *facts))
    return pd.DataFrame(rows, columns=["layer", "coherence", "condition"])
