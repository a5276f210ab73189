"""Do the hidden units of a trained network find the latents? JoMA's Table 1, with its baselines.

    python demos/labs/joma_tree.py [--quick | --full] --out DIR

NCorr (arXiv 2310.00535, Table 1) is each latent's largest correlation with a hidden unit of its
layer, the unit's maximum over tokens; a cell is the mean over latents. The table has no baseline.
Here is one: the network before training, at the published size. Latents permuted over the inputs
are none for a training, as an untrained network lies above them too. Training is reduced: d = 128
instead of 1024, a few hundred iterations instead of 10,000, at a rate of 1e-3 instead of 1e-4.

The paper does not give the number of hidden units. The released command has 400, four a token of
the vocabulary; the default of the released network is 4 d = 4096. Both are measured.

The released generator is not the paper's tree of probabilities: a class names N_ch latents of layer
1, each of them N_ch of layer 0, each of those N_ch tokens, and a sample is the union. A class has
one sample, so there are only as many inputs as classes.
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from drawing import panels, tidy, titled
from lab import LabResult, Steps, claim, main, result, values
from torch import Tensor, nn

from crate_interp.stats.intervals import share_interval

VOCABULARY, LENGTH, LAYERS = 100, 30, 3  # M, T; the last token of the vocabulary fills up
PAD = VOCABULARY - 1
WIDTH, WIDTHS_HIDDEN = 1024, (400, 4096)
SMALL, RATE = 128, 1e-3  # what is trained
SEEDS = 5  # as published
ITERATIONS = {"quick": 200, "full": 400}
TRAINED_CLASSES = {"quick": (20,), "full": (20, 30, 50)}
CELLS = tuple(product(((10, 20), (20, 30)), (20, 30, 50), (2, 3)))  # latents, classes, children

# Table 1: mean NCorr of layers 0 and 1 over 5 seeds, one pair for each of CELLS
PUBLISHED = (
    (0.99, 0.81), (1.00, 0.69), (0.99, 0.73), (0.99, 0.72), (0.99, 0.58), (0.99, 0.64),
    (0.97, 0.80), (0.96, 0.68), (0.94, 0.74), (0.95, 0.66), (0.95, 0.55), (0.95, 0.61),
)  # fmt: skip

SERIES = {  # quantity: how it is named in the figure, its marker
    "untrained 400": ("untrained, 400 hidden units", "o"),
    "untrained 4096": ("untrained, 4096 hidden units", "s"),
    "small before": ("d = 128, untrained", "v"),
    "small trained": ("d = 128, trained", "^"),
}


@dataclass(frozen=True)
class Tree:
    """The inputs of all classes, and which latents are on in them.

    tokens [class, pos]: the distinct columns, which are the first filling token and all that some
    class has others in; fills: how many equal filling tokens the first column stands for.
    latents: for layers 0 and 1, [class, latent] of 0 and 1.
    """

    tokens: Tensor
    fills: int
    latents: tuple[Tensor, Tensor]


def combinations(count: int, size: int, below: int, generator: torch.Generator) -> Tensor:
    """Returns `count` different sets of `size` numbers, as [count, below] of 0 and 1."""
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        chosen = torch.randperm(below, generator=generator)[:size]
        found[tuple(sorted(chosen.tolist()))] = None
    sets = torch.zeros(count, below)
    return sets.scatter_(1, torch.tensor(list(found)), 1.0)


def tree(classes: int, children: int, latents: tuple[int, int], seed: int) -> Tree:
    """Returns a random tree. latents: how many layers 0 and 1 have; children: N_ch."""
    generator = torch.Generator().manual_seed(seed)
    widths = (PAD, *latents, classes)
    below = [
        combinations(n, children, wide, generator)
        for wide, n in zip(widths[:-1], widths[1:], strict=True)
    ]
    on = [(below[2] > 0).float()]  # of layer 1, [class, latent]
    for sets in (below[1], below[0]):
        on.insert(0, (on[0] @ sets > 0).float())
    present, layer_0, layer_1 = on
    # the tokens of a class in order (the release has those of a Python set), behind filling tokens
    tokens = torch.arange(PAD).where(present > 0, -1).sort(dim=1).values[:, -LENGTH:]
    tokens = tokens.where(tokens >= 0, PAD)
    fills = int((tokens == PAD).all(dim=0).sum())  # at least 3: a class has at most 27 tokens
    return Tree(tokens[:, fills - 1 :], fills, (layer_0, layer_1))


class Layer(nn.Module):
    """Attention of one head with no output map, a ReLU MLP, and a LayerNorm after each."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.k, self.q, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.ln_attn, self.ln_mlp = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the stream and the hidden units, [batch, pos, d] and [batch, pos, hidden]."""
        scores = self.q(x) @ self.k(x).mT / math.sqrt(x.shape[-1])
        mixed = self.ln_attn(torch.softmax(scores + mask, dim=-1) @ self.v(x) + x)
        units = torch.relu(self.up(mixed))
        return self.ln_mlp(self.down(units) + mixed), units


class Network(nn.Module):
    """The network of Table 1: token embeddings without positions, three layers, a linear map."""

    def __init__(self, d: int, hidden: int, classes: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, d)
            self.layers = nn.ModuleList([Layer(d, hidden) for _ in range(LAYERS)])
            self.out = nn.Linear(d, classes)

    def forward(self, tokens: Tensor, fills: int) -> tuple[Tensor, list[Tensor]]:
        """Returns logits at the last token, [batch, class], and each layer's hidden units.

        There are no positions, and attention is causal, so equal filling tokens at the start are
        equal in all layers: the first key counts `fills` times, and stands for all of them.
        """
        n = tokens.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)
        mask[:, 0] += math.log(fills)
        x, units = self.embed(tokens), []
        for layer in self.layers:
            x, hidden = layer(x, mask)
            units.append(hidden)
        return self.out(x[:, -1]), units


def train(model: Network, data: Tree, steps: int, rate: float, seed: int) -> float:
    """Trains as the release does, and returns the last accuracy.

    Adam with weight decay 1e-4 on batches of 128 labels. A label has one input, so a batch is the
    inputs of all classes, weighted by how often the label was drawn.
    """
    classes = len(data.tokens)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = torch.randint(classes, (128,), generator=generator)
        logits, _ = model(data.tokens, data.fills)
        losses = nn.functional.cross_entropy(logits, torch.arange(classes), reduction="none")
        optimizer.zero_grad()
        (losses @ torch.bincount(drawn, minlength=classes).float() / 128).backward()
        optimizer.step()
    with torch.no_grad():
        logits, _ = model(data.tokens, data.fills)
    return (logits.argmax(dim=1) == torch.arange(classes)).float().mean().item()


def best_correlation(latents: Tensor, units: Tensor, weights: Tensor) -> Tensor:
    """Returns NCorr: each latent's largest correlation with a unit over weighted samples, [latent].

    latents [sample, latent] and units [sample, unit], weights [sample] sum to one. A latent of zero
    variance gives 0: it correlates with nothing. So does a unit. The paper's code divides by a
    norm plus 1e-9, which gives the same 0.
    """
    a, b = (x.double() - weights.double() @ x.double() for x in (latents, units))
    root = weights.double().sqrt()[:, None]
    a, b = a * root, b * root
    norms = [x.norm(dim=0) for x in (a, b)]
    # what is constant leaves a norm of rounding alone
    a, b = (
        (x / norm).where(norm > 1e-6 * raw.abs().amax(dim=0).clamp_min(1e-30), 0.0)
        for x, norm, raw in zip((a, b), norms, (latents, units), strict=True)
    )
    return (a.mT @ b).amax(dim=1)


def name(cell: tuple) -> str:
    """Returns a cell in words, such as "(10, 20) C20 N2"."""
    latents, classes, children = cell
    return f"{latents} C{classes} N{children}"


@torch.no_grad()
def scores(model: Network, data: Tree) -> list[list[float]]:
    """Returns for layers 0 and 1 the mean NCorr over all latents, and over those that vary.

    All classes weigh the same, where the release draws 1280 labels.
    """
    _, units = model(data.tokens, data.fills)
    weights, found = torch.full((len(data.tokens),), 1 / len(data.tokens)), []
    for latents, hidden in zip(data.latents, units[:-1], strict=True):
        values = best_correlation(latents, hidden.amax(dim=1), weights)
        varies = latents.amax(dim=0) > latents.amin(dim=0)
        found.append([values.mean().item(), values[varies].mean().item()])
    return found


def as_rows(quantity: str, cell: tuple, seed: int, found: list[list[float]]) -> list[list]:
    """Returns rows (quantity, cell, seed, layer, NCorr), with those of latents that vary."""
    rows = []
    for layer, (every, varying) in enumerate(found):
        rows.append([quantity, name(cell), seed, layer, every])
        rows.append([f"{quantity}, varying", name(cell), seed, layer, varying])
    return rows


def untrained(cell: tuple, seed: int) -> list[list]:
    """Returns rows of networks of the published size before training."""
    latents, classes, children = cell
    data, rows = tree(classes, children, latents, seed), []
    for hidden in WIDTHS_HIDDEN:
        found = scores(Network(WIDTH, hidden, classes, seed), data)
        rows += as_rows(f"untrained {hidden}", cell, seed, found)
    return rows


def trained(cell: tuple, seed: int, iterations: int) -> list[list]:
    """Returns rows of a small network before and after training."""
    latents, classes, children = cell
    data = tree(classes, children, latents, seed)
    model = Network(SMALL, WIDTHS_HIDDEN[0], classes, seed)
    rows = as_rows("small before", cell, seed, scores(model, data))
    accuracy = train(model, data, iterations, RATE, seed)
    rows += as_rows("small trained", cell, seed, scores(model, data))
    return [*rows, ["accuracy", name(cell), seed, 0, accuracy]]


def untrained_level(rows: list[list], hidden: int, layer: int) -> list[float]:
    """Returns the mean NCorr of untrained networks, for each of `CELLS`."""
    return [values(rows, f"untrained {hidden}", name(cell), layer).mean() for cell in CELLS]


def against_published(rows: list[list], layer: int) -> dict:
    """Returns the claim that the published cells lie above untrained networks: a sign test.

    The number is the share of cells with the hidden units of the released command.
    """
    printed, cases, shares = [cell[layer] for cell in PUBLISHED], {}, []
    for hidden in WIDTHS_HIDDEN:
        above = int(np.greater(printed, untrained_level(rows, hidden, layer)).sum())
        low, high = share_interval(above, len(CELLS))
        cases[f"{hidden} hidden units"] = (float(low), float(high))
        shares.append(above / len(CELLS))
    return claim(
        "joma_tree.published", shares[0], interval=next(iter(cases.values())), layer=layer,
        cases=cases, n=len(CELLS), printed=np.mean(printed), baseline=0.5, share=shares[1],
        hidden=WIDTHS_HIDDEN[1],
    )  # fmt: skip


def of_training(rows: list[list], layer: int, iterations: int) -> dict:
    """Returns the claim that training raises NCorr: a unit is a seed, the mean over its cells."""
    after, before = (
        values(rows, f"small {what}", None, layer).reshape(-1, SEEDS).mean(axis=0)
        for what in ("trained", "before")
    )
    return claim(
        "joma_tree.before", after - before, layer=layer, baseline=before.mean(),
        printed=np.mean([cell[layer] for cell in PUBLISHED]), after=after.mean(),
        iterations=iterations, seeds=SEEDS,
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about Table 1."""
    each = [(at, cell, seed) for at, cell in enumerate(CELLS) for seed in range(SEEDS)]
    jobs = {f"untrained-{at}-{seed}": partial(untrained, cell, seed) for at, cell, seed in each}
    jobs |= {
        f"trained-{at}-{seed}": partial(trained, cell, seed, ITERATIONS[form])
        for at, cell, seed in each if cell[1] in TRAINED_CLASSES[form]
    }  # fmt: skip
    rows = steps.rows(jobs, "networks")
    claims = [against_published(rows, layer) for layer in (0, 1)]
    claims += [of_training(rows, layer, ITERATIONS[form]) for layer in (0, 1)]
    few, many = (
        [np.mean(untrained_level(rows, hidden, layer)) for layer in (0, 1)]
        for hidden in WIDTHS_HIDDEN
    )
    accuracy = values(rows, "accuracy").mean()
    return result("joma_tree", form, claims, rows, accuracy=accuracy, few=few, many=many)


def draw(found: LabResult) -> Any:
    """Draws NCorr of each cell and layer: published, untrained, trained small."""
    figure, axes = panels(1, 2, size=(11, 8), sharex=True)
    at = np.arange(len(CELLS))
    for layer, axis in enumerate(axes):
        axis.plot(at, [cell[layer] for cell in PUBLISHED], "k_", markersize=28, markeredgewidth=2,
                  label="published, trained")  # fmt: skip
        for place, (quantity, (words, marker)) in enumerate(SERIES.items()):
            rows = found.numbers(quantity, place=layer).groupby("setting")["value"]
            mean, spread = rows.mean(), rows.std()
            of = [i for i in at if name(CELLS[i]) in mean.index]
            cells = [name(CELLS[i]) for i in of]
            x = np.array(of) + (place - 1.5) * 0.16
            axis.errorbar(x, mean[cells], spread[cells], fmt=marker, label=words)
        tidy(axis, legend=0, ylabel=f"NCorr of layer {layer}", ylim=(0.3, 1.03))
        axis.grid(axis="y", alpha=0.3)
    axes[1].set_xticks(at, [name(cell).replace(") C", ")\nC") for cell in CELLS], fontsize=8)
    axes[0].legend(ncols=2, fontsize=8, loc="center left", bbox_to_anchor=(0, 0.55))
    return titled(figure, found, seeds=found.numbers("untrained 400")["seed"].nunique())


if __name__ == "__main__":
    main(run, draw)
