"""The figure of srr_zoo.py."""

from typing import Any

import layerwise
import srr_zoo
import zoo
from lab import LabResult, mean_and_interval
from zoo import NAMES

TITLES = {
    "stream": "the stream, as the paper has it",
    "read": "after LayerNorm, as U reads it",
    "unit": "scaled to one norm",
}


def draw(found: LabResult) -> Any:
    """Returns the figure of a result of srr_zoo.py."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, 3)
    draw_accuracy(panels[0, 0], found)
    for axes, frame in zip((panels[0, 1], panels[0, 2], panels[1, 0]), layerwise.FRAMES,
                           strict=True):  # fmt: skip
        draw_layers(axes, found, frame)
    draw_training(panels[1, 1], found)
    draw_maps(panels[1, 2], found)
    figure.legend(*panels[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    figure.suptitle(title(found))
    return figure


def title(found: LabResult) -> str:
    """Returns what the figure shows, and at what size."""
    table: Any = found.table()
    pairs = table.iloc[: len(srr_zoo.PAIRS)]
    agree = int((pairs["answer"] == "supported").sum())
    text = f"{agree} of {len(pairs)} published rankings of CRATE's variants hold"
    return f"{text}: digits 8x8, d = 32, 4 layers, 5 seeds\n(95 % intervals over seeds)"


def interval_of(values: Any) -> tuple[float, list[list[float]]]:
    """Returns a mean and its interval as matplotlib takes error bars."""
    mean, (low, high) = mean_and_interval(list(values))
    return mean, [[mean - low], [high - mean]]


def draw_accuracy(axes: Any, found: LabResult) -> None:
    """Draws a point for each variant, its published accuracy beside it."""
    for place, (variant, name) in enumerate(NAMES.items()):
        own = 100 * found.numbers("accuracy", setting=name, place=zoo.STEPS)["value"]
        mean, error = interval_of(own)
        axes.errorbar(place, mean, error, fmt="o", color=srr_zoo.COLOURS[variant], capsize=4)
        axes.plot(place + 0.25, float(srr_zoo.PUBLISHED[variant]), "x", color="0.4")
    axes.plot([], [], "x", color="0.4", label="published, CIFAR-10")
    axes.set_xticks(range(len(NAMES)), [name.removeprefix("CRATE-") for name in NAMES.values()])
    axes.set(ylabel="test accuracy, %", title="accuracy (untrained: 10 %)")
    axes.legend()


def draw_layers(axes: Any, found: LabResult, frame: str) -> None:
    """Draws the measure against the layer, untrained dashed, trained with intervals."""
    places = list(range(1, zoo.LAYERS + 1))
    for variant, name in NAMES.items():
        for step, style in ((0, "--"), (zoo.STEPS, "-")):
            rows = found.numbers(f"srr_{frame}", setting=f"{name}, step {step}")
            means = [rows[rows["place"] == place]["value"].mean() for place in places]
            label = name if step else None
            axes.plot(places, means, style, color=srr_zoo.COLOURS[variant], label=label, lw=1.5)
    axes.plot([], [], "--", color="0.3", label="untrained")
    axes.set(title=f"measure: {TITLES[frame]}", xlabel="layer", ylabel="nats, lower is better")
    axes.set_xticks(places)


def draw_training(axes: Any, found: LabResult) -> None:
    """Draws the measure of the stream along training, its mean over layers."""
    for variant, name in NAMES.items():
        means, errors = [], [[], []]
        for step in zoo.READ_AT:
            rows = found.numbers("srr_stream", setting=f"{name}, step {step}")
            mean, error = interval_of(rows.groupby("seed")["value"].mean())
            means.append(mean)
            errors = [kept + new for kept, new in zip(errors, error, strict=True)]
        axes.errorbar(zoo.READ_AT, means, errors, color=srr_zoo.COLOURS[variant], capsize=3)
    axes.set(title="along training: the stream, mean of layers", xlabel="step", ylabel="nats")


def draw_maps(axes: Any, found: LabResult) -> None:
    """Draws the cosine of the output maps with U_k^T against the layer, a point for each head."""
    for variant in ("crate", "fix"):
        for head in range(4):
            setting = f"{NAMES[variant]}, step {zoo.STEPS}"
            rows = found.numbers(f"cosine_{head}", setting=setting)
            shift = -0.1 if variant == "crate" else 0.1
            places = rows["place"] + shift
            axes.plot(places, rows["value"], ".", color=srr_zoo.COLOURS[variant], alpha=0.6)
    for level, name in ((1, "CRATE-C"), (-1, "CRATE-N"), (0, "maps drawn apart")):
        axes.axhline(level, color="0.7", lw=1)
        axes.annotate(name, (0.6, level + (0.03 if level else 0.25)), color="0.4")
    axes.set(xlim=(0.5, zoo.LAYERS + 0.5), ylim=(-1.15, 1.2), xlabel="layer", ylabel="cosine")
    axes.set_xticks(range(1, zoo.LAYERS + 1))
    axes.set_title("output map of a head with its U$_k^T$, trained")
