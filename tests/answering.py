"""The models that have logits, with inputs."""

import torch

from conftest import BATCH, make, make_lm

VISION, TEXT = (
    ["crate", "crate-alpha"],
    ["crate-lm", "crate-lm vanilla", "nanochat-crate", "gpt-baseline"],
)


def ready(name, **over):
    """Returns a random model and inputs for it."""
    if name in VISION:
        return make(name, **over), torch.randn(
            BATCH, 3, 6, 20, generator=torch.Generator().manual_seed(1)
        )
    return make_lm(name, **over), torch.randint(
        47, (BATCH, 11), generator=torch.Generator().manual_seed(1)
    )
