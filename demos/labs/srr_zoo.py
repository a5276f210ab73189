"""Sparse rate reduction, layer by layer, in six variants of CRATE, beside their accuracy.

    python demos/labs/srr_zoo.py --out runs/labs/srr_zoo

arXiv 2411.17182 trains CRATE and variants of its attention on CIFAR, ranks them (Table 3) and looks
at the summand of eq. 11 in each layer. Here the six variants are small networks on scikit-learn's
digits, 5 seeds each. The quick form measures the weights in demos/weights/zoo at the start and at
the end, and takes what lies between from readings.csv beside them. --full trains anew (10 min).
"""

from collections.abc import Sequence
from typing import Any

import layerwise
import numpy as np
import pandas as pd
import zoo
from lab import LabResult, Steps, claim, main, mean_and_interval, result
from rules import highest
from tqdm.auto import tqdm
from zoo import NAMES, Recipe

SIZE = "digits 8x8, d = 32, 4 layers, 5 seeds (published: CIFAR-10, d = 384, 12 layers, 1 run)"
PUBLISHED = {
    "c": "76.87", "n": "81.52", "t": "85.49", "crate": "86.67", "fix": "80.73",
    "identity": "83.18",
}  # fmt: skip
PAIRS = (("c", "n"), ("n", "t"), ("t", "crate"), ("fix", "crate"), ("identity", "crate"))
MAIN = ("c", "n", "t", "crate")
COLOURS = dict(zip(NAMES, ("C3", "C1", "C2", "C0", "C4", "C5"), strict=True))


def readings(recipe: Recipe, form: str) -> dict[str, Any]:
    """Returns what one network shows: its accuracy, and `layerwise.reading` at its steps."""
    _, _, images, labels = zoo.digits()
    untrained, rows = zoo.start(recipe), []

    def read(model: zoo.HookedCrate, step: int) -> None:
        found = layerwise.reading(model.eval(), images[: zoo.READ_ON])
        rows.extend({"step": step, **row} for row in found)

    if form == "full":
        model = zoo.fit_zoo(recipe, read)
    else:
        model = zoo.trained(recipe)
        read(untrained, 0)
        read(model, zoo.STEPS)
    accuracy = {"accuracy": zoo.scores(model, images, labels)[1]}
    return accuracy | {"untrained": zoo.scores(untrained, images, labels)[1], "rows": rows}


def gathered(form: str, steps: Steps) -> tuple[Any, Any]:
    """Returns a row for each network, and one for each network, step and layer."""
    networks, layers = [], []
    for recipe in tqdm(zoo.zoo(), desc="networks", unit="network"):
        found = steps.do(recipe.name, lambda recipe=recipe: readings(recipe, form))
        key = {"variant": recipe.variant, "seed": recipe.seed}
        networks.append(key | {name: found[name] for name in ("accuracy", "untrained")})
        layers += [key | row for row in found["rows"]]
    table = pd.DataFrame(layers)
    if form == "quick":
        kept = pd.read_csv(zoo.READINGS)
        between = kept["step"].isin(zoo.READ_AT[1:-1])
        table = pd.concat([table, kept[between]], ignore_index=True)
    return pd.DataFrame(networks), table


def pair_claim(networks: Any, lower: str, higher: str) -> dict[str, Any]:
    """Returns the claim that one variant is more accurate than another, paired by seed."""
    table: Any = networks.pivot(index="seed", columns="variant", values="accuracy")
    two = np.abs(np.subtract.outer(*2 * [100 * table[higher].to_numpy()]))
    return claim(
        "srr_zoo.less",
        list(100 * (table[higher] - table[lower])),
        lower=NAMES[lower],
        higher=NAMES[higher],
        published=f"{PUBLISHED[lower]} < {PUBLISHED[higher]}",
        baseline=float(two[np.triu_indices(len(two), 1)].mean()),
        n=len(zoo.SEEDS),
        size=SIZE,
        why="paired by seed",
    )


def over_frames(rule: str, variant: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a claim that a change is negative; values: by frame, trained and untrained by seed.

    In each frame both must lie below 0: the trained networks, and trained minus untrained. The
    numbers of the row are those of the stream, the paper's own frame.
    """
    cases = {
        frame: highest(*(mean_and_interval(list(each[x]))[1] for x in ("trained", "over")))
        for frame, each in values.items()
    }
    below = [frame for frame, (_, high) in cases.items() if high < 0]
    return claim(
        f"srr_zoo.{rule}", list(values["stream"]["trained"]), cases=cases, variant=NAMES[variant],
        baseline=float(values["stream"]["untrained"].mean()),
        n=len(zoo.SEEDS),
        size=SIZE,
        why=f"it holds in these frames: {', '.join(below) or 'none'}",
    )  # fmt: skip


def depth_change(layers: Any, variant: str, frame: str) -> Any:
    """Returns the measure of the last layer minus the first by seed, trained and untrained."""
    columns: dict[str, Any] = {}
    for name, step in (("untrained", 0), ("trained", zoo.STEPS)):
        own = layers[(layers["variant"] == variant) & (layers["step"] == step)]
        table: Any = own.pivot(index="seed", columns="layer", values=f"srr_{frame}")
        columns[name] = table[zoo.LAYERS] - table[1]
    return pd.DataFrame(columns).assign(over=lambda x: x["trained"] - x["untrained"])


def training_change(layers: Any, variant: str, frame: str) -> Any:
    """Returns how training changed the measure, its mean over layers, by seed.

    untrained: the measure before it.
    """
    means: Any = layers[layers["variant"] == variant].groupby(["seed", "step"])
    table: Any = means[f"srr_{frame}"].mean().unstack()
    change = table[zoo.STEPS] - table[0]
    return pd.DataFrame({"trained": change, "untrained": table[0], "over": change})


def layer_claims(layers: Any) -> list[dict[str, Any]]:
    """Returns the claims about the measure, two for each variant of MAIN."""
    found = []
    for variant in MAIN:
        frames = layerwise.FRAMES
        depth = {frame: depth_change(layers, variant, frame) for frame in frames}
        trained = {frame: training_change(layers, variant, frame) for frame in frames}
        found.append(over_frames("depth", variant, depth))
        found.append(over_frames("training", variant, trained))
    return found


def head_cosines(layers: Any, variant: str, step: int) -> Any:
    """Returns the mean cosine over heads, a row for each seed and a column for each layer."""
    own = layers[(layers["variant"] == variant) & (layers["step"] == step)]
    heads = own.filter(like="cosine_").mean(axis=1)
    return own.assign(cosine=heads).pivot(index="seed", columns="layer", values="cosine")


def map_claim(layers: Any) -> dict[str, Any]:
    """Returns the claim that the learned output map is what the derivation says."""
    trained, start = (head_cosines(layers, "crate", step) for step in (zoo.STEPS, 0))
    return claim(
        "srr_zoo.map",
        list(trained.mean(axis=1)),
        published="",
        baseline=float(start.to_numpy().mean()),
        n=len(zoo.SEEDS),
        size=SIZE,
        why="by layer " + ", ".join(f"{value:.2f}" for value in trained.mean()),
    )


def number_rows(networks: Any, layers: Any) -> list[tuple]:
    """Returns every number: accuracies, and the readings by variant, step, seed and layer."""
    rows: list[tuple] = []
    for each in networks.to_dict("records"):
        name, seed = NAMES[each["variant"]], each["seed"]
        rows.append(("accuracy", name, seed, zoo.STEPS, each["accuracy"]))
        rows.append(("accuracy", name, seed, 0, each["untrained"]))
    values = [name for name in layers if str(name).startswith(("srr_", "cosine_"))]
    for each in layers.to_dict("records"):
        setting = f"{NAMES[each['variant']]}, step {each['step']}"
        rows += [(value, setting, each["seed"], each["layer"], each[value]) for value in values]
    return rows


def headline(networks: Any, claims: Sequence[dict[str, Any]]) -> str:
    """Returns the finding in one sentence."""
    means: Any = 100 * networks.groupby("variant")["accuracy"].mean()
    order = sorted(MAIN, key=lambda variant: means[variant])
    ranks = " < ".join(f"{NAMES[variant]} {means[variant]:.1f}" for variant in order)
    falls = claims[len(PAIRS) :: 2][: len(MAIN)]
    deep = sum(each["answer"] == "supported" for each in falls)
    return (
        f"On digits, over 5 seeds: {ranks} % (published C < N < T < CRATE). The measure falls with "
        f"depth in all frames, more than in untrained networks, for {deep} of {len(MAIN)} variants."
    )


def run(form: str, steps: Steps) -> LabResult:
    """Returns the accuracy, the measure layer by layer, and the output maps of the zoo."""
    networks, layers = gathered(form, steps)
    claims = [pair_claim(networks, *pair) for pair in PAIRS]
    claims += [*layer_claims(layers), map_claim(layers)]
    numbers = number_rows(networks, layers)
    return result("srr_zoo", form, headline(networks, claims), claims, numbers)


def draw(found: LabResult) -> Any:
    """Returns the figure: accuracies, the measure in three frames, its training, the maps."""
    from srr_zoo_figure import draw as figure

    return figure(found)


if __name__ == "__main__":
    main(run, draw)
