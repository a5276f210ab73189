"""What an evaluation of autoencoders looks at, and how it reads activations."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from crate_interp.saes.coders import Coder, flat, matched
from crate_interp.sweeps.runs.batches import Batch


@dataclass(frozen=True)
class Plan:
    """What both passes need to know.

    kind: that of the loss, a key of LOSSES. classes, mask `[n, pos]`: of all samples, or None.
    first: the number of the first sample.
    """

    saes: Mapping[str, Coder]
    kind: str
    classes: Tensor | None
    mask: Tensor | None
    first: int

    def part(self, values: Tensor | None, batch: Batch) -> Tensor | None:
        """Returns the rows of a batch."""
        start = batch.start - self.first
        return None if values is None else values[start : start + len(batch.inputs)]


def vectors_of(sae: Coder, x: Tensor, point: str) -> Tensor:
    """Returns what a point holds with one row for each row of features, in the model's dtype."""
    read = flat(sae, x, point)
    matched(sae, read)  # raises for another device
    return read.flatten(-2) if getattr(sae, "hook_z_reshaping_mode", False) is True else read


def weights_of(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Returns 1 for rows of tokens that count and 0 for padding, `[batch, ...]`, in float64."""
    weight = torch.ones(vectors.shape[:-1], dtype=torch.float64, device=vectors.device)
    if mask is None or weight.ndim < 2:
        return weight
    return weight * mask.reshape(*mask.shape, *[1] * (weight.ndim - 2))
