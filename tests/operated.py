"""Models of each kind that surgery is tried on, their inputs and labels."""

import torch

from conftest import make, make_lm

N = 5
MODELS = {
    "crate": lambda: make("crate"),
    "crate-alpha": lambda: make("crate-alpha"),
    "crate-lm": make_lm,
    "windowed": lambda: _positive(make_lm("nanochat-crate", window_pattern="LS")),
}


def _positive(lm):
    for block in lm.blocks:
        block.mlp.threshold.data.abs_()
    return lm


def inputs_of(model, n=N):
    generator = torch.Generator().manual_seed(1)
    if model.unit == "windows":
        return torch.randint(0, 47, (n, 13), generator=generator)
    return torch.randn(n, 3, 6, 20, generator=generator, dtype=torch.float64)


def labels_of(model, n=N):
    return None if model.unit == "windows" else [(3 * place) % 11 for place in range(n)]
