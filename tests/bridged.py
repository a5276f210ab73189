"""Pairs of a hooked model and its bridge, for the tests of the bridge."""

import torch

import crate_interp as ci
from conftest import make, make_lm

VISION = ["crate", "crate-alpha"]
TEXT = ["crate-lm", "crate-lm vanilla", "gpt-baseline", "nanochat-crate"]


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


def metric(logits):
    """A class's or a next token's logit, mean over samples."""
    return (logits if logits.ndim == 2 else logits[:, -1])[:, 3].mean()
