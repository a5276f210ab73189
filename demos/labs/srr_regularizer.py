"""Does sparse rate reduction as a term of the loss make small CRATEs more accurate?

    python demos/labs/srr_regularizer.py [--quick | --full] --out DIR

arXiv 2411.17182 adds the measure of a layer to the cross-entropy (eq. 14) and reports .03 to 1.13
points more accuracy (Table 2, one run each, CIFAR). Here four variants are trained on
scikit-learn's digits with and without the term on the last layer, from the same weights with the
same batches, so differences are paired by seed. The weight is the paper's, 1e-3; others stand
among the numbers. The paper's term counts entries, which has no gradient; "l1" takes the sum of
their sizes in its place.
"""

from typing import Any, Literal

import layerwise
import pandas as pd
import zoo
from lab import LabResult, Steps, claim, main, result
from srr_regularizer_drawing import draw
from tqdm.auto import tqdm
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
COLUMNS = ("accuracy", "measure")

HEADLINE = (
    "The term raises accuracy beyond its interval in {sure} of {variants} variants: {words} "
    "points; two seeds differ by {least:.2f} to {most:.2f}."
)


def trained(
    recipe: Recipe, steps: int, weight: float, penalty: Literal["l0", "l1"]
) -> dict[str, float]:
    """Returns accuracy on the test images, and the measure of the last layer, of one training."""

    def term(model: zoo.HookedCrate) -> ci.SRRRegularizer:
        return ci.SRRRegularizer(model, weight, penalty=penalty)

    model = zoo.fit(
        recipe, steps, lambda step: learning_rate(step, steps, recipe.lr), lambda *_: False, term
    )
    _, _, images, labels = zoo.digits()
    measure = layerwise.layer_measures(model, images[: zoo.READ_ON], "stream", lambd=0.0)
    accuracy = 100 * zoo.scores(model, images, labels)[1]
    return {"accuracy": accuracy, "measure": float(measure[-1])}


def gathered(form: str, steps: Steps) -> pd.DataFrame:
    """Returns a row for each training: variant, seed, weight, penalty, accuracy and measure."""
    arms = [(0.0, "l0"), *ARMS[form]]
    jobs = [
        (recipe, arm) for recipe in zoo.zoo()
        if recipe.seed in SEEDS[form] and recipe.variant in PUBLISHED for arm in arms
    ]  # fmt: skip
    rows = []
    for recipe, arm in tqdm(jobs, desc="regulariser", unit="training"):
        name = f"{recipe.name}-{arm[0]:g}-{arm[1]}"
        found = steps.do(name, lambda recipe=recipe, arm=arm: trained(recipe, STEPS[form], *arm))
        key = {"variant": recipe.variant, "seed": recipe.seed, "weight": arm[0], "penalty": arm[1]}
        rows.append(key | found)
    return pd.DataFrame(rows)


def gains(table: pd.DataFrame, variant: str, arm: tuple, column: str) -> list[float]:
    """Returns a column with the term minus without it, by seed."""
    own: Any = table[table["variant"] == variant]
    chosen: Any = own[(own["weight"] == arm[0]) & (own["penalty"] == arm[1])]
    plain: Any = own[own["weight"] == 0]
    return list(chosen.set_index("seed")[column] - plain.set_index("seed")[column])


def spread(table: pd.DataFrame, variant: str) -> float:
    """Returns the mean absolute difference in accuracy of two seeds without the term."""
    values = table[(table["variant"] == variant) & (table["weight"] == 0)]["accuracy"].tolist()
    pairs = [abs(a - b) for place, a in enumerate(values) for b in values[:place]]
    return sum(pairs) / len(pairs)


def of_variant(table: pd.DataFrame, variant: str, size: str) -> dict:
    """Returns the claim about accuracy; why tells whether the term did anything."""
    before, after = PUBLISHED[variant]
    moved = gains(table, variant, MAIN, "measure")
    return claim(
        "srr_regularizer.accuracy", gains(table, variant, MAIN, "accuracy"),
        variant=NAMES[variant], n=len(set(table["seed"])), size=size,
        published=f"{before} to {after}", baseline=spread(table, variant),
        why=f"Paired by seed. R^c - R changes by {sum(moved) / len(moved):.3g} on test images.",
    )  # fmt: skip


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims about the regulariser."""
    table = gathered(form, steps)
    n, updates = len(SEEDS[form]), STEPS[form]
    size = f"digits 8x8, d = 32, 4 layers, {updates} updates, {n} seeds (published: CIFAR, 1 run)"
    claims = [of_variant(table, variant, size) for variant in PUBLISHED]
    rows = [
        [column, f"{NAMES[row['variant']]}, weight {row['weight']:g} {row['penalty']}",
         row["seed"], updates, row[column]]
        for row in table.to_dict("records") for column in COLUMNS
    ]  # fmt: skip
    words = ", ".join(
        f"{NAMES[variant]} {row['ours']:+.2f} ({row['low']:.2f} to {row['high']:.2f})"
        for variant, row in zip(PUBLISHED, claims, strict=True)
    )
    sure = sum(row["answer"] == "supported" for row in claims)
    headline = HEADLINE.format(
        sure=sure,
        variants=len(claims),
        words=words,
        least=min(row["baseline"] for row in claims),
        most=max(row["baseline"] for row in claims),
    )
    return result("srr_regularizer", form, headline, claims, rows)


if __name__ == "__main__":
    main(run, draw)
