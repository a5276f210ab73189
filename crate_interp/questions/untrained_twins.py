"""Untrained twins: the same architecture with random weights, to compare a model with."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.text_and_tokens import TOKENIZER_STATE

SAMPLES = 64  # samples below this number are those on which twins are measured; enough for a mean
FEW = 16  # number of samples on which an audit measures shuffled networks


def twin(model: HookedModel, seed: int) -> Any:
    """Returns a model of the same architecture with the official random initialisation.

    torch's global random state is left as it was.
    """
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            other: Any = model.fresh()
        finally:
            torch.set_default_dtype(default)
    for name in TOKENIZER_STATE:
        if name in vars(model):
            vars(other)[name] = vars(model)[name]
    return other.to(device=model.cfg.device, dtype=model.cfg.dtype).eval()


def shuffled(model: HookedModel, seed: int) -> Any:
    """Returns the network with the entries of each of its tensors in random order.

    Its weights are random, but as large as the model's, tensor by tensor. So a network whose
    weights were drawn independently, at whatever scale, differs from it only by chance.
    """
    other = twin(model, seed)
    generator = torch.Generator().manual_seed(seed)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in other.named_parameters():
            flat = own[name].detach().flatten()
            order = torch.randperm(len(flat), generator=generator).to(flat.device)
            weight.copy_(flat[order].reshape(weight.shape))
    return other


def stacked(tables: Sequence[pd.DataFrame], *keys: str) -> pd.DataFrame:
    """Returns the tables of the twins as one table with a column `seed`.

    keys: the columns of the table if there are no twins.
    """
    parts = [table.assign(seed=seed) for seed, table in enumerate(tables)]
    if not parts:
        return pd.DataFrame({name: [] for name in (*keys, "seed")})
    return pd.concat(parts, ignore_index=True)
