"""Head-to-head composition: how much of what one head writes lies in the subspace that a later head reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from crate_hooks import read
from crate_interp import checks
from crate_interp.circuits.circuit import Circuit, Edge, head_name
from crate_interp.circuits.linear import normed, pushed, stepped
from crate_interp.measures.checks import qr
from crate_interp.models.digest import model_digest
from crate_interp.sweeps.stream import batches, check_batch_size, check_model, run, samples_of

THROUGH = ("direct", "linear", "data")
_POINTS = ("hook_resid_pre", "attn.hook_z", "hook_resid_mid")
Grams = dict[
    int, Float[Tensor, "sender d_model d_model"]
]  # layer that reads -> of each earlier head, what arrives: A^T A


@dataclass(frozen=True)
class Composition:
    """Scores of pairs of heads. `table`: from_layer, from_head, to_layer, to_head, score, chance, percentile_99; `meta`: how."""

    table: pd.DataFrame
    meta: dict[str, Any]

    def top(self, count: int = 20) -> pd.DataFrame:
        """The pairs with the highest scores."""
        if not checks.is_int(count) or count < 1:
            raise ValueError(f"count={count!r}: give a whole number of at least 1.")
        return (
            self.table.sort_values("score", ascending=False, kind="stable")
            .head(count)
            .reset_index(drop=True)
        )

    def above(self) -> pd.DataFrame:
        """The pairs above the 99th percentile of random subspaces.

        One pair in a hundred is so by chance, but pairs share heads, so that their number scatters widely: compare with an
        untrained network.
        """
        table: Any = self.table
        return (
            table[table["score"] > table["percentile_99"]]
            .sort_values("score", ascending=False)
            .reset_index(drop=True)
        )

    def circuit(self, count: int = 10) -> Circuit:
        """The `count` highest pairs as edges between heads, weighted by their score."""
        rows: Any = self.top(count).itertuples()
        edges = [
            Edge(
                head_name(row.from_layer, row.from_head),
                head_name(row.to_layer, row.to_head),
                float(row.score),
            )
            for row in rows
        ]
        return Circuit(tuple(edges), f"composition, {self.meta['through']}")

    def __repr__(self) -> str:
        table: Any = self.table
        best = self.top(1).iloc[0]
        return (
            f"Composition ({self.meta['through']}) of {len(table)} pairs: highest {best['score']:.3f} "
            f"({head_name(best['from_layer'], best['from_head'])} -> {head_name(best['to_layer'], best['to_head'])}), "
            f"{len(self.above())} above the 99th percentile of random subspaces, chance {best['chance']:.3f}"
        )

    def _repr_html_(self) -> str:
        return self.top().to_html(index=False, float_format=lambda value: f"{value:.3f}")


def composition(
    model: Any,
    data: Any = None,
    *,
    through: str = "linear",
    role: str = "q",
    draws: int = 200,
    seed: int = 0,
    limit: int | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> Composition:
    """The share of what head (l, i) writes that head (m, j) of a later layer reads: `|A Q_j|_F^2 / |A|_F^2` in [0, 1].

    Q_j = qr(U_j): in CRATE query, key and value read one subspace (role "q", "k" or "v" chooses elsewhere). A is what arrives at
    layer m, after its LayerNorm: W_O,i `[d_head, d_model]`, every code alike, carried by the layers between. through: "direct",
    as if the stream came unchanged; "linear", by the sparse steps with all atoms on and norms of scale 1; "data", what the
    heads wrote in fact, z_i W_O,i of every token, by the derivative of norms and steps at that token, attention between held
    as it was. 1 is everything, p/d what a random subspace gets. percentile_99: of `draws` random subspaces of the same width
    (seed), for what arrives from this head at this layer. TransformerLens' composition scores divide by |A| |U_j| instead and
    so have no such scale; here only the span of U_j matters.

    data, limit: as in `ci.sweep`, for "data" alone. Raises ValueError for another `through` or role, data that is missing or not
    used, one layer alone, and models of images and language aside.
    """
    _check(model, data, through, role, draws, batch_size)
    grams = (
        _measured(model, data, limit, batch_size, progress)
        if through == "data"
        else _of_weights(model, through)
    )
    generator = torch.Generator().manual_seed(seed)
    cfg = model.cfg
    noise = torch.randn(draws, cfg.d_model, cfg.d_head, generator=generator, dtype=torch.float64)
    random = qr(noise)[0]
    rows: list[tuple] = []
    for layer, gram in grams.items():
        u = getattr(model.blocks[layer].attn, f"W_{role}".upper()).detach().double().cpu()
        basis = qr(u)[0]
        scores, chance = (
            _shares(gram, basis),
            _shares(gram, random),
        )  # [sender, head], [sender, draw]
        edge = chance.quantile(0.99, dim=1)
        for sender, line in enumerate(scores.tolist()):
            place = divmod(sender, cfg.n_heads)
            rows += [
                (*place, layer, head, score, cfg.d_head / cfg.d_model, edge[sender].item())
                for head, score in enumerate(line)
            ]
    columns = ["from_layer", "from_head", "to_layer", "to_head", "score", "chance", "percentile_99"]
    meta = {
        "model": cfg.model_name,
        "model_digest": model_digest(model),
        "through": through,
        "role": role,
        "draws": draws,
        "seed": seed,
    }
    return Composition(pd.DataFrame(rows, columns=columns), meta)


def _shares(
    gram: Float[Tensor, "sender d d"], bases: Float[Tensor, "base d width"]
) -> Float[Tensor, "sender base"]:
    """`tr(Q^T G Q) / tr(G)`; 0 for a head that writes nothing."""
    inside = einsum(bases, gram, bases, "base d width, sender d e, base e width -> sender base")
    whole = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1, keepdim=True)
    return torch.where(whole > 0, inside / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0)


def _of_weights(model: Any, through: str) -> Grams:
    grams: Grams = {}
    carried: list[
        Tensor
    ] = []  # of each earlier layer, [head, d_head, d_model] in the stream before the layer at hand
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            if layer:
                arrived = torch.cat([normed(block.ln1, rows) for rows in carried]).double().cpu()
                grams[layer] = arrived.mT @ arrived
            carried.append(block.attn.W_O)
            if through == "linear":
                carried = [stepped(block, rows) for rows in carried]
    return grams


def _measured(model: Any, data: Any, limit: int | None, batch_size: int, progress: bool) -> Grams:
    """Sums over the tokens of data; a layer's tangents are let go as soon as the next layer has taken them over."""
    samples = samples_of(model, data, limit)
    grams: Grams = {}
    carried: list[Tensor] = []  # [head, batch, pos, d_model] for each earlier layer

    def follow(layer: int, acts: dict[str, Tensor]) -> None:
        block = model.blocks[layer]
        if layer:
            arrived = [pushed(block.ln1, acts["hook_resid_pre"], tangents) for tangents in carried]
            flat = torch.cat(arrived).flatten(1, 2).double().cpu()  # [sender, token, d_model]
            grams[layer] = grams.get(layer, 0) + flat.mT @ flat
        written = einsum(
            acts["attn.hook_z"], block.attn.W_O, "batch pos head p, head p d -> head batch pos d"
        )
        step = _step(block)
        carried[:] = [
            pushed(step, acts["hook_resid_mid"], tangents) for tangents in [*carried, written]
        ]

    with torch.no_grad(), read(model, _POINTS, follow):
        for _, batch in batches(model, samples, batch_size, "composition", progress):
            carried.clear()
            run(model, batch)
    return grams


def _step(block: Any) -> Callable[[Tensor], Tensor]:
    def step(mid: Tensor) -> Tensor:
        out = block.mlp(block.ln2(mid))
        return mid + out if block.residual else out

    return step


def _check(model: Any, data: Any, through: str, role: str, draws: int, batch_size: int) -> None:
    check_model(model)
    check_batch_size(batch_size)
    if model.cfg.kind not in ("vision", "text", "mae"):
        raise ValueError(
            "composition is of one model's layers; of a CLIP give a tower, model.visual."
        )
    if through not in THROUGH:
        raise ValueError(f"through={through!r}: give one of {', '.join(THROUGH)}.")
    if role not in ("q", "k", "v"):
        raise ValueError(f"role={role!r}: give 'q', 'k' or 'v'.")
    if (through == "data") != (data is not None):
        raise ValueError(
            "through='data' needs data, and nothing else takes it: ci.circuits.composition(model, data, through='data')."
        )
    if not isinstance(draws, int) or draws < 100:
        raise ValueError(f"draws={draws!r}: a 99th percentile needs 100 at least.")
    if len(model.blocks) < 2:
        raise ValueError("composition is between layers: the model has only one.")
