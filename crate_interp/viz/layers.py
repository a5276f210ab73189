"""A statistic by layer: the model, its heads, its spread over samples, and the same network untrained."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crate_interp.sweep.result import SweepResult
from crate_interp.viz.curves import baseline, curve

_MODEL, _UNTRAINED = "#2a7ab9", "#c4682b"  # apart for colour-blind eyes, and readable on white and on black


def layers(result: SweepResult, statistic: str, untrained: Sequence[SweepResult] | None = None) -> Any:
    """A matplotlib Figure of "probe.statistic" by layer.

    Line and band: mean and one standard deviation over samples; thin lines: heads, where the statistic has them;
    dashed line and band: mean, lowest and highest of `untrained`, results of the same network with random weights.
    Raises ValueError for a statistic the result lacks, and for `untrained` of another depth.
    """
    drawn, random = curve(result, statistic), baseline(untrained, statistic)
    if random is not None and random.shape[1] != len(drawn.layers):
        raise ValueError(f"untrained has {random.shape[1]} layers of {statistic!r}, the result {len(drawn.layers)}.")
    figure, axes = _figure(result, statistic)
    if drawn.heads is not None:
        axes.plot(drawn.layers, drawn.heads, color=_MODEL, lw=0.7, alpha=0.6)
        axes.plot([], [], color=_MODEL, lw=0.7, alpha=0.6, label="one head each")
    label = result.meta["model"] or "model"
    axes.plot(
        drawn.layers, drawn.mean, color=_MODEL, lw=2, marker="o", ms=4, label=_named(label, drawn.heads is not None)
    )
    if not np.isnan(drawn.std).all():
        low, high = drawn.mean - drawn.std, drawn.mean + drawn.std
        axes.fill_between(
            drawn.layers, low, high, color=_MODEL, alpha=0.2, lw=0, label=f"± 1 std over {result.meta['unit']}"
        )
    if random is not None:
        axes.plot(
            drawn.layers,
            random.mean(axis=0),
            color=_UNTRAINED,
            lw=1.5,
            ls="--",
            label=f"untrained, {len(random)} seed{'s' * (len(random) > 1)}",
        )
        axes.fill_between(drawn.layers, random.min(axis=0), random.max(axis=0), color=_UNTRAINED, alpha=0.25, lw=0)
    _finish(figure, axes)
    return figure


def heads(result: SweepResult, statistic: str) -> Any:
    """A matplotlib Figure of a per-head statistic: layers down, heads across, the value in each cell.

    Raises ValueError for a statistic the result lacks, or that has no heads.
    """
    drawn = curve(result, statistic)
    if drawn.heads is None:
        raise ValueError(f"{statistic!r} has one value per layer, not per head: draw it with ci.viz.layers.")
    figure, axes = _figure(result, statistic)
    image = axes.imshow(drawn.heads, aspect="auto", cmap="viridis")
    axes.set(xlabel="head", ylabel="layer")
    axes.set_xticks(range(drawn.heads.shape[1]))
    axes.set_yticks(range(len(drawn.layers)), [f"{layer:g}" for layer in drawn.layers])
    for (row, column), value in np.ndenumerate(drawn.heads):
        shade = "white" if image.norm(value) < 0.6 else "black"
        axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=shade, fontsize=7)
    figure.colorbar(image, label=_unit(result, statistic))
    return figure


def _figure(result: SweepResult, statistic: str) -> tuple[Any, Any]:
    # not pyplot: a library must neither choose a backend nor keep figures open
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.1), layout="constrained")  # small, so that its words stay readable on a phone
    axes = figure.add_subplot()
    axes.set_title(statistic, fontsize=10)
    axes.set_ylabel(_unit(result, statistic))
    return figure, axes


def _finish(figure: Any, axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.margins(x=0.03)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def _named(label: str, has_heads: bool) -> str:
    return f"{label}, mean over heads" if has_heads else label


def _unit(result: SweepResult, statistic: str) -> str:
    return result.meta["statistics"][statistic][0] or "no unit"
