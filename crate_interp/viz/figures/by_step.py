"""A statistic during training: a line for each layer, and where it changes its course."""

from typing import TYPE_CHECKING, Any

import numpy as np

from crate_interp.core import checks
from crate_interp.probes import built_in
from crate_interp.results.result import Result
from crate_interp.stats.significance import LEVEL
from crate_interp.training.watch_result import WatchResult
from crate_interp.viz.figures.canvas import TEXT, axis_label, canvas, finished, set_frame

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure


def steps(
    result: Result,
    statistic: str,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of "probe.statistic" by training step, a line for each layer.

    A line is the mean over samples, and for a statistic per head over heads too. A ring stands
    where a layer's line changes its course (p at most .05 by circular shifts, `result.changes()`);
    a statistic per head has no rings, because its heads are tested one by one.

    ax, title and dpi are those of `ci.viz.layers`. Raises ValueError if the result lacks the
    statistic.
    """
    if not isinstance(result, WatchResult):
        raise ValueError(f"give what watch.result() returns, got {type(result).__name__}.")
    checks.one_of("statistic", statistic, tuple(result.meta["statistics"]))
    means = _means(result, statistic)
    if not means.size:
        raise ValueError(f"the result has no number of {statistic!r}: its model has no such layer.")
    figure, axes = canvas(ax, 2.4, dpi)
    import matplotlib

    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, means.shape[1]))
    for layer, colour in zip(means.columns, colours, strict=True):
        axes.plot(means.index, means[layer], color=colour, lw=1.4, label=f"layer {layer}")
    _draw_changes(axes, result, statistic, means)
    axes.set_ylabel(axis_label(result, statistic), fontsize=TEXT)
    axes.set_xlabel("updates", fontsize=TEXT)
    set_frame(axes)
    axes.margins(x=0.03)
    words = built_in.statistic(result.meta, statistic).title
    return finished(figure, [axes], ax, title, f"{words}, along training")


def _means(result: WatchResult, statistic: str) -> Any:
    """Returns the means, a row for each step and a column for each layer."""
    probe, name = statistic.split(".")
    parts = []
    for table in (result.table("layers"), result.table("heads")):
        own: Any = table[(table["probe"] == probe) & (table["statistic"] == name)]
        parts.append(own.pivot_table(index="step", columns="layer", values="mean"))
    return parts[0] if parts[0].size else parts[1]


def _draw_changes(axes: Any, result: WatchResult, statistic: str, means: Any) -> None:
    probe, name = statistic.split(".")
    table: Any = result.table("changes")
    chosen = (table["probe"] == probe) & (table["statistic"] == name) & table["head"].isna()
    found = table[chosen & (table["p"] <= LEVEL)]
    if len(found):
        heights = [means.loc[step, layer] for step, layer in found[["step", "layer"]].values]
        words = f"the course changes (p at most {LEVEL:g})"
        axes.plot(
            found["step"].to_numpy(int), heights, "o", mfc="none", mec="#b00020", ms=7, label=words
        )
