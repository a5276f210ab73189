"""Codes of the stream before and after an update or its baseline, under three scalings (frames).

The stream is projected onto the subspaces once. Everything else, including the nulls, is computed
from these codes and from products of rows. This works because LayerNorm is linear except for the
mean and the scale of each token.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.audits.objectives import Codes, Objective, PerSample, PerToken, Stream
from crate_interp.measures.checks import qr
from crate_interp.measures.lasso import steepest
from crate_interp.models.layers.norm import HookedLayerNorm, HookedNorm, HookedRMSNorm


@dataclass(frozen=True)
class Norm:
    """A layer's norm in float64, without hook points.

    centred: whether the norm subtracts the mean. there: False if the layer has no norm.
    """

    gains: Float[Tensor, "d_model"]
    shift: Float[Tensor, "d_model"]
    centred: bool
    there: bool
    eps: float

    def normalised(self, z: Float[Tensor, "*batch pos d_model"]) -> Tensor:
        """Returns normalised tokens, before gains and shift."""
        if not self.there:
            return z
        centred = z - z.mean(dim=-1, keepdim=True) if self.centred else z
        return centred * (centred.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()

    def applied(self, z: Float[Tensor, "*batch pos d_model"]) -> Tensor:
        """Returns tokens after the norm."""
        return self.normalised(z) * self.gains + self.shift


def norm_of(norm: HookedNorm, like: Float[Tensor, "d_model *more"]) -> Norm:
    """Returns the `Norm` of a layer; like: a tensor on the layer's device, first axis d_model."""
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
    """Values computed from U and from the norm before the attention, in float64.

    wide: the U_k side by side; gained: diag(gains) U_k, the bases for normalised tokens. bias: the
    codes of the norm's shift, plus the bias of the codes. Expensive values are computed when first
    needed, then kept.
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
        """Returns concatenated codes as `[..., head, pos, d_head]`."""
        return flat.unflatten(-1, (self.heads, self.width)).transpose(-3, -2)

    @cached_property
    def reading(self) -> Float[Tensor, "d_model inner"]:
        """Returns the map to codes for tokens that the norm has neither centred nor scaled.

        The map is `gained`; it also subtracts a token's mean if the norm does.
        """
        if not self.norm.centred:
            return self.wide if bool((self.norm.gains == 1).all()) else self.gained
        return self.gained - self.gained.mean(dim=0)

    @cached_property
    def narrow(self) -> tuple[Tensor, Tensor]:
        """Returns `wide` and `reading` in float32."""
        return self.wide.float(), self.reading.float()

    @cached_property
    def shifted(self) -> bool:
        """Tells whether the codes of normalised tokens have a bias."""
        return bool(self.bias.any())

    @cached_property
    def kernels(self) -> tuple[Tensor, Tensor]:
        """Returns the inner products of the columns of `wide`, and of the columns of `reading`."""
        return self.wide.T @ self.wide, self.reading.T @ self.reading

    @cached_property
    def largest(self) -> tuple[float, float]:
        """Returns the squared spectral norms of `wide` and of `gained`."""
        return steepest(self.wide), steepest(self.gained)


def subspaces_of(
    u: Float[Tensor, "head d_model d_head"], norm: HookedNorm, bias: Float[Tensor, "head d_head"]
) -> Subspaces:
    """Returns the `Subspaces` of U and of the norm before the attention; bias: of the codes."""
    wide = u.detach().double().transpose(0, 1).flatten(1)  # [d_model, head * d_head]
    reads = norm_of(norm, wide)
    shift = reads.shift @ wide + bias.detach().double().flatten()
    return Subspaces(wide, reads.gains[:, None] * wide, shift, reads, len(u))


def orthonormal(u: Float[Tensor, "head d_model d_head"]) -> Float[Tensor, "head d_model width"]:
    """Returns orthonormal subspaces near U: jointly orthonormal if the space is wide enough.

    The nearest matrix with orthonormal columns is the polar factor of the U_k side by side. If
    there are more columns than dimensions, each U_k is orthonormalised on its own.
    """
    heads, width, p = u.shape
    if heads * p > width:
        return qr(u.double())[0]
    left, _, right = torch.linalg.svd(u.double().transpose(0, 1).flatten(1), full_matrices=False)
    return (left @ right).unflatten(1, (heads, p)).transpose(0, 1)


@dataclass(frozen=True)
class Rows:
    """Tokens as codes, with the squared length and the mean of each token, both in float64.

    codes: the codes by `Subspaces.wide`; read: the codes by `Subspaces.reading`. Codes in float32
    are enough for nulls, of which no difference is taken that cancels more than a few digits.
    """

    codes: Codes
    read: Codes
    square: PerToken
    mean: PerToken


@dataclass(frozen=True)
class Update(Rows):
    """An update that is added to tokens; dot: the inner product of each row with its token."""

    dot: PerToken


def single_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of what needs no float64: float32, or the model's own if it is wider."""
    return torch.promote_types(dtype, torch.float32)


Coded = TypeVar("Coded", Rows, Update)


def in_dtype(rows: Coded, dtype: torch.dtype) -> Coded:
    """Returns rows with their codes in a dtype."""
    codes = rows.codes.to(dtype)
    read = codes if rows.read is rows.codes else rows.read.to(dtype)
    return replace(rows, codes=codes, read=read)


def rows_of(z: Stream, u: Subspaces) -> Rows:
    """Returns tokens as rows; their codes are in the dtype of the tokens, stored head by head."""
    wide, reading = u.narrow if z.dtype == torch.float32 else (u.wide, u.reading)
    codes = u.spread(z @ wide).contiguous()
    read = codes if u.reading is u.wide else u.spread(z @ reading).contiguous()
    square = torch.linalg.vector_norm(z, dim=-1, dtype=torch.float64).square()
    return Rows(codes, read, square, z.mean(dim=-1, dtype=torch.float64))


def update_of(delta: Stream, z: Stream, u: Subspaces) -> Update:
    """Returns the update that adds delta to the tokens z."""
    rows = rows_of(delta, u)
    return Update(rows.codes, rows.read, rows.square, rows.mean, (delta * z).sum(dim=-1))


def negated(update: Update) -> Update:
    """Returns the update with the opposite sign."""
    return Update(-update.codes, -update.read, update.square, -update.mean, -update.dot)


def rearranged(update: Update, dot: PerToken, order: Int[Tensor, "batch pos"]) -> Update:
    """Returns the update with its rows reordered; dot: the new rows' products with the tokens."""
    places = order[:, None].expand(-1, update.codes.shape[1], -1)
    codes = permute_rows(update.codes, places)
    read = codes if update.read is update.codes else permute_rows(update.read, places)
    square, mean = (torch.take_along_dim(x, order, dim=1) for x in (update.square, update.mean))
    return Update(codes, read, square, mean, dot)


def permute_rows(x: Float[Tensor, "*batch pos width"], order: Int[Tensor, "*batch pos"]) -> Tensor:
    """Returns x with its rows in another order, `[..., pos, width]`."""
    pos, width = x.shape[-2:]
    first = torch.arange(order[..., 0].numel(), device=x.device)[:, None] * pos
    places = (order.reshape(-1, pos) + first).flatten()
    return x.reshape(-1, width).index_select(0, places).view(x.shape)


def unit_scale(square: PerToken, d_model: int) -> PerSample:
    """Returns the factor that scales Z to |Z|_F = sqrt(pos d_model); square: |z|^2 by token."""
    total = square.sum(dim=-1)
    wanted = (square.shape[-1] * d_model) ** 0.5
    return wanted / total.clamp_min(0).sqrt().where(total > 0, 1.0)


@dataclass(frozen=True)
class Side:
    """One side of an update: the tokens before it, or the tokens after it.

    codes: the codes of the tokens. read: the codes of the normalised tokens. square: the squared
    length of each token before the norm. goal: what the attention descends.
    """

    codes: Codes
    read: Codes
    square: PerToken
    goal: Objective

    @cached_property
    def grams(self) -> dict[tuple[str, str], Float[Tensor, "batch head d_head d_head"]]:
        """Returns the Gram matrices of F_k C_k by frame ("stream", "read") and "all" or "patches".

        If F_k = I, the matrix of all tokens is the patches' matrix plus the first token's matrix.
        This sum cancels no digits; a difference would.
        """
        found: dict[tuple[str, str], Tensor] = {}
        for frame, codes in (("stream", self.codes), ("read", self.read)):
            rest = self.goal.after(1).mixed(codes[:, :, 1:])
            found[frame, "patches"] = rest.mT @ rest
            if self.goal.plain:
                first = codes[:, :, :1]
                found[frame, "all"] = torch.addcmul(found[frame, "patches"], first.mT, first)
            else:
                every = self.goal.mixed(codes)
                found[frame, "all"] = every.mT @ every
        return found


def side_of(rows: Rows, update: Update | None, u: Subspaces, goal: Objective) -> Side:
    """Returns the side after an update, or before any update if `update` is None."""
    square, mean, codes, read = rows.square, rows.mean, rows.codes, rows.read
    if update is not None:
        square = square + 2 * update.dot + update.square
        mean, codes = mean + update.mean, codes + update.codes
        read = codes if rows.read is rows.codes else read + update.read
    scale = _inverse_scale(square, mean, u)
    if u.norm.there:
        read = read * scale[:, None, :, None].to(read)
    if u.shifted:
        read = read + u.spread(u.bias[None]).to(read)
    return Side(codes, read, square, goal)


def _inverse_scale(square: Tensor, mean: Tensor, u: Subspaces) -> PerToken:
    if not u.norm.there:
        return torch.ones_like(square)
    variance = square / u.d_model - (mean.square() if u.norm.centred else 0.0)
    return (variance.clamp_min(0) + u.norm.eps).rsqrt()


def read_products(rows: Rows, update: Update, u: Subspaces) -> tuple[PerToken, PerToken, PerToken]:
    """Returns |x|^2, <x, x' - x> and |x' - x|^2 for each token.

    x, x': the normalised token before and after the update.
    """
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


def over(x: Tensor, y: Tensor) -> Tensor:
    """Returns x / y, or 0 if both are 0."""
    return torch.where((x == 0) & (y == 0), 0.0, x / y)
