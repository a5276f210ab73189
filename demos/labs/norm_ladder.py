"""What does one matrix for query, key and value cost, and how does a tied head look back?

    python demos/labs/norm_ladder.py [--quick | --full] --out DIR

A tied head scores u_p . u_j, so that a token prefers another to itself only if the other's code is
longer by more than their distance (`ci.measures.norm_ladder`). Two questions follow. Do trained
networks live on the norms of their codes? Five trainings of crate-tiny-induction, and its twin of
free queries, keys and values, take their attention with queries and keys of other norms.
And does tying keep a network from learning? A toy binds: three pairs "key value", of one
vocabulary, then QUERY and a key; wanted is its value, at the last token, and the first position is
drawn at random. Guessing one of the three values gives 1/3.

The toy has two layers of two heads, an MLP with a residual or an ISTA step that replaces the
stream. Its settings: the standard deviation of the embeddings; query, key and value of one matrix
("tied"), a free query, or all free; the diagonal of attention kept, or masked; positions as
embeddings, or as a bias by distance. Seeds of a setting are trained side by side. A run ends when
all its seeds are right on 95 % of new sequences, or after its last step; a seed that was never
right so often is censored there. Which way a network binds is told by cuts: without attention from
each value to its own key (a previous-token head), or from the last token to the stored keys (a
pointer).
"""

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from drawing import interval, level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, result, values
from torch import Tensor
from torch.nn import functional as F

import crate_interp as ci

WEIGHTS = Path(__file__).parent.parent / "weights"
NETWORKS = {
    "tied": [
        "crate-tiny-induction",
        "crate-tiny-induction-seed-1",
        "crate-tiny-induction-seed-2",
        "tied-induction-seed-3",
        "tied-induction-seed-4",
    ],
    "untied": ["gpt-tiny-induction"],
}
NORMS = ("flat_norms", "ladder_only", "permuted_norms", "masked_diagonal")

SYMBOLS, PAIRS, LENGTH, OFFSETS = 10, 3, 8, 4
WIDTH, HEADS, LAYERS, SEEDS, BATCH = 32, 2, 2, 5, 128
STEPS, EVERY, RATE, SOLVED = {"quick": 1200, "full": 12000}, 100, 3e-3, 0.95
# .02 is the official one of language models
SCALES = {"quick": (0.02, 1.0), "full": (0.02, 0.1, 0.3, 1.0)}
TYINGS, DIAGONALS = ("tied", "free query", "all free"), ("kept", "masked")
POSITIONS, SPARSE = ("absolute", "relative"), ("mlp", "ista")
CHANCE = 1 / PAIRS
CUTS = {"values": [(1, 0), (3, 2), (5, 4)], "query": [(7, 0), (7, 2), (7, 4)]}
Weights = dict[str, Tensor]


class Setting(NamedTuple):
    """A setting of the toy."""

    scale: float
    tying: str
    diagonal: str
    positions: str
    sparse: str

    def __str__(self) -> str:
        return ", ".join(map(str, self))


def bindings(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens [seed, count, pos], the first positions [seed, count], and the answers."""
    draws = torch.rand(SEEDS, count, SYMBOLS, generator=generator).argsort(dim=-1)
    pairs = draws[..., : 2 * PAIRS]
    asked = torch.randint(PAIRS, (SEEDS, count, 1), generator=generator)
    query = torch.full_like(asked, SYMBOLS)
    tokens = torch.cat([pairs, query, pairs.gather(-1, 2 * asked)], dim=-1)
    starts = torch.randint(OFFSETS, (SEEDS, count), generator=generator)
    return tokens, starts, pairs.gather(-1, 2 * asked + 1)[..., 0]


def drawn(setting: Setting) -> Weights:
    """Returns the weights of all seeds, with a first axis of seeds."""

    each = [torch.Generator().manual_seed(seed) for seed in range(SEEDS)]

    def normal(*shape: int, std: float) -> Tensor:
        made = torch.stack([torch.randn(*shape, generator=one) for one in each])
        return (std * made).requires_grad_()

    wide = WIDTH if setting.sparse == "ista" else 4 * WIDTH
    weights = {
        "embed": normal(SYMBOLS + 1, WIDTH, std=setting.scale),
        "unembed": normal(WIDTH, SYMBOLS, std=WIDTH**-0.5),
    }
    if setting.positions == "absolute":
        weights["place"] = normal(LENGTH + OFFSETS, WIDTH, std=setting.scale)
    roles = {"tied": "u", "free query": "qu", "all free": "qku"}[setting.tying]
    for layer in range(LAYERS):
        for role in [*roles, "o"]:
            weights[f"{role}{layer}"] = normal(WIDTH, WIDTH, std=WIDTH**-0.5)
        weights[f"in{layer}"] = normal(WIDTH, wide, std=WIDTH**-0.5)
        if setting.sparse == "mlp":
            weights[f"out{layer}"] = normal(wide, WIDTH, std=wide**-0.5)
        if setting.positions == "relative":
            weights[f"bias{layer}"] = normal(HEADS, LENGTH, std=setting.scale)
    return weights


def visible(diagonal: str, cut: str = "") -> Tensor:
    """Returns which key a query sees, [query, key]; one that sees nothing else sees itself."""
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1 if diagonal == "masked" else 0)
    for query, key in CUTS.get(cut, []):
        sees[query, key] = False
    return sees | (torch.eye(LENGTH, dtype=torch.bool) & ~sees.any(dim=1, keepdim=True))


def answers(
    weights: Weights, setting: Setting, tokens: Tensor, starts: Tensor, cut: str = ""
) -> Tensor:
    """Returns the logits at the last token, [seed, sequence, symbol]."""
    apart = torch.arange(LENGTH)
    # products with one-hot rows have a faster gradient than indexing
    z = mapped(F.one_hot(tokens, SYMBOLS + 1).float(), weights["embed"])
    if setting.positions == "absolute":
        rows = F.one_hot(starts[..., None] + apart, LENGTH + OFFSETS).float()
        z = z + mapped(rows, weights["place"])
    sees, distance = visible(setting.diagonal, cut), (apart[:, None] - apart).clamp(min=0)
    for layer in range(LAYERS):
        # of the last layer only the last token is read
        asks = slice(LENGTH - 1, LENGTH) if layer == LAYERS - 1 else slice(LENGTH)
        x = F.layer_norm(z, (WIDTH,))
        codes = {
            role: in_heads(x[:, :, asks] if role == "q" else x, weights.get(f"{role}{layer}"))
            for role in "uqk"
        }  # [seed, sequence, head, pos, d_head]
        u = codes["u"]
        k = u if codes["k"] is None else codes["k"]
        q = u[..., asks, :] if codes["q"] is None else codes["q"]
        scores = q @ k.mT * (WIDTH // HEADS) ** -0.5
        if setting.positions == "relative":
            scores = scores + weights[f"bias{layer}"][:, None, :, distance[asks]]
        heads = scores.masked_fill(~sees[asks], -torch.inf).softmax(dim=-1) @ u
        z = z[:, :, asks] + mapped(heads.transpose(2, 3).flatten(3), weights[f"o{layer}"])
        x, into = F.layer_norm(z, (WIDTH,)), weights[f"in{layer}"]
        if setting.sparse == "mlp":
            z = z + mapped(F.gelu(mapped(x, into)), weights[f"out{layer}"])
        else:  # one step of ISTA from the stream, which it replaces; eta and lambda .1
            z = F.relu(x + 0.1 * mapped(x - mapped(x, into.mT), into) - 0.01)
    return F.layer_norm(z[:, :, -1], (WIDTH,)) @ weights["unembed"]


def in_heads(x: Tensor, weight: Tensor | None) -> Any:
    """Returns the codes of heads [seed, sequence, head, pos, d_head]; None without a map."""
    return None if weight is None else mapped(x, weight).unflatten(-1, (HEADS, -1)).transpose(2, 3)


def mapped(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [seed, sequence, pos, in] through the map [seed, in, out] of its seed."""
    return (x.flatten(1, 2) @ weight).unflatten(1, x.shape[1:3])


def accuracy(weights: Weights, setting: Setting, cut: str = "") -> list[float]:
    """Returns the share of right answers of each seed, on new sequences."""
    tokens, starts, wanted = bindings(1024, torch.Generator().manual_seed(10**6))
    with torch.no_grad():
        best = answers(weights, setting, tokens, starts, cut).argmax(dim=-1)
    return (best == wanted).double().mean(dim=1).tolist()


def trained(setting: Setting, steps: int) -> list[list]:
    """Returns rows of a setting: accuracy, the step at which it was solved, and accuracy by cut."""
    weights, generator = drawn(setting), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(weights.values(), lr=RATE, betas=(0.9, 0.98))
    escaped = [math.inf] * SEEDS
    for step in range(1, steps + 1):
        tokens, starts, wanted = bindings(BATCH, generator)
        logits = answers(weights, setting, tokens, starts)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) * SEEDS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            right = accuracy(weights, setting)
            escaped = [min(at, step if share >= SOLVED else math.inf)
                       for at, share in zip(escaped, right, strict=True)]  # fmt: skip
            if min(right) >= SOLVED:
                break
    found = {"accuracy": accuracy(weights, setting), "escape": [min(at, steps) for at in escaped],
             "solved": [float(at <= steps) for at in escaped]}  # fmt: skip
    found |= {f"without {cut}": accuracy(weights, setting, cut) for cut in CUTS}
    return [
        [name, str(setting), seed, steps, value]
        for name, each in found.items()
        for seed, value in enumerate(each)
    ]


def of_norms(kind: str, seed: int) -> list[list]:
    """Returns how many next tokens an induction network has right at other norms, by layer."""
    name = NETWORKS[kind][seed]
    model = ci.load(name if seed == 0 else WEIGHTS / name)
    options: Any = {"mixes": [1.0], "directions": 2, "progress": False}
    found = ci.surgery(model, "embedded:repeats", replacements=NORMS, **options)
    whole = found.table("unchanged")["right"].mean()
    rows = [["right", f"{kind}, as it is", seed, -1, whole]]
    mixes: Any = found.table("mixes")
    for row in mixes.itertuples():
        rows.append(["right", f"{kind}, {row.replacement}", seed, row.layer, row.accuracy])
        share = 1 - row.accuracy / whole
        rows.append(["lost", f"{kind}, {row.replacement}", seed, row.layer, share])
    return rows


def lost(rows: list[list], kind: str, name: str, layers: tuple[int, ...] = (0,)) -> np.ndarray:
    """Returns the largest share of right answers that a layer's other norms take, by seed."""
    return np.max([values(rows, "lost", f"{kind}, {name}", layer) for layer in layers], axis=0)


def of_settings(rows: list[list], quantity: str, **chosen: Any) -> np.ndarray:
    """Returns a number of the settings that have what is chosen, [setting, seed]."""
    found = [
        values(rows, quantity, str(setting))
        for setting in settings("full")
        if all(getattr(setting, name) == value for name, value in chosen.items())
    ]
    return np.array([each for each in found if len(each)])


def settings(form: str) -> list[Setting]:
    axes: Any = (SCALES[form], TYINGS, DIAGONALS, POSITIONS, SPARSE)
    return [Setting(*one) for one in product(*axes)]


def ways(rows: list[list], **chosen: Any) -> np.ndarray:
    """Returns accuracy without previous tokens less accuracy without pointers, by seed.

    It is the mean over the settings that the seed solved, 0 for a seed that solved none.
    """
    solved = of_settings(rows, "solved", **chosen) > 0
    values, query = (of_settings(rows, f"without {cut}", **chosen) for cut in CUTS)
    count = solved.sum(axis=0)
    return np.where(solved, values - query, 0).sum(axis=0) / np.maximum(count, 1)


def claims_of(rows: list[list], steps: int) -> list[dict]:
    """Returns the claims about norms of trained networks, and about what a tied head can learn."""
    found = []
    for key, layers in (("flat", (0,)), ("later", (1, 2))):
        tied, untied = (lost(rows, kind, "flat_norms", layers) for kind in NETWORKS)
        found.append(claim(f"norm_ladder.{key}", tied - untied.max(), baseline=untied.mean()))
    flat, alone = (lost(rows, "tied", name) for name in ("flat_norms", "ladder_only"))
    found.append(claim("norm_ladder.mean", alone, baseline=flat.mean()))
    kept = {"tying": "tied", "diagonal": "kept"}
    right = of_settings(rows, "accuracy", **kept, scale=0.02, positions="absolute", sparse="mlp")[0]
    found.append(claim("norm_ladder.learns", right - CHANCE, baseline=0.0, steps=steps))
    solved = {
        diagonal: of_settings(rows, "solved", tying="tied", diagonal=diagonal).mean(axis=0)
        for diagonal in DIAGONALS
    }
    gain = solved["masked"] - solved["kept"]
    found.append(claim("norm_ladder.masked", gain, baseline=solved["kept"].mean(), steps=steps))
    for key, sign, chosen in (
        ("pointer", 1, kept), ("previous", -1, {"tying": "free query", "diagonal": "kept"}),
        ("masked_previous", -1, {"tying": "tied", "diagonal": "masked"}),
    ):  # fmt: skip
        way = sign * ways(rows, **chosen)
        found.append(claim(f"norm_ladder.{key}", way, baseline=0.0, steps=steps))
    return found


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the norm ladder."""
    jobs = {
        f"{kind}-{seed}": partial(of_norms, kind, seed)
        for kind, names in NETWORKS.items() for seed in range(len(names))
    }  # fmt: skip
    rows = steps.rows(jobs, "norms")
    jobs = {
        str(setting).replace(", ", "-").replace(" ", "-"): partial(trained, setting, STEPS[form])
        for setting in settings(form)
    }
    rows += steps.rows(jobs, "bindings")
    tied, untied = (lost(rows, kind, "flat_norms").mean() for kind in NETWORKS)
    shares = {
        diagonal: of_settings(rows, "solved", tying="tied", diagonal=diagonal)
        for diagonal in DIAGONALS
    }
    return result(
        "norm_ladder", form, claims_of(rows, STEPS[form]), rows, steps=STEPS[form], lost=tied,
        untied=untied, count=len(shares["kept"]), **{k: v.mean() for k, v in shares.items()},
    )  # fmt: skip


def draw(found: LabResult) -> Any:
    """Draws what other norms take from induction networks, and which settings learn to bind."""
    figure, axes = panels(3)
    for place, (kind, shift) in enumerate((("tied", -0.1), ("untied", 0.1))):
        for layer in range(3):
            rows = found.numbers("lost", setting=f"{kind}, flat_norms", place=layer)["value"]
            name = kind if layer == 0 else None
            interval(axes[0], layer + shift, 100 * rows, color=f"C{place}", label=name)
    alone: Any = found.numbers("lost", setting="tied, ladder_only", place=0)["value"]
    interval(axes[0], 0.3, 100 * alone, color="C2", label="tied, each position's mean norm")
    tidy(axes[0], xlabel="layer with equal norms", ylabel="right answers lost (%)",
         title="induction: what the norms carry", xticks=range(3))  # fmt: skip
    numbers, scales = found.table("numbers").to_numpy().tolist(), SCALES[found.meta["form"]]
    for axis, sparse in zip(axes[1:], SPARSE, strict=True):
        for place, (tying, diagonal) in enumerate(product(TYINGS, DIAGONALS)):
            shares = [
                100 * of_settings(
                    numbers, "solved", scale=scale, tying=tying, diagonal=diagonal, sparse=sparse
                ).mean()
                for scale in scales
            ]  # fmt: skip
            style = f"{'-' if diagonal == 'kept' else '--'}oC{place // 2}"
            axis.plot(range(len(scales)), shares, style, label=f"{tying}, diagonal {diagonal}")
        level(axis, 0)
        tidy(axis, xlabel="standard deviation of the embeddings", ylabel="seeds that learn (%)",
             title=f"binding: {sparse.upper()}", xticks=range(len(scales)),
             xticklabels=scales)  # fmt: skip
    return titled(figure, found)


if __name__ == "__main__":
    main(run, draw)
