"""Writes records of atoms for automated interpretability: tokens and activations, as JSON files.

    python demos/neuron_records.py --layer 2 --atoms 3 17 --out runs/records

The format is that of OpenAI's automated-interpretability (neuron-explainer/activations), a
NeuronRecord for each atom, with which the neuron-level scores of the CRATE-LM paper (arXiv
2410.16443) can be computed by a language model; this script asks none.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kurtosis, skew
from torch import Tensor
from training import arguments

import crate_interp as ci

LONGEST, BATCH = 64, 8  # tokens of a piece, as in OpenAI's records; windows that run at once


@torch.no_grad()
def neuron_records(
    model: Any,
    tokens: Tensor,
    out: Path,
    layer: int,
    atoms: Sequence[int],
    top: int = 20,
    random: int = 20,
    seed: int = 0,
) -> None:
    """Writes a record of each atom of a layer into out/LAYER/ATOM.json.

    A record holds the `top` pieces of text with the largest activation, `random` others, and the
    mean, variance, skewness and kurtosis of the activation over all tokens. A piece is a window of
    the data, cut into parts of 64 tokens. tokens: the windows, `[window, pos]`.
    """
    point = f"blocks.{layer}.mlp.hook_post"
    codes = torch.cat([
        model.run_with_cache(part, names_filter=point)[1][point][..., list(atoms)].float().cpu()
        for part in tokens.split(BATCH)
    ])  # fmt: skip
    size = min(LONGEST, tokens.shape[1])
    whole = tokens.shape[1] // size * size  # a last part that is shorter is left out
    pieces = tokens[:, :whole].reshape(-1, size).tolist()
    values = codes[:, :whole].reshape(len(pieces), size, len(atoms)).double().numpy()
    words = [[model.to_single_str_token(token) for token in piece] for piece in pieces]
    generator = np.random.default_rng(seed)
    (out / str(layer)).mkdir(parents=True, exist_ok=True)
    for place, atom in enumerate(atoms):
        own = values[:, :, place]
        order = np.argsort(-own.max(axis=1), kind="stable")
        others = generator.permutation(order[top:])[:random]
        record = {
            "dataclass_name": "NeuronRecord",
            "neuron_id": {
                "dataclass_name": "NeuronId", "layer_index": layer, "neuron_index": atom,
            },
            "random_sample": [activation_record(words[n], own[n]) for n in others],
            "random_sample_by_quantile": None,
            "quantile_boundaries": None,
            "mean": float(own.mean()),
            "variance": float(own.var()),
            "skewness": float(skew(own.ravel())) if own.any() else 0.0,
            "kurtosis": float(kurtosis(own.ravel(), fisher=False)) if own.any() else 0.0,
            "most_positive_activation_records": [
                activation_record(words[n], own[n]) for n in order[:top]
            ],
        }  # fmt: skip
        path = out / str(layer) / f"{atom}.json"
        path.write_text(json.dumps(record, allow_nan=False), encoding="utf-8")


def activation_record(words: list[str], values: np.ndarray) -> dict[str, Any]:
    """Returns the tokens of a piece and the activations at them."""
    rounded = [float(f"{value:.6g}") for value in values]
    return {"dataclass_name": "ActivationRecord", "tokens": words, "activations": rounded}


def main() -> None:
    """Reads the arguments, and writes the records of some atoms of a language model."""
    given = arguments(
        __doc__, model="crate-tiny-lm", data="embedded:held-out-text", layer=int, atoms=[0, 0],
        limit=0, out=Path("runs/records"),
    )  # fmt: skip
    model: Any = ci.load(given.model)
    samples = ci.data.open_text(given.data, model.window_rows, given.limit or None, model.to_tokens)
    tokens = samples.read(0, samples.n)
    neuron_records(model, tokens, given.out, given.layer, given.atoms)
    print(f"{len(given.atoms)} records in {given.out / str(given.layer)}")


if __name__ == "__main__":
    main()
