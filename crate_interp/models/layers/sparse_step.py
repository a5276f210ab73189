"""What every sparse step says of itself: its lasso, its linear form, and what its atoms write."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Lasso:
    """A sparse step as proximal gradient steps on a lasso.

    The lasso is the minimum over z >= 0 of `|y - D z|^2 / 2 + <lambd, z>`; lambd is one number, or
    one for each atom. The step takes `count` steps of size `eta`, from its own input (`warm`) or
    from zero.
    """

    d: Float[Tensor, "d_model d_mlp"]
    eta: float
    lambd: Float[Tensor, "*atoms"]
    warm: bool
    count: int

    def start(self, y: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch pos d_mlp"]:
        """Returns where it starts: its input without the negative entries, or zero."""
        return torch.relu(y) if self.warm else y.new_zeros(*y.shape[:-1], self.d.shape[1])

    def run(
        self, y: Float[Tensor, "*batch pos d_model"], lambd: Float[Tensor, "*atoms"]
    ) -> Float[Tensor, "*batch pos d_mlp"]:
        """Returns the code after its steps with another penalty; with its own it is the layer's."""
        code = y if self.warm else self.start(y)
        for _ in range(self.count):
            code = torch.relu(
                code - self.eta * ((code @ self.d.mT - y) @ self.d) - self.eta * lambd
            )
        return code


class SparseStep(nn.Module):
    """What follows attention in a layer.

    A step is a subclass with `forward`, `lasso`, `linear`, and `W_out` or `written`. The forward
    takes the normalised stream `[batch, pos, d_model]` and returns what the layer adds to the
    stream, or what replaces it. Configs choose a step by the table in
    crate_interp/models/layers/block.py.
    """

    def lasso(self) -> Lasso | str:
        """Returns the lasso that the step works on, or a sentence that says why there is none.

        The lasso has the weights, eta and lambd that the step has at the time of the call.
        """
        raise NotImplementedError

    def linear(self, y: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Returns the linear part of the step if every atom is on.

        y: rows of the normalised stream. Thresholds and biases are constants then and left out.
        """
        raise NotImplementedError

    def written(self) -> Float[Tensor, "d_mlp d_model"]:
        """Returns the direction in the stream that each atom writes."""
        rows: Any = self.W_out
        return rows
