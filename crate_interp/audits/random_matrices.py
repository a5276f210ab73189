"""Random weights in place of a layer's own: matrices with the same singular values."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def random_like(
    matrix: Float[Tensor, "rows columns"],
    generator: torch.Generator,
    values: Float[Tensor, "number"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """Returns a random matrix with the same singular values and uniformly random bases.

    values: the singular values, if they are already known.
    """
    own = torch.linalg.svdvals(matrix.double()) if values is None else values
    left, right = (
        torch.linalg.qr(torch.randn(n, len(own), generator=generator, dtype=torch.float64))[0]
        for n in matrix.shape
    )
    return ((left.to(own.device) * own) @ right.to(own.device).T).to(matrix.dtype)


def randoms_like(
    matrix: Float[Tensor, "rows columns"], generators: Sequence[torch.Generator]
) -> tuple[Float[Tensor, "rows columns"], ...]:
    """Returns `random_like` for each generator."""
    values = torch.linalg.svdvals(matrix.double()) if generators else None
    return tuple(random_like(matrix, generator, values) for generator in generators)
