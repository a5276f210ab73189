"""Models and data that the tests of atlases and of effects share."""

import torch

from conftest import make, make_lm

LOOK = dict(
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.25, 0.25),
    labels=[f"<kind {number}>" for number in range(11)],
)
MODELS = ["crate", "crate-alpha", "crate-lm", "crate-lm vanilla", "nanochat-crate"]


def ready(name):
    if name.startswith(("crate-lm", "nanochat")):
        return make_lm(name), torch.randint(47, (5, 11), generator=torch.Generator().manual_seed(1))
    return make(name, **LOOK), torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))
