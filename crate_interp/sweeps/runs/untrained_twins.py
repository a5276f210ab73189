"""Untrained twins: the same architecture with random weights, to compare with a trained model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch

from crate_interp.data import Samples, part
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.text_and_tokens import TOKENIZER_STATE

SAMPLES = 64  # number of samples on which twins are measured
_SMALLER = 1 / 3  # training does not shrink official positional embeddings below this share


def first_samples(samples: Samples) -> Samples | None:
    """Returns the samples on which twins are measured, or None if there are no such samples.

    Twins are measured on the given samples that are among the first 64 of the data.
    64 samples are enough for a mean, and networks differ more than samples do.
    """
    stop = min(SAMPLES, samples.start + samples.n)
    return part(samples, samples.start, stop) if samples.start < stop else None


def twin(model: HookedModel, seed: int) -> Any:
    """Returns a model of the same architecture with the official random initialisation.

    torch's global random state is left as it was.
    """
    with _seeded(seed):
        other: Any = model.fresh()
    for name in TOKENIZER_STATE:
        if name in vars(model):
            vars(other)[name] = vars(model)[name]
    return other.to(device=model.cfg.device, dtype=model.cfg.dtype).eval()


def other_start(model: HookedModel) -> str:
    """Returns a caution if a model's positional embeddings are far smaller than its twins'.

    Rates depend on the length of tokens, and therefore on how the training was initialised.
    Returns "" if there is nothing to caution about.
    """
    drawn, own = (getattr(one, "pos_embed", None) for one in (twin(model, 0), model))
    if not isinstance(drawn, torch.Tensor) or not isinstance(own, torch.Tensor):
        return ""
    first, now = (float(one.detach().double().std()) for one in (drawn, own))
    if not now < first * _SMALLER:
        return ""
    return (
        "Untrained twins draw their positional embeddings with a standard deviation of "
        f"{first:.2g}, as the authors' code does; this model's embeddings have {now:.2g}. If the "
        "training of this model began with smaller embeddings, the model at its start has other "
        "rates than the twins. Then compare the model with a checkpoint of its own start "
        "(`crate-interp compare`)."
    )


def stacked(tables: Sequence[pd.DataFrame], *keys: str) -> pd.DataFrame:
    """Returns the tables of the twins as one table with a column `seed`.

    keys: the columns of the table if there are no twins.
    """
    parts = [table.assign(seed=seed) for seed, table in enumerate(tables)]
    if not parts:
        return pd.DataFrame({name: [] for name in (*keys, "seed")})
    return pd.concat(parts, ignore_index=True)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch's global generator while the context is open."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
