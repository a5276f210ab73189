"""A statistic by layer: the model, its heads, its interval, and its untrained twins."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from crate_interp.probes import built_in
from crate_interp.sweeps.layer_curves import Curve, baseline, chance, curve
from crate_interp.sweeps.result import SweepResult
from crate_interp.viz.figures.canvas import (
    SMALL,
    TEXT,
    WIDTH,
    axis_label,
    canvas,
    finished,
    panels,
    set_frame,
    set_title,
)
from crate_interp.viz.figures.colours import CHANCE, TRAINED, UNTRAINED
from crate_interp.viz.figures.labels import label
from crate_interp.viz.figures.paper_curves import PUBLISHED, is_crate_s

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_MARKERS = "osD^vP"  # besides colours, so that lines differ in print too


def layers(
    result: SweepResult | Sequence[SweepResult],
    statistic: str,
    untrained: Sequence[SweepResult] | None = None,
    labels: Sequence[str] | None = None,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of "probe.statistic" by layer, for one result or several.

    A line is the mean over samples, its band a 95 % interval of that mean by Student's t; a
    statistic of the weights has none. A statistic per head is averaged over heads; with a single
    result, thin lines are heads. The dashed line and its band are the mean, lowest and highest of
    `untrained`, results of the same network with random weights. A known chance level is dotted.
    labels: a name for each result; None takes the model's. For a CRATE-S the published curve of
    `compression.official_rate` or `sparsity.zero_fraction` is drawn too, labelled as read off a
    figure (crate_interp/viz/figures/paper_curves.py).

    ax: Axes of your own to draw into, legend included; their Figure is returned. title: None makes
    one from the statistic, "" means no title. dpi: of the figure, None for 200 (with ax: as it is).

    Raises ValueError if a result lacks the statistic, if there is no result, if `untrained` has
    another number of layers, and if ax or dpi are not what they should be.
    """
    results = [result] if isinstance(result, SweepResult) else list(result)
    names = _labels(results, labels)
    random = baseline(untrained, statistic)
    drawn = [curve(one, statistic) for one in results]
    if random is not None and random.shape[1] != len(drawn[0].layers):
        raise ValueError(
            f"untrained has {random.shape[1]} layers of {statistic!r}, "
            f"the result {len(drawn[0].layers)}."
        )
    figure, axes = canvas(ax, 2.1, dpi)
    alone = len(drawn) == 1
    looks = zip(_colours(len(drawn)), _MARKERS * len(drawn), strict=False)
    for one, name, (colour, marker) in zip(drawn, names, looks, strict=False):
        _draw(axes, one, name, colour, marker, with_heads=alone)
    _draw_band_label(axes, drawn, results)
    if random is not None:
        _draw_untrained(axes, drawn[0], random)
    if any(is_crate_s(one.meta["config"]) for one in results) and statistic in PUBLISHED:
        _draw_published(axes, statistic)
    level = chance(results, statistic)
    if level is not None:
        axes.plot(drawn[0].layers, level[1], color=CHANCE, ls=":", lw=1.5, label=level[0])
    _tidy(axes, results[0], statistic)
    axes.set_xlabel("layer", fontsize=TEXT)
    words = built_in.statistic(results[0].meta, statistic).title
    return finished(figure, [axes], ax, title, words)


def beside(
    first: SweepResult,
    statistic: str,
    second: SweepResult,
    other: str,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of two statistics by layer, one above the other.

    For example `linear.accuracy` of a linear probe over `compression.subspace_rate_mid` of a sweep.
    Lines, bands, ax, title and dpi are those of `ci.viz.layers`; with ax both panels lie within it.
    title: "" removes both titles, any other text is put above the upper panel. Raises ValueError if
    a result lacks its statistic.
    """
    results, wanted = (first, second), (statistic, other)
    drawn = [curve(one, name) for one, name in zip(results, wanted, strict=True)]
    figure, grid = panels(ax, (2, 1), (WIDTH, 3.5), (0.3, 0.0), dpi)
    rows = [row[0] for row in grid]
    for axes, one, result, name in zip(rows, drawn, results, wanted, strict=True):
        axes.tick_params(labelsize=SMALL)
        _draw(axes, one, label(result.meta["model"] or "model"), TRAINED, "o", with_heads=True)
        _draw_band_label(axes, [one], [result])
        level = chance([result], name)
        if level is not None:
            axes.plot(one.layers, level[1], color=CHANCE, ls=":", lw=1.5, label=level[0])
        if name == "linear.accuracy":
            permuted = curve(result, "linear.permuted").mean
            axes.plot(one.layers, permuted, color=CHANCE, ls="-.", lw=1, label="permuted labels")
        _tidy(axes, result, name, line=22)
        every = np.concatenate([curve.layers for curve in drawn])
        axes.set_xlim(every.min() - 0.2, every.max() + 0.2)
        words = built_in.statistic(result.meta, name).title
        set_title(axes, title if axes is rows[0] or title == "" else None, words)
    rows[0].tick_params(labelbottom=False)
    rows[1].set_xlabel("layer", fontsize=TEXT)
    return finished(figure, rows, ax, "", "")


def _labels(results: list[SweepResult], labels: Sequence[str] | None) -> list[str]:
    if not results or not all(isinstance(one, SweepResult) for one in results):
        raise ValueError("there is no result to draw: give a SweepResult, or a list of them.")
    names = [one.meta["model"] or "model" for one in results] if labels is None else list(labels)
    names = [label(name) for name in names]
    if len(names) != len(results):
        raise ValueError(f"there are {len(names)} labels for {len(results)} results.")
    if labels is None and len(set(names)) < len(names):
        names = [f"{name} {place}" for place, name in enumerate(names)]
    return names


def _colours(count: int) -> list[Any]:
    import matplotlib

    return (
        [TRAINED]
        if count == 1
        else [matplotlib.colormaps["viridis"](x) for x in np.linspace(0, 0.85, count)]
    )


def _draw(
    axes: Any, drawn: Curve, name: str, colour: Any, marker: str, *, with_heads: bool
) -> None:
    """Draws a curve and the interval of its mean."""
    if drawn.heads is not None and with_heads:
        axes.plot(drawn.layers, drawn.heads, color=colour, lw=0.6, alpha=0.6)
        axes.plot([], [], color=colour, lw=0.6, alpha=0.6, label="one head each")
    words = f"{name}, mean over heads" if drawn.heads is not None else name
    axes.plot(drawn.layers, drawn.mean, color=colour, lw=1.6, marker=marker, ms=3, label=words)
    if not np.isnan(drawn.low).all():
        axes.fill_between(drawn.layers, drawn.low, drawn.high, color=colour, alpha=0.22, lw=0)


def _draw_band_label(axes: Any, drawn: list[Curve], results: list[SweepResult]) -> None:
    """Adds to the legend what the bands are, and over how many samples."""
    banded = [one.n for one in drawn if not np.isnan(one.low).all()]
    if banded:
        low, high = min(banded), max(banded)
        count = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        words = f"95 % interval of the mean, n = {count} {label(results[0].meta['unit'])}"
        colour = TRAINED if len(drawn) == 1 else "#888888"
        axes.fill_between([], [], [], color=colour, alpha=0.3, lw=0, label=words)


def _draw_untrained(axes: Any, drawn: Curve, random: np.ndarray) -> None:
    mean, low, high = random.mean(axis=0), random.min(axis=0), random.max(axis=0)
    several = len(random) > 1
    words = f"untrained, {len(random)} seeds: mean and range" if several else "untrained, 1 seed"
    axes.plot(drawn.layers, mean, color=UNTRAINED, lw=1.5, ls="--", label=words)
    axes.fill_between(drawn.layers, low, high, color=UNTRAINED, alpha=0.22, lw=0)


def _draw_published(axes: Any, statistic: str) -> None:
    values, spread = PUBLISHED[statistic]
    line = np.array(values)
    words = f"CRATE-S, ImageNet val, read off a figure, ± {spread:g}"
    look: Any = {"color": "#777777", "ls": (0, (6, 1.5, 1, 1.5)), "marker": "x", "ms": 3}
    places = range(len(line))
    axes.plot(places, line, lw=1, label=words, **look)
    axes.fill_between(places, line - spread, line + spread, color="#777777", alpha=0.2, lw=0)


def _tidy(axes: Any, result: SweepResult, statistic: str, line: int = 30) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(axis_label(result, statistic, line), fontsize=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    set_frame(axes)
    axes.margins(x=0.03)
