"""The cost of ablating each head, as a heat map."""

from typing import TYPE_CHECKING, Any

import numpy as np

from crate_interp.circuits.head_ablation_result import HeadAblation
from crate_interp.stats.significance import LEVEL
from crate_interp.viz.figures.heatmaps import frame, heatmap

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_UNITS = {"loss": "rise of the loss (nats)", "accuracy": "drop of the accuracy"}


def head_ablation(
    result: HeadAblation,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of the cost of ablating each head: a row per layer, heads across.

    Blue means that a head helps, orange that the model does better without it. A frame marks an
    effect, p <= 0.017 adjusted over all heads (0.05 for the accuracy of images); a dashed frame
    marks an open case, p <= 0.05. ax, title, dpi: as in `ci.viz.layers`.
    """
    table: Any = result.heads()
    drop, low, high, p = (
        table.pivot(index="layer", columns="head", values=name).to_numpy(float)
        for name in ("drop", "low", "high", "p")
    )
    held, maybe = p <= result.level, (p > result.level) & (p <= LEVEL)
    ends = np.where(held, low, -np.inf), np.where(held, high, np.inf)
    settings = result.meta["settings"]
    words = f"{settings['how'].capitalize()} ablation of each head" if title is None else title
    unit = _UNITS[settings["metric"]]
    figure = heatmap(drop, interval=ends, unit=unit, signed=True, ax=ax, title=words, dpi=dpi)
    axes = figure.axes[0] if ax is None else ax
    frame(axes, np.argwhere(maybe), dashed=True)
    legend = [f"framed: p <= {result.level:.2g}"] if held.any() else []
    legend += ["dashed: p <= 0.05"] if maybe.any() else []
    axes.set_xlabel(f"head ({', '.join(legend)})" if legend else "head")
    return figure
