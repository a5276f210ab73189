"""What an autoencoder is compared with: shuffled weights, constants, and PCA of the activations.

The first pass of an evaluation measures mean and covariance of the activations at points.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.questions.experiment import Rules
from crate_interp.saes.coders import Coder
from crate_interp.sweeps.moments import from_bytes, to_bytes


def shuffled(sae: Coder, seed: int) -> Coder | None:
    """Returns a copy of a module with the numbers of each matrix in random order.

    Architecture, biases, thresholds and the distribution of weights stay; the learned directions
    are lost. Returns None for an autoencoder that is not a module, since its weights are unknown.
    """
    if not isinstance(sae, nn.Module):
        return None
    random = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(sae)
    with torch.no_grad():
        for value in other.parameters():
            if value.ndim > 1:
                order = torch.randperm(value.numel(), generator=random).to(value.device)
                value.copy_(value.flatten()[order].view_as(value))
    return other


@dataclass(frozen=True)
class Components:
    """PCA as an autoencoder: `acts = (x - mean) V`, `x' = acts V^T + mean`.

    directions V `[d_in, k]`: the orthonormal directions of largest variance. Without directions,
    every token becomes the mean, as in mean ablation.
    """

    mean: Float[Tensor, "d_in"]
    directions: Float[Tensor, "d_in k"]

    def encode(self, x: Tensor, /) -> Tensor:
        """Returns the components of activations, all of them active."""
        return ((x.double() - self.mean) @ self.directions).to(x.dtype)

    def decode(self, acts: Tensor, /) -> Tensor:
        """Returns the activations reconstructed from components."""
        return (acts.double() @ self.directions.T + self.mean).to(acts.dtype)


@dataclass(frozen=True)
class Moments:
    """Sums over the tokens at a hook point, in float64; they give the mean and the covariance.

    tokens: the number of tokens. mean `[d_in]`. products `[d_in, d_in]`: the sum of products of
    centred activations (without centring, a large mean would make the variances inexact).
    features: the number of active features, summed over tokens.
    """

    tokens: int
    mean: Float[Tensor, "d_in"]
    products: Float[Tensor, "d_in d_in"]
    features: int

    @classmethod
    def of(cls, x: Float[Tensor, "token d_in"], features: int) -> "Moments":
        """Returns the moments of tokens; features: the number of active features of all tokens."""
        wide = x.double()
        mean = wide.mean(dim=0)
        off = wide - mean
        return cls(len(wide), mean, off.T @ off, features)

    def merged(self, other: "Moments") -> "Moments":
        """Returns the moments of both sets of tokens (Chan, Golub, LeVeque 1979)."""
        tokens, step = self.tokens + other.tokens, other.mean - self.mean
        apart = (self.tokens * other.tokens / tokens) * step[:, None] * step
        mean = self.mean + step * (other.tokens / tokens)
        products = self.products + other.products + apart
        return Moments(tokens, mean, products, self.features + other.features)

    def components(self) -> Components:
        """Returns PCA with as many components as a token has active features on average.

        There is at least one component.
        """
        width = len(self.mean)
        k = min(max(round(self.features / self.tokens), 1), width)
        directions = torch.linalg.eigh(self.products / self.tokens).eigenvectors[:, width - k :]
        return Components(self.mean, directions)


def moments_in(table: pd.DataFrame, device: str | torch.device = "cpu") -> dict[str, Moments]:
    """Returns the moments of each point from a table "moments"."""
    found: dict[str, Moments] = {}
    rows: Any = table.itertuples()
    for row in rows:
        arrays = from_bytes(row.mean, -1), from_bytes(row.products, len(row.mean) // 8, -1)
        mean, products = (torch.from_numpy(array).to(device) for array in arrays)
        found[row.point] = Moments(int(row.tokens), mean, products, int(row.features))
    return found


def _merged(mine: pd.DataFrame, theirs: pd.DataFrame, meta: Mapping[str, Any]) -> pd.DataFrame:
    """Returns the moments of two sets of tokens together."""
    one, two = moments_in(mine), moments_in(theirs)
    return table_of({point: one[point].merged(two[point]) for point in one})


def table_of(moments: Mapping[str, Moments]) -> pd.DataFrame:
    """Returns the table "moments", a row per point: the fields of `Moments`, arrays as bytes."""
    rows = [(point, *vars(own).values()) for point, own in moments.items()]
    table: Any = pd.DataFrame(rows, columns=["point", *Moments.__dataclass_fields__])
    return table.assign(**{name: [*map(to_bytes, table[name])] for name in ("mean", "products")})


MEANS: Rules = {"moments": _merged}
