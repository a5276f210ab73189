"""Untrained twins: the same network with random weights, to be measured beside a trained one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch

from crate_interp.data import Samples, part
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text import TOKENIZER_STATE

SAMPLES = 64  # on which twins are measured


def first_samples(samples: Samples) -> Samples | None:
    """Returns those of the samples, if any, that twins are measured on: the first 64 of the data.

    That is enough for a mean to compare with, and networks differ more than samples.
    """
    stop = min(SAMPLES, samples.start + samples.n)
    return part(samples, samples.start, stop) if samples.start < stop else None


def twin(model: HookedModel, seed: int) -> Any:
    """Returns the same architecture with the official random initialisation.

    torch's global random state is left as it was.
    """
    with _seeded(seed):
        other: Any = model.fresh()
    for name in TOKENIZER_STATE:
        if name in vars(model):
            vars(other)[name] = vars(model)[name]
    return other.to(device=model.cfg.device, dtype=model.cfg.dtype).eval()


def stacked(tables: Sequence[pd.DataFrame], *keys: str) -> pd.DataFrame:
    """Returns the tables of the twins as one, with their seed.

    keys: the columns that it has even without twins.
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
