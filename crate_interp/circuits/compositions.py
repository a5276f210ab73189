"""Head-to-head composition: how much of one head's output a later head reads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from crate_interp.circuits.circuit import Circuit, Edge, head_name
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data
from crate_interp.measures.checks import in_full_precision, qr
from crate_interp.models.hooked import HookedModel, check_gradients
from crate_interp.models.layers.block import CrateBlock
from crate_interp.models.layers.norm import HookedLayerNorm, HookedNorm
from crate_interp.models.runtimes import with_weights
from crate_interp.questions.asking import Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Reading, check_model
from crate_interp.questions.edited_runs import every_entry, joined, pushed
from crate_interp.questions.experiment import Pass, Question, Tables
from crate_interp.questions.provenance import model_meta
from crate_interp.results.result import Result, sums

_FEWEST = 100  # random subspaces needed for a 99th percentile
_POINTS = ("hook_resid_pre", "attn.hook_z", "hook_resid_mid")
_SENDER = ["from_layer", "from_head", "to_layer"]
Rows = Float[Tensor, "*rows d_model"]
# reading layer -> A^T A of each head of the earlier layers, whose output arrives there as A
Grams = dict[int, Float[Tensor, "sender d_model d_model"]]
# bases of random subspaces, and bases of the heads of each layer
Bases = tuple[Float[Tensor, "draw d_model d_head"], list[Float[Tensor, "head d_model d_head"]]]


def _pairs(result: Result) -> pd.DataFrame:
    senders, inside = result.table("senders"), result.table("inside")
    energy = torch.tensor(senders["energy"].to_numpy())[:, None]
    tiny, columns = torch.finfo(energy.dtype).tiny, []
    for name in ("inside", "random"):
        values = torch.tensor(result.table(name)["inside"].to_numpy().reshape(len(senders), -1))
        # 0 for a head that writes nothing
        columns.append(torch.where(energy > 0, values / energy.clamp(min=tiny), 0))
    edge = columns[1].quantile(0.99, dim=1).repeat_interleave(columns[0].shape[1])
    cfg = result.meta["config"]
    table = inside[[*_SENDER, "to_head"]].assign(score=columns[0].flatten().numpy())
    return table.assign(chance=cfg["d_head"] / cfg["d_model"], percentile_99=edge.numpy())


class Composition(Result):
    """How much each head reads of the output of each head of an earlier layer.

    `table()` has a row per pair: from_layer, from_head, to_layer, to_head, score, chance,
    percentile_99. The stored tables hold sums over tokens: `senders` (energy, |A|_F^2), `inside`
    (|A Q_j|_F^2) and `random` (|A Q|_F^2 for the basis Q of each random subspace).
    `ci.circuits.composition` explains the columns and the symbols.
    """

    KIND = "composition"
    MAIN = "pairs"
    STORED = {
        "senders": sums(*_SENDER),
        "inside": sums(*_SENDER, "to_head"),
        "random": sums(*_SENDER, "draw"),
    }
    DERIVED = {"pairs": _pairs}

    @property
    def alone(self) -> str:
        """Returns why this result does not merge, or "" if it does."""
        if self.meta["settings"]["through"] == "data":
            return ""
        return "composition of weights does not depend on data."

    def top(self, count: int = 20) -> pd.DataFrame:
        """Returns the `count` pairs with the highest scores.

        Raises ValueError unless the count is a whole number of at least 1.
        """
        checks.count("count", count)
        table: Any = self._table("pairs").sort_values("score", ascending=False, kind="stable")
        return table.head(count).reset_index(drop=True)

    def above(self) -> pd.DataFrame:
        """Returns the pairs whose score exceeds the 99th percentile of random subspaces.

        By chance, one pair in a hundred has such a score. Because pairs share heads, the number of
        such pairs varies widely: compare it with the number in an untrained network.
        """
        table: Any = self._table("pairs")
        above = table[table["score"] > table["percentile_99"]]
        return above.sort_values("score", ascending=False).reset_index(drop=True)

    def circuit(self, count: int = 10) -> Circuit:
        """Returns a circuit of the `count` pairs with the highest scores, weighted by score."""
        rows: Any = self.top(count).itertuples()
        edges = [
            Edge(head_name(row.from_layer, row.from_head), head_name(row.to_layer, row.to_head),
                 float(row.score))
            for row in rows
        ]  # fmt: skip
        return Circuit(tuple(edges), f"composition, {self.meta['settings']['through']}")

    def finding(self) -> str:
        """Returns the pair with the highest score, the chance score, and the size of `above()`."""
        (edge,), best = self.circuit(1).edges, self.top(1).iloc[0]
        return (
            f"In {self.meta['model'] or 'the model'}, {edge.target} reads "
            f"{100 * edge.weight:.0f}\u00a0% of what {edge.source} writes, the most of all pairs; "
            f"a random subspace reads {100 * best['chance']:.0f}\u00a0%. {len(self.above())} of "
            f"{len(self._table('pairs'))} pairs lie above the 99th percentile of random subspaces."
        )

    def _notebook_table(self) -> pd.DataFrame:
        return self.top()


@with_weights
@in_full_precision
def composition(
    model: HookedModel,
    data: Data | None = None,
    *,
    through: str = "linear",
    role: str = "q",
    draws: int = 200,
    seed: int = 0,
    **run: Unpack[Run],
) -> Perhaps[Composition]:
    """Measures how much of the output of head (l, i) is read by head (m, j) of a later layer.

    Head i writes the rows of W_O,i `[d_head, d_model]` (all codes of the head weigh the same), and
    the layers between carry these rows on. A holds the rows as they arrive at layer m, after its
    LayerNorm. Q_j = qr(U_j) is a basis of the subspace that head j reads. The score is
    `|A Q_j|_F^2 / |A|_F^2` in [0, 1]. A score of 1 means that head j reads everything; a random
    subspace gets p/d, which is d_head / d_model.

    TransformerLens' composition scores divide by |A| |U_j|; here only the span of U_j matters, so
    scores have a fixed scale.

    Args:
        model: A hooked model of at least two layers.
        data: As in `ci.sweep`, only with through="data".
        through: How the layers between carry the rows. "direct" leaves them unchanged. "linear"
            applies the sparse steps with all atoms on and norms of scale 1. "data" takes the heads'
            outputs on data instead, z_i W_O,i of every token, and applies the derivative of norms
            and steps at that token, with attention held fixed.
        role: The map by which head j reads, "q", "k" or "v"; in CRATE all three are one subspace
            U_j.
        draws: How many random subspaces there are, at least 100.
        seed: The seed of the random subspaces.
        run: As in `ci.sweep`, only with through="data"; batch_size is 8 unless given.

    Returns:
        The score of each pair of heads, with its chance level p/d, and percentile_99. This is the
            99th percentile of the scores of `draws` random subspaces of the same width, for the
            same head i and layer m. None while chunks of other shards are missing.

    Raises:
        ValueError: For an unknown `through` or role, for data that is missing or that `through`
            does not use, for a folder or shard without data, for a model of a single layer, for a
            CLIP (give one of its towers), and for through="data" under torch.inference_mode(),
            because it needs gradients.
    """
    options = run_options(composition, run, batch_size=8)
    check_model(model)
    checks.one_of("through", through, ("direct", "linear", "data"))
    checks.one_of("role", role, ("q", "k", "v"))
    if (through == "data") != (data is not None):
        raise ValueError("give data with through='data', and with nothing else.")
    if len(model.blocks) < 2:
        raise ValueError("composition is between layers, and the model has only one.")
    draws = checks.count("draws", draws, least=_FEWEST)
    question = Compositions(through, role, draws, int(seed))
    if data is not None:
        check_gradients("composition with through='data'", model)
        return ask(question, model, data, options)
    if options.out is not None:
        raise ValueError("out is for through='data': use composition(model).save(folder).")
    meta = model_meta(model, 0) | {"data": []} | question.facts(model)
    return Composition(_tables(model, _of_weights(model, through), question.bases(model)), meta)


@dataclass(frozen=True)
class Compositions(Question):
    """Measures what heads read of earlier heads."""

    through: str
    role: str
    draws: int
    seed: int
    result = Composition

    def passes(self, model: HookedModel) -> Pass:
        """Returns the pass of the question."""
        return Pass("composition", partial(_of_chunk, question=self), Composition.STORED)

    def bases(self, model: Any) -> Bases:
        """Returns orthonormal bases `[base, d_model, width]`: random, and the heads' by layer."""
        cfg, name = model.cfg, f"W_{self.role}".upper()
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.draws, cfg.d_model, cfg.d_head)
        noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        # ToST and CBT have no roles: a head reads by its one subspace, which is W_V
        name = name if hasattr(model.blocks[0].attn, name) else "W_V"
        heads = [getattr(block.attn, name).detach().double().cpu() for block in model.blocks]
        return qr(noise)[0], [qr(u)[0] for u in heads]


def _of_chunk(chunk: Chunk, question: Compositions) -> Tables:
    if "bases" not in chunk.once:
        chunk.once["bases"] = question.bases(chunk.model)
    return _tables(chunk.model, _measured(chunk), chunk.once["bases"])


def _tables(model: Any, grams: Grams, bases: Bases) -> Tables:
    """Returns the tables of sums: by sender, by pair, and by sender and random subspace."""
    cfg, (random, of_layer) = model.cfg, bases
    parts: dict[str, list[pd.DataFrame]] = {"senders": [], "inside": [], "random": []}
    for layer, gram in grams.items():
        places = {"from_layer": range(layer), "from_head": range(cfg.n_heads), "to_layer": [layer]}
        energy = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        parts["senders"].append(every_entry("energy", energy, **places))
        for name, key, basis in (
            ("inside", "to_head", of_layer[layer]), ("random", "draw", random),
        ):  # fmt: skip
            # tr(Q^T G Q) for the Gram matrix G of each sender and each basis Q
            pattern = "base d width, sender d e, base e width -> sender base"
            inside = einsum(basis, gram, basis, pattern)
            axes = places | {key: range(len(basis))}
            parts[name].append(every_entry("inside", inside, **axes))
    return joined(parts)


def _of_weights(model: Any, through: str) -> Grams:
    """Returns A^T A, where A holds the rows of W_O as they arrive at a later layer."""
    grams: Grams = {}
    # rows of each earlier layer [head, d_head, d_model], as they arrive at the current layer
    carried: list[Tensor] = []
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            if layer:
                arrived = torch.cat([normed(block.ln1, rows) for rows in carried]).double().cpu()
                grams[layer] = arrived.mT @ arrived
            carried.append(block.attn.W_O)
            if through == "linear":
                carried = [stepped(block, rows) for rows in carried]
    return grams


def _measured(chunk: Chunk) -> Grams:
    """Returns A^T A for the heads' outputs on data, summed over tokens.

    At each layer, memory holds the outputs of all earlier layers only as they arrive there.
    """
    model = chunk.model
    grams: Grams = {}
    carried: list[Tensor] = []  # [head, batch, pos, d_model] for each earlier layer

    def carry(function: Callable[[Tensor], Tensor], at: Tensor, rows: Tensor) -> Tensor:
        with torch.enable_grad():
            x = at.detach().requires_grad_()
            return pushed(function(x), [x], *([row] for row in rows))

    def follow(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        block: Any = model.blocks[layer]
        if not layer:
            carried.clear()
        else:
            arrived = [carry(block.ln1, acts["hook_resid_pre"], rows) for rows in carried]
            flat = torch.cat(arrived).flatten(1, 2).double().cpu()  # [sender, token, d_model]
            grams[layer] = grams.get(layer, 0) + flat.mT @ flat
        pattern = "batch pos head p, head p d -> head batch pos d"
        written = einsum(acts["attn.hook_z"], block.attn.W_O, pattern)

        def step(mid: Tensor) -> Tensor:
            if not hasattr(block, "ln2"):  # attention alone
                return mid
            out = block.mlp(block.ln2(mid))
            return mid + out if block.residual else out

        carried[:] = [carry(step, acts["hook_resid_mid"], rows) for rows in [*carried, written]]

    chunk.measure_all(Reading(_POINTS, follow))
    return grams


def normed(norm: HookedNorm, rows: Rows) -> Rows:
    """Returns rows of the stream after a norm of scale 1, without its bias.

    A LayerNorm gives `(v - mean v) * weight`. An RMS norm, or no norm, does not change the rows.
    """
    if not isinstance(norm, HookedLayerNorm):
        return rows
    return (rows - rows.mean(dim=-1, keepdim=True)) * norm.weight


def stepped(block: CrateBlock, rows: Rows) -> Rows:
    """Returns rows of the stream after a layer's sparse step.

    Every atom is on, and the norm before the step has scale 1. Without a step they stay as they
    are.
    """
    if not hasattr(block, "ln2"):  # attention alone
        return rows
    step = block.mlp.linear(normed(block.ln2, rows))
    return rows + step if block.residual else step
