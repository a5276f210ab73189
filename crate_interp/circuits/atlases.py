"""ci.atlas: what every dictionary atom fires on, what it changes, and which atoms are like it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch

from crate_interp import checks
from crate_interp.circuits.ablations import ablations, merged_ablations
from crate_interp.circuits.directions import directions
from crate_interp.circuits.excerpts import excerpts
from crate_interp.data import Data
from crate_interp.models.hooked import HookedModel
from crate_interp.results import Result, by, counted, first
from crate_interp.sweeps.atom_statistics import AtomResult, atom_settings, atom_tables
from crate_interp.sweeps.provenance import data_meta
from crate_interp.sweeps.stream import Chunk, check_model, fold, samples_of

_SHOWN = ["layer", "atom", "firing_rate", "max", "ablation", "raises", "lowers", "nearest"]


def _atlas(result: Result) -> pd.DataFrame:
    """Returns statistics, ablations and directions side by side."""
    keys = ["layer", "atom"]
    moved = result.table("ablations").drop(columns="samples")
    atoms = result.table("atoms").merge(moved, on=keys)
    return atoms.merge(result.table("directions"), on=keys)


class Atlas(AtomResult):
    """What is known of every atom: an AtomResult, with effects, neighbours and examples.

    `table()` has a row per layer and atom: the columns of `ci.atoms`, then ablation (nats, NaN if
    it was not measured), raises and lowers (names of classes or tokens), nearest (atoms of other
    layers) and nearest_cosine. `table("tiles")` (images) or `table("contexts")` (text) shows what
    surrounds the tokens of `table("top")`.

    If two atlases merge, ablation is the mean over the samples on which either measured it.
    """

    KIND = "atlas"
    MAIN = "atlas"
    STORED = {
        **AtomResult.STORED,
        "directions": first,
        "ablations": merged_ablations,
        "tiles": by("sample", "token"),
        "contexts": by("sample", "token"),
    }
    DERIVED = {**AtomResult.DERIVED, "atlas": _atlas}

    def row(self, layer: int, atom: int) -> dict[str, Any]:
        """Returns the main table's row of one atom. Raises ValueError if there is no such atom."""
        self.top(layer, atom)
        table: Any = self._table("atlas")
        return table[(table["layer"] == layer) & (table["atom"] == atom)].iloc[0].to_dict()

    def merge(self, other: Result) -> Any:
        """Returns the atlas over the samples of both, with the tiles or contexts of its top tokens.

        Raises ValueError as `Result.merge` does.
        """
        merged = super().merge(other)
        places = merged.stored["top"][["sample", "token"]].drop_duplicates()
        shown = {
            name: merged.stored[name].merge(places, on=["sample", "token"])
            for name in ("tiles", "contexts")
        }
        return Atlas({**merged.stored, **shown}, merged.meta)

    def headline(self) -> str:
        """Returns how many atoms there are and are dead, and the atom that answers need most."""
        table: Any = self._table("atlas")
        words = super().headline()
        if table["ablation"].isna().all():
            return words
        best = table.loc[table["ablation"].idxmax()]
        samples: Any = self._table("ablations")["samples"].max()
        return (
            f"{words.removesuffix('.')}; answers depend most on atom {best['atom']} of layer "
            f"{best['layer']}, without which they move by {best['ablation']:.2g} nats on average "
            f"over {counted(int(samples), self.meta['unit'])}."
        )

    def _shown(self) -> pd.DataFrame:
        table: Any = self._table("atlas")
        return table.sort_values("ablation", ascending=False, kind="stable").head(20)[_SHOWN]


def atlas(
    model: HookedModel,
    data: Data,
    *,
    top: int = 9,
    ablate: int = 2,
    limit: int | None = None,
    batch_size: int = 32,
    progress: bool = True,
) -> Atlas:
    """Measures every atom of every layer: statistics, top activations, effects, nearest atoms.

    Statistics and the `top` tokens of each atom come from one pass over `data` (`ci.atoms`); memory
    does not grow with the number of samples. raises, lowers: the classes or tokens whose logit the
    atom's direction moves most, `<row of W_out, g * w_t>` less the mean over t. That is the direct
    path alone (a logit lens): in CRATE and CRATE-LM, where later steps re-code the stream, it is
    exact in the last layer only. nearest: atoms of other layers by the cosine of columns of D.
    ablation: the mean Kullback-Leibler divergence, in nats, of the model's answers with the atom
    set to 0 everywhere from its own answers, over the first `ablate` samples; with 0 it is not
    measured.

    data, limit: as in `ci.sweep`. `ci.viz.atlas_pages(atlas, out)` writes pages of an atlas. Raises
    ValueError as `ci.sweep` does, and for models without logits (a masked autoencoder, a CLIP).
    """
    check_model(model)
    if model.cfg.kind not in ("vision", "text"):
        raise ValueError(
            f"{type(model).__name__} has no logits, so that there is no atlas of it: give a "
            "classifier of images or a language model."
        )
    ablate = checks.count("ablate", ablate, least=0)
    checks.count("top", top)
    checks.count("batch_size", batch_size)
    samples = samples_of(model, data, limit)
    settings = atom_settings(model, top=top) | {"ablate": ablate}
    meta = data_meta(model, samples, batch_size) | {"settings": settings}
    measure = partial(_of_chunk, meta=meta, progress=progress)
    options: dict[str, Any] = dict(batch_size=batch_size, what="atoms", progress=progress)
    return fold(model, samples, measure, Atlas.merge, **options)


def _of_chunk(chunk: Chunk, meta: Mapping[str, Any], progress: bool) -> Atlas:
    model, samples, settings = chunk.model, chunk.samples, meta["settings"]
    tables = atom_tables(chunk, settings)
    # ablations are over the first samples of the entire data set: this chunk may hold none of them
    last = min(settings["ablate"], samples.start + samples.n)
    inputs = None
    if last > samples.start:
        inputs = samples.read(samples.start, last).to(model.cfg.device)
    with torch.no_grad():
        tables |= {"directions": directions(model), "ablations": ablations(model, inputs, progress)}
    tables |= excerpts(tables["top"], model, samples, progress)
    return Atlas(tables, {**meta, **chunk.range})
