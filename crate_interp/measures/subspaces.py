"""Geometry of the learned subspaces U_k and the dictionary D, and of tokens relative to them."""

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.measures import checks, rates, spectra
from crate_interp.measures.checks import Bases, HeadCodes, Tokens

__all__ = [
    "column_cosines", "completeness_defect", "condition_number", "dictionary_defect",
    "head_overlap", "incoherence", "membership_entropy", "mutual_coherence",
    "orthonormality_defect", "output_map_cosine", "principal_angles", "projection_energy",
    "scale_free_defect", "subspace_overlap", "subspace_snr",
]  # fmt: skip


@checks.in_full_precision
def orthonormality_defect(u: Float[Tensor, "*batch d_model d_head"]) -> Float[Tensor, "*batch"]:
    """Returns how far each basis is from orthonormality, `|U_k^T U_k - I|_F / sqrt(p)`.

    u `[..., d_model, d_head]` -> `[...]`, dimensionless, >= 0, and 0 only if the columns are
    orthonormal. The theory (arXiv 2306.01129) assumes 0. The official initialisation has U_k^T U_k
    of about I/3, a defect of about 2/3. Raises ValueError if the matrix is empty.
    """
    _check(u, "d_model d_head")
    gram = u.mT @ u
    eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    return torch.linalg.matrix_norm(gram - eye) / u.shape[-1] ** 0.5


@checks.in_full_precision
def completeness_defect(u: Float[Tensor, "*batch head d_model d_head"]) -> Float[Tensor, "*batch"]:
    """Returns how far the subspaces together are from an orthonormal cover of the space.

    `|sum_k U_k U_k^T - I|_F / sqrt(d)`.

    u `[..., head, d_model, d_head]` -> `[...]`, dimensionless, >= 0, and 0 only if sum_k U_k U_k^T
    = I. Raises ValueError if the matrix is empty.
    """
    _check(u, "head d_model d_head")
    wide = u.transpose(-3, -2).flatten(-2)  # [..., d_model, head * d_head]
    eye = torch.eye(u.shape[-2], dtype=u.dtype, device=u.device)
    return torch.linalg.matrix_norm(wide @ wide.mT - eye) / u.shape[-2] ** 0.5


@checks.in_full_precision
def subspace_overlap(
    u: Float[Tensor, "*batch d_model d_head"], v: Float[Tensor, "*batch d_model d_head"]
) -> Float[Tensor, "*batch"]:
    """Returns the overlap of two subspaces: the mean squared cosine of their angles.

    `|Q_u^T Q_v|_F^2 / p`, where Q = qr(U).

    u, v `[..., d_model, d_head]` -> `[...]` in [0, 1]: 0 for orthogonal subspaces, 1 for equal
    ones, p/d on average for random ones. Only the spans matter, not the bases. If the widths
    differ, p is the width of u: the overlap is the share of u that lies in v. Raises ValueError if
    a matrix is empty.
    """
    _check(u, "d_model d_head")
    _check(v, "d_model d_head")
    inner = checks.qr(u)[0].mT @ checks.qr(v)[0]
    return inner.square().sum(dim=(-2, -1)) / u.shape[-1]


@checks.in_full_precision
def head_overlap(u: Float[Tensor, "*batch head d_model d_head"]) -> Float[Tensor, "*batch head"]:
    """Returns each head's mean `subspace_overlap` with the other heads.

    u `[..., head, d_model, d_head]` -> `[..., head]` in [0, 1]; p/d on average for random
    subspaces. Raises ValueError if there is only one head or if the matrix is empty.
    """
    _check(u, "head d_model d_head")
    heads = u.shape[-3]
    if heads < 2:
        raise ValueError("head_overlap compares heads, but the layer has only one.")
    wide = checks.qr(u)[0].transpose(-3, -2).flatten(-2)  # [..., d_model, head * d_head]
    cosines = (wide.mT @ wide).square().unflatten(-1, (heads, -1)).unflatten(-3, (heads, -1))
    overlap = cosines.sum(dim=(-3, -1)) / u.shape[-1]  # [..., head, head]
    return (overlap.sum(dim=-1) - overlap.diagonal(dim1=-2, dim2=-1)) / (heads - 1)


@checks.in_full_precision
def projection_energy(z: Tokens, u: Bases) -> Float[Tensor, "*batch pos head"]:
    """Returns the share of each token's energy that lies in each subspace.

    `|Q_k^T z|^2 / |z|^2`, where Q_k = qr(U_k).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., pos, head]` in [0, 1]; p/d on
    average for a random subspace. The shares of the heads sum to 1 for every token if the subspaces
    are a complete orthonormal cover. The share is 0 for an all-zero token. Raises ValueError if the
    basis is empty.
    """
    _check(u, "head d_model d_head")
    checks.require_floats(z, "pos d_model")
    # project with Q itself: Q_k^T z = R_k^{-T} U_k^T z would square the condition number of U_k
    return energy_of_codes(rates.head_codes(z, checks.qr(u)[0]), z)


def energy_of_codes(codes: HeadCodes, z: Tokens) -> Float[Tensor, "*batch pos head"]:
    """Returns `projection_energy` from given orthonormal codes."""
    lengths = torch.linalg.vector_norm(codes, dim=-1).transpose(-2, -1)  # [..., pos, head]
    norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    if not checks.squares_fit(norms):
        largest = checks.largest_entry(z)
        norms = torch.linalg.vector_norm(z / largest, dim=-1, keepdim=True)
        lengths = torch.linalg.vector_norm(codes / largest.unsqueeze(-3), dim=-1).transpose(-2, -1)
    return (lengths / norms.masked_fill(norms == 0, 1)).square()


@checks.in_full_precision
def dictionary_defect(d: Float[Tensor, "*batch d_model d_mlp"]) -> Float[Tensor, "*batch"]:
    """Returns how far the dictionary is from a scaled tight frame, `|G - c I|_F / sqrt(n)`.

    d `[..., d_model, d_mlp]` -> `[...]`, dimensionless, >= 0. G is the smaller Gram matrix, D^T D
    or D D^T, n its width and c = tr(G) / n. For the square dictionary of CRATE both Gram matrices
    give the same number, which is 0 only if D is a multiple of an orthonormal matrix. Raises
    ValueError if the matrix is empty.
    """
    _check(d, "d_model d_mlp")
    _, size, scale = _off_scale(d)
    return size * scale / min(d.shape[-2:]) ** 0.5


@checks.in_full_precision
def scale_free_defect(m: Float[Tensor, "*batch n width"]) -> Float[Tensor, "*batch"]:
    """Returns how far the matrix is from a multiple of an orthonormal one, whatever its scale.

    `|G - c I|_F / (c sqrt(w))`, where G is the smaller Gram matrix, M^T M or M M^T, w its width and
    c = tr(G) / w.

    m `[..., n, width]` -> `[...]`, dimensionless, in [0, sqrt(w - 1)]: 0 only if the vectors along
    the shorter axis are orthogonal and equally long, the maximum for rank 1. It is
    `dictionary_defect` divided by c, and does not change if m is scaled or rotated. A random matrix
    of independent entries has about sqrt(w / max(n, width)). The result is NaN for a matrix of
    zeros, whose scale is 0. Raises ValueError if the matrix is empty.
    """
    _check(m, "n width")
    zero, size, _ = _off_scale(m)
    return (size / min(m.shape[-2:]) ** 0.5).masked_fill(zero, torch.nan)


def _off_scale(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for the smaller Gram matrix G of m: whether m is zero, |G - c I|_F / c, and c."""
    largest = m.detach().abs().amax(dim=(-2, -1), keepdim=True)
    zero = largest == 0
    largest = largest.masked_fill(zero, 1)
    scaled = m / largest  # squares of very small or very large entries would underflow or overflow
    gram = scaled.mT @ scaled if m.shape[-1] <= m.shape[-2] else scaled @ scaled.mT
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].masked_fill(zero, 1)
    eye = torch.eye(gram.shape[-1], dtype=m.dtype, device=m.device)
    size = torch.linalg.matrix_norm(gram / scale - eye).masked_fill(zero[..., 0, 0], 0)
    return zero[..., 0, 0], size, (scale * largest.square())[..., 0, 0]


@checks.in_full_precision
def output_map_cosine(w_o: Float[Tensor, "head d_head d_model"], u: Bases) -> Float[Tensor, "head"]:
    """Returns how much each head writes along its own subspace: the cosine of W_O,k and U_k^T.

    `<W_O,k, U_k^T>_F / (|W_O,k|_F |U_k|_F)`.

    w_o `[head, d_head, d_model]`, u `[head, d_model, d_head]` -> `[head]` in [-1, 1]: 1 if a head's
    map is a positive multiple of U_k^T, -1 if it is a negative multiple; random matrices have mean
    0 and a standard deviation of about 1 / sqrt(d_head d_model). arXiv 2306.01129 derives +U_k^T
    but trains a separate map in its place; arXiv 2411.17182 (section 4.2) compares +U_k^T (CRATE-C)
    with -U_k^T (CRATE-N). The cosine is 0 for a map of zeros. Raises ValueError if the shapes of
    w_o and u do not fit, or if a matrix is empty.
    """
    _check(w_o, "head d_head d_model")
    _check(u, "head d_model d_head")
    if w_o.shape != u.mT.shape:
        raise ValueError(f"w_o {list(w_o.shape)} does not fit u {list(u.shape)}, transposed.")
    rows = [_unit(matrix.flatten(1)) for matrix in (w_o, u.mT)]
    return (rows[0] * rows[1]).sum(dim=-1).clamp(-1, 1)


def _unit(rows: Tensor) -> Tensor:
    """Returns rows of length one; a row of zeros stays zero."""
    scaled = rows / checks.largest_entry(rows)
    norms = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / norms.masked_fill(norms == 0, 1)


@checks.in_full_precision
def principal_angles(
    u: Float[Tensor, "*batch d_model d_head"], v: Float[Tensor, "*batch d_model width"]
) -> Float[Tensor, "*batch rank"]:
    """Returns the principal angles between two subspaces, smallest first.

    `arccos` of the singular values of `Q_u^T Q_v`, where Q = qr(U).

    u `[..., d_model, p]`, v `[..., d_model, q]` -> `[..., min(p, q)]` in radians, 0 to pi/2. Only
    the spans matter. Angles below pi/4 are computed from their sines, because arccos loses their
    digits (Bjorck and Golub 1973). Raises ValueError if a matrix is empty.
    """
    _check(u, "d_model d_head")
    _check(v, "d_model width")
    if u.shape[-1] < v.shape[-1]:
        u, v = v, u
    first, second = checks.qr(u.double())[0], checks.qr(v.double())[0]
    inner = first.mT @ second
    cosines = spectra.singular_values(inner)[..., : v.shape[-1]]  # descending: smallest angle first
    sines = spectra.singular_values(second - first @ inner).flip(-1)
    small = cosines.square() > 0.5
    return torch.where(small, sines.clamp(max=1).asin(), cosines.clamp(max=1).acos()).to(u.dtype)


@checks.in_full_precision
def incoherence(u: Float[Tensor, "*batch head d_model d_head"]) -> Float[Tensor, "*batch"]:
    """Returns the largest cosine between directions in the subspaces of two different heads.

    `max_{i != j} |Q_i^T Q_j|_2`, where Q = qr(U).

    u `[..., head, d_model, d_head]` -> `[...]` in [0, 1]: 0 if all subspaces are orthogonal, 1 if
    two share a direction. The theory (arXiv 2306.01129) assumes that it is small. Raises ValueError
    if there is only one head or if the matrix is empty.
    """
    _check(u, "head d_model d_head")
    heads = u.shape[-3]
    if heads < 2:
        raise ValueError("incoherence compares heads, but the layer has only one.")
    q = checks.qr(u)[0]
    pairs = torch.triu_indices(heads, heads, offset=1, device=u.device)
    inner = q[..., pairs[0], :, :].mT @ q[..., pairs[1], :, :]  # [..., pair, d_head, d_head]
    return spectra.singular_values(inner)[..., 0].amax(dim=-1)


@checks.in_full_precision
def column_cosines(d: Float[Tensor, "*batch d_model n"]) -> Float[Tensor, "*batch n n"]:
    """Returns the absolute cosines between all columns, `|d_i^T d_j| / (|d_i| |d_j|)`.

    d `[..., d_model, n]` -> `[..., n, n]` in [0, 1]. Figure 7 of arXiv 2306.01129 shows these
    cosines for the concatenated bases of all heads. A column of zeros has the cosine 0 with every
    column. Raises ValueError if the matrix is empty.
    """
    _check(d, "d_model n")
    unit = _unit(d.mT)
    return (unit @ unit.mT).abs()


def mutual_coherence(d: Float[Tensor, "*batch d_model n"]) -> Float[Tensor, "*batch"]:
    """Returns the largest absolute cosine between two different columns.

    d `[..., d_model, n]` -> `[...]` in [0, 1]: 0 for orthogonal columns, and at least sqrt((n - d)
    / (d (n - 1))) for n > d (Welch). Sparse coding needs a dictionary with a small coherence.
    Raises ValueError if there is only one column or if the matrix is empty.
    """
    _check(d, "d_model n")
    if d.shape[-1] < 2:
        raise ValueError("mutual_coherence compares columns, but there is only one.")
    cosines = column_cosines(d)
    same = torch.eye(d.shape[-1], dtype=torch.bool, device=d.device)
    return cosines.masked_fill(same, 0).flatten(-2).amax(dim=-1)


@checks.in_full_precision
def condition_number(d: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    """Returns largest / smallest of the min(rows, columns) singular values.

    d `[..., rows, columns]` -> `[...]`, dimensionless, >= 1; Inf for a singular matrix. NaN or Inf
    gives NaN. Raises ValueError if the matrix is empty.
    """
    _check(d, "rows columns")
    values = spectra.singular_values(d.double())
    most, least = values[..., 0], values[..., -1]
    return (most / least).masked_fill(least == 0, torch.inf).to(d.dtype)


def membership_entropy(z: Tokens, u: Bases) -> Float[Tensor, "*batch pos"]:
    """Returns how spread each token is over the subspaces.

    It is the entropy of the token's `projection_energy`, normalised over heads.

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., pos]` in nats, 0 (in one
    subspace) to ln K (evenly in all). It is ln K also for a token without energy in any subspace.
    NaN or Inf in a token gives NaN. Raises ValueError if the basis is empty.
    """
    energy = projection_energy(z, u)  # [..., pos, head]
    total = energy.sum(dim=-1, keepdim=True)
    share = (energy / total.masked_fill(total == 0, 1)).where(total > 0, 1 / energy.shape[-1])
    entropy = torch.special.entr(share).sum(dim=-1)
    return entropy.masked_fill(~total[..., 0].isfinite(), torch.nan)


@checks.in_full_precision
def subspace_snr(z: Tokens, u: Bases) -> Float[Tensor, "*batch head"]:
    """Returns the tokens' length inside each subspace divided by their length outside.

    `|Q_k Q_k^T Z|_F / |(I - Q_k Q_k^T) Z|_F`, where Q_k = qr(U_k).

    z `[..., pos, d_model]`, u `[head, d_model, d_head]` -> `[..., head]`, dimensionless, >= 0; Inf
    if all tokens lie in the subspace, 0 for tokens of zeros, about sqrt(p / (d - p)) for a random
    subspace. The attention-only transformer (arXiv 2506.03790) measures only the tokens of head k,
    with U itself as Q: to compare, give only those tokens. Computed in float64. NaN or Inf in a
    sample gives NaN. Raises ValueError if the basis is empty.
    """
    _check(u, "head d_model d_head")
    checks.require_floats(z, "pos d_model")
    wide, basis = z.double(), checks.qr(u.double())[0]
    inside = rates.head_codes(wide, basis)  # [..., head, pos, d_head]
    rest = wide.unsqueeze(-3) - inside @ basis.mT
    signal, noise = torch.linalg.matrix_norm(inside), torch.linalg.matrix_norm(rest)
    # a remainder this small is the rounding of tokens that lie inside the subspace
    floor = 4 * z.shape[-1] * torch.finfo(torch.float64).eps * signal
    ratio = torch.where(noise <= floor, torch.inf, signal / noise).masked_fill(signal == 0, 0)
    return ratio.masked_fill(~(signal + noise).isfinite(), torch.nan).to(z.dtype)


def _check(u: Tensor, axes: str) -> None:
    checks.require_floats(u, axes)
    if 0 in u.shape:
        raise ValueError(f"the matrix is empty: shape {list(u.shape)}.")
