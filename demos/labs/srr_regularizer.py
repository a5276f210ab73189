"""Does sparse rate reduction as a term of the loss make small CRATEs more accurate?

    python demos/labs/srr_regularizer.py [--quick | --full] --out DIR

arXiv 2411.17182 adds the measure of a layer to the cross-entropy (eq. 14) and reports .03 to 1.13
points more accuracy (Table 2, one run each, CIFAR). Here four variants are trained on
scikit-learn's digits with and without the term on the last layer, from the same weights with the
same batches, so differences are paired by seed. The weight is the paper's, 1e-3; others stand
among the numbers. The paper's term counts entries, which has no gradient; "l1" takes the sum of
their sizes in its place. Table 6 has the term on one layer, or on a random one at each step: here
on the first, the last and a random layer.
"""

from functools import partial
from itertools import combinations, product
from typing import Any, Literal

import layerwise
import numpy as np
import pandas as pd
import zoo
from drawing import interval, level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, result
from training import learning_rate
from zoo import NAMES, Recipe

import crate_interp as ci

PUBLISHED = {
    "c": ("76.87", "77.61"), "n": ("81.52", "81.91"), "t": ("85.49", "85.52"),
    "crate": ("86.67", "86.79"),
}  # fmt: skip
SEEDS = {"quick": (0, 1), "full": (0, 1, 2, 3, 4)}
STEPS = {"quick": 200, "full": zoo.STEPS}
MAIN = (1e-3, "l0")  # weight and what stands for the count: those of the claims
# one layer's measure is 5 to 10 nats: the weights make it .01 to 1 times a start of ln 10
ARMS = {"quick": (MAIN,), "full": (MAIN, (1e-2, "l0"), (1e-1, "l0"), (1e-3, "l1"))}
LAYERS = {"layer 1": [0], "a random layer": "random"}  # beside the last, at MAIN
COLUMNS = {
    "accuracy": "accuracy with the term less without it, points",
    "measure": "R^c - R of the last layer, with less without, nats",
}


def trained(
    recipe: Recipe, steps: int, weight: float, penalty: Literal["l0", "l1"], layers: Any = "last"
) -> dict[str, float]:
    """Returns accuracy on the test images, and the measure of the last layer, of one training."""

    def term(model: zoo.HookedCrate) -> ci.SRRRegularizer:
        return ci.SRRRegularizer(model, weight, penalty=penalty, layers=layers)

    model = zoo.fit(
        recipe, steps, lambda step: learning_rate(step, steps, recipe.lr), lambda *_: False, term
    )
    _, _, images, labels = zoo.digits()
    measure = layerwise.layer_measures(model, images[: zoo.READ_ON], "stream", lambd=0.0)
    accuracy = 100 * zoo.scores(model, images, labels)[1]
    return {"accuracy": accuracy, "measure": float(measure[-1])}


def gathered(form: str, steps: Steps) -> pd.DataFrame:
    """Returns a row for each training: variant, seed, weight, penalty, accuracy and measure."""
    recipes = [r for r in zoo.zoo() if r.seed in SEEDS[form] and r.variant in PUBLISHED]
    keys, jobs = [], {}
    for recipe, (weight, penalty) in product(recipes, [(0.0, "l0"), *ARMS[form]]):
        make = partial(trained, recipe, STEPS[form], weight, penalty)
        jobs[f"{recipe.name}-{weight:g}-{penalty}"] = make
        keys.append((recipe.variant, recipe.seed, weight, penalty))
    found = steps.all(jobs, "regulariser").values()
    index = pd.MultiIndex.from_tuples(keys, names=["variant", "seed", "weight", "penalty"])
    return pd.DataFrame(list(found), index=index).reset_index()


def of_layers(form: str, steps: Steps, table: pd.DataFrame) -> tuple[list[dict], list[list]]:
    """Returns the claims of Table 6, and rows of accuracy with the term on other layers."""
    found, rows = {}, []
    for variant, (name, layers) in product(PUBLISHED, LAYERS.items()):
        recipes = [r for r in zoo.zoo() if r.seed in SEEDS[form] and r.variant == variant]
        jobs = {
            f"{r.name}-{name}": partial(trained, r, STEPS[form], *MAIN, layers) for r in recipes
        }
        each = [one["accuracy"] for one in steps.all(jobs, f"{NAMES[variant]}, {name}").values()]
        own: Any = table[(table["variant"] == variant) & (table["penalty"] == "l0")]
        plain, last = (own[own["weight"] == weight]["accuracy"] for weight in (0, MAIN[0]))
        less = {"a random layer": plain, "layer 1": last}[name].to_numpy()
        found.setdefault(name, {})[NAMES[variant]] = np.subtract(each, less)
        what = f"{NAMES[variant]}, weight {MAIN[0]:g}, {name}"
        rows += [["accuracy", what, seed, STEPS[form], one] for seed, one in enumerate(each)]
    beside = np.mean([spread(table, variant) for variant in PUBLISHED])
    keys = {"random": "a random layer", "shallow": "layer 1"}
    claims = [
        claim(f"srr_regularizer.{key}", np.mean(list(found[name].values()), axis=0),
              cases=found[name], baseline=beside, updates=STEPS[form])
        for key, name in keys.items()
    ]  # fmt: skip
    return claims, rows


def gains(table: pd.DataFrame, variant: str, arm: tuple, column: str) -> list[float]:
    """Returns a column with the term minus without it, by seed."""
    own: Any = table[table["variant"] == variant]
    chosen: Any = own[(own["weight"] == arm[0]) & (own["penalty"] == arm[1])]
    plain: Any = own[own["weight"] == 0]
    return list(chosen.set_index("seed")[column] - plain.set_index("seed")[column])


def spread(table: pd.DataFrame, variant: str) -> float:
    """Returns the mean absolute difference in accuracy of two seeds without the term."""
    own = table[(table["variant"] == variant) & (table["weight"] == 0)]["accuracy"]
    pairs = [abs(b - a) for b, a in combinations(own, 2)]
    return sum(pairs) / len(pairs)


def of_variant(table: pd.DataFrame, variant: str, updates: int) -> dict:
    """Returns the claim about accuracy; its texts tell whether the term did anything."""
    before, after = PUBLISHED[variant]
    return claim(
        "srr_regularizer.accuracy", gains(table, variant, MAIN, "accuracy"),
        variant=NAMES[variant], updates=updates, before=before, after=after,
        baseline=spread(table, variant), moved=np.mean(gains(table, variant, MAIN, "measure")),
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the regulariser."""
    table, updates = gathered(form, steps), STEPS[form]
    claims = [of_variant(table, variant, updates) for variant in PUBLISHED]
    rows = [
        [column, f"{NAMES[row['variant']]}, weight {row['weight']:g} {row['penalty']}",
         row["seed"], updates, row[column]]
        for row in table.to_dict("records") for column in COLUMNS
    ]  # fmt: skip
    placed, more = of_layers(form, steps, table)
    said = ", ".join(
        f"{NAMES[variant]} {row['ours']:+.2f} ({row['low']:.2f} to {row['high']:.2f})"
        for variant, row in zip(PUBLISHED, claims, strict=True)
    )
    beside = [row["baseline"] for row in claims]
    sure = sum(row["answer"] == "supported" for row in claims)
    words = {"sure": sure, "variants": len(claims), "said": said}
    most = {"least": min(beside), "most": max(beside)}
    return result("srr_regularizer", form, claims + placed, rows + more, **words, **most)


def draw(found: LabResult) -> Any:
    """Draws the change by the term for each variant and weight: seeds as dots, mean, interval."""
    figure, axes = panels(2, size=(13, 4.6))
    names, arms = [NAMES[variant] for variant in PUBLISHED], ARMS[found.meta["form"]]
    for axis, (quantity, words) in zip(axes, COLUMNS.items(), strict=True):
        groups = found.numbers(quantity).groupby("setting")["value"]
        by = {setting: rows.to_numpy() for setting, rows in groups}
        for (place, arm), (row, name) in product(enumerate(arms), enumerate(names)):
            label = f"weight {arm[0]:g} {arm[1]}"
            moved = by[f"{name}, {label}"] - by[f"{name}, weight 0 l0"]
            at = row + 0.8 * ((place + 0.5) / len(arms) - 0.5)
            axis.plot([at] * len(moved), moved, ".", color=f"C{place}", alpha=0.4)
            interval(axis, at, moved, color=f"C{place}", capsize=3, label=None if row else label)
        level(axis, 0)
        axis.set_xticks(range(len(names)), names)
        tidy(axis, legend=8 * (quantity == "accuracy"), ylabel=words)
    size = found.table()["size"].iloc[0].split(" (")[0]
    return titled(figure, found, size=size, sure=sum(found.table()["answer"][:4] == "supported"))


if __name__ == "__main__":
    main(run, draw)
