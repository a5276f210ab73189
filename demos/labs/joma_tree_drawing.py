"""The figure of the lab joma_tree."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

SERIES = {  # quantity: how it is named, its marker
    "untrained 400": ("untrained, 400 hidden units", "o"),
    "untrained 4096": ("untrained, 4096 hidden units", "s"),
    "small before": ("d = 128, untrained", "v"),
    "small trained": ("d = 128, trained", "^"),
}


def draw(found: Any) -> Figure:
    """Draws NCorr of each cell and layer: published, untrained, trained small."""
    from joma_tree import CELLS, PUBLISHED, name

    figure, axes = pyplot.subplots(2, 1, figsize=(11, 8), sharex=True, layout="constrained")
    at = np.arange(len(CELLS))
    for layer, axis in enumerate(axes):
        axis.plot(at, [cell[layer] for cell in PUBLISHED], "k_", markersize=28, markeredgewidth=2,
                  label="published, trained")  # fmt: skip
        for place, (quantity, (words, marker)) in enumerate(SERIES.items()):
            rows = found.numbers(quantity, place=layer).groupby("setting")["value"]
            mean, spread = rows.mean(), rows.std()
            x = [i + (place - 1.5) * 0.16 for i in at if name(CELLS[i]) in mean.index]
            cells = [name(cell) for cell in CELLS if name(cell) in mean.index]
            axis.errorbar(x, mean[cells], spread[cells], fmt=marker, label=words)
        axis.set(ylabel=f"NCorr of layer {layer}", ylim=(0.3, 1.03))
        axis.grid(axis="y", alpha=0.3)
    axes[1].set_xticks(at, [name(cell).replace(") C", ")\nC") for cell in CELLS], fontsize=8)
    axes[0].legend(ncols=2, fontsize=8, loc="center left", bbox_to_anchor=(0, 0.55))
    seeds = found.numbers("untrained 400")["seed"].nunique()
    figure.suptitle(
        "JoMA Table 1: untrained networks have most of the published NCorr\n"
        f"(untrained at the published size, trained reduced to d = 128; {seeds} seeds, bars: std)"
    )
    return figure
