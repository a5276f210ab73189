"""The objective that a CRATE layer is meant to improve: sparse rate reduction."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import rates, sparsity

__all__ = ["layer_objectives", "sparse_rate_reduction"]

Penalty = Callable[[Tensor], Tensor]  # [..., pos, d_model] -> [..., pos]


def sparse_rate_reduction(
    z: Float[Tensor, "*batch pos d_model"],
    u: Float[Tensor, "head d_model d_head"],
    eps: float,
    lambd: float,
    penalty: Penalty = sparsity.l0_norm,
    normalise: bool = False,
) -> Float[Tensor, "*batch"]:
    """Returns the negated objective of a layer: lower is better.

    `lambd |Z|_0 + R^c(Z | U; eps) - R(Z; eps)`.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[...]` in nats, either sign; 0 for Z =
    0. arXiv 2411.17182 eq. 11 (its summand), arXiv 2306.01129 eq. 1 (negated). penalty: `l0_norm`,
    a count whose gradient is zero everywhere, or another function to `[..., pos]` such as
    `l1_norm`. The penalty is summed over tokens and, with `normalise`, divided by the number of
    entries of z. The papers do not say whether their count is a fraction, which eps they used, or
    whether they trained with the count or with a surrogate; 2411.17182 has lambd = 0.1 and measures
    without LayerNorm. Raises ValueError as `coding_rate` does.
    """
    rate, per_head = rates.coding_rate(z, eps), rates.subspace_coding_rate(z, u, eps)
    size = penalty(z).sum(dim=-1)
    if normalise:
        size = size / (z.shape[-1] * z.shape[-2])
    return lambd * size + per_head.sum(dim=-1) - rate


def layer_objectives(
    layers: Sequence[Callable[[Tensor], Tensor]],
    bases: Sequence[Tensor],
    z: Float[Tensor, "*batch pos d_model"],
    eps: float,
    lambd: float,
    penalty: Penalty = sparsity.l0_norm,
    normalise: bool = False,
) -> Float[Tensor, "layer *batch"]:
    """Returns the `sparse_rate_reduction` of each layer's output, with detached layer inputs.

    `mu_l = mu(f_l(sg(Z^{l-1})) | U_l)`, where sg detaches the output of the layer before.

    layers: callables z -> z, such as `model.blocks`. bases: the U of each layer, `[head, d_model,
    d_head]`. z: the input of the first layer, `[..., pos, d_model]`. -> `[layer, ...]` in nats.
    arXiv 2411.17182 eq. 14 adds gamma = 0.001 times the sum of all mu_l, or times mu_l of the last
    layer, to the cross-entropy. The gradient of mu_l reaches only layer l, and the default penalty
    adds nothing to it. Raises ValueError if there are no layers, or if there are not as many bases
    as layers.
    """
    if not len(layers) or len(layers) != len(bases):
        raise ValueError(
            f"there are {len(layers)} layers and {len(bases)} bases: give at least one layer, and "
            "as many bases as layers."
        )
    terms: list[Tensor] = []
    for layer, u in zip(layers, bases, strict=True):
        z = layer(z.detach())
        terms.append(sparse_rate_reduction(z, u, eps, lambd, penalty, normalise))
    return torch.stack(terms)
