"""The slope of the loss where a step begins to replace a layer's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import full_name
from crate_interp.models.hooked import HookedModel
from crate_interp.surgeries.answers import Answers, answers
from crate_interp.surgeries.steps import Step

_POINTS = {"hook_attn_out": 0, "mlp.hook_post": 1}  # part of the seed


@dataclass(frozen=True)
class Unchanged:
    """A forward of the model as it is: its answers, and what its points hold, by full name.

    gradients: those of the sum of the losses, at the points that steps replace.
    """

    answers: Answers
    acts: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def layer(self, step: Step, layer: int) -> dict[str, Tensor]:
        """Returns the activations that a step needs in a layer, by their points in a block."""
        points = (*step.reads, step.point)
        return {point: self.acts[full_name(point, layer)] for point in points}


def unchanged(
    model: HookedModel, inputs: Tensor, classes: Tensor | None, steps: Sequence[Step]
) -> Unchanged:
    """Runs the model as it is, forward and backward."""
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> Tensor:
        # a leaf of the graph's own, so that weights without gradient do not matter
        seen[hook.name] = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return seen[hook.name]

    layers = range(len(model.blocks))
    targets = [full_name(point, k) for point in {step.point for step in steps} for k in layers]
    reads = {full_name(point, k) for step in steps for point in step.reads for k in layers}
    with torch.enable_grad():
        hooks = [(name, keep) for name in (*targets, *sorted(reads))]
        own = answers(model, inputs, classes, hooks)
        gradients = torch.autograd.grad(own.loss.sum(), [seen[name] for name in targets])
    own = Answers(own.loss.detach(), own.right, own.stream)
    acts = {name: value.detach() for name, value in seen.items()}
    return Unchanged(own, acts, dict(zip(targets, gradients, strict=True)))


def slope(
    gradient: Float[Tensor, "batch pos width"], change: Float[Tensor, "batch pos width"]
) -> Float[Tensor, "batch"]:
    """Returns `<gradient, change>` of each sample, in float64."""
    return (gradient.double() * change.double()).sum(dim=(1, 2))


def random_slopes(
    gradient: Float[Tensor, "batch pos width"],
    change: Float[Tensor, "batch pos width"],
    turns: tuple[Tensor, Tensor],
) -> Float[Tensor, "direction"]:
    """Returns the slopes along turned changes, summed over the batch, in float64.

    A turn puts entry order[j] of each token's change, times signs[j], in the place of entry j. With
    M = sum change^T gradient `[width, width]` the slope is `sum_j signs_j M[order_j, j]`.
    """
    order, signs = turns  # [direction, width] each
    products = change.double().flatten(0, 1).T @ gradient.double().flatten(0, 1)
    columns = torch.arange(order.shape[1], device=order.device)
    return (signs * products[order, columns]).sum(dim=-1)


def turns_of(
    step: Step, layer: int, width: int, directions: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns the orders and the signs of some random turns, `[direction, width]` each.

    They depend on the seed, the layer and the point, and neither on samples nor on the step.
    """
    drawn = [
        np.random.default_rng([seed, _POINTS[step.point], layer, direction])
        for direction in range(directions)
    ]
    order = np.stack([one.permutation(width) for one in drawn])
    signs = np.stack([one.choice([-1.0, 1.0], width) for one in drawn])
    return torch.from_numpy(order), torch.from_numpy(signs)
