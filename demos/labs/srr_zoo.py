"""Sparse rate reduction, layer by layer, in six variants of CRATE, beside their accuracy.

    python demos/labs/srr_zoo.py --out runs/labs/srr_zoo

arXiv 2411.17182 trains CRATE and variants of its attention on CIFAR, ranks them (Table 3) and looks
at the summand of eq. 11 in each layer. Here the six variants are small networks on scikit-learn's
digits, 5 seeds each. The quick form measures the weights in demos/weights/zoo at the start and at
the end, and takes what lies between from readings.csv beside them. --full trains anew (10 min).
"""

from functools import partial
from typing import Any

import layerwise
import numpy as np
import pandas as pd
import zoo
from drawing import curve, interval, level, panels, tidy, titled
from lab import LabResult, Steps, claim, ends_of, main, mean_and_interval, result
from rules import highest
from zoo import NAMES, Recipe

PUBLISHED = {
    "c": "76.87", "n": "81.52", "t": "85.49", "crate": "86.67", "fix": "80.73",
    "identity": "83.18",
}  # fmt: skip
PAIRS = (("c", "n"), ("n", "t"), ("t", "crate"), ("fix", "crate"), ("identity", "crate"))
MAIN = ("c", "n", "t", "crate")
TITLES = {
    "stream": "the stream, as the paper has it",
    "read": "after LayerNorm, as U reads it",
    "unit": "scaled to one norm",
}
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
    jobs = {recipe.name: partial(readings, recipe, form) for recipe in zoo.zoo()}
    networks, layers = [], []
    for recipe, found in zip(zoo.zoo(), steps.all(jobs, "networks").values(), strict=True):
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
        "srr_zoo.less", (100 * (table[higher] - table[lower])).to_numpy(), lower=NAMES[lower],
        higher=NAMES[higher], least=PUBLISHED[lower], most=PUBLISHED[higher],
        baseline=two[np.triu_indices(len(two), 1)].mean(),
    )  # fmt: skip


def over_frames(rule: str, variant: str, change: Any, layers: Any) -> dict[str, Any]:
    """Returns a claim that a change is negative, for a variant.

    change: the function that gives it in a frame, of trained and untrained networks by seed. In
    each frame both must lie below 0: the trained networks, and trained minus untrained. The numbers
    of the row are those of the stream, the paper's own frame.
    """
    found = {frame: change(layers, variant, frame) for frame in layerwise.FRAMES}
    cases = {
        frame: highest(*(ends_of(each[x].to_numpy()) for x in ("trained", "over")))
        for frame, each in found.items()
    }
    stream, below = found["stream"], [frame for frame, (_, high) in cases.items() if high < 0]
    return claim(
        f"srr_zoo.{rule}", stream["trained"].to_numpy(), cases=cases, variant=NAMES[variant],
        baseline=stream["untrained"].mean(), frames=", ".join(below) or "none",
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


def map_claim(layers: Any) -> dict[str, Any]:
    """Returns the claim that the learned output map is what the derivation says."""
    own = layers[layers["variant"] == "crate"]
    own = own.assign(cosine=own.filter(like="cosine_").mean(axis=1))
    trained, start = (
        own[own["step"] == step].pivot(index="seed", columns="layer", values="cosine")
        for step in (zoo.STEPS, 0)
    )
    return claim(
        "srr_zoo.map", trained.mean(axis=1).to_numpy(), baseline=start.to_numpy().mean(),
        layers=", ".join(f"{value:.2f}" for value in trained.mean()),
    )  # fmt: skip


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


def run(form: str, steps: Steps) -> LabResult:
    """Returns the accuracy, the measure layer by layer, and the output maps of the zoo."""
    networks, layers = gathered(form, steps)
    claims = [pair_claim(networks, *pair) for pair in PAIRS]
    for variant in MAIN:
        claims.append(over_frames("depth", variant, depth_change, layers))
        claims.append(over_frames("training", variant, training_change, layers))
    claims.append(map_claim(layers))
    means: Any = 100 * networks.groupby("variant")["accuracy"].mean()
    order = sorted(MAIN, key=lambda variant: means[variant])
    ranks = " < ".join(f"{NAMES[variant]} {means[variant]:.1f}" for variant in order)
    deep = sum(row["answer"] == "supported" for row in claims if row["rule"] == "srr_zoo.depth")
    numbers = number_rows(networks, layers)
    return result("srr_zoo", form, claims, numbers, ranks=ranks, deep=deep, main=len(MAIN))


def draw_accuracy(axis: Any, found: LabResult) -> None:
    """Draws a point for each variant, its published accuracy beside it."""
    for place, (variant, name) in enumerate(NAMES.items()):
        own = 100 * found.numbers("accuracy", setting=name, place=zoo.STEPS)["value"]
        interval(axis, place, own, color=COLOURS[variant], capsize=4)
        axis.plot(place + 0.25, float(PUBLISHED[variant]), "x", color="0.4")
    axis.plot([], [], "x", color="0.4", label="published, CIFAR-10")
    axis.set_xticks(range(len(NAMES)), [name.removeprefix("CRATE-") for name in NAMES.values()])
    tidy(axis, 10, ylabel="test accuracy, %", title="accuracy (untrained: 10 %)")


def draw_layers(axis: Any, found: LabResult, frame: str) -> None:
    """Draws the measure against the layer, untrained dashed, trained with intervals."""
    for variant, name in NAMES.items():
        for step, style in ((0, "--"), (zoo.STEPS, "-")):
            rows = found.numbers(f"srr_{frame}", setting=f"{name}, step {step}")
            label = name if step else None
            curve(axis, rows, style, 0, color=COLOURS[variant], label=label)
    axis.plot([], [], "--", color="0.3", label="untrained")
    axis.set_xticks(range(1, zoo.LAYERS + 1))
    words = f"measure: {TITLES[frame]}"
    tidy(axis, legend=0, title=words, xlabel="layer", ylabel="nats, lower is better")


def draw_training(axis: Any, found: LabResult) -> None:
    """Draws the measure of the stream along training, its mean over layers."""
    for variant, name in NAMES.items():
        means, errors = [], [[], []]
        for step in zoo.READ_AT:
            rows = found.numbers("srr_stream", setting=f"{name}, step {step}")
            mean, (low, high) = mean_and_interval(rows.groupby("seed")["value"].mean())
            means.append(mean)
            errors = [errors[0] + [mean - low], errors[1] + [high - mean]]
        axis.errorbar(zoo.READ_AT, means, errors, color=COLOURS[variant], capsize=3)
    words = "along training: the stream, mean of layers"
    tidy(axis, legend=0, title=words, xlabel="step", ylabel="nats")


def draw_maps(axis: Any, found: LabResult) -> None:
    """Draws the cosine of the output maps with U_k^T against the layer, a point for each head."""
    for variant, shift in (("crate", -0.1), ("fix", 0.1)):
        for head in range(4):
            setting = f"{NAMES[variant]}, step {zoo.STEPS}"
            rows = found.numbers(f"cosine_{head}", setting=setting)
            places = rows["place"] + shift
            axis.plot(places, rows["value"], ".", color=COLOURS[variant], alpha=0.6)
    for at, name in ((1, "CRATE-C"), (-1, "CRATE-N"), (0, "maps drawn apart")):
        level(axis, at, color="0.7", lw=1)
        axis.annotate(name, (0.6, at + (0.03 if at else 0.25)), color="0.4")
    axis.set_xticks(range(1, zoo.LAYERS + 1))
    words = "output map of a head with its U$_k^T$, trained"
    limits = {"xlim": (0.5, zoo.LAYERS + 0.5), "ylim": (-1.15, 1.2)}
    tidy(axis, legend=0, **limits, xlabel="layer", ylabel="cosine", title=words)


def draw(found: LabResult) -> Any:
    """Returns the figure: accuracies, the measure in three frames, its training, the maps."""
    figure, axes = panels(3, 2, size=(12, 7))
    first, *frames, training, maps = axes.flat
    draw_accuracy(first, found)
    for axis, frame in zip(frames, layerwise.FRAMES, strict=True):
        draw_layers(axis, found, frame)
    draw_training(training, found)
    draw_maps(maps, found)
    table: Any = found.table()
    agree = (table["answer"][: len(PAIRS)] == "supported").sum()
    return titled(figure, found, frames[0], 8, agree=agree, pairs=len(PAIRS))


if __name__ == "__main__":
    main(run, draw)
