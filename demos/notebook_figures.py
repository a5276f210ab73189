"""The figures that one notebook alone draws. They show themselves as the last line of a cell."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.viz.canvas import CHANCE, TRAINED, UNTRAINED, NotebookFigure

LINES = [TRAINED, UNTRAINED, "#1a1d20", CHANCE]
PALE, FOUR = "#c3d4e5", [("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D")]
BELOW: Any = {"loc": "outside lower center", "frameon": False}
Panels = Mapping[str, pd.DataFrame]  # title -> what a panel shows


def _panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> Any:
    """Returns a figure and its Axes `[row, column]`."""
    figure = NotebookFigure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def rates_by_frame(rates: pd.DataFrame, frames: Mapping[str, str]) -> NotebookFigure:
    """Draws how attention changes R^c in each frame, in per cent, beside its nulls (02)."""
    figure, (axes,) = _panels(1, len(frames), (10, 3.9), sharey=True)
    for axis, (frame, name) in zip(axes, frames.items(), strict=True):
        rows: Any = 100 * rates.loc[frame][["value", "low", "high", "null", "untrained"]]
        axis.axhline(0, color="0.3", lw=0.8)
        ends, look = [rows["value"] - rows["low"], rows["high"] - rows["value"]], dict(marker="o")
        look |= dict(color=TRAINED, label="trained, 95 % interval over images")
        axis.errorbar(rows.index, rows["value"], ends, lw=2, capsize=3, **look)
        look = dict(color=UNTRAINED, label="the same updates, shuffled over tokens")
        axis.plot(rows.index, rows["null"], marker="x", ls=":", lw=1.8, **look)
        axis.plot(rows.index, rows["untrained"], color="0.4", ls="--", label="untrained, mean of 2")
        axis.set(title=name, xlabel="layer", xticks=list(rows.index))
    axes[0].set_ylabel("change of $R^c$ by attention, per cent")
    axes[0].text(0.03, 0.03, "below 0: compressed", transform=axes[0].transAxes, color="0.25")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=3, **BELOW)
    return figure


def cosines_by_step(cosines: Any, steps: Sequence[int], band: float) -> NotebookFigure:
    """Draws the cosine `[step, layer, head]` of output maps and U along the training (02)."""
    figure, (axes,) = _panels(1, cosines.shape[1], (11, 3.4), sharey=True)
    for layer, axis in enumerate(axes):
        axis.axhspan(-band, band, color="0.88", label="95 % of random matrices")
        for head, (colour, mark) in enumerate(FOUR):
            look: Any = dict(color=colour, marker=mark, ms=3.5, label=f"head {head}")
            axis.plot(steps, cosines[:, layer, head], **look)
        axis.set_xscale("symlog", linthresh=10)
        axis.set_xticks([0, 10, 100, 1000], ["0", "10", "100", "1000"], rotation=45)
        axis.set(title=f"layer {layer}", xlabel="training step")
    axes[0].set_ylabel("cosine of output map and $U_k^T$")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, **BELOW)
    return figure


def masks_on(pictures: Sequence[Any], masks: Sequence[Any]) -> NotebookFigure:
    """Draws masks over their pictures (03)."""
    figure, (axes,) = _panels(1, len(pictures), (2.2 * len(pictures), 2.3))
    for axis, picture, mask in zip(axes, pictures, masks, strict=True):
        axis.imshow(picture, extent=(0, 1, 1, 0))
        axis.imshow(mask, extent=(0, 1, 1, 0), cmap="Blues", alpha=0.55 * mask)
        axis.set_axis_off()
    return figure


def line_panels(panels: Panels, xlabel: str, ylabel="", mark=np.nan, **look: Any) -> NotebookFigure:
    """Draws the columns of tables, a panel for each table (05, 11). mark: of a thin line."""
    figure, (axes,) = _panels(1, len(panels), (3.2 * len(panels), 2.8), sharey=True)
    names = [list(table) for table in panels.values()]
    for axis, (title, table) in zip(axes, panels.items(), strict=True):
        look["legend"] = axis is axes[0] or list(table) != names[0]
        table.plot(ax=axis, style=["-", "--", "-.", ":"], color=LINES, ylim=(0, 1.1), **look)
        axis.set(title=title, xlabel=xlabel)
        axis.axvline(mark, color=CHANCE, lw=0.7)
    axes[0].set_ylabel(ylabel)
    return figure


def score_bars(rows: Mapping[str, Panels], size: tuple[float, float], xlabel="") -> NotebookFigure:
    """Draws bars of scores with their intervals (05). rows: label of a row -> its panels.

    A table has the columns score, low, high and dark, and maybe even (dotted) and untrained.
    """
    count = max(map(len, rows.values()))
    figure, axes = _panels(len(rows), count, size, sharex=True, sharey="row")
    for line, (words, panels) in zip(axes, rows.items(), strict=True):
        line[0].set_ylabel(words)
        for axis, (title, table) in zip(line, panels.items(), strict=True):
            errors = [table["score"] - table["low"], table["high"] - table["score"]]
            colours = np.where(table["dark"], TRAINED, PALE)
            axis.bar(table.index, table["score"], yerr=errors, color=colours)
            axis.set_title(title)
            if "untrained" in table:
                axis.plot(table.index, table["untrained"], color=UNTRAINED, ls="--")
                axis.axhline(table["even"].mean(), color=CHANCE, ls=":")
            else:
                axis.axvline(0, color=CHANCE, ls=":", lw=1)
    figure.supxlabel(xlabel, fontsize="medium")
    return figure


def slopes_by_layer(tables: Panels, steps: Sequence[str]) -> NotebookFigure:
    """Draws the slope of the loss in each layer, a row for a network, a column for a step (08)."""
    figure, axes = _panels(len(tables), len(steps), (11, 6), sharey="row")
    for row, (name, table) in zip(axes, tables.items(), strict=True):
        row[0].set_ylabel(f"{name.removeprefix('crate-tiny-')}\nnats per unit of t")
        for axis, step in zip(row, steps, strict=True):
            rows: Any = table[table["replacement"] == step]
            if not len(rows):
                axis.set_axis_off()
                continue
            layers, slope = rows["layer"], rows["slope"]
            ends = rows["random_low"], rows["random_high"]
            axis.fill_between(layers, *ends, color="0.85", label="random directions")
            axis.axhline(0, color="0.5", linewidth=0.8)
            ends = [slope - rows["slope_low"], rows["slope_high"] - slope]
            axis.errorbar(layers, slope, ends, fmt="o", markersize=3.5, label="step, 95 % interval")
            axis.set(title=step, xlabel="layer", xticks=layers)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=2, **BELOW)
    return figure


def networks_of_kinds(values: Mapping[str, Mapping[tuple[str, bool], Any]]) -> NotebookFigure:
    """Draws a number of each CRATE ("a") and ViT ("b"), hollow if untrained (09)."""
    figure, (axes,) = _panels(1, len(values), (12, 3))
    for axis, (title, own) in zip(axes, values.items(), strict=True):
        for (side, trained), numbers in own.items():
            colour, x = (TRAINED, 0) if side == "a" else (UNTRAINED, 3)
            look: Any = dict(color=colour, alpha=0.7, mfc=colour if trained else "white")
            axis.plot(np.full(len(numbers), x + trained), numbers, "o", **look)
        axis.set(title=title, xlim=(-0.7, 4.7))
        axis.set_xticks([0.5, 3.5], ["CRATE", "ViT"])
    return figure
