"""Rates of a frame at many eps, and how an update lies to the gradient of R^c in that frame."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.audits.frames import (
    Rows,
    Subspaces,
    Update,
    read_products,
    read_side,
    stream_side,
    unit_scale,
)

PerEps = dict[str, Tensor]  # frame -> [batch, eps]
_DOUBTFUL = 1e9  # of the largest diagonal entry over the smallest squared pivot


def alphas(u: Subspaces, pos: int, eps: Sequence[float]) -> Float[Tensor, "eps"]:
    """Returns p / (N eps^2)."""
    return u.width / (pos * torch.tensor(eps, dtype=torch.float64).square())


def rates(rows: Rows, update: Update | None, u: Subspaces, eps: Sequence[float]) -> PerEps:
    """Returns R^c in every frame and at every eps, of the tokens or of the tokens moved."""
    alpha = alphas(u, rows.square.shape[1], eps).to(rows.square.device)
    unit = unit_scale(rows, update, u.d_model).square()[:, None] * alpha
    stream = alpha.expand_as(unit)
    both = rates_of_codes(stream_side(rows, update).codes, torch.cat([stream, unit], dim=1))
    read = rates_of_codes(read_side(rows, update, u).codes, stream)
    return {"stream": both[:, : len(eps)], "read": read, "unit": both[:, len(eps) :]}


def rates_of_codes(
    codes: Float[Tensor, "batch head pos d_head"], alpha: Float[Tensor, "batch eps"]
) -> Float[Tensor, "batch eps"]:
    """Returns sum over heads of 1/2 logdet(I + alpha C^T C).

    Samples whose factor cannot be trusted are computed again from singular values.
    """
    gram = codes.mT @ codes if codes.shape[-2] >= codes.shape[-1] else codes @ codes.mT
    matrix = gram[:, None] * alpha[..., None, None, None]  # [batch, eps, head, n, n]
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal += 1
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    rate = pivots.log().sum(dim=(-2, -1))
    ratio = diagonal.amax(dim=-1) / pivots.amin(dim=-1).square()
    doubtful = ~((ratio < _DOUBTFUL) & (failed == 0)).all(dim=-1).all(dim=-1)
    if bool(doubtful.any()):
        values = torch.linalg.svdvals(codes[doubtful]).square()[:, None]
        again = torch.log1p(alpha[doubtful][..., None, None] * values)
        rate[doubtful] = 0.5 * again.sum(dim=(-2, -1))
    return rate


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues and vectors of C_k^T C_k of one side in one frame."""

    values: Float[Tensor, "batch head d_head"]
    vectors: Float[Tensor, "batch head d_head d_head"]
    codes: Float[Tensor, "batch head pos d_head"]

    def rotated(self, codes: Float[Tensor, "*batch head rows d_head"]) -> Tensor:
        """Returns codes in the eigenbasis, heads side by side: `[..., rows, inner]`."""
        return (codes @ self.vectors).transpose(-3, -2).flatten(-2)

    def projections(
        self, moved: Float[Tensor, "batch head pos d_head"]
    ) -> Float[Tensor, "b inner"]:
        """Returns <v_i, C^T D v_i> for each eigenvector, heads side by side."""
        cross = self.codes.mT @ moved
        return (self.vectors * (cross @ self.vectors)).sum(dim=-2).flatten(1)


def spectrum(codes: Float[Tensor, "batch head pos d_head"]) -> Spectrum:
    """Returns the spectrum of the codes of a side."""
    values, vectors = torch.linalg.eigh(codes.mT @ codes)
    return Spectrum(values.clamp_min(0), vectors, codes)


@dataclass(frozen=True)
class Descent:
    """The gradient of R^c along one frame, and of its Neumann form, at every eps.

    coefficients: the gradient is sum_i c_i C v_i v_i^T U^T over eigenvectors. normal: what of it is
    at right angles to the frame, sample by sample (unit) or token by token (read). steep: the
    length of the rest. curvature: L at every eps. The second half of `way` is of the Neumann form.
    """

    frame: str
    spectrum: Spectrum
    coefficients: Float[Tensor, "batch way inner"]
    normal: Float[Tensor, "batch *pos way"] | None
    steep: Float[Tensor, "batch way"]
    curvature: Float[Tensor, "eps"]

    def numbers(self, rows: Rows, update: Update, u: Subspaces) -> dict[str, Tensor]:
        """Returns the numbers of an update that have a direction, `[batch, eps]` each."""
        inner, length = _along(self, rows, update, u)
        count = len(self.curvature)
        cosine = _over(-inner, length[:, None] * self.steep)
        kappa = _over(-inner[:, :count], self.steep[:, :count].square())
        return {
            "gradient": cosine[:, :count],
            "step": kappa * self.curvature,
            "neumann_direction": cosine[:, count:],
        }


def descents(rows: Rows, u: Subspaces, eps: Sequence[float]) -> dict[str, Descent]:
    """Returns the gradient in every frame."""
    alpha = alphas(u, rows.square.shape[1], eps).to(rows.square.device)
    largest = [torch.linalg.matrix_norm(wide, ord=2).square() for wide in (u.wide, u.gained)]
    stream = spectrum(rows.codes)
    scale = unit_scale(rows, None, u.d_model)
    unit = Spectrum(
        stream.values * scale[:, None, None].square(),
        stream.vectors,
        stream.codes * scale[:, None, None, None],
    )
    plain = [_coefficients(side.values.flatten(1), alpha) for side in (stream, unit)]
    products = _products(stream, u.wide)
    steep = [_quadratic(c, products) for c in plain]
    size = rows.square.shape[1] * u.d_model  # |Z|^2 in the frame "unit"
    radial = (plain[1] * unit.values.flatten(1)[:, None]).sum(dim=-1)
    steep[1] = steep[1] * scale[:, None].square() - radial.square() / size
    bends = [9 * alpha / 4 * value for value in largest]
    return {
        "stream": Descent("stream", stream, plain[0], None, _root(steep[0]), bends[0]),
        "unit": Descent("unit", unit, plain[1], radial, _root(steep[1]), bends[0]),
        "read": _read_descent(rows, u, alpha, bends[1]),
    }


def _read_descent(
    rows: Rows, u: Subspaces, alpha: Float[Tensor, "eps"], bend: Float[Tensor, "eps"]
) -> Descent:
    """Returns the gradient with respect to the normalised tokens, before the LayerNorm's gains.

    A normalised token keeps its length and its mean: along them the frame does not move.
    """
    side = read_side(rows, None, u)
    found = spectrum(side.codes)
    coefficients = _coefficients(found.values.flatten(1), alpha)
    steep = _quadratic(coefficients, _products(found, u.gained))
    if not u.norm.there:
        return Descent("read", found, coefficients, None, _root(steep), bend)
    rotated = found.rotated(side.codes)  # [batch, pos, inner]
    tokens = found.rotated(side.codes - u.spread(u.bias[None]))
    radial = (rotated * tokens) @ coefficients.mT  # [batch, pos, way]: <gradient, token>
    square = _token_square(rows, u)
    steep = steep - (radial.square() / square[..., None]).sum(dim=1)
    if u.norm.centred:
        ones = u.spread(u.gained.sum(dim=0)[None]).expand(len(rotated), -1, -1, -1)
        level = (rotated * found.rotated(ones)) @ coefficients.mT
        steep = steep - level.square().sum(dim=1) / u.d_model
    return Descent("read", found, coefficients, radial, _root(steep), bend)


def _along(
    descent: Descent, rows: Rows, update: Update, u: Subspaces
) -> tuple[Float[Tensor, "batch way"], Float[Tensor, "batch"]]:
    """Returns <update, gradient> and the update's length, both along the frame."""
    if descent.frame == "stream":
        inner = _paired(descent, descent.spectrum.projections(update.codes))
        return inner, update.square.sum(dim=-1).sqrt()
    if descent.frame == "unit":
        before, after = (unit_scale(rows, moved, u.d_model) for moved in (None, update))
        ratio = (after / before)[:, None, None, None]
        moved = (ratio - 1) * descent.spectrum.codes + after[:, None, None, None] * update.codes
        size = rows.square.shape[1] * u.d_model
        own, dot, step = (part.sum(dim=-1) for part in (rows.square, update.dot, update.square))
        grown = after - before
        radial = before * (grown * own + after * dot)  # <update, Z> in the frame
        length = grown.square() * own + 2 * grown * after * dot + after.square() * step
        inner = _paired(descent, descent.spectrum.projections(moved))
        normal: Any = descent.normal
        inner = inner - normal * (radial / size)[:, None]
        return inner, _root(length - radial.square() / size)
    moved = read_side(rows, update, u).codes - descent.spectrum.codes
    inner = _paired(descent, descent.spectrum.projections(moved))
    own, along, length = read_products(rows, update, u)
    if descent.normal is not None:
        share = _over(along, own)  # the part of the update along its token
        inner = inner - (descent.normal * share[..., None]).sum(dim=1)
        length = length - share.square() * own
    return inner, _root(length.sum(dim=-1))


def _paired(descent: Descent, along: Float[Tensor, "batch inner"]) -> Float[Tensor, "batch way"]:
    return (descent.coefficients @ along[..., None])[..., 0]


def _coefficients(
    values: Float[Tensor, "batch inner"], alpha: Float[Tensor, "eps"]
) -> Float[Tensor, "batch way inner"]:
    """Returns alpha / (1 + alpha lambda), and alpha - alpha^2 lambda of the Neumann form."""
    scaled = alpha[:, None] * values[:, None]
    return torch.cat([alpha[:, None] / (1 + scaled), alpha[:, None] * (1 - scaled)], dim=1)


def _products(found: Spectrum, wide: Float[Tensor, "d_model inner"]) -> Tensor:
    """Returns <C v_i v_i^T U^T, C v_j v_j^T U^T> of all pairs of eigenvectors of all heads."""
    rotated = found.rotated(found.codes)
    heads, width = found.values.shape[1:]
    written = (wide.unflatten(1, (heads, width)).transpose(0, 1) @ found.vectors).transpose(1, 2)
    written = written.flatten(2)  # [batch, d_model, inner]
    return (rotated.mT @ rotated) * (written.mT @ written)


def _quadratic(c: Float[Tensor, "batch way inner"], products: Tensor) -> Float[Tensor, "batch way"]:
    return ((c @ products) * c).sum(dim=-1)


def _token_square(rows: Rows, u: Subspaces) -> Float[Tensor, "batch pos"]:
    still = torch.zeros_like(rows.square)
    nothing = Update(rows.codes, rows.read, still, still, still)
    own = read_products(rows, nothing, u)[0]
    return own.where(own > 0, 1.0)


def _root(square: Tensor) -> Tensor:
    return square.clamp_min(0).sqrt()


def _over(x: Tensor, y: Tensor) -> Tensor:
    """Returns x / y, and 0 if both are 0."""
    return torch.where((x == 0) & (y == 0), 0.0, x / y)
