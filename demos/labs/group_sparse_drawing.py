"""The figure of the lab group_sparse."""

import math
from typing import Any  # of a LabResult: pandas' own types are too wide here

from matplotlib import pyplot
from matplotlib.figure import Figure

CHANCE = {"attention": None, "cosine": 0.0, "loss": math.log(2)}
WORDS = {
    "attention": "attention on the chosen group",
    "cosine": "cosine of v and v*",
    "loss": "loss on fresh samples, nats",
}


def draw(found: Any) -> Figure:
    """Draws attention, direction and loss along training, a line for each size and form."""
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for axis, (quantity, chance) in zip(axes, CHANCE.items(), strict=True):
        for setting, rows in found.numbers(quantity).groupby("setting", sort=False):
            curves = rows.groupby("place")["value"]
            line = "--" if str(setting).endswith("fresh") else "-"
            axis.plot(curves.mean(), line, label=setting)
        if chance is not None:
            axis.axhline(chance, color="black", linestyle=":", label="before training")
        axis.set(xlabel="iteration", title=WORDS[quantity])
    axes[0].set_ylim(0, 1.02)
    axes[0].legend(title="(n, d, D)", fontsize=8)
    seeds = found.numbers("loss")["seed"].nunique()
    figure.suptitle(
        f"Attention finds the group, more of it with fresh samples (published size, {seeds} seeds)"
    )
    return figure
