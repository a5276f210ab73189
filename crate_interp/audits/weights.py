"""The audit of a layer's weights: whether they satisfy the assumptions of the derivation.

It also makes the random weights that replace a layer's own.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp import measures
from crate_interp.probes.layer_reading import dictionary, tied_subspaces


def of_weights(block: Any) -> dict[str, tuple[float, float]]:
    """Returns (value, null) for each number of a layer's weights; null is NaN if there is none.

    The null of "incoherent" is its value for random subspaces, p / d.
    """
    u, d = tied_subspaces(block), dictionary(block)
    none = float("nan")
    numbers: dict[str, tuple[float, float]] = {}
    if u is not None:
        u = u.detach().double()
        wide = u.transpose(0, 1).flatten(1)  # [d_model, head * d_head]
        numbers["orthonormal"] = float(measures.orthonormality_defect(u).mean()), none
        numbers["orthonormal_scaled"] = float(measures.scale_free_defect(u).mean()), none
        numbers["complete"] = float(measures.completeness_defect(u)), none
        numbers["complete_scaled"] = _from_scaled_identity(wide @ wide.T), none
        cosines: Any = of_heads(block)
        numbers["output_map"] = tuple(cosines[["cosine", "null"]].mean())
        if len(u) > 1:
            numbers["incoherent"] = float(measures.head_overlap(u).mean()), u.shape[2] / u.shape[1]
    if d is not None and d.shape[0] == d.shape[1]:
        d = d.detach().double()
        numbers["dictionary"] = float(measures.orthonormality_defect(d)), none
        numbers["dictionary_scaled"] = float(measures.scale_free_defect(d)), none
    return numbers


def of_heads(block: Any) -> pd.DataFrame:
    """Returns each head's cosine of its output map with U_k^T, and with the other heads' U_j^T.

    Columns: head, cosine, null (the mean cosine with the other heads' U_j), spread (the standard
    deviation of the cosine of random matrices, 1 / sqrt(p d)).
    """
    u = tied_subspaces(block)
    columns = ["head", "cosine", "null", "spread"]
    if u is None:
        return pd.DataFrame(columns=columns)
    u, out = u.detach().double(), block.attn.W_O.detach().double()
    own = measures.output_map_cosine(out, u)
    others = [measures.output_map_cosine(out, u.roll(turn, dims=0)) for turn in range(1, len(u))]
    null = torch.stack(others).mean(dim=0) if others else own * float("nan")
    spread = (u.shape[1] * u.shape[2]) ** -0.5
    rows = zip(range(len(u)), own.tolist(), null.tolist(), [spread] * len(u), strict=True)
    return pd.DataFrame(list(rows), columns=columns)


def _from_scaled_identity(gram: Float[Tensor, "d d"]) -> float:
    """Returns |G - c I|_F / (c sqrt(d)), where c is the mean of the diagonal."""
    level = gram.diagonal().mean()
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return float(torch.linalg.matrix_norm(gram / level - eye) / len(gram) ** 0.5)


def randoms_like(
    matrix: Float[Tensor, "rows columns"], generators: Sequence[torch.Generator]
) -> tuple[Float[Tensor, "rows columns"], ...]:
    """Returns a random matrix for each generator, with the singular values of `matrix`.

    Both bases of a random matrix are drawn uniformly.
    """
    if not generators:
        return ()
    own = torch.linalg.svdvals(matrix.double())

    def uniform(rows: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(rows, len(own), generator=generator, dtype=torch.float64)
        return torch.linalg.qr(noise)[0].to(own.device)

    bases = [[uniform(rows, generator) for rows in matrix.shape] for generator in generators]
    return tuple(((left * own) @ right.T).to(matrix.dtype) for left, right in bases)
