"""The audit of a layer's weights: whether they satisfy the assumptions of the derivation.

It also makes the random weights that replace a layer's own.
"""

from collections.abc import Callable, Iterator
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
        # |G - c I|_F / (c sqrt(d)), where c is the mean of the diagonal
        gram = wide @ wide.T
        off = gram / gram.diagonal().mean() - torch.eye(len(gram)).to(gram)
        numbers["complete_scaled"] = float(torch.linalg.matrix_norm(off) / len(gram) ** 0.5), none
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


class Bases:
    """Pairs of random orthonormal bases, uniformly drawn. The layers of a network share them.

    For matrices of one shape the draws are the same, and each is made once: of a wide layer their
    QR factorisations would cost more than its audit. generator: returns the generator of a draw.
    """

    def __init__(self, generator: Callable[[int], torch.Generator]) -> None:
        self._generator = generator
        self._drawn: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}

    def like(
        self, matrix: Float[Tensor, "rows columns"], draws: int
    ) -> Iterator[Float[Tensor, "rows columns"]]:
        """Yields random matrices with the singular values of `matrix`, in its dtype."""
        own = torch.linalg.svdvals(matrix.double()).to(matrix) if draws else matrix
        for draw in range(draws):
            if (draw, matrix.shape) not in self._drawn:
                generator, least = self._generator(draw), min(matrix.shape)
                noise = [
                    torch.randn(rows, least, generator=generator, dtype=torch.float64)
                    for rows in matrix.shape
                ]
                left, right = (torch.linalg.qr(one)[0] for one in noise)
                self._drawn[draw, matrix.shape] = left, right
            left, right = self._drawn[draw, matrix.shape]
            yield (left.to(own) * own) @ right.to(own).T
