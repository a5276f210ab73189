"""The audit of one layer's attention, beside baselines, upper limits and the papers' operators."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.audits import claims, frames
from crate_interp.audits.descent import Arm, Descent, PerEps, alphas, descents, directions, rates
from crate_interp.audits.frames import Rows, Side, Subspaces, Update
from crate_interp.audits.objectives import Kind, Objective, PerToken, Stream, kind_of
from crate_interp.audits.setting import Cells, Setting
from crate_interp.measures import checks, least_rate
from crate_interp.measures.lasso import steepest
from crate_interp.models.layers.attention import Attention
from crate_interp.models.layers.norm import HookedNorm

_SINGULAR = 1e-10  # columns count as dependent if smallest / largest pivot is at most this
DRAWS_OF_GRID = 2  # how many of the shuffled updates are measured away from the main setting
_MILD = 100.0  # a Gram matrix changes basis only if U_k has at most this condition number


@dataclass(frozen=True)
class Layer:
    """Values computed from a layer's weights that the audit of its attention needs."""

    u: Float[Tensor, "head d_model d_head"]
    norm: HookedNorm
    stored: Subspaces
    to_orthonormal: Float[Tensor, "head d_head d_head"]  # M_k; C_k M_k are the codes in qr(U_k)
    maps: Callable[[], Iterator[Tensor]]  # random `[inner, d_model]`, with W_O's singular values
    shift: Float[Tensor, "d_model"]  # the bias of the output map
    kind: Kind
    attn: Attention

    @cached_property
    def orthonormal_sum(self) -> float:
        """Returns |sum U_k U_k^T|_2 in the orthonormal basis."""
        return steepest((self.u @ self.to_orthonormal).transpose(0, 1).flatten(1))

    def arms(self, setting: Setting) -> tuple[Arm, ...]:
        """Returns the arms of the star design; the first has the stored basis and all tokens."""
        found = [Arm(setting.grid)]
        change = self.to_orthonormal
        if setting.star and bool(change.isfinite().all()):  # it is NaN for dependent columns
            values = torch.linalg.svdvals(change)
            mild = bool((values[:, 0] <= _MILD * values[:, -1]).all())
            found.append(Arm((setting.eps,), "orthonormal", change=change, mild=mild))
        if setting.star and setting.has_cls:
            found.append(Arm((setting.eps,), tokens="patches"))
        return tuple(found)


@dataclass(frozen=True)
class AttentionData:
    """A layer's streams for some samples: z before attention, and the update delta of attention.

    other: for each sample, the delta of the next sample. orders: one order per draw of the shuffled
    update; if its entry i is j, token i gets the update of token j. noise: Gaussian directions.
    gathered: the heads' concatenated outputs before the output map. goal: what the attention
    descends. single: the dtype of what only nulls and random maps need, float32 unless the model
    computes in float64.
    """

    z: Stream
    delta: Stream
    other: Stream | None = None
    orders: Sequence[Int[Tensor, "batch pos"]] = ()
    noise: Stream | None = None
    gathered: Float[Tensor, "batch pos inner"] | None = None
    goal: Objective = Objective()
    single: torch.dtype = torch.float32


def layer_of(attn: Any, norm: HookedNorm, maps_like: Callable[[Tensor], Iterator[Tensor]]) -> Layer:
    """Returns the `Layer` of an attention with subspaces U; maps_like: makes random output maps."""
    wide = attn.U.detach().double()
    out = attn.W_O.detach().double().flatten(0, 1)  # [inner, d_model]
    change = _to_orthonormal(wide)
    stored = frames.subspaces_of(wide, norm, attn.b_V)
    # drawn again for each slice: of all layers together the maps would fill the memory
    drawn = partial(maps_like, out.to(frames.single_of(attn.W_O.dtype)))
    return Layer(wide, norm, stored, change, drawn, attn.b_O.detach().double(), kind_of(attn), attn)


def _to_orthonormal(u: Float[Tensor, "head d_model d_head"]) -> Float[Tensor, "head d_head d_head"]:
    """Returns M_k with U_k M_k = qr(U_k); NaN if columns are linearly dependent."""
    eye = torch.eye(u.shape[2], dtype=u.dtype, device=u.device).expand(len(u), -1, -1)
    if u.shape[2] > u.shape[1]:
        return eye * torch.nan
    r = checks.qr(u)[1]
    pivots = r.diagonal(dim1=-2, dim2=-1).abs()
    if bool((pivots.amin(dim=-1) <= _SINGULAR * pivots.amax(dim=-1)).any()):
        return eye * torch.nan
    return torch.linalg.solve_triangular(r, eye, upper=True)


@dataclass(frozen=True)
class Base:
    """The tokens before an update, with their rates on each arm and the objective's gradient.

    found: the gradient in each frame at the eps of the first arm; empty if no gradient is needed.
    """

    rows: Rows
    side: Side
    u: Subspaces
    arms: tuple[Arm, ...]
    before: tuple[PerEps, ...]
    found: dict[str, Descent]

    def in_dtype(self, dtype: torch.dtype) -> "Base":
        """Returns a copy for updates whose codes are in a dtype."""
        if dtype != torch.float32:
            return self
        found = {}
        for frame, descent in self.found.items():
            codes = descent.spectrum.codes.float()
            found[frame] = replace(descent, spectrum=replace(descent.spectrum, codes=codes))
        # made like the side after an update, so that both are equal if the update is 0
        rows = frames.in_dtype(self.rows, dtype)
        side = frames.side_of(rows, None, self.u, self.side.goal)
        return replace(self, rows=rows, side=side, found=found)

    def at(self, eps: float) -> "Base":
        """Returns a copy of the base that keeps only its first arm, at one eps."""
        place = self.arms[0].eps.index(eps)
        before = {frame: number[:, [place]] for frame, number in self.before[0].items()}
        found = {frame: descent.at(place) for frame, descent in self.found.items()}
        return replace(self, arms=(Arm((eps,)),), before=(before,), found=found)


def base_of(
    rows: Rows, u: Subspaces, arms: tuple[Arm, ...], goal: Objective, dtype: torch.dtype
) -> Base:
    """Returns the base for updates of the tokens `rows`; dtype: as in `descents`."""
    side = frames.side_of(rows, None, u, goal)
    before = tuple(rates(side, u, arm) for arm in arms)
    return Base(rows, side, u, arms, before, descents(rows, side, u, arms[0].eps, dtype))


def of_attention(layer: Layer, data: AttentionData, setting: Setting) -> Cells:
    """Returns the numbers of the attention step, and of the nulls and limits in its settings.

    The shuffled update is measured in every setting. The other nulls are measured only at the main
    eps, with U as stored and all tokens.
    """
    u = layer.stored
    rows, update = frames.rows_of(data.z, u), frames.update_of(data.delta, data.z, u)
    base = base_of(rows, u, layer.arms(setting), data.goal, data.single)
    cells = _of_update(base, update)
    if setting.nulls:
        _nulls(cells, base.in_dtype(data.single), data, update, setting)
    if setting.limited:
        _limits(cells, layer, data, setting, base, update)
    if layer.kind.no_series:
        for numbers in cells.values():
            for name in claims.CLAIMS["neumann"].numbers:
                numbers.pop(name, None)
    return cells


def _of_update(base: Base, update: Update) -> Cells:
    """Returns the numbers of the layer's own update, including the rates themselves."""
    cells: Cells = {}
    after = _measure(cells, base, "layer", update)
    pos = base.rows.square.shape[1]
    for arm, start, end in zip(base.arms, base.before, after, strict=True):
        for frame in start:
            numbers = {"rate_before": start[frame], "rate_after": end[frame]}
            if arm.directed:
                # which share of the heads' min(pos, p) largest eigenvalues has alpha lambda > 1
                alpha = alphas(base.side.goal, base.u, pos, arm.eps)
                values = base.found[frame].spectrum.values[..., -min(pos, base.u.width) :]
                beyond = alpha[:, None] * values.flatten(1)[:, None] > 1
                numbers["neumann"] = beyond.double().mean(dim=-1)
            _add(cells, arm, "layer", frame, numbers)
    return cells


def _measure(cells: Cells, base: Base, name: str, change: Update) -> list[PerEps]:
    """Adds the numbers of one update to the cells; returns the rates after the update, by arm."""
    moved = frames.side_of(base.rows, change, base.u, base.side.goal)
    along: dict[str, dict[str, Tensor]] = {}
    if base.found:
        along = directions(base.found, base.rows, base.side, change, moved, base.u)
    every: list[PerEps] = []
    for arm, before in zip(base.arms, base.before, strict=True):
        after = rates(moved, base.u, arm)
        for frame, start in before.items():
            numbers = {"compresses": frames.over(after[frame] - start, start)}
            if arm.directed and along:
                numbers |= along[frame]
            _add(cells, arm, name, frame, numbers)
        every.append(after)
    return every


def _nulls(cells: Cells, base: Base, data: AttentionData, update: Update, setting: Setting) -> None:
    """Adds the numbers of the nulls.

    The shuffled update is averaged over draws. Only the first draws are measured on the whole grid.
    """
    here, u = base.at(setting.eps), base.u
    update = frames.in_dtype(update, data.single)
    drawn: Cells = {}
    delta, z = (x.to(data.single) for x in (data.delta, data.z))
    for draw, order in enumerate(data.orders):
        dot = (frames.permute_rows(delta, order) * z).sum(dim=-1).double()
        change = frames.rearranged(update, dot, order)
        _measure(drawn, base if draw < DRAWS_OF_GRID else here, "shuffled", change)
    main = (here.arms[0].eps[0], here.arms[0].basis, here.arms[0].tokens)
    for key, numbers in drawn.items():
        count = len(data.orders) if key[2:] == main else min(len(data.orders), DRAWS_OF_GRID)
        cells[key] = {name: number / count for name, number in numbers.items()}
    if "negated" in setting.nulls:
        _measure(cells, here, "negated", frames.negated(update))
    if data.other is not None:
        _measure(cells, here, "next sample", frames.update_of(data.other, data.z, u))
    if data.noise is not None:
        lengths = torch.linalg.vector_norm(data.delta, dim=-1, keepdim=True).to(data.noise)
        drawn = data.noise / torch.linalg.vector_norm(data.noise, dim=-1, keepdim=True)
        _measure(cells, here, "random", frames.update_of(lengths * drawn, data.z, u))


def _limits(
    cells: Cells, layer: Layer, data: AttentionData, setting: Setting, base: Base, update: Update
) -> None:
    """Adds the numbers of ceilings, the paper's operators, an ideal layer and random maps."""
    norm = layer.stored.norm
    # for each token, the squared distance between the norm's outputs before and after the update
    apart = norm.normalised(data.z + data.delta) - norm.normalised(data.z)
    apart = (apart * norm.gains).square().sum(dim=-1)
    for arm in base.arms:  # bounds that no update of this length can bring the objective below
        square, goal = base.side.square[:, arm.first :], base.side.goal.after(arm.first)
        alpha = alphas(goal, base.u, square.shape[1], arm.eps)
        stream, read = (
            goal.values(arm.gram(base.side, frame)).sqrt().flatten(1)
            for frame in ("stream", "read")
        )
        unit = stream * frames.unit_scale(square, base.u.d_model)[:, None]
        lengths = _lengths(base.rows, update, apart, base.u, arm.first)
        weights = goal.weights
        if weights is not None:
            weights = weights.repeat_interleave(base.u.width, dim=1)[:, None]
        stretch = goal.stretch[0].to(stream).sqrt()[:, None]
        whole = base.u.largest[0] if arm.change is None else layer.orthonormal_sum
        reach = stretch * (alpha * whole).sqrt()
        for frame, x in (("stream", stream), ("read", read), ("unit", unit)):
            scaled = alpha.sqrt()[:, None] * x[:, None]  # [batch, eps, number]
            terms = torch.log1p(scaled.square())
            before = 0.5 * (terms if weights is None else weights * terms).sum(dim=-1)
            each = None if weights is None else weights.expand_as(scaled)
            least = least_rate(scaled, reach * lengths[frame][:, None], each)
            _add(cells, arm, "ceiling", frame, {"compresses": frames.over(least - before, before)})
    # the paper's steps with the layer's U, as long as the layer's update
    step, here = written(layer, data.z, layer.stored, setting.causal)[0], base.at(setting.eps)
    steps = {"gradient step": here.found["stream"].step(0, base.u), "+U": step}
    if not layer.kind.no_series:
        steps["Neumann step"] = here.found["stream"].step(1, base.u)
    for name, step in steps.items():
        change = frames.update_of(as_long(step, data.delta), data.z, layer.stored)
        _measure(cells, replace(here, found={}), name, change)
        if name == "+U":
            _measure(cells, replace(here, found={}), "-U", frames.negated(change))
    _constructions(cells, layer, data, setting)
    gathered: Any = data.gathered
    base = base.in_dtype(data.single)
    for draw, out in enumerate(layer.maps()):
        change = frames.update_of(gathered @ out + layer.shift.to(out), data.z, layer.stored)
        _measure(cells, base, f"random map {draw}", change)


def _lengths(
    rows: Rows, update: Update, apart: PerToken, u: Subspaces, first: int
) -> dict[str, Tensor]:
    """Returns the Frobenius length of the update in each frame, over the tokens from `first` on."""
    square, along, length = (x[:, first:] for x in (rows.square, update.dot, update.square))
    own, dot, step = (part.sum(dim=-1) for part in (square, along, length))
    before = frames.unit_scale(square, u.d_model)
    after = frames.unit_scale(square + 2 * along + length, u.d_model)
    grown = after - before
    unit = grown.square() * own + 2 * grown * after * dot + after.square() * step
    return {
        "stream": step.clamp_min(0).sqrt(),
        "read": apart[:, first:].sum(dim=-1).sqrt(),
        "unit": unit.clamp_min(0).sqrt(),
    }


def written(layer: Layer, z: Stream, u: Subspaces, causal: bool) -> tuple[Stream, Objective]:
    """Returns the paper's attention of the tokens with the output map U_k^T, and its objective."""
    codes = u.spread(u.norm.normalised(z) @ u.gained + u.bias)
    heads, goal = layer.kind.heads(layer.attn, codes, causal)
    return heads.transpose(1, 2).flatten(2) @ u.wide.T, goal


def _constructions(cells: Cells, layer: Layer, data: AttentionData, setting: Setting) -> None:
    """Adds the numbers of the layer's kind of attention on orthonormal subspaces.

    Adding and subtracting the attention are both tried; the better one counts.
    """
    bases = frames.orthonormal(layer.u)  # narrower if heads are wider than the stream
    u = frames.subspaces_of(bases, layer.norm, layer.attn.b_V[:, : bases.shape[2]])
    arms = tuple(replace(arm, change=None) for arm in layer.arms(setting))  # u is orthonormal
    step, goal = written(layer, data.z, u, setting.causal)
    update = frames.update_of(as_long(step, data.delta), data.z, u)
    base = base_of(frames.rows_of(data.z, u), u, arms, goal, data.single)
    one, two = (_of_update(base, way) for way in (update, frames.negated(update)))
    for key, numbers in one.items():
        cells["construction", *key[1:]] = {
            name: (torch.minimum if claims.NUMBERS[name].better < 0 else torch.maximum)(
                value, two[key][name]
            )
            for name, value in numbers.items()
            if not name.startswith("rate_") and name != "step"  # "step" needs its own length
        }


def as_long(step: Tensor, update: Tensor) -> Stream:
    """Returns a step scaled, sample by sample, to the Frobenius length of an update."""
    lengths = [torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (update, step)]
    return step * (lengths[0] / lengths[1].where(lengths[1] > 0, 1.0))


def _add(cells: Cells, arm: Arm, of: str, frame: str, numbers: PerEps) -> None:
    """Adds numbers `[batch, eps]` to the cells of their eps; repeated calls add up."""
    for index, value in enumerate(arm.eps):
        cell = cells.setdefault((of, frame, value, arm.basis, arm.tokens), {})
        for name, number in numbers.items():
            column = number[:, index]
            cell[name] = cell[name] + column if name in cell else column
