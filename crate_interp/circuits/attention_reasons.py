"""Why a head looks there: a score of attention as a sum over pairs of atoms, and what they do."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from crate_hooks import full_name
from crate_interp.circuits.attention_reasons_result import (
    BIAS,
    KINDS,
    MODEL,
    OTHERS,
    STREAM,
    TAKEN_OUT,
    UNTRAINED,
    WEIGHED,
    AttentionReason,
)
from crate_interp.circuits.code_swaps import rotation
from crate_interp.circuits.excerpts import sample_picture, special_tokens, token_words
from crate_interp.circuits.graphs import question as questions
from crate_interp.circuits.graphs.derivatives import directions
from crate_interp.circuits.graphs.question import Question
from crate_interp.core import checks
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.context import contexts, turned
from crate_interp.models.runtimes import bias_of
from crate_interp.questions.edited_runs import may_share
from crate_interp.questions.provenance import model_meta
from crate_interp.questions.untrained_twins import twin

SIDES = {"query": ("query",), "key": ("key",), "both": WEIGHED}
DRAWS = 10  # of random atoms
_PAIRS = 1000  # the pairs that have a row of their own
_AT_A_TIME = 2**22  # pairs whose parts are in memory together
_AT_ONCE = 16  # copies of the sample in one forward


@in_full_precision
@torch.no_grad()
def why_attends(
    model: HookedModel,
    inputs: object,
    layer: int,
    head: int,
    query: int | None = None,
    key: int | None = None,
    *,
    seed: int = 0,
) -> AttentionReason:
    """Returns why a head looks from a token at another: which atoms of the two tokens match.

    A score is `s = scale <q, k>` with q and k linear in the stream once the norm's scale is held
    (U^T norm(z); arXiv 2306.01129 eq. 11), and the stream is a sum of atoms, each its code times
    what it writes, and a rest. So `s = sum_ab part_ab` with `part_ab = scale z_qa z_kb <A_q d_a,
    A_k d_b>`, exactly: nothing is fitted. Where codes replace the stream (crate, crate-lm, cbt) the
    atoms are those of the layer below; elsewhere those of all layers below. nanochat's rotation is
    part of A_q and A_k, and its norm of queries and keys is held too. In cbt the query is one of 64
    representatives, whose code is the mean over its tokens, and the pattern is the contraction.

    Args:
        model: A hooked model with logits and an attention pattern.
        inputs: One sample: an image, or token ids, or a text.
        layer: The layer of the head, from 1 on, because layer 0 reads embeddings and no codes.
        head: The head.
        query: The token that looks. Default: 0, CLS in most image models; of a text the last.
        key: The token that it looks at. Default: the other token that it looks at most.
        seed: Draws random atoms, random axes and the untrained network.

    Returns:
        The parts of the score by pairs of atoms, and real effects of taking atoms out.

    Raises:
        ValueError: Before work starts, for a model without a pattern (ToST), without codes or
            logits, for several samples, and for a layer, head, query or key that there is not, or
            that a causal model masks.
    """
    questions.check_model(model, "why_attends")
    seed = checks.count("seed", seed, least=0)
    if model.cfg.facts["attention"] == "tssa":
        raise ValueError("why_attends: ToST's heads have no scores between tokens.")
    sample = questions.one_sample(model, inputs)
    if query is None:
        query = sample.shape[1] - 1 if model.cfg.kind == "text" else 0
    if model.cfg.causal and checks.is_int(query) and 0 <= query < sample.shape[1]:
        end = max(query, key or 0) if key is None or checks.is_int(key) else query
        sample = sample[:, : end + 1]  # later tokens change nothing
    _within("layer", layer, range(1, model.cfg.n_layers))
    _within("head", head, range(model.cfg.n_heads))
    case = _read(model, sample, _look(model, sample, [layer]), layer, head, query, key)
    place = case.place
    position = query if model.cfg.kind == "text" else None
    question = questions.ask_answer(model, case.logits, None, position)
    tables, of_atoms = _parts(case)
    whole: Any = tables["pieces"]["part"].sum() / 2
    if abs(whole - case.score) > 1e-3 * max(1.0, abs(case.score)):
        raise ValueError(
            f"the parts add up to {whole:.4g}, and the score is {case.score:.4g}: a hook changes "
            "what the head reads. Call model.reset_hooks() first."
        )
    effects = _effects(case, question, seed).assign(network=MODEL)
    other = twin(model, seed)
    rival = _read(other, sample, _look(other, sample, [layer]), **vars(place))
    beside = _effects(rival, question, seed).assign(network=UNTRAINED)
    tables["effects"] = pd.concat([effects, beside], ignore_index=True)
    tables["picture"] = sample_picture(model, sample)
    tokens, at = token_words(model, sample), (place.query, place.key, int(case.row.argmax()))
    words = [f"{tokens[number]!r} ({number})" if tokens else f"token {number}" for number in at]
    special: Any = special_tokens(model)
    for columns in tables["picture"]["columns"]:  # none for a text
        patches = [divmod(int(number - special), int(columns)) for number in at]
        words = [f"patch {patch}" if patch[0] >= 0 else "CLS" for patch in patches]
    if model.cfg.facts["attention"] == "cbsa":
        words[0] = f"representative {place.query}"
    meta = model_meta(model, 1) | {
        "layer": layer, "head": head, "places": [*at[:2]], "query": words[0], "key": words[1],
        "most": words[2], "most_share": float(case.row.max()),
        "score": case.score, "attention": case.attention,
        "even": case.even, "score_of_atoms": of_atoms, "answer": question.answer,
        "sample": questions.sample_digest(sample), "tokens": tokens,
        "special": special,
    }  # fmt: skip
    return AttentionReason(tables, meta)


@dataclass(frozen=True)
class Place:
    """A score: a head of a layer, and two tokens."""

    layer: int
    head: int
    query: int
    key: int


@dataclass(frozen=True)
class _Case:
    """A score, and the stream before its layer as a sum of atoms and a rest.

    atoms `[atom, 2]`: the layer and number of each atom that is on at either side. codes: their
    codes, times what later layers scale the stream with. written: what they write. weights: of
    each token in the query and in the key. roles: how the head's query and key come from the
    stream. even: the attention of a query that gives every token it sees the same. row: what the
    query gives each token.
    """

    model: HookedModel
    sample: Tensor
    logits: Tensor
    place: Place
    score: float
    attention: float
    even: float
    row: Float[Tensor, "pos"]
    stream: Float[Tensor, "pos d_model"]
    atoms: Int[Tensor, "atom two"]
    codes: Float[Tensor, "pos atom"]
    written: Float[Tensor, "atom d_model"]
    weights: Mapping[str, Float[Tensor, "pos"]]
    roles: Mapping[str, "Role"]

    def pieces(
        self, side: str, codes: Float[Tensor, "pos atom"], written: Float[Tensor, "atom d_model"]
    ) -> Float[Tensor, "piece d_head"]:
        """Returns the query or key of each piece of the stream: atoms, the rest, the biases."""
        role, rest = self.roles[side], self.stream - codes @ written
        amounts = role.weights @ codes
        others = role.of((role.weights @ rest)[None]), role.bias[None]
        return torch.cat([amounts[:, None] * role.of(written), *others])


@dataclass(frozen=True)
class Role:
    """How a side's query or key comes from the stream. weights: by token, over the norm's scale."""

    weights: Float[Tensor, "pos"]
    centred: bool
    map: Float[Tensor, "d_model d_head"]
    bias: Float[Tensor, "d_head"]

    def of(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_head"]:
        """Returns the linear part for a stream whose scale is divided out already."""
        return (x - x.mean(dim=-1, keepdim=True) if self.centred else x) @ self.map


def strongest_pairs(
    model: HookedModel, sample: Tensor, places: Sequence[tuple[int, int, int, int]], most: int
) -> pd.DataFrame:
    """Returns the strongest pairs of atoms of several scores of a sample, from one forward.

    Biases of the key are left out: what they add is the same for all keys, which a softmax
    forgets.
    places: layer, head, query, key of each, layer from 1 on, in a model with an attention pattern.
    """
    if not places:
        return pd.DataFrame()
    looked, found = _look(model, sample, sorted({place[0] for place in places})), []
    for place in places:
        case = _read(model, sample, looked, *place)
        pairs: Any = _parts(case)[0]["pairs"]
        pairs = pairs[pairs["key_atom"] > BIAS].head(most)
        numbers = asdict(case.place) | {"attention": case.attention, "score": case.score}
        found.append(pairs.assign(**numbers)[[*numbers, *pairs.columns]])
    return pd.concat(found, ignore_index=True)


def _look(model: HookedModel, sample: Tensor, layers: Sequence[int]) -> tuple[Tensor, CrateCache]:
    """Returns the answer, and what scores of these layers are made of."""
    below = range(max(layers, default=0)) if model.cfg.residual else [at - 1 for at in layers]
    wanted = {full_name(name, layer) for layer in layers for name in _points(model)}
    wanted |= {full_name("mlp.hook_post", at) for at in below}
    logits, cache = model.run_with_cache(sample, names_filter=lambda name: name in wanted)
    return logits, cache


def _read(
    model: HookedModel, sample: Tensor, looked: tuple[Tensor, CrateCache],
    layer: int, head: int, query: int, key: int | None,
) -> _Case:  # fmt: skip
    """Returns a score and the pieces of the stream; raises ValueError for a place there is not."""
    block: Any = model.blocks[layer]
    below = range(layer) if model.cfg.residual else [layer - 1]
    posts = [full_name("mlp.hook_post", at) for at in below]
    before, pattern, scores, reps, us = (full_name(name, layer) for name in _points(model))
    logits, cache = looked
    shares = cache[pattern][0, head]  # [query, key]
    _within("query", query, range(shares.shape[0]))
    contracts = model.cfg.facts["attention"] == "cbsa"
    if key is None:
        others = torch.arange(shares.shape[1], device=shares.device) != query
        key = int((shares[query] * (others | contracts)).argmax())
        if key == query and not contracts:
            raise ValueError(f"token {query} sees no other token: give key={query}.")
    _within("key", key, range(shares.shape[1]))
    place = Place(layer, head, query, key)
    stream, seen = cache[before][0].double(), shares.shape[1]
    weights = {side: torch.zeros_like(stream[:, 0]) for side in WEIGHED}
    weights["key"][key] = 1
    if contracts:
        eye = torch.eye(len(stream)).to(stream)
        weights["query"] = block.attn.pooled(eye[None, :, None])[0, query, 0]
        codes = cache[reps][0, query, head], cache[us][0, key, head]
        score = float(codes[0] @ codes[1]) / model.cfg.d_head**0.5
    else:
        weights["query"][query] = 1
        score = float(cache[scores][0, head, query, key])
        seen = int(cache[scores][0, head, query].isfinite().sum())
    if math.isinf(score):
        raise ValueError(f"token {query} does not see token {key}: give a key that it sees.")
    scales: Any = getattr(model, "resid_lambdas", torch.ones(model.cfg.n_layers))
    read, pieces = (weights["query"] + weights["key"]) > 0, []
    for at, post in zip(below, posts, strict=True):
        code = cache[post][0]
        on = (code[read] != 0).any(dim=0).nonzero()[:, 0]
        gain = float(scales[at + 1 : layer + 1].prod())  # of the layers before this one reads it
        atoms = torch.stack([torch.full_like(on, at), on], dim=1).cpu()
        pieces.append((atoms, gain * code[:, on].double(), directions(model, at)[on].double()))
    atoms, codes, written = zip(*pieces, strict=True)
    roles = {side: role_of(model, place, stream, weights[side], side) for side in WEIGHED}
    return _Case(
        model, sample, logits, place, score, float(shares[query, key]),
        1 / seen, shares[query], stream, torch.cat(atoms),
        torch.cat(codes, dim=1), torch.cat(written), weights, roles,
    )  # fmt: skip


def _within(name: str, value: object, choices: range) -> None:
    if not checks.is_int(value) or value not in choices:
        known = (
            f"give {choices[0]} to {choices[-1]}"
            if choices
            else "layer 0, the only one, has no codes"
        )
        raise ValueError(f"{name}={checks.quote(value)}: {known}.")


def _points(model: HookedModel) -> list[str]:
    """Returns the points of the stream, the pattern, the scores, and CBT's representatives."""
    pattern = "contract" if model.cfg.facts["attention"] == "cbsa" else "pattern"
    return [
        "hook_resid_pre",
        *(f"attn.hook_{name}" for name in (pattern, "attn_scores", "rep", "u")),
    ]


def role_of(model: HookedModel, place: Place, stream: Tensor, weights: Tensor, side: str) -> Role:
    """Returns how the query or the key of a place comes from the stream."""
    block: Any = model.blocks[place.layer]
    attn, norm, head = block.attn, block.ln1, place.head
    centred = isinstance(norm, nn.LayerNorm)
    less = stream - stream.mean(dim=-1, keepdim=True) if centred else stream
    scale = torch.ones_like(stream[:, 0])
    if hasattr(norm, "eps"):
        scale = (less.square().mean(dim=-1) + norm.eps).sqrt()
    if hasattr(attn, "u_proj"):
        map, bias = attn.U[head], bias_of(attn.u_proj).unflatten(0, (model.cfg.n_heads, -1))[head]
    else:
        letter = side[0].upper()
        map, bias = getattr(attn, f"W_{letter}")[head], getattr(attn, f"b_{letter}")[head]
    map, bias = map.double(), bias.double()
    if centred:
        affine: Any = norm
        bias, map = bias + affine.b.double() @ map, affine.w.double()[:, None] * map
    role = Role(weights / scale, centred, map, bias)
    if model.cfg.rotary:
        at = place.query if side == "query" else place.key
        rotation: Any = contexts(model.cfg, len(stream), None, stream.device)[place.layer].rotation
        here = (rotation[0][at, 0], rotation[1][at, 0])
        map, bias = turned(map, here), turned(bias, here)
        whole = Role(role.weights, centred, map, bias)
        size = whole.of(whole.weights @ stream) + bias
        size = (size.square().mean() + model.cfg.ln_eps).sqrt()
        role = Role(role.weights, centred, map / size, bias / size)
    if side == "query":  # the scale of the score
        length = model.cfg.d_head**-0.5
        role = Role(role.weights, centred, role.map * length, role.bias * length)
    return role


def _parts(case: _Case) -> tuple[dict[str, pd.DataFrame], float]:
    """Returns the tables "pairs" and "pieces", and the sum of all pairs of atoms."""
    query, key = (case.pieces(side, case.codes, case.written) for side in WEIGHED)
    sums = {"query": query @ key.sum(dim=0), "key": key @ query.sum(dim=0)}
    names = np.array([*case.atoms.tolist(), [STREAM, STREAM], [BIAS, BIAS]])
    values = {
        side: [*(case.weights[side] @ case.codes).tolist(), np.nan, np.nan] for side in WEIGHED
    }
    pieces = [
        pd.DataFrame(names, columns=["layer", "atom"]).assign(
            side=side, value=values[side], part=sums[side].cpu().numpy()
        )
        for side in WEIGHED
    ]
    found, places = _largest(query, key)
    rows, columns = np.divmod(places.numpy(), len(names))
    pairs: Any = pd.DataFrame(
        {
            "query_layer": names[rows, 0], "query_atom": names[rows, 1],
            "key_layer": names[columns, 0], "key_atom": names[columns, 1],
            "query_value": np.array(values["query"])[rows],
            "key_value": np.array(values["key"])[columns], "part": found.numpy(),
        }
    )  # fmt: skip
    others = [*[OTHERS] * 4, np.nan, np.nan, float(sums["query"].sum().cpu() - found.sum())]
    pairs.loc[len(pairs)] = others
    whole = pairs.columns[:4]
    table: Any = pd.concat(pieces, ignore_index=True)[["side", "layer", "atom", "value", "part"]]
    of_atoms = float(query[:-2].sum(dim=0) @ key[:-2].sum(dim=0))
    return {"pairs": pairs.astype(dict.fromkeys(whole, int)), "pieces": table}, of_atoms


def _largest(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest inner products of rows, and their places in the matrix of all pairs."""
    found, places = query.new_zeros(0), torch.zeros(0, dtype=torch.long, device=query.device)
    size = max(1, _AT_A_TIME // len(key))
    for start in range(0, len(query), size):  # the matrix of a wide network does not fit
        flat = (query[start : start + size] @ key.T).flatten()
        own = torch.arange(len(flat), device=flat.device) + start * len(key)
        found, places = torch.cat([found, flat]), torch.cat([places, own])
        best = found.abs().topk(min(_PAIRS, len(found))).indices
        found, places = found[best], places[best]
    return found.cpu(), places.cpu()


def _effects(case: _Case, question: Question, seed: int) -> pd.DataFrame:
    """Returns the table "effects" of one network."""
    keys: list[tuple[str, int, str]] = []
    found: list[tuple[float, float]] = []
    streams: list[Tensor] = []

    def run() -> None:
        found.extend(_run(case, question, torch.stack(streams)))
        streams.clear()

    for side, k, kind, stream in _edited(case, seed):
        keys.append((side, k, kind))
        streams.append(stream)
        if len(streams) == _AT_ONCE:
            run()
    if streams:
        run()
    table = pd.DataFrame(keys, columns=["side", "k", "kind"])
    table[["attention", "answer"]] = found
    groups: Any = table.groupby(["side", "k", "kind"], sort=False)
    spread = groups["attention"].agg(attention="mean", low="min", high="max")
    return spread.assign(answer=groups["answer"].mean()).reset_index()


def _edited(case: _Case, seed: int) -> Iterator[tuple[str, int, str, Tensor]]:
    """Yields side, k and kind, and the stream without k entries of it at this side."""
    yield "both", 0, "nothing", case.stream
    generator = torch.Generator().manual_seed(seed)
    axes = rotation(case.stream.shape[1], seed).to(case.stream)
    totals = {side: case.pieces(side, case.codes, case.written).sum(dim=0) for side in WEIGHED}
    sizes = {side: (case.weights[side] @ case.codes).abs() for side in WEIGHED}
    counts = [k for k in TAKEN_OUT if k <= min(int((one > 0).sum()) for one in sizes.values())]
    for kind in (*KINDS, *["random"] * (DRAWS - 1)):
        codes, written = case.codes, case.written
        if kind == "rotated":
            codes, written = case.stream @ axes, axes.T
        order: dict[str, Tensor] = {}
        for side, total in zip(WEIGHED, (totals["key"], totals["query"]), strict=True):
            rank = case.pieces(side, codes, written)[:-2] @ total
            if kind == "largest":
                rank = sizes[side]
            elif kind == "random":
                draw = torch.rand(len(rank), generator=generator, dtype=torch.float64)
                rank = draw.to(rank).masked_fill(sizes[side] == 0, -1.0)
            order[side] = rank.argsort(descending=True)
        for (name, sides), k in product(SIDES.items(), counts):
            mask = torch.zeros_like(codes)
            for side in sides:
                mask[case.weights[side].nonzero(), order[side][:k]] = 1
            yield name, k, kind, case.stream - (codes * mask) @ written


def _run(
    case: _Case, question: Question, streams: Float[Tensor, "copy pos d_model"]
) -> list[tuple[float, float]]:
    """Returns the attention and the answer of runs from these streams on."""
    place, model, patterns = case.place, case.model, []
    streams = streams.to(case.sample.dtype if case.sample.is_floating_point() else model.cfg.dtype)

    def put(stream: Tensor, hook: object) -> Tensor:
        return streams

    def note(pattern: Tensor, hook: object) -> None:
        patterns.append(pattern[:, place.head, place.query, place.key])

    hooks: list[Any] = [
        (full_name("hook_resid_pre", place.layer), put),
        (full_name(_points(model)[1], place.layer), note),
    ]
    copies = case.sample.expand(len(streams), *case.sample.shape[1:])
    start: Any = {"start_at_layer": place.layer} if may_share(model) else {}
    logits = model.run_with_hooks(streams if start else copies, fwd_hooks=hooks, **start)
    return list(zip(patterns[0].tolist(), question.of(logits).tolist(), strict=True))
