"""Records of atoms for automated interpretability: tokens and activations, as JSON files.

The format is that of OpenAI's automated-interpretability (neuron-explainer/activations): a
NeuronRecord for each atom, with the windows at which it is largest and random ones. Neuronpedia
reads the same lists of tokens and activations.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import kurtosis, skew
from torch import Tensor

from crate_interp.circuits.atlases.atom_logits import answer_names
from crate_interp.core import checks
from crate_interp.core.files import write_text
from crate_interp.core.run_options import DEFAULTS
from crate_interp.data import Data
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.compat.offload import with_weights
from crate_interp.models.hook_points import check_atoms
from crate_interp.models.hooked import HookedModel
from crate_interp.sweeps.atom_statistics import CODE
from crate_interp.sweeps.runs.batches import Batch, Chunk, Reading, check_model, samples_of

_LONGEST = 64  # tokens of a window, as in the records that OpenAI published
_BATCH = 8


@with_weights
@in_full_precision
def neuron_records(
    model: HookedModel,
    data: Data,
    out: str | Path,
    *,
    layer: int,
    atoms: Sequence[int] | None = None,
    top: int = 20,
    random: int = 20,
    limit: int | None = None,
    seed: int = 0,
) -> Path:
    """Writes a record of each atom of a layer into out/LAYER/ATOM.json, and returns out.

    A record holds the `top` pieces of text with the largest activation, `random` others, and the
    mean, variance, skewness and kurtosis of the activation over all tokens. A piece is a window of
    the data, cut into parts of 64 tokens. With them and a language model to ask, the neuron-level
    scores of the CRATE-LM paper (arXiv 2410.16443) can be computed; this function asks none.

    data: texts, as in `ci.sweep`; limit: the first so many windows. atoms: None stands for all.
    Raises ValueError for a model that reads no text or has no codes, and for a layer or an atom
    that it lacks.
    """
    check_model(model)
    check_atoms(model.cfg, "a neuron record")
    if model.cfg.kind != "text":
        raise ValueError("neuron records are of tokens: give a language model.")
    layer = checks.layer("layer", layer, model.cfg.n_layers)
    net: Any = model
    width = net.cfg.d_mlp
    chosen = list(range(width)) if atoms is None else list(atoms)
    if layer == model.cfg.n_layers or not all(
        checks.is_int(atom) and 0 <= atom < width for atom in chosen
    ):
        raise ValueError(
            f"layer {layer}, atoms {checks.shown(atoms)}: the model has layers 0 to "
            f"{model.cfg.n_layers - 1} and atoms 0 to {width - 1}."
        )
    top, random = checks.count("top", top), checks.count("random", random)
    samples = samples_of(model, data, replace(DEFAULTS, limit=checks.limit(limit)))
    tokens, codes = _read(Chunk(model, samples, _BATCH), layer, chosen)
    words = answer_names(model)
    texts = [[words[token] for token in piece] for piece in tokens.tolist()]
    folder = Path(out) / str(layer)
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for place, atom in enumerate(chosen):
        record = _record(layer, atom, texts, codes[:, :, place].numpy(), top, random, generator)
        write_text(folder / f"{atom}.json", json.dumps(record, allow_nan=False))
    return Path(out)


def _read(
    chunk: Chunk, layer: int, atoms: list[int]
) -> tuple[Tensor, Float[Tensor, "piece pos atom"]]:
    """Returns the tokens of each piece `[piece, pos]`, and the codes of the atoms."""
    tokens, codes = [], []

    def read(layer: int, acts: Any, batch: Batch) -> None:
        codes.append(acts[CODE][..., atoms].detach().float().cpu())

    for batch in chunk.batches():
        chunk.measure(batch, [Reading([CODE], read, [layer])])
        tokens.append(batch.inputs.cpu())
    every, found = torch.cat(tokens), torch.cat(codes)
    size = min(_LONGEST, every.shape[1])
    whole = every.shape[1] // size * size  # a last part that is shorter is left out
    return every[:, :whole].reshape(-1, size), found[:, :whole].reshape(-1, size, len(atoms))


def _record(
    layer: int,
    atom: int,
    texts: list[list[str]],
    values: Float[np.ndarray, "piece pos"],
    top: int,
    random: int,
    generator: np.random.Generator,
) -> dict[str, Any]:
    order = np.argsort(-values.max(axis=1), kind="stable")
    others = generator.permutation(order[top:])[:random]
    flat = values.astype(np.float64).ravel()
    curved = flat.std() > 0  # an atom that is never on has no skewness
    return {
        "dataclass_name": "NeuronRecord",
        "neuron_id": {
            "dataclass_name": "NeuronId", "layer_index": layer, "neuron_index": int(atom),
        },
        "random_sample": [_piece(texts[n], values[n]) for n in others],
        "random_sample_by_quantile": None,
        "quantile_boundaries": None,
        "mean": float(flat.mean()),
        "variance": float(flat.var()),
        "skewness": float(skew(flat)) if curved else 0.0,
        "kurtosis": float(kurtosis(flat, fisher=False)) if curved else 0.0,
        "most_positive_activation_records": [_piece(texts[n], values[n]) for n in order[:top]],
    }  # fmt: skip


def _piece(words: list[str], values: Float[np.ndarray, "pos"]) -> dict[str, Any]:
    return {
        "dataclass_name": "ActivationRecord", "tokens": words,
        "activations": [float(f"{value:.6g}") for value in values],
    }  # fmt: skip
