"""Heat maps with a cell for each layer and head: of any numbers, or of the cost of ablation."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from crate_interp import probes
from crate_interp.circuits.head_ablation import HeadAblation
from crate_interp.stats.intervals import LEVEL, signs
from crate_interp.sweeps.layer_curves import curve, head_interval
from crate_interp.sweeps.result import SweepResult
from crate_interp.viz import canvas
from crate_interp.viz.canvas import TRAINED, UNTRAINED, ink_on

Numbers = Float[np.ndarray, "layer head"] | Float[Tensor, "layer head"] | Sequence[Sequence[float]]
_ROW, _LEAST, _MOST = 0.17, 1.1, 3.6  # inches: one row; least and most for all rows
_BELOW = 0.42  # inches from cells to colour bar: room for the heads' numbers and the word "head"
_DIGIT, _NARROW = 0.64, {".": 0.32, "-": 0.37}  # widths of characters, relative to the font size
SIGNED = LinearSegmentedColormap.from_list("signed", [UNTRAINED, "#f6f6f6", TRAINED])
_UNITS = {"loss": "rise of the loss (nats)", "accuracy": "drop of the accuracy"}


def heatmap(
    values: SweepResult | Numbers,
    statistic: str | None = None,
    *,
    interval: tuple[Numbers, Numbers] | None = None,
    unit: str | None = None,
    signed: bool | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of a number per head: layers down, heads across.

    If values of both signs occur, blue is above 0 and orange below, on equal scales; otherwise
    colours go from dark to light. Numbers are written into the cells if they fit; NaN is grey. If
    both signs occur, cells whose interval excludes 0 are framed.

    Args:
        values: Numbers `[layer, head]`, or a result whose `statistic` ("probe.statistic", with a
            value per head) is drawn.
        statistic: "probe.statistic" of a result.
        interval: Lower and upper ends `[layer, head]`; None takes the 95 % intervals of a result.
        unit: The label of the colour bar; None takes the statistic's unit.
        signed: Whether to use the colours for both signs; None decides from the numbers.
        ax: As in `ci.viz.layers`; the colour bar goes below the Axes.
        title: As in `ci.viz.layers`; the colour bar goes below the Axes.
        dpi: As in `ci.viz.layers`; the colour bar goes below the Axes.

    Raises:
        ValueError: If the result lacks the statistic or has one value for all heads, and if the
            numbers are not `[layer, head]`.
    """
    if isinstance(values, SweepResult):
        if statistic is None:
            raise ValueError('name the statistic to draw, such as statistic="attention.entropy".')
        drawn = curve(values, statistic)
        if drawn.heads is None:
            raise ValueError(f"{statistic!r} has no value per head: draw it with ci.viz.layers.")
        grid, names = drawn.heads, [f"{layer:g}" for layer in drawn.layers]
        words = probes.statistic(values.meta, statistic).title
        interval = head_interval(values, statistic) if interval is None else interval
        unit = canvas.axis_label(values, statistic, line=60) if unit is None else unit
    else:
        grid, words = _array(values), canvas.label(statistic or "")
        if grid.ndim != 2 or not grid.size:
            raise ValueError(
                f"got numbers of shape {list(grid.shape)}. Give numbers [layer, head]."
            )
        names = [str(layer) for layer in range(len(grid))]
    ends = None if interval is None else [_array(end) for end in interval]
    tall = min(max(_LEAST, _ROW * len(grid)), _MOST)
    figure, axes = canvas.canvas(ax, tall + 1.0, dpi)
    both = bool((grid < 0).any() and (grid > 0).any()) if signed is None else signed
    bar = _draw(figure, axes, grid, ends, canvas.label(unit or ""), both)
    axes.set_yticks(range(len(grid)), names)
    axes.set_xticks(range(grid.shape[1]))
    canvas.set_title(axes, title, words)
    canvas.as_written(figure, axes, bar.ax)  # before the layout is computed
    _write_numbers(figure, axes, grid)
    return figure


def _array(values: Numbers) -> np.ndarray:
    cpu: Any = values.detach().double().cpu() if isinstance(values, Tensor) else values
    return np.asarray(cpu, dtype=float)


def heads(
    result: SweepResult,
    statistic: str,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns `ci.viz.heatmap` of a statistic of a result: layers down, heads across.

    Args:
        result: A result with a value per head, such as of `ci.sweep`.
        statistic: Its name, such as "compression.official_rate".
        ax: As in `ci.viz.layers`.
        title: As in `ci.viz.layers`.
        dpi: As in `ci.viz.layers`.

    Raises:
        ValueError: If the result lacks the statistic, or if it has one value for all heads.
    """
    return heatmap(result, statistic, ax=ax, title=title, dpi=dpi)


def _largest(grid: np.ndarray) -> float:
    return float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0


def _draw(figure: Any, axes: Any, grid: np.ndarray, ends: Any, unit: str, signed: bool) -> Any:
    """Draws cells and frames, and returns the colour bar."""
    most = _largest(grid)
    colours, limits = matplotlib.colormaps["cividis"], {}
    if signed:
        colours = SIGNED
        limits = {"vmin": -most, "vmax": most}
    look: Any = {"aspect": "auto", "interpolation": "nearest", **limits}
    image = axes.imshow(grid, cmap=colours.with_extremes(bad="#bbbbbb"), **look)
    axes.set_ylabel("layer", fontsize=canvas.TEXT)
    framed = np.argwhere(signs(*ends)) if ends is not None and signed else np.empty((0, 2))
    words = "head (framed: 95 % interval excludes 0)" if len(framed) else "head"
    axes.set_xlabel(words, fontsize=canvas.TEXT)
    for row, column in framed:
        place = (column - 0.43, row - 0.43)
        axes.add_patch(Rectangle(place, 0.86, 0.86, fill=False, ec="black", lw=0.9))
    # the bar is below the cells, so that the numbers of twelve heads have the full column width
    pad = 0.03
    if figure.get_layout_engine() is None:  # then the bar would cover the heads' numbers
        box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        pad = _BELOW / box.height
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=40, fraction=0.05, pad=pad)
    bar.ax.tick_params(labelsize=canvas.SMALL)
    bar.set_label(unit, fontsize=canvas.TEXT)
    return bar


def _write_numbers(figure: Any, axes: Any, grid: np.ndarray) -> None:
    """Writes the numbers into the cells, if all of them fit."""
    image, most = axes.images[-1], _largest(grid)
    figure.draw_without_rendering()  # the width of a cell is not known before this
    box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    wide, tall = box.width * 72 / grid.shape[1], box.height * 72 / grid.shape[0]
    if canvas.SMALL + 0.8 > tall:
        return
    for digits in (2, 1):
        texts = {place: written(value, most, digits) for place, value in np.ndenumerate(grid)}
        longest = max(sum(_NARROW.get(sign, _DIGIT) for sign in text) for text in texts.values())
        if longest * canvas.SMALL <= wide - 0.5:
            break
    else:
        return
    for (row, column), text in texts.items():
        shade = ink_on(image.cmap(image.norm(grid[row, column])))
        centred: Any = {"ha": "center", "va": "center"}
        axes.text(column, row, text, color=shade, fontsize=canvas.SMALL, **centred)


def written(value: float, most: float, digits: int = 2) -> str:
    """Returns a number as a short text: .12, 1.2, 12.

    most: the largest absolute value that is shown, which sets the decimals of all numbers. digits:
    the significant digits of `most` if it is below .1: 2 gives .012, and 1 gives .01.
    """
    if np.isnan(value):
        return ""
    if not 0.01 <= most < 9999:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    places = 1 + digits if most < 0.1 else 2 if most < 1 else 1 if most < 10 else 0
    text = f"{value:.{places}f}"
    return "0" if float(text) == 0 else text.replace("0.", ".", 1) if most < 1 else text


def head_ablation(
    result: HeadAblation,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of what ablating each head costs: layers down, heads across.

    A blue head helps the model; without an orange head, the model does better. A frame marks an
    effect: p, adjusted over all heads, is at most 0.05.

    Args:
        result: What `ci.ablate_heads` returns.
        ax: As in `ci.viz.layers`.
        title: As in `ci.viz.layers`.
        dpi: As in `ci.viz.layers`.
    """
    table: Any = result.heads()
    drop, low, high, p = (
        table.pivot(index="layer", columns="head", values=name).to_numpy(float)
        for name in ("drop", "low", "high", "p")
    )
    shown = p <= LEVEL
    ends = np.where(shown, low, -np.inf), np.where(shown, high, np.inf)
    settings = result.meta["settings"]
    words = f"{settings['how'].capitalize()} ablation of each head" if title is None else title
    unit = _UNITS[settings["metric"]]
    figure = heatmap(drop, interval=ends, unit=unit, signed=True, ax=ax, title=words, dpi=dpi)
    axes = figure.axes[0] if ax is None else ax
    axes.set_xlabel(f"head (framed: p <= {LEVEL})" if shown.any() else "head")
    return figure
