"""The audit of one layer: every number of every claim, on its weights and sample by sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp import measures
from crate_interp.audits import attention, claims, frames, objectives, sparse
from crate_interp.audits.setting import Cells, Setting
from crate_interp.measures.lasso import steepest
from crate_interp.models.layers.sparse_steps import Lasso
from crate_interp.probes.layer_reading import dictionary, tied_subspaces

POINTS = (
    "hook_resid_pre", "hook_resid_mid", "ln2.hook_normalized", "mlp.hook_post", "attn.hook_z",
    "attn.hook_pi", "attn.hook_contract",
)  # fmt: skip
MAPS = 32  # number of random output maps
SHUFFLES = 8  # how often the update is shuffled
_AT_ONCE = 2**21  # numbers of a stream that are measured at a time: 16 MB in float64
_PLACES = 2**20  # this many samples, or layers, get seeds that differ
_STREAMS = 1009  # generators reserved for each sample or layer
# the index of the first generator of each null; "random" uses one index per layer, counting down
# from the first, so that no two nulls share a generator
_FIRST = {"shuffled": 0, "random D": 100, "random map": 200, "tokens": 300, "random": _STREAMS - 1}


@dataclass(frozen=True)
class Audited:
    """The values computed from a layer's weights that its audit needs."""

    index: int
    attention: attention.Layer | None
    lasso: Lasso | str
    random: tuple[Tensor, ...]  # random dictionaries with the singular values of D
    norm: frames.Norm | None  # the norm before the sparse step, if the code is as wide as Z
    largest: float  # |D|_2^2 of the lasso; 0 without one


def audited(blocks: Sequence[Any], setting: Setting) -> list[Audited]:
    """Returns the `Audited` of each layer; its random weights depend on the seed."""
    of_maps = Bases(partial(_generator, setting.seed, "random map", 0))
    of_d = Bases(partial(_generator, setting.seed, "random D", 0))
    maps = MAPS if setting.limited else 0
    draws = sparse.DRAWS if "random D" in setting.nulls else 0
    found = []
    for index, block in enumerate(blocks):
        u, d, lasso = tied_subspaces(block), dictionary(block), block.mlp.lasso()
        is_lasso = isinstance(lasso, Lasso)
        random = tuple(of_d.like(lasso.d, draws)) if is_lasso else ()
        square = is_lasso and not _unlike_the_stream(d)
        norm = frames.norm_of(block.ln2, d) if square and d is not None else None
        attn = None
        if u is not None:
            attn = attention.layer_of(block.attn, block.ln1, partial(of_maps.like, draws=maps))
        largest = steepest(lasso.d) if is_lasso else 0.0
        found.append(Audited(index, attn, lasso, random, norm, largest))
    return found


def why_not(block: Any) -> dict[str, str]:
    """Returns why numbers do not apply to a layer; numbers that apply have no entry."""
    u, lasso = tied_subspaces(block), block.mlp.lasso()
    three = "queries, keys and values are three codes: the layer has no subspaces U"
    lacks: dict[claims.Need, str] = {
        "subspaces": three if u is None else "",
        "series": objectives.kind_of(block.attn).no_series if u is not None else "",
        "several heads": "the layer has one head" if u is not None and len(u) < 2 else "",
        "lasso": lasso if isinstance(lasso, str) else "",
        "square dictionary": _unlike_the_stream(dictionary(block)),
    }
    reasons: dict[str, str] = {}
    for claim in claims.CLAIMS.values():
        reason = next((lacks[need] for need in claim.needs if lacks[need]), "")
        reasons |= dict.fromkeys(claim.numbers, reason) if reason else {}
    return reasons


def _unlike_the_stream(d: Float[Tensor, "d_model d_mlp"] | None) -> str:
    """Returns why the code of D is not as wide as the stream, or "" if it is."""
    if d is None:
        return "there is no dictionary"
    if d.shape[1] > d.shape[0]:
        return "the dictionary is overcomplete: D^T D cannot be I"
    return "" if d.shape[0] == d.shape[1] else "the code is not as wide as the stream"


def of_layer(
    layer: Audited, acts: dict[str, Tensor], start: int, count: int, setting: Setting
) -> list[tuple[int, Cells]]:
    """Returns the numbers of the first `count` samples: (index of first sample, numbers) per slice.

    start: the index of the first sample in the data. acts may hold one more sample; its update is
    the null "next sample" of the last sample. Limits are computed for all samples of a slice or for
    none of them, and so are nulls and the grid.
    """
    pos, width = acts[POINTS[0]].shape[1:]
    found: list[tuple[int, Cells]] = []
    for first, stop in _slices(count, start, setting, pos * width):
        own, cells = setting.at(start + first), Cells()
        if layer.attention is not None:
            given = _read_attention(layer, acts, first, stop, start, own)
            cells |= attention.of_attention(layer.attention, given, own)
        if layer.norm is not None and isinstance(layer.lasso, Lasso):
            y, code = (acts[point][first:stop] for point in POINTS[2:4])
            cells |= sparse.of_rates(layer.lasso, layer.norm, y, code, own.grid)
        found.append((start + first, cells))
    return found + _sparse(layer, acts, start, count, setting)


def _slices(count: int, start: int, setting: Setting, numbers: int) -> Iterator[tuple[int, int]]:
    """Yields slices (first, stop) of `count` samples, in each of which the settings are the same.

    start: the index of the first sample in the data. numbers: how many numbers a sample holds.
    """
    step = max(1, _AT_ONCE // numbers)
    for _, same in groupby(range(count), key=lambda place: setting.kind(start + place)):
        places = list(same)
        for first in places[::step]:
            yield first, min(first + step, places[-1] + 1)


def _sparse(
    layer: Audited, acts: dict[str, Tensor], start: int, count: int, setting: Setting
) -> list[tuple[int, Cells]]:
    """Returns the numbers of the sparse step, with nulls and limits for the first samples.

    What costs only a step is measured on all tokens; what needs the lasso's solution, on some.
    """
    lasso, found = layer.lasso, []
    if not isinstance(lasso, Lasso):
        return found
    pos, atoms = acts[POINTS[0]].shape[1], lasso.d.shape[1]
    for first, stop in _slices(count, start, setting, pos * atoms):
        mid, y, code = (acts[point][first:stop] for point in POINTS[1:4])
        cells = sparse.of_sparse_step(lasso, mid, y, code)
        if "random D" in setting.at(start + first).nulls:
            places = _drawn_tokens(range(start + first, start + stop), pos, setting.seed)
            cells |= sparse.of_random(lasso, y, layer.random, places)
        found.append((start + first, cells))
    for first, stop in _slices(count, start, setting, len(sparse.SCALES) * setting.tokens * atoms):
        y, code = (acts[point][first:stop] for point in POINTS[2:4])
        limited = bool(setting.at(start + first).limited)
        cells, scales = sparse.of_solution(lasso, y, code, setting.tokens, layer.largest, limited)
        if scales is not None and layer.norm is not None:
            rates = sparse.rates_at_scale(lasso, scales, layer.norm, y, setting.grid)
            cells |= {("construction", *key[1:]): numbers for key, numbers in rates.items()}
        found.append((start + first, cells))
    return found


def _read_attention(
    layer: Audited, acts: dict[str, Tensor], first: int, stop: int, start: int, setting: Setting
) -> attention.AttentionData:
    before, after = acts[POINTS[0]], acts[POINTS[1]]
    single = frames.single_of(before.dtype)
    z = before[first:stop].double()
    delta, other, noise = after[first:stop].double() - z, None, None
    if "next sample" in setting.nulls and len(before) > stop:
        ahead = slice(first + 1, stop + 1)
        other = (after[ahead].double() - before[ahead].double()).to(single)
    samples = range(start + first, start + stop)
    if "random" in setting.nulls:
        seeds = [_generator(setting.seed, "random", sample, -layer.index) for sample in samples]
        drawn = torch.stack(
            [torch.randn(z.shape[1:], generator=seed, dtype=torch.float32) for seed in seeds]
        )
        noise = drawn.to(z.device, single)
    orders = [
        torch.stack([_order(sample, draw, z.shape[1], setting) for sample in samples]).to(z.device)
        for draw in range(SHUFFLES if "shuffled" in setting.nulls else 0)
    ]
    gathered = acts[POINTS[4]][first:stop].flatten(2).to(single) if setting.limited else None
    assert layer.attention is not None
    seen = {point: acts[point][first:stop] for point in POINTS[5:] if point in acts}
    goal = layer.attention.kind.seen(layer.attention.attn, seen)
    return attention.AttentionData(z, delta, other, orders, noise, gathered, goal, single)


def _drawn_tokens(samples: range, pos: int, seed: int) -> Int[Tensor, "batch tokens"] | None:
    """Returns tokens drawn for each sample on which random dictionaries are measured; None: all."""
    if pos <= sparse.TOKENS:
        return None
    seeds = (_generator(seed, "tokens", sample, 0) for sample in samples)
    drawn = [torch.randperm(pos, generator=each)[: sparse.TOKENS] for each in seeds]
    return torch.stack(drawn).sort(dim=1).values


def _order(sample: int, draw: int, pos: int, setting: Setting) -> Int[Tensor, "pos"]:
    """Returns an order, the same in every layer: token i gets the update of token order[i]."""
    first = int(setting.has_cls)
    generator = _generator(setting.seed, "shuffled", sample, draw)
    mixed = first + torch.randperm(pos - first, generator=generator)
    return torch.cat([torch.arange(first), mixed])


def _generator(seed: int, null: str, place: int, draw: int) -> torch.Generator:
    """Returns a separate generator for a draw of a null; place: the sample's or layer's index."""
    own = (seed * _PLACES + place) * _STREAMS + _FIRST[null] + draw
    return torch.Generator().manual_seed(own)


def of_weights(block: Any, heads: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Returns (value, null) for each number of a layer's weights; null is NaN if there is none.

    heads: the layer's `of_heads`. The null of "incoherent" is its value for random subspaces, p /
    d.
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
        numbers["output_map"] = heads["cosine"].mean().item(), heads["null"].mean().item()
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
    if u is None:
        return pd.DataFrame(columns=["head", "cosine", "null", "spread"])
    u, out = u.detach().double(), block.attn.W_O.detach().double()
    own = measures.output_map_cosine(out, u)
    cosines = F.normalize(out.flatten(1)) @ F.normalize(u.mT.flatten(1)).T
    null = (cosines.sum(dim=1) - cosines.diagonal()) / (len(u) - 1)
    spread = (u.shape[1] * u.shape[2]) ** -0.5
    columns = {"head": range(len(u)), "cosine": own.tolist(), "null": null.tolist()}
    return pd.DataFrame(columns).assign(spread=spread)


class Bases:
    """Pairs of random orthonormal bases, uniformly drawn. The layers of a network share them.

    Matrices of one shape share their draws, and each draw is made once. In a wide layer, the QR
    factorisations of new draws would cost more than the audit. generator: returns the generator of
    a draw.
    """

    def __init__(self, generator: Callable[[int], torch.Generator]) -> None:
        self._generator = generator
        self._drawn: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}

    def like(
        self, matrix: Float[Tensor, "rows columns"], draws: int
    ) -> Iterator[Float[Tensor, "rows columns"]]:
        """Yields random matrices with the singular values of `matrix`, in its dtype."""
        own = torch.linalg.svdvals(matrix.double()).to(matrix) if draws else matrix
        dtype = torch.promote_types(matrix.dtype, torch.float32)  # no QR in half precision
        for draw in range(draws):
            key = (draw, matrix.shape, matrix.dtype)
            if key not in self._drawn:
                generator, least = self._generator(draw), min(matrix.shape)
                noise = [
                    torch.randn(rows, least, generator=generator, dtype=torch.float64)
                    for rows in matrix.shape
                ]
                left, right = (torch.linalg.qr(one.to(dtype))[0] for one in noise)
                self._drawn[key] = left, right
            left, right = self._drawn[key]
            yield (left.to(own) * own) @ right.to(own).T
