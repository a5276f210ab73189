"""Sparse rate reduction layer by layer, in the audit's frames, and what the output maps are."""

from typing import Any

import torch
from torch import Tensor

from crate_interp import HookedCrate
from crate_interp.measures import l0_norm, sparse_rate_reduction

FRAMES = ("stream", "read", "unit")
EPS, LAMBD = 0.1, 0.1  # 2411.17182 has lambd = 0.1 and leaves eps open


def framed(z: Tensor, norm: torch.nn.Module, frame: str) -> Tensor:
    """Returns tokens [..., pos, d_model] in a frame of the audit.

    stream: as they are. read: through the norm before U. unit: scaled to |Z|_F = sqrt(pos d_model);
    Z = 0 stays.
    """
    if frame == "read":
        return norm(z)
    if frame == "unit":
        size = torch.linalg.matrix_norm(z, keepdim=True)
        return z * (z.shape[-2] * z.shape[-1]) ** 0.5 / size.where(size > 0, 1.0)
    return z


@torch.no_grad()
def streams(model: HookedCrate, images: Tensor) -> list[Tensor]:
    """Returns Z^0 to Z^L, `[batch, pos, d_model]` each: Z^l is the output of layer l."""
    last = model.cfg.n_layers - 1
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)]
    names.append(f"blocks.{last}.hook_resid_post")
    _, cache = model.run_with_cache(images, names_filter=names)
    return [cache[name] for name in names]


@torch.no_grad()
def layer_measures(
    model: HookedCrate,
    images: Tensor,
    frame: str,
    eps: float = EPS,
    lambd: float = LAMBD,
    share: bool = False,
) -> Tensor:
    """Returns the measure of each layer in nats, `[layer]`, averaged over images.

    `lambd |Z^l|_0 + R^c(F Z^l | U^l; eps) - R(F Z^l; eps)`, lower is better. arXiv 2411.17182
    eq. 11, its summand; Z^l is what layer l writes, as in eq. 14. F is the frame: the paper has the
    stream. The entries are counted in the stream, as LayerNorm leaves no zeros; share: divide
    their number by that of all.
    """
    found = []
    blocks: Any = model.blocks
    for block, z in zip(blocks, streams(model, images)[1:], strict=True):
        count = l0_norm(z).sum(dim=-1) / (z.shape[-1] * z.shape[-2] if share else 1)
        rates = sparse_rate_reduction(framed(z, block.ln1, frame), block.attn.U, eps, lambd=0.0)
        found.append((lambd * count + rates).mean())
    return torch.stack(found)


@torch.no_grad()
def output_cosines(model: HookedCrate) -> Tensor:
    """Returns the cosine of each head's output map with U_k^T, `[layer, head]`.

    `<W_O,k, U_k^T> / (|W_O,k| |U_k|)` in the inner product of matrices: 1 in CRATE-C, -1 in
    CRATE-N, and 0 on average for maps that are drawn apart.
    """
    found = []
    blocks: Any = model.blocks
    for block in blocks:
        both = [x.flatten(1) for x in (block.attn.W_O, block.attn.U.mT)]  # [head, d_head * d_model]
        found.append(torch.cosine_similarity(*both, dim=-1))
    return torch.stack(found)


def reading(model: HookedCrate, images: Tensor) -> list[dict[str, float]]:
    """Returns a row for each layer: the measure in each frame, and the cosines of the heads."""
    measures = {frame: layer_measures(model, images, frame) for frame in FRAMES}
    cosines, rows = output_cosines(model), []
    for layer in range(model.cfg.n_layers):
        row: dict[str, float] = {"layer": layer + 1}
        row |= {f"srr_{frame}": float(value[layer]) for frame, value in measures.items()}
        rows.append(row | {f"cosine_{k}": float(value) for k, value in enumerate(cosines[layer])})
    return rows
