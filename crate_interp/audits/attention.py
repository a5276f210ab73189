"""The audit of one layer's attention: its numbers, beside its nulls, its ceilings and the paper's
operators."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.audits.descent import Descent, PerEps, alphas, descents, rates
from crate_interp.audits.frames import (
    AnyRows,
    Rows,
    Subspaces,
    Update,
    changed,
    in_basis,
    negated,
    orthonormal,
    read_side,
    rearranged,
    rows_of,
    stream_side,
    subspaces_of,
    unit_scale,
    update_of,
    without_cls,
)
from crate_interp.measures import least_rate, neumann_gradient, subspace_coding_rate_gradient
from crate_interp.measures.checks import qr
from crate_interp.models.norm import HookedNorm

# of, frame, eps, basis, tokens
Key = tuple[str, str, float, str, str]
Cells = dict[Key, dict[str, Tensor]]  # the numbers `[batch]` of each key
_DIRECTED = ("compresses", "gradient", "step", "neumann_direction")


@dataclass(frozen=True)
class Layer:
    """What of a layer's weights its attention is measured against."""

    u: Float[Tensor, "head d_model d_head"]
    stored: Subspaces
    ideal: Subspaces  # orthonormal subspaces near U
    to_orthonormal: Float[Tensor, "head d_head d_head"]  # C_k M_k are the codes in qr(U_k)
    whole: float  # |sum U_k U_k^T|_2
    maps: tuple[Float[Tensor, "inner d_model"], ...]  # random, with the singular values of W_O
    shift: Float[Tensor, "d_model"]  # the bias of the output


@dataclass(frozen=True)
class Setting:
    """What is measured, and how.

    eps: the asked one; grid: all of them. draws: of the shuffled update. limited: how many of the
    first samples have ceilings, operators and constructions. has_cls: whether token 0 is CLS. star:
    whether orthonormal U, and patches alone, are measured too, one at a time. tokens: of each
    sample, for the sparse step.
    """

    eps: float
    grid: tuple[float, ...]
    nulls: tuple[str, ...]
    draws: int
    limited: int
    has_cls: bool
    causal: bool
    star: bool
    tokens: int
    seed: int


@dataclass(frozen=True)
class Given:
    """A layer's streams on some samples: z before attention, delta what it added.

    other: delta of the next samples. orders: for each draw, where a shuffled update takes each
    token's from. noise: Gaussian directions. gathered: what the heads gathered, side by
    side, before the output map.
    """

    z: Float[Tensor, "batch pos d_model"]
    delta: Float[Tensor, "batch pos d_model"]
    other: Float[Tensor, "batch pos d_model"] | None = None
    orders: Sequence[Int[Tensor, "batch pos"]] = ()
    noise: Float[Tensor, "batch pos d_model"] | None = None
    gathered: Float[Tensor, "batch pos inner"] | None = None


def layer_of(attn: Any, norm: HookedNorm, generators: Sequence[torch.Generator]) -> Layer:
    """Returns the constants of a layer with subspaces U; a random map for each generator."""
    wide = attn.U.detach().double()
    stored = subspaces_of(wide, norm)
    out = attn.W_O.detach().double().flatten(0, 1)  # [inner, d_model]
    maps = tuple(random_like(out, generator) for generator in generators)
    r = qr(wide)[1]
    eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device).expand_as(r)
    change = torch.linalg.solve_triangular(r, eye, upper=True)
    largest = float(torch.linalg.matrix_norm(stored.wide, ord=2)) ** 2
    ideal = subspaces_of(orthonormal(wide), norm)
    return Layer(wide, stored, ideal, change, largest, maps, attn.b_O.detach().double())


def random_like(
    matrix: Float[Tensor, "rows columns"], generator: torch.Generator
) -> Float[Tensor, "rows columns"]:
    """Returns a random matrix with the same singular values: both its bases are uniform."""
    values = torch.linalg.svdvals(matrix.double())
    left, right = (
        torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64))[0]
        for n in matrix.shape
    )
    return ((left.to(values.device) * values) @ right.to(values.device).T).to(matrix.dtype)


def of_attention(layer: Layer, given: Given, setting: Setting) -> Cells:
    """Returns the numbers of the attention step and of its nulls.

    The shuffled update is measured in every setting, other nulls at the asked eps, with U as stored
    and all tokens.
    """
    u = layer.stored
    rows, update = rows_of(given.z, u), update_of(given.delta, given.z, u)
    shuffled = list(_shuffled(given, update)) if "shuffled" in setting.nulls else []
    cells = _arm(Arm(u, setting.grid), rows, update, shuffled)
    others = dict(_nulls(u, given, update, setting.nulls))
    if others:
        arm = Arm(u, (setting.eps,))
        before, found = rates(rows, None, u, arm.eps), descents(rows, u, arm.eps)
        for name, change in others.items():
            _measure(cells, arm, name, rows, change, before, found)
    for arm, turned in _other_arms(layer, setting):
        cells |= _arm(arm, turned(rows), turned(update), [turned(null) for null in shuffled])
    return cells


@dataclass(frozen=True)
class Arm:
    """An arm of the star: a basis, a choice of tokens, and the eps that are measured there."""

    u: Subspaces
    eps: tuple[float, ...]
    basis: str = "stored"
    tokens: str = "all"

    @property
    def directed(self) -> bool:
        """Tells whether the numbers that have a direction are measured."""
        return (self.basis, self.tokens) == ("stored", "all")


def _other_arms(
    layer: Layer, setting: Setting
) -> Iterator[tuple[Arm, Callable[[AnyRows], AnyRows]]]:
    """Yields the arms with orthonormal U and without CLS, and what they do to rows of the first."""
    if not setting.star:
        return
    change = layer.to_orthonormal
    if bool(change.isfinite().all()):  # else a basis has columns that depend on each other
        arm = Arm(changed(layer.stored, change), (setting.eps,), basis="orthonormal")
        yield arm, partial(in_basis, change=change)
    if setting.has_cls:
        yield Arm(layer.stored, (setting.eps,), tokens="patches"), without_cls


def _arm(arm: Arm, rows: Rows, update: Update, shuffled: Sequence[Update]) -> Cells:
    """Returns the numbers on one arm, of the layer and of its shuffled update."""
    before = rates(rows, None, arm.u, arm.eps)
    found = descents(rows, arm.u, arm.eps) if arm.directed else {}
    cells: Cells = {}
    after = _measure(cells, arm, "layer", rows, update, before, found)
    for frame, start in before.items():
        numbers = {"rate_before": start, "rate_after": after[frame]}
        if arm.directed:
            numbers["neumann"] = _beyond(found[frame], rows, arm.u, arm.eps)
        _add(cells, arm, "layer", frame, numbers)
    for change in shuffled:
        _measure(cells, arm, "shuffled", rows, change, before, found)
    for key, numbers in cells.items():
        if key[0] == "shuffled":
            cells[key] = {name: number / len(shuffled) for name, number in numbers.items()}
    return cells


def _measure(
    cells: Cells,
    arm: Arm,
    name: str,
    rows: Rows,
    change: Update,
    before: PerEps,
    found: dict[str, Descent],
) -> PerEps:
    """Adds the numbers of one update to the cells, and returns the rates after it."""
    after = rates(rows, change, arm.u, arm.eps)
    for frame, start in before.items():
        numbers = {"compresses": _over(after[frame] - start, start)}
        if found:
            numbers |= found[frame].numbers(rows, change, arm.u)
        _add(cells, arm, name, frame, numbers)
    return after


def _beyond(
    descent: Descent, rows: Rows, u: Subspaces, eps: Sequence[float]
) -> Float[Tensor, "batch eps"]:
    """Returns the share of eigenvalues alpha lambda above 1, of the min(pos, p) of each head."""
    pos = rows.square.shape[1]
    alpha = alphas(u, pos, eps).to(rows.square.device)
    values = descent.spectrum.values[..., -min(pos, u.width) :].flatten(1)
    return (alpha[:, None] * values[:, None] > 1).double().mean(dim=-1)


def _shuffled(given: Given, update: Update) -> Iterator[Update]:
    """Yields the update with its tokens in other orders."""
    for order in given.orders:
        moved = torch.take_along_dim(given.delta, order[..., None], dim=1)
        yield rearranged(update, (moved * given.z).sum(dim=-1), order)


def _nulls(
    u: Subspaces, given: Given, update: Update, names: Sequence[str]
) -> Iterator[tuple[str, Update]]:
    """Yields the other updates that stand for the layer's, each under its name."""
    if "negated" in names:
        yield "negated", negated(update)
    if "next sample" in names and given.other is not None:
        yield "next sample", update_of(given.other, given.z, u)
    if "random" in names and given.noise is not None:
        lengths = torch.linalg.vector_norm(given.delta, dim=-1, keepdim=True)
        drawn = given.noise / torch.linalg.vector_norm(given.noise, dim=-1, keepdim=True)
        yield "random", update_of(lengths * drawn, given.z, u)


def limits(layer: Layer, given: Given, setting: Setting) -> Cells:
    """Returns the ceilings, what the paper's operators reach, and what an ideal layer reaches."""
    cells: Cells = {}
    rows = rows_of(given.z, layer.stored)
    update = update_of(given.delta, given.z, layer.stored)
    _ceilings(cells, Arm(layer.stored, setting.grid), layer.whole, rows, update, given)
    for arm, turned in _other_arms(layer, setting):
        whole = float(torch.linalg.matrix_norm(arm.u.wide, ord=2)) ** 2
        _ceilings(cells, arm, whole, turned(rows), turned(update), given)
    _operators(cells, layer, given, setting)
    _constructions(cells, layer, given, setting)
    if given.gathered is not None:
        _random_maps(cells, layer, given, setting, rows)
    return cells


def _random_maps(cells: Cells, layer: Layer, given: Given, setting: Setting, rows: Rows) -> None:
    """Adds what the layer's attention does with random output maps, a cell for each draw."""
    gathered: Any = given.gathered
    for draw, out in enumerate(layer.maps):
        update = update_of(gathered @ out + layer.shift, given.z, layer.stored)
        for arm, turned in [(Arm(layer.stored, setting.grid), _same), *_other_arms(layer, setting)]:
            for key, numbers in _arm(arm, turned(rows), turned(update), []).items():
                cells[f"random map {draw}", *key[1:]] = {
                    name: value for name, value in numbers.items() if name in _DIRECTED
                }


def _ceilings(
    cells: Cells, arm: Arm, whole: float, rows: Rows, update: Update, given: Given
) -> None:
    """Adds the lowest that R^c can go with an update of this length, in each frame."""
    u = arm.u
    alpha = alphas(u, rows.square.shape[1], arm.eps).to(rows.square.device)
    stream = _values(stream_side(rows, None).codes)
    scale = unit_scale(rows, None, u.d_model)[:, None]
    lengths = _lengths(rows, update, given, u)
    read = _values(read_side(rows, None, u).codes)
    for frame, x in (("stream", stream), ("read", read), ("unit", stream * scale)):
        scaled = alpha.sqrt()[:, None] * x[:, None]  # [batch, eps, number]
        distance = (alpha * whole).sqrt() * lengths[frame][:, None]
        before = 0.5 * torch.log1p(scaled.square()).sum(dim=-1)
        least = least_rate(scaled, distance)
        _add(cells, arm, "ceiling", frame, {"compresses": _over(least - before, before)})


def _values(codes: Float[Tensor, "batch head pos d_head"]) -> Float[Tensor, "batch number"]:
    gram = codes.mT @ codes if codes.shape[-2] >= codes.shape[-1] else codes @ codes.mT
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flatten(1)


def _lengths(rows: Rows, update: Update, given: Given, u: Subspaces) -> dict[str, Tensor]:
    """Returns the Frobenius distance of the two sides in each frame."""
    own, dot, step = (part.sum(dim=-1) for part in (rows.square, update.dot, update.square))
    before, after = (unit_scale(rows, moved, u.d_model) for moved in (None, update))
    grown = after - before
    unit = grown.square() * own + 2 * grown * after * dot + after.square() * step
    first = given.z.shape[1] - rows.square.shape[1]  # 1 without CLS
    z, delta = given.z[:, first:], given.delta[:, first:]
    apart = u.norm.normalised(z + delta) - u.norm.normalised(z)
    return {
        "stream": step.clamp_min(0).sqrt(),
        "read": torch.linalg.vector_norm(apart * u.norm.gains, dim=(1, 2)),
        "unit": unit.clamp_min(0).sqrt(),
    }


def mssa(
    z: Float[Tensor, "batch pos d_model"], u: Subspaces, causal: bool
) -> Float[Tensor, "batch pos d_model"]:
    """Returns MSSA of the tokens with the output map U_k^T, read through the LayerNorm."""
    codes = u.spread(u.norm.normalised(z) @ u.gained + u.bias)
    scores = codes @ codes.mT / u.width**0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(dim=-1) @ codes).transpose(1, 2).flatten(2) @ u.wide.T


def _operators(cells: Cells, layer: Layer, given: Given, setting: Setting) -> None:
    """Adds what the paper's steps on this U do at the length of the layer's update."""
    arm = Arm(layer.stored, (setting.eps,))
    written = mssa(given.z, arm.u, setting.causal)
    steps = {
        "gradient step": -subspace_coding_rate_gradient(given.z, layer.u, setting.eps),
        "Neumann step": -neumann_gradient(given.z, layer.u, setting.eps),
        "+U": written,
        "-U": -written,
    }
    rows = rows_of(given.z, arm.u)
    before = rates(rows, None, arm.u, arm.eps)
    for name, step in steps.items():
        change = update_of(as_long(step, given.delta), given.z, arm.u)
        _measure(cells, arm, name, rows, change, before, {})


def _constructions(cells: Cells, layer: Layer, given: Given, setting: Setting) -> None:
    """Adds the best that MSSA on orthonormal subspaces reaches, with either sign."""
    u = layer.ideal
    step = as_long(mssa(given.z, u, setting.causal), given.delta)
    rows, update = rows_of(given.z, u), update_of(step, given.z, u)
    for arm, turned in [(Arm(u, setting.grid), _same), *_other_arms(layer, setting)]:
        own = replace(arm, u=u)  # it is orthonormal already
        if arm.basis == "orthonormal":
            turned = _same
        one, two = (_arm(own, turned(rows), turned(way), []) for way in (update, negated(update)))
        for key, numbers in one.items():
            cells["construction", *key[1:]] = {
                name: _better(name, value, two[key][name])
                for name, value in numbers.items()
                if not name.startswith("rate_")
            }


def _same(rows: AnyRows) -> AnyRows:
    return rows


def _better(number: str, one: Tensor, two: Tensor) -> Tensor:
    pick: Callable[[Tensor, Tensor], Tensor] = (
        torch.minimum if number in ("compresses", "neumann") else torch.maximum
    )
    return pick(one, two)


def as_long(step: Tensor, update: Tensor) -> Float[Tensor, "batch pos d_model"]:
    """Returns a step scaled, sample by sample, to the Frobenius length of an update."""
    lengths = [torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (update, step)]
    return step * (lengths[0] / lengths[1].where(lengths[1] > 0, 1.0))


def _add(cells: Cells, arm: Arm, of: str, frame: str, numbers: PerEps) -> None:
    """Adds numbers `[batch, eps]` to the cells of their eps; what is there already is added to."""
    for index, value in enumerate(arm.eps):
        cell = cells.setdefault((of, frame, value, arm.basis, arm.tokens), {})
        for name, number in numbers.items():
            column = number[:, index]
            cell[name] = cell[name] + column if name in cell else column


def _over(x: Tensor, y: Tensor) -> Tensor:
    """Returns x / y, and 0 if both are 0."""
    return torch.where((x == 0) & (y == 0), 0.0, x / y)
