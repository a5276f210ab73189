"""Streams before and after an update as codes in three frames, for the update and for its nulls.

The stream is projected onto the subspaces once. Everything else, the nulls too, is made from these
codes and from products of rows: LayerNorm is linear but for the mean and the scale of each token.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.measures.checks import qr
from crate_interp.models.norm import HookedLayerNorm, HookedNorm, HookedRMSNorm


@dataclass(frozen=True)
class Norm:
    """What a layer's norm does, in float64, without its hook points.

    centred: whether it subtracts the mean; there: whether there is a norm at all.
    """

    gains: Float[Tensor, "d_model"]
    shift: Float[Tensor, "d_model"]
    centred: bool
    there: bool
    eps: float

    def normalised(self, z: Float[Tensor, "*batch pos d_model"]) -> Tensor:
        """Returns tokens before the gains and the shift."""
        if not self.there:
            return z
        centred = z - z.mean(dim=-1, keepdim=True) if self.centred else z
        return centred * (centred.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()

    def applied(self, z: Float[Tensor, "*batch pos d_model"]) -> Tensor:
        """Returns the tokens through the norm."""
        return self.normalised(z) * self.gains + self.shift


def norm_of(norm: HookedNorm, like: Float[Tensor, "d_model *more"]) -> Norm:
    """Returns the norm of a layer; like: a tensor on its device, as wide as the stream."""
    gains = torch.ones(len(like), dtype=torch.float64, device=like.device)
    shift = torch.zeros_like(gains)
    centred = isinstance(norm, HookedLayerNorm)
    if isinstance(norm, HookedLayerNorm):
        gains = norm.weight.detach().double()
        shift = torch.zeros_like(gains) if norm.bias is None else norm.bias.detach().double()
    there = isinstance(norm, (HookedLayerNorm, HookedRMSNorm))
    return Norm(gains, shift, centred, there, float(norm.eps) if there else 0.0)


@dataclass(frozen=True)
class Subspaces:
    """What of U and of the norm before it does not depend on data, in float64.

    wide: the U_k side by side; gained: the same for normalised tokens, diag(gains) U_k. bias: the
    codes of the norm's shift.
    """

    wide: Float[Tensor, "d_model inner"]
    gained: Float[Tensor, "d_model inner"]
    bias: Float[Tensor, "inner"]
    norm: Norm
    heads: int

    @property
    def d_model(self) -> int:
        """Returns d, the width of the stream."""
        return self.wide.shape[0]

    @property
    def width(self) -> int:
        """Returns p, the width of a head."""
        return self.wide.shape[1] // self.heads

    def spread(self, flat: Float[Tensor, "*batch pos inner"]) -> Tensor:
        """Returns codes side by side as `[..., head, pos, d_head]`."""
        return flat.unflatten(-1, (self.heads, self.width)).transpose(-3, -2)


def subspaces_of(u: Float[Tensor, "head d_model d_head"], norm: HookedNorm) -> Subspaces:
    """Returns the constants of a layer."""
    wide = u.detach().double().transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    reads = norm_of(norm, wide)
    return Subspaces(wide, reads.gains[:, None] * wide, reads.shift @ wide, reads, len(u))


def changed(u: Subspaces, change: Float[Tensor, "head d_head d_head"]) -> Subspaces:
    """Returns the constants in another basis of each subspace, U_k M_k."""

    def turned(wide: Tensor) -> Tensor:
        return (u.spread(wide) @ change).transpose(-3, -2).flatten(-2)

    bias = turned(u.bias[None])[0]
    return replace(u, wide=turned(u.wide), gained=turned(u.gained), bias=bias)


def orthonormal(u: Float[Tensor, "head d_model d_head"]) -> Float[Tensor, "head d_model d_head"]:
    """Returns orthonormal subspaces near U: together where they fit into the space, else each.

    The nearest matrix with orthonormal columns is the polar factor of the U_k side by side.
    """
    heads, width, p = u.shape
    if heads * p > width:
        return qr(u.double())[0]
    left, _, right = torch.linalg.svd(u.double().transpose(0, 1).flatten(1), full_matrices=False)
    return (left @ right).unflatten(1, (heads, p)).transpose(0, 1)


@dataclass(frozen=True)
class Rows:
    """Tokens in codes, and the squares and means of their rows.

    codes: those of the stream; read: those of diag(gains) times the stream.
    """

    codes: Float[Tensor, "batch head pos d_head"]
    read: Float[Tensor, "batch head pos d_head"]
    square: Float[Tensor, "batch pos"]
    mean: Float[Tensor, "batch pos"]


@dataclass(frozen=True)
class Update(Rows):
    """What is added to the tokens; dot: its product with the token, row by row."""

    dot: Float[Tensor, "batch pos"]


def rows_of(z: Float[Tensor, "batch pos d_model"], u: Subspaces) -> Rows:
    """Returns tokens as rows."""
    codes = u.spread(z @ u.wide)
    same = bool((u.norm.gains == 1).all())
    read = codes if same else u.spread(z @ u.gained)
    return Rows(codes, read, z.square().sum(dim=-1), z.mean(dim=-1))


def update_of(
    delta: Float[Tensor, "batch pos d_model"], z: Float[Tensor, "batch pos d_model"], u: Subspaces
) -> Update:
    """Returns an update of the tokens z."""
    rows = rows_of(delta, u)
    return Update(rows.codes, rows.read, rows.square, rows.mean, (delta * z).sum(dim=-1))


AnyRows = TypeVar("AnyRows", bound=Rows)


def negated(update: Update) -> Update:
    """Returns the update with the other sign."""
    return Update(-update.codes, -update.read, update.square, -update.mean, -update.dot)


def rearranged(
    update: Update, dot: Float[Tensor, "batch pos"], order: Int[Tensor, "batch pos"]
) -> Update:
    """Returns the update with its tokens in another order; dot: the products of the new rows."""
    places = order[:, None, :, None]
    return Update(
        torch.take_along_dim(update.codes, places, dim=2),
        torch.take_along_dim(update.read, places, dim=2),
        torch.take_along_dim(update.square, order, dim=1),
        torch.take_along_dim(update.mean, order, dim=1),
        dot,
    )


def without_cls(rows: AnyRows) -> AnyRows:
    """Returns all tokens but the first."""
    parts: dict[str, Any] = {"codes": rows.codes[:, :, 1:], "read": rows.read[:, :, 1:]}
    parts |= {"square": rows.square[:, 1:], "mean": rows.mean[:, 1:]}
    if isinstance(rows, Update):
        parts["dot"] = rows.dot[:, 1:]
    return replace(rows, **parts)


def in_basis(rows: AnyRows, change: Float[Tensor, "head d_head d_head"]) -> AnyRows:
    """Returns the codes in another basis of each subspace, C_k M_k."""
    return replace(rows, codes=rows.codes @ change, read=rows.read @ change)


@dataclass(frozen=True)
class Side:
    """One side of an update in a frame: the codes, and what places them there.

    scale: of the whole sample (frame "unit"), or 1 over the scale of each token (frame "read").
    """

    codes: Float[Tensor, "batch head pos d_head"]
    scale: Float[Tensor, "batch *pos"]


def stream_side(rows: Rows, update: Update | None) -> Side:
    """Returns a side as it is: the tokens, with the update if there is one."""
    codes = rows.codes if update is None else rows.codes + update.codes
    return Side(codes, torch.ones_like(codes[:, 0, 0, 0]))


def unit_scale(rows: Rows, update: Update | None, d_model: int) -> Float[Tensor, "batch"]:
    """Returns what a side is multiplied by to have |Z|_F = sqrt(pos d_model)."""
    square = rows.square if update is None else rows.square + 2 * update.dot + update.square
    total = square.sum(dim=-1)
    wanted = (square.shape[-1] * d_model) ** 0.5
    return wanted / total.clamp_min(0).sqrt().where(total > 0, 1.0)


def read_side(rows: Rows, update: Update | None, u: Subspaces) -> Side:
    """Returns a side through the LayerNorm that attention reads through."""
    square, mean, read = rows.square, rows.mean, rows.read
    if update is not None:
        square = square + 2 * update.dot + update.square
        mean, read = mean + update.mean, read + update.read
    scale = _inverse_scale(square, mean, u)
    if u.norm.centred:
        ones = u.spread(u.gained.sum(dim=0)[None])  # [head, 1, d_head]
        read = read - mean[:, None, :, None] * ones
    return Side(read * scale[:, None, :, None] + u.spread(u.bias[None]), scale)


def _inverse_scale(square: Tensor, mean: Tensor, u: Subspaces) -> Float[Tensor, "batch pos"]:
    if not u.norm.there:
        return torch.ones_like(square)
    variance = square / u.d_model - (mean.square() if u.norm.centred else 0.0)
    return (variance.clamp_min(0) + u.norm.eps).rsqrt()


def read_products(
    rows: Rows, update: Update, u: Subspaces
) -> tuple[Float[Tensor, "batch pos"], Float[Tensor, "batch pos"], Float[Tensor, "batch pos"]]:
    """Returns |x|^2, <x, x' - x> and |x' - x|^2 of the normalised tokens, row by row."""
    width = u.d_model if u.norm.centred else 0
    own = rows.square - width * rows.mean.square()
    dot = update.dot - width * rows.mean * update.mean
    step = update.square - width * update.mean.square()
    moved, mean = rows.square + 2 * update.dot + update.square, rows.mean + update.mean
    before, after = _inverse_scale(rows.square, rows.mean, u), _inverse_scale(moved, mean, u)
    grown = after - before  # x' - x = grown (z - mean) + after (delta - its mean)
    along = before * (grown * own + after * dot)
    length = grown.square() * own + 2 * grown * after * dot + after.square() * step
    return own * before.square(), along, length
