"""The stream's way from one layer's attention to a later one, as a linear map: with all atoms on, or at the tokens of data."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.models.baseline import MLP
from crate_interp.models.norm import HookedLayerNorm
from crate_interp.models.sparsify import ISTA, OvercompleteODL, ThresholdODL

Rows = Float[Tensor, "*rows d_model"]


def normed(norm: Any, rows: Rows) -> Rows:
    """The linear part of a norm whose scale is taken as 1: `(v - mean v) * weight`; RMS norms and none change nothing."""
    if not isinstance(norm, HookedLayerNorm):
        return rows
    return (rows - rows.mean(dim=-1, keepdim=True)) * norm.weight


def stepped(block: Any, rows: Rows) -> Rows:
    """One sparse step with its norm, all atoms on: rows of the stream after attention -> rows after the layer."""
    step = _LINEAR[type(block.mlp)](block.mlp, normed(block.ln2, rows))
    return rows + step if block.residual else step


def _ista(mlp: Any, y: Rows) -> Rows:
    return y - mlp.eta * ((y @ mlp.D.T) @ mlp.D - y @ mlp.D)


def _overcomplete(mlp: Any, y: Rows) -> Rows:
    code = mlp.eta * (y @ mlp.D)
    return (code - mlp.eta * ((code @ mlp.D.T - y) @ mlp.D)) @ mlp.W_out


def _through(mlp: Any, y: Rows) -> Rows:
    return (y @ mlp.W_in) @ mlp.W_out


_LINEAR: dict[type, Callable[[Any, Rows], Rows]] = {
    ISTA: _ista,
    OvercompleteODL: _overcomplete,
    ThresholdODL: _through,
    MLP: _through,
}


def pushed(
    function: Callable[[Tensor], Tensor],
    at: Tensor,
    tangents: Float[Tensor, "count batch pos d_model"],
) -> Float[Tensor, "count batch pos d_model"]:
    """The derivative of a function of the stream at `at` `[batch, pos, d_model]` along each of several tangents.

    By two reverse passes: the first is linear in its cotangent w, and its own derivative is the forward one.
    """
    with torch.enable_grad():
        x = at.detach().requires_grad_()
        out = function(x)
        w = torch.zeros_like(out, requires_grad=True)
        (back,) = torch.autograd.grad(out, x, w, create_graph=True)
        return torch.stack(
            [torch.autograd.grad(back, w, tangent, retain_graph=True)[0] for tangent in tangents]
        )
