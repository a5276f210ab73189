"""Pairs of a hooked model and its bridge, for the tests of the bridge."""

import pytest
import torch

import crate_interp as ci
from conftest import IMAGE, make, make_lm

VISION = ["crate", "crate-alpha"]
TEXT = ["crate-lm", "crate-lm vanilla", "gpt-baseline", "nanochat-crate"]
EVERY = VISION + TEXT
# the first one always, the others where slow tests run
FEW = [VISION[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EVERY[1:])]
FEW_TEXT = [TEXT[-1], *(pytest.param(name, marks=pytest.mark.slow) for name in TEXT[:-1])]


def model_of(name):
    return make(name) if name in VISION else make_lm(name)


def input_of(name, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if name in VISION:
        return torch.randn(2, 3, 6, 20, generator=generator)
    return torch.randint(47, (2, 7), generator=generator)


def pair(name):
    """A model, a bridge over it, and an input."""
    model = model_of(name)
    return model, ci.to_bridge(model), input_of(name)


def make_mae():
    size = dict(d_model=30, n_layers=2, n_heads=5, decoder_n_heads=5, decoder_n_layers=3)
    return ci.HookedCrateMAE(ci.CrateConfig(family="crate-mae", **size, **IMAGE)).eval()


def make_clip():
    size = dict(d_model=30, n_layers=2, n_heads=5, **IMAGE)
    text = dict(d_embed=8, text_d_model=12, text_n_layers=1, text_n_heads=2, n_ctx=5, d_vocab=11)
    return ci.HookedCrateCLIP(ci.CrateConfig(family="clipa", **size, **text)).eval()


def metric(logits):
    """A class's or a next token's logit, mean over samples."""
    return (logits if logits.ndim == 2 else logits[:, -1])[:, 3].mean()
