"""An objective under each scaling at many eps, and how an update relates to its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.audits import frames
from crate_interp.audits.frames import Rows, Side, Subspaces, Update
from crate_interp.audits.objectives import TRUSTED, Codes, Objective, PerSample, Stream
from crate_interp.core.device_waits import holds_somewhere

PerEps = dict[str, Tensor]  # frame -> [batch, eps]
PerWay = Float[Tensor, "batch way"]
_CANCELS = 0.01  # a difference of squares below this share of them is computed in float64


@dataclass(frozen=True)
class Arm:
    """An arm of the audit's star design, which varies the basis and the tokens one at a time.

    eps: the eps at which this arm is measured. change: M_k if the basis is U_k M_k, None for the
    stored U_k. mild: whether M_k^T G_k M_k, where G_k is a Gram matrix in the stored basis, is as
    precise as the Gram matrix of the codes in the basis U_k M_k.
    """

    eps: tuple[float, ...]
    basis: str = "stored"
    tokens: str = "all"
    change: Float[Tensor, "head d_head d_head"] | None = None
    mild: bool = True

    @property
    def directed(self) -> bool:
        """Tells whether this arm measures the numbers of an update's direction."""
        return (self.basis, self.tokens) == ("stored", "all")

    @property
    def first(self) -> int:
        """Returns the position of the first token that this arm measures."""
        return int(self.tokens == "patches")

    def measured_codes(self, side: Side, frame: str) -> Float[Tensor, "batch head rows d_head"]:
        """Returns the F_k C_k that this arm measures."""
        codes = side.codes if frame == "stream" else side.read
        own = side.goal.after(self.first).mixed(codes[:, :, self.first :])
        return own if self.change is None else own @ self.change.to(own)

    def gram(self, side: Side, frame: str) -> Float[Tensor, "batch head d_head d_head"]:
        """Returns the Gram matrix of F_k C_k on this arm, in the frame "stream" or "read"."""
        if self.change is None:
            return side.grams[frame, self.tokens]
        if self.mild and side.codes.dtype != torch.float32:
            return self.change.mT @ side.grams[frame, self.tokens] @ self.change
        codes = self.measured_codes(side, frame)
        return codes.mT @ codes


def alphas(goal: Objective, u: Subspaces, pos: int, eps: Sequence[float]) -> Float[Tensor, "eps"]:
    """Returns alpha for each eps; in R^c it is p / (N eps^2)."""
    square = torch.tensor(eps, dtype=torch.float64, device=u.wide.device).square()
    return goal.size(u.width, pos) / square


def rates(side: Side, u: Subspaces, arm: Arm) -> PerEps:
    """Returns the objective of one side, in every frame and at every eps of an arm."""
    square, goal = side.square[:, arm.first :], side.goal.after(arm.first)
    alpha = alphas(goal, u, square.shape[1], arm.eps)
    unit = frames.unit_scale(square, u.d_model).square()[:, None] * alpha
    stream, count = alpha.expand_as(unit), len(arm.eps)

    def rate(frame: str, alpha: Tensor) -> Tensor:
        again = lambda rows: arm.measured_codes(side, frame)[rows]  # noqa: E731
        return goal.rate(arm.gram(side, frame), alpha, TRUSTED[side.codes.dtype], again)

    both, read = rate("stream", torch.cat([stream, unit], dim=1)), rate("read", stream)
    return {"stream": both[:, :count], "read": read, "unit": both[:, count:]}


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues and eigenvectors of the Gram matrix of F_k C_k, of one side in one frame.

    codes: F_k^T F_k C_k. If only the diagonals count, they are the values, and the axes the
    vectors.
    """

    values: Float[Tensor, "batch head d_head"]
    vectors: Float[Tensor, "batch head d_head d_head"]
    codes: Codes

    def in_dtype(self, dtype: torch.dtype) -> "Spectrum":
        """Returns the spectrum in another dtype."""
        return Spectrum(self.values.to(dtype), self.vectors.to(dtype), self.codes.to(dtype))

    def rotated(self, codes: Float[Tensor, "*batch head rows d_head"]) -> Tensor:
        """Returns codes in the eigenbasis, heads concatenated: `[..., rows, inner]`."""
        return (codes @ self.vectors).transpose(-3, -2).flatten(-2)

    def projections(self, cross: Float[Tensor, "batch head d_head d_head"]) -> Tensor:
        """Returns <v_i, X v_i> for each eigenvector v_i and X = `cross`, heads concatenated."""
        cross = cross.double()
        return (self.vectors * (cross @ self.vectors)).sum(dim=-2).flatten(1)


def spectrum(side: Side, frame: str) -> Spectrum:
    """Returns the spectrum of one side on all tokens, in the frame "stream" or "read"."""
    values, vectors = side.goal.axes(side.grams[frame, "all"])
    codes = side.codes if frame == "stream" else side.read
    return Spectrum(values, vectors, side.goal.returned(codes))


@dataclass(frozen=True)
class Descent:
    """An objective's gradient and its Neumann form under one scaling, at every eps.

    The first half of the axis `way` holds the gradient at every eps, the second half its Neumann
    form. coefficients: c_i in sum_i c_i F^T F C v_i v_i^T U^T over eigenvectors v_i, which gives
    the gradient. normal: the component of the gradient at right angles to the frame, by sample
    (unit) or by token (read). steep: the length of the gradient's component along the frame.
    curvature: L of the number "step" (claims.toml) at every eps.
    """

    spectrum: Spectrum
    coefficients: Float[Tensor, "batch way inner"]
    normal: Float[Tensor, "batch *pos way"] | None
    steep: PerWay
    curvature: Float[Tensor, "some eps"]

    def step(self, way: int, u: Subspaces) -> Stream:
        """Returns the step against the gradient at an index of `way`, in the frame "stream"."""
        bases = self.spectrum.vectors
        heads = self.coefficients[:, way].unflatten(1, bases.shape[1:3])
        codes = self.spectrum.codes @ ((bases * heads[..., None, :]) @ bases.mT)
        return -(codes.transpose(1, 2).flatten(2) @ u.wide.T)

    def at(self, place: int) -> "Descent":
        """Returns the gradients at one of the eps, given by its index."""
        ways = [place, self.curvature.shape[1] + place]
        normal = None if self.normal is None else self.normal[..., ways]
        coefficients, steep = self.coefficients[:, ways], self.steep[:, ways]
        return Descent(self.spectrum, coefficients, normal, steep, self.curvature[:, [place]])

    def numbers(self, inner: Tensor, length: PerSample) -> dict[str, Tensor]:
        """Returns the numbers of an update's direction, `[batch, eps]` each.

        inner `[batch, way]`: the inner product of the update and the gradient. length: the length
        of the update. Product and length count only components along the frame.
        """
        count = self.curvature.shape[1]
        cosine = frames.over(-inner, length[:, None] * self.steep)
        kappa = frames.over(-inner[:, :count], self.steep[:, :count].square())
        return {
            "gradient": cosine[:, :count],
            "step": kappa * self.curvature,
            "neumann_direction": cosine[:, count:],
        }


def descents(
    rows: Rows, side: Side, u: Subspaces, eps: Sequence[float], dtype: torch.dtype
) -> dict[str, Descent]:
    """Returns the gradients in every frame.

    rows, side: the tokens before the update. dtype: of the products behind the gradients' lengths.
    The gradient "read" is with respect to the normalised tokens, before the LayerNorm's gains. No
    update changes the length and the mean of a normalised token, so the gradient's components along
    them are removed.
    """
    goal, pos = side.goal, rows.square.shape[1]
    alpha, stream = alphas(goal, u, pos, eps), spectrum(side, "stream")
    scale = frames.unit_scale(rows.square, u.d_model)
    unit = replace(stream, values=stream.values * scale[:, None, None].square())
    plain = [_coefficients(found.values, alpha, goal) for found in (stream, unit)]
    size = pos * u.d_model  # |Z|^2 in the frame "unit"
    radial = (plain[1] * unit.values.flatten(1)[:, None]).sum(dim=-1)
    scaled = torch.cat([plain[0], plain[1] * scale[:, None, None]], dim=1)
    less = torch.cat([torch.zeros_like(radial), radial.square() / size], dim=1)
    steep = _steep(stream, u.kernels[0], scaled, less, dtype).chunk(2, dim=1)
    most = goal.stretch[1].to(alpha)[:, None]
    bends = [9 * alpha / 4 * value * most for value in u.largest]
    read = spectrum(side, "read")
    normal, coefficients = None, _coefficients(read.values, alpha, goal)
    less = torch.zeros_like(coefficients[..., 0])
    if u.norm.there:
        # [batch, pos, inner], without the codes of the norm's shift
        tokens = read.rotated(side.read - u.spread(u.bias[None]))
        # [batch, pos, way]: <gradient, token>
        normal = (read.rotated(read.codes) * tokens) @ coefficients.mT
        still = torch.zeros_like(rows.square)
        nothing = Update(rows.codes, rows.read, still, still, still)
        square = frames.read_products(rows, nothing, u)[0]
        less = (normal.square() / square.where(square > 0, 1.0)[..., None]).sum(dim=1)
    # the kernel has the mean removed already
    along = _steep(read, u.kernels[1], coefficients, less, dtype)
    return {
        "stream": Descent(stream, plain[0], None, steep[0], bends[0]),
        "unit": Descent(unit, plain[1], radial, steep[1], bends[0]),
        "read": Descent(read, coefficients, normal, along, bends[1]),
    }


def directions(
    arms: dict[str, Descent], rows: Rows, side: Side, update: Update, moved: Side, u: Subspaces
) -> dict[str, dict[str, Tensor]]:
    """Returns the numbers of an update's direction, in every frame.

    side, moved: the tokens before and after the update.
    """
    stream, unit, read = (arms[frame] for frame in ("stream", "unit", "read"))
    onto = stream.spectrum.projections(stream.spectrum.codes.mT @ update.codes)
    own, dot, step = (part.sum(dim=-1) for part in (rows.square, update.dot, update.square))
    numbers = {"stream": stream.numbers(_paired(stream, onto), step.sqrt())}
    before, after = (frames.unit_scale(square, u.d_model) for square in (side.square, moved.square))
    grown = after - before
    # <grown * Z + after * Delta, Z> by eigenvector
    lies = grown[:, None] * stream.spectrum.values.flatten(1) + after[:, None] * onto
    radial = before * (grown * own + after * dot)  # <update, Z> in this frame
    size = rows.square.shape[1] * u.d_model
    length = grown.square() * own + 2 * grown * after * dot + after.square() * step
    normal: Any = unit.normal
    inner = _paired(unit, before[:, None] * lies) - normal * (radial / size)[:, None]
    numbers["unit"] = unit.numbers(inner, _root(length - radial.square() / size))
    onto = read.spectrum.projections(read.spectrum.codes.mT @ (moved.read - side.read))
    inner = _paired(read, onto)
    own, along, length = frames.read_products(rows, update, u)
    if read.normal is not None:
        share = frames.over(along, own)  # the share of the update that is parallel to its token
        inner = inner - (read.normal * share[..., None]).sum(dim=1)
        length = length - share.square() * own
    numbers["read"] = read.numbers(inner, _root(length.sum(dim=-1)))
    return numbers


def _paired(descent: Descent, along: Float[Tensor, "batch inner"]) -> PerWay:
    return (descent.coefficients @ along[..., None])[..., 0]


def _coefficients(
    values: Float[Tensor, "batch head d_head"], alpha: Float[Tensor, "eps"], goal: Objective
) -> Float[Tensor, "batch way inner"]:
    """Returns alpha / (1 + alpha lambda), and alpha - alpha^2 lambda for the Neumann form.

    Both are times w_k.
    """
    scaled, factor = alpha[:, None] * values.flatten(1)[:, None], alpha[:, None]
    if goal.weights is not None:
        factor = factor * goal.weights.repeat_interleave(values.shape[2], dim=1)[:, None]
    return torch.cat([factor / (1 + scaled), factor * (1 - scaled)], dim=1)


def _steep(
    spectrum: Spectrum,
    kernel: Float[Tensor, "inner inner"],
    ways: Float[Tensor, "batch way inner"],
    less: PerWay,
    dtype: torch.dtype,
) -> PerWay:
    """Returns the lengths of gradients, given their coefficients, along a frame.

    less: the squared length of what does not lie along the frame. dtype: if it is float32, those
    gradients of which this takes nearly all are computed again in float64.
    """
    whole = _lengths(spectrum.in_dtype(dtype), kernel.to(dtype), ways)
    along = whole - less
    if dtype == torch.float32:
        cancels = along < _CANCELS * whole
        rows = cancels.any(dim=1)
        if holds_somewhere(rows):
            few = Spectrum(spectrum.values[rows], spectrum.vectors[rows], spectrum.codes[rows])
            exact = _lengths(few, kernel, ways[rows]) - less[rows]
            along[rows] = torch.where(cancels[rows], exact, along[rows])
    return _root(along)


def _lengths(
    spectrum: Spectrum, kernel: Float[Tensor, "inner inner"], ways: Float[Tensor, "batch way inner"]
) -> PerWay:
    """Returns the squared lengths of sum_i c_i X v_i v_i^T U^T over the eigenvectors of all heads.

    X = F^T F C. kernel: the inner products of the columns of U. ways: the c_i.
    """
    heads, width = spectrum.values.shape[1:]
    by_head = kernel.unflatten(1, (heads, width)).transpose(0, 1).contiguous()
    found = torch.empty_like(ways[..., 0])
    # sample by sample, since a matrix [inner, inner] of one sample fits the cache
    for place, rotated in enumerate(spectrum.rotated(spectrum.codes)):
        v, c = spectrum.vectors[place], ways[place]
        # V^T K V with a block of V for each head, multiplied from one side at a time
        half = (by_head @ v).transpose(0, 1).reshape(heads, width, -1)
        products = (v.mT @ half).flatten(0, 1).mul_(rotated.mT @ rotated).to(c)
        found[place] = ((c @ products) * c).sum(dim=-1)
    return found


def _root(square: Tensor) -> Tensor:
    return square.clamp_min(0).sqrt()
