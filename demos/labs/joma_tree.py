"""Do the hidden units of a trained network find the latents? JoMA's Table 1, with its baselines.

    python demos/labs/joma_tree.py [--quick | --full] --out DIR

NCorr (arXiv 2310.00535, Table 1) is each latent's largest correlation with a hidden unit of its
layer, the unit's maximum over tokens; a cell is the mean over latents. The table has no baseline.
Here is one: the network before training, at the published size. Latents permuted over the inputs
are none for a training, as an untrained network lies above them too. Training is reduced: d = 128
instead of 1024, a few hundred iterations instead of 10,000, at a rate of 1e-3 instead of 1e-4.

The paper does not give the number of hidden units. The released command has 400, four a token of
the vocabulary; the default of the released network is 4 d = 4096. Both are measured.
"""

from itertools import product
from typing import Any

import numpy as np
import torch
from joma_tree_drawing import draw
from lab import LabResult, Steps, claim, main, result
from latent_tree import Network, Tree, best_correlation, train, tree
from tqdm.auto import tqdm

from crate_interp.stats.intervals import share_interval

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

HEADLINE = (
    "An untrained network of the published size has NCorr {few[0]:.2f} (layer 0) and {few[1]:.2f} "
    "(layer 1) with 400 hidden units, {many[0]:.2f} and {many[1]:.2f} with 4096; the published are "
    "0.97 and 0.68. Small networks trained to accuracy {accuracy:.2f} have {claims[2][ours]:+.2f} "
    "and {claims[3][ours]:+.2f} more than before, when they have {claims[2][baseline]:.2f} and "
    "{claims[3][baseline]:.2f}."
)


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


def means(rows: list[list], quantity: str, layer: int) -> dict[str, list[float]]:
    """Returns a cell's values over seeds, by name of the cell."""
    found: dict[str, list[float]] = {}
    for what, cell, _, place, value in rows:
        if what == quantity and place == layer:
            found.setdefault(cell, []).append(value)
    return found


def untrained_level(rows: list[list], hidden: int, layer: int) -> list[float]:
    """Returns the mean NCorr of untrained networks, for each of `CELLS`."""
    values = means(rows, f"untrained {hidden}", layer)
    return [float(np.mean(values[name(cell)])) for cell in CELLS]


def against_published(rows: list[list], layer: int) -> dict:
    """Returns the claim that the published cells lie above untrained networks: a sign test.

    The number is the share of cells with the hidden units of the released command.
    """
    cases, shares = {}, []
    for hidden in WIDTHS_HIDDEN:
        levels = untrained_level(rows, hidden, layer)
        above = sum(cell[layer] > at for cell, at in zip(PUBLISHED, levels, strict=True))
        low, high = share_interval(above, len(CELLS))
        cases[f"{hidden} hidden units"] = (float(low), float(high))
        shares.append(above / len(CELLS))
    published = float(np.mean([cell[layer] for cell in PUBLISHED]))
    return claim(
        "joma_tree.published", shares[0], interval=cases[f"{WIDTHS_HIDDEN[0]} hidden units"],
        layer=layer, cases=cases, n=len(CELLS), published=f"{published:.3f} (mean of 12 cells)",
        baseline=0.5, size="published size",
        why=f"With {WIDTHS_HIDDEN[1]} hidden units it is {shares[1]:.2f}.",
    )  # fmt: skip


def of_training(rows: list[list], layer: int, size: str) -> dict:
    """Returns the claim that training raises NCorr: a unit is a seed, the mean over its cells."""
    after, before = (
        np.array(list(means(rows, f"small {what}", layer).values())).mean(axis=0)  # of [cell, seed]
        for what in ("trained", "before")
    )
    return claim(
        "joma_tree.before", (after - before).tolist(), layer=layer, size=size,
        published=f"{np.mean([cell[layer] for cell in PUBLISHED]):.3f} (after training)",
        baseline=float(before.mean()), n=len(after),
        why=f"It is {after.mean():.3f} after training.",
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about Table 1."""
    rows: list[list] = []
    jobs: list[tuple[str, Any]] = [
        (f"untrained-{at}-{seed}", lambda cell=cell, seed=seed: untrained(cell, seed))
        for at, cell in enumerate(CELLS)
        for seed in range(SEEDS)
    ]
    jobs += [
        (f"trained-{at}-{seed}",
         lambda cell=cell, seed=seed: trained(cell, seed, ITERATIONS[form]))
        for at, cell in enumerate(CELLS) if cell[1] in TRAINED_CLASSES[form]
        for seed in range(SEEDS)
    ]  # fmt: skip
    for step, make in tqdm(jobs, desc="networks", unit="network"):
        rows += steps.do(step, make)
    size = f"reduced: d=128, {ITERATIONS[form]} iterations at 1e-3, {SEEDS} seeds"
    claims = [against_published(rows, layer) for layer in (0, 1)]
    claims += [of_training(rows, layer, size) for layer in (0, 1)]
    accuracy = np.mean([row[4] for row in rows if row[0] == "accuracy"])
    few, many = (
        [np.mean(untrained_level(rows, hidden, layer)) for layer in (0, 1)]
        for hidden in WIDTHS_HIDDEN
    )
    headline = HEADLINE.format(claims=claims, accuracy=accuracy, few=few, many=many)
    return result("joma_tree", form, headline, claims, rows)


if __name__ == "__main__":
    main(run, draw)
