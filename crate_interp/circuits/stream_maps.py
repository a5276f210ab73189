"""How rows of the stream pass through layers: with every atom on, or at the tokens of data."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.models.layers.block import CrateBlock
from crate_interp.models.layers.norm import HookedLayerNorm, HookedNorm

Rows = Float[Tensor, "*rows d_model"]


def normed(norm: HookedNorm, rows: Rows) -> Rows:
    """Returns rows of the stream after a norm of scale 1, without its bias.

    That is `(v - mean v) * weight`. An RMS norm, or no norm, then changes nothing.
    """
    if not isinstance(norm, HookedLayerNorm):
        return rows
    return (rows - rows.mean(dim=-1, keepdim=True)) * norm.weight


def stepped(block: CrateBlock, rows: Rows) -> Rows:
    """Returns rows of the stream after a layer's sparse step.

    Every atom is on, and the norm before the step has scale 1.
    """
    step = block.mlp.linear(normed(block.ln2, rows))
    return rows + step if block.residual else step


def pushed(
    function: Callable[[Tensor], Tensor],
    at: Float[Tensor, "batch pos d_model"],
    tangents: Float[Tensor, "count batch pos d_model"],
) -> Float[Tensor, "count batch pos d_model"]:
    """Returns the derivative of a function of the stream at `at` along each of several tangents.

    It takes two reverse passes: the first is linear in its cotangent w, and the derivative of that
    is the forward one.
    """
    with torch.enable_grad():
        x = at.detach().requires_grad_()
        out = function(x)
        w = torch.zeros_like(out, requires_grad=True)
        (back,) = torch.autograd.grad(out, x, w, create_graph=True)
        return torch.stack(
            [torch.autograd.grad(back, w, tangent, retain_graph=True)[0] for tangent in tangents]
        )
