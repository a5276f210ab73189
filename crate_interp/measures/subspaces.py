"""Geometry of the learned subspaces U_k and the dictionary D, and of tokens against them."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import in_full_precision, largest_entry, qr, require_floats, squares_fit
from crate_interp.measures.rates import head_codes


@in_full_precision
def orthonormality_defect(u: Float[Tensor, "*batch d_model d_head"]) -> Float[Tensor, "*batch"]:
    """How far each basis is from orthonormal: `|U_k^T U_k - I|_F / sqrt(p)`.

    u `[..., d_model, d_head]` -> `[...]`, >= 0, 0 iff the columns are orthonormal; without unit. The theory (arXiv
    2306.01129) assumes 0; the official initialisation has U_k^T U_k about I/3, a defect of about 2/3.
    """
    _check(u, "d_model d_head")
    gram = u.mT @ u
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    return torch.linalg.matrix_norm(gram - eye) / u.shape[-1] ** 0.5


@in_full_precision
def completeness_defect(u: Float[Tensor, "*batch head d_model d_head"]) -> Float[Tensor, "*batch"]:
    """How far the subspaces together are from an orthonormal cover of the space: `|sum_k U_k U_k^T - I|_F / sqrt(d)`.

    u `[..., head, d_model, d_head]` -> `[...]`, >= 0, 0 iff sum_k U_k U_k^T = I; without unit.
    """
    _check(u, "head d_model d_head")
    wide = u.transpose(-3, -2).flatten(-2)  # [..., d_model, head * d_head]
    eye = torch.eye(u.shape[-2], dtype=u.dtype, device=u.device)
    return torch.linalg.matrix_norm(wide @ wide.mT - eye) / u.shape[-2] ** 0.5


@in_full_precision
def subspace_overlap(
    u: Float[Tensor, "*batch d_model d_head"], v: Float[Tensor, "*batch d_model d_head"]
) -> Float[Tensor, "*batch"]:
    """The overlap of two subspaces, `|Q_u^T Q_v|_F^2 / p` with Q = qr(U): the mean squared cosine of their angles.

    u, v `[..., d_model, d_head]` -> `[...]` in [0, 1]: 0 orthogonal, 1 equal; p/d on average for random subspaces.
    Only the spans matter, not the bases. Of two widths p is the first's: how much of u lies in v.
    """
    _check(u, "d_model d_head")
    _check(v, "d_model d_head")
    inner = qr(u)[0].mT @ qr(v)[0]
    return inner.square().sum(dim=(-2, -1)) / u.shape[-1]


@in_full_precision
def head_overlap(u: Float[Tensor, "*batch head d_model d_head"]) -> Float[Tensor, "*batch head"]:
    """Each head's mean `subspace_overlap` with the other heads.

    u `[..., head, d_model, d_head]` -> `[..., head]` in [0, 1]; p/d on average for random subspaces. Raises
    ValueError for a single head, which has no others.
    """
    _check(u, "head d_model d_head")
    heads = u.shape[-3]
    if heads < 2:
        raise ValueError("head_overlap compares heads: the layer has only one.")
    wide = qr(u)[0].transpose(-3, -2).flatten(-2)  # [..., d_model, head * d_head]
    cosines = (wide.mT @ wide).square().unflatten(-1, (heads, -1)).unflatten(-3, (heads, -1))
    overlap = cosines.sum(dim=(-3, -1)) / u.shape[-1]  # [..., head, head]
    return (overlap.sum(dim=-1) - overlap.diagonal(dim1=-2, dim2=-1)) / (heads - 1)


@in_full_precision
def projection_energy(
    z: Float[Tensor, "*batch pos d_model"], u: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "*batch pos head"]:
    """The share of a token's energy inside each subspace: `|Q_k^T z|^2 / |z|^2` with Q_k = qr(U_k).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., pos, head]` in [0, 1]; p/d on average for a random
    subspace; the heads sum to 1 iff the subspaces are a complete orthonormal cover. An all-zero token has 0.
    """
    _check(u, "head d_model d_head")
    require_floats(z, "pos d_model")
    # Q_k^T z = R_k^{-T} U_k^T z would square the condition of U_k: project with Q itself
    return energy_of_codes(head_codes(z, qr(u)[0]), z)


def energy_of_codes(
    codes: Float[Tensor, "*batch head pos d_head"], z: Float[Tensor, "*batch pos d_model"]
) -> Float[Tensor, "*batch pos head"]:
    """`projection_energy` for a caller who has the codes of an orthonormal basis already."""
    lengths = torch.linalg.vector_norm(codes, dim=-1).transpose(-2, -1)  # [..., pos, head]
    norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    if not squares_fit(norms):
        largest = largest_entry(z)
        norms = torch.linalg.vector_norm(z / largest, dim=-1, keepdim=True)
        lengths = torch.linalg.vector_norm(codes / largest.unsqueeze(-3), dim=-1).transpose(-2, -1)
    return (lengths / norms.masked_fill(norms == 0, 1)).square()


@in_full_precision
def dictionary_defect(d: Float[Tensor, "*batch d_model d_mlp"]) -> Float[Tensor, "*batch"]:
    """How far the dictionary is from a scaled tight frame: `|G - c I|_F / sqrt(n)`, c = tr(G) / n.

    d `[..., d_model, d_mlp]` -> `[...]`, >= 0, without unit. G is the smaller Gram, D^T D or D D^T, n its width; for
    the square dictionary of CRATE both give the same number, 0 iff D is a multiple of an orthonormal matrix.
    """
    _check(d, "d_model d_mlp")
    gram = d.mT @ d if d.shape[-1] <= d.shape[-2] else d @ d.mT
    width = gram.shape[-1]
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    eye = torch.eye(width, dtype=d.dtype, device=d.device)
    return torch.linalg.matrix_norm(gram - scale * eye) / width**0.5


def _check(u: Tensor, axes: str) -> None:
    require_floats(u, axes)
    if 0 in u.shape:
        raise ValueError(f"the matrix is empty: shape {list(u.shape)}.")
