"""Figures of a statistic: by layer, beside untrained networks, and along training."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crate_interp import probes
from crate_interp.core import checks
from crate_interp.stats.intervals import LEVEL
from crate_interp.sweeps.findings import Change
from crate_interp.sweeps.layer_curves import Curve, baseline, chance, curve
from crate_interp.sweeps.result import SweepResult
from crate_interp.training.watch_result import WatchResult
from crate_interp.viz import canvas
from crate_interp.viz.canvas import CHANCE, SHUFFLED, TRAINED, UNTRAINED, line

# CRATE-S on ImageNet validation, read off figure 3 of arXiv 2306.01129 (no table was published).
# The paper's layers 1 to 12 are layers 0 to 11 here. The figure shows the fraction of non-zeros;
# the values here are the fraction of zeros, as in `sparsity.zero_fraction`.
# statistic -> (values by layer, largest error of reading a value off the figure)
PUBLISHED: dict[str, tuple[tuple[float, ...], float]] = {
    "compression.official_rate": (
        (1101, 1028, 1093, 1063, 916, 933, 1002, 945, 856, 833, 754, 667), 3.0,
    ),
    "sparsity.zero_fraction": (
        (0.588, 0.534, 0.565, 0.624, 0.587, 0.608, 0.650, 0.670, 0.722, 0.737, 0.795, 0.665), 0.01,
    ),
}  # fmt: skip
_MARKERS = "osD^vP"  # markers of lines, so that lines differ in print and not only in colour


def is_crate_s(config: dict[str, Any]) -> bool:
    """Tells whether a config is that of CRATE-S, the only model with published numbers by layer."""
    wanted = {"family": "crate", "d_model": 576, "n_layers": 12, "n_heads": 12}
    return all(config.get(name) == value for name, value in wanted.items())


def layers(
    result: SweepResult | Sequence[SweepResult],
    statistic: str,
    untrained: Sequence[SweepResult] | None = None,
    labels: Sequence[str] | None = None,
    *,
    shuffled: Sequence[SweepResult] | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of "probe.statistic" by layer, for one result or several.

    A line is the mean over samples, and its band is the 95 % interval of this mean by Student's t;
    a statistic of the weights has no band. If a statistic has a value per head, each sample counts
    with its mean over heads; if there is a single result, thin lines show the heads. For a CRATE-S,
    the published curve of `compression.official_rate` or `sparsity.zero_fraction` is added,
    labelled as read off a figure (`PUBLISHED` in this file).

    Args:
        result: A result, such as of `ci.sweep`, or a list of them.
        statistic: Its name, such as "compression.official_rate".
        untrained: Results of the same network with random weights. A dashed line shows the mean of
            these results, and its band goes from the lowest to the highest of them. A dotted line
            shows the chance level, if it is known.
        labels: A name for each result; None takes the model's name.
        shuffled: Like `untrained`: results of networks with the model's weights in random order.
        ax: Axes of your own to draw into, legend included; their Figure is returned.
        title: None takes the statistic's title, "" means no title.
        dpi: The resolution of the figure. None means 200, or the figure's resolution if `ax` is
            given.

    Raises:
        ValueError: If a result lacks the statistic, if there is no result, if `untrained` has
            another number of layers, and if ax is not a matplotlib Axes.
    """
    results = [result] if isinstance(result, SweepResult) else list(result)
    names = _labels(results, labels)
    figure, axes = canvas.canvas(ax, 2.1, dpi)
    _draw(axes, results, names, statistic, {"untrained": untrained, "shuffled": shuffled})
    canvas.set_layers(axes, canvas.axis_label(results[0], statistic))
    words = probes.statistic(results[0].meta, statistic).title
    return canvas.finished(figure, [axes], ax, title, words)


def beside(
    first: SweepResult,
    statistic: str,
    second: SweepResult,
    other: str,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of two statistics by layer, one above the other.

    For example, `linear.accuracy` of a linear probe is drawn above `compression.subspace_rate_mid`
    of a sweep. Lines and bands are as in `ci.viz.layers`; ax holds both panels.

    Args:
        first: The result of the upper panel.
        statistic: Its statistic.
        second: The result of the lower panel.
        other: Its statistic.
        ax: As in `ci.viz.layers`.
        title: "" removes both titles, any other text is put above the upper panel.
        dpi: As in `ci.viz.layers`.

    Raises:
        ValueError: If a result lacks its statistic.
    """
    figure, rows = canvas.two_panels(ax, dpi)
    panels = list(zip(rows, (first, second), (statistic, other), strict=True))
    drawn = [_draw(axes, [one], _labels([one], None), name) for axes, one, name in panels]
    every = np.concatenate([one.layers for one in drawn])
    for axes, result, name in panels:
        if name == "linear.accuracy":
            permuted = curve(result, "linear.permuted")
            look: Any = {"color": CHANCE, "ls": "-.", "lw": 1, "label": "permuted labels"}
            axes.plot(permuted.layers, permuted.mean, **look)
        xlabel = "layer" if axes is rows[1] else ""
        canvas.set_layers(axes, canvas.axis_label(result, name, line=22), xlabel, every)
        words = probes.statistic(result.meta, name).title
        canvas.set_title(axes, title if axes is rows[0] or title == "" else None, words)
    return canvas.finished(figure, rows, ax, "", "")


def _labels(results: list[SweepResult], labels: Sequence[str] | None) -> list[str]:
    if not results or not all(isinstance(one, SweepResult) for one in results):
        raise ValueError("there is no result to draw. Give one SweepResult, or a list.")
    names = [one.meta["model"] or "model" for one in results] if labels is None else labels
    names = [canvas.label(name) for name in names]
    if len(names) != len(results):
        raise ValueError(f"got {len(names)} labels for {len(results)} results. Give one for each.")
    if labels is None and len(set(names)) < len(names):
        names = [f"{name} {place}" for place, name in enumerate(names)]
    return names


def _viridis(count: int) -> Any:
    """Returns colours from dark to light, which differ in print too."""
    return matplotlib.colormaps["viridis"](np.linspace(0, 0.85, count))


def _draw(
    axes: Any,
    results: list[SweepResult],
    names: list[str],
    statistic: str,
    random: Mapping[str, Sequence[SweepResult] | None] | None = None,
) -> Curve:
    """Draws a curve for each result, with its baselines; returns the first curve.

    random: results of networks with random weights, by the kind of these weights.
    """
    drawn = [curve(one, statistic) for one in results]
    first, alone = drawn[0], len(drawn) == 1
    looks = zip([TRAINED] if alone else _viridis(len(drawn)), cycle(_MARKERS))
    for one, name, (colour, marker) in zip(drawn, names, looks, strict=False):
        if one.heads is not None and alone:
            axes.plot(one.layers, one.heads, color=colour, lw=0.6, alpha=0.6)
            axes.plot([], [], color=colour, lw=0.6, alpha=0.6, label="one head each")
        words = f"{name}, mean over heads" if one.heads is not None else name
        band = (one.low, one.high)
        line(axes, one.layers, one.mean, band, label=words, color=colour, marker=marker)
    banded = [one.n for one in drawn if not np.isnan(one.low).all()]
    if banded:
        low, high = min(banded), max(banded)
        count = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        words = f"95 % interval of the mean, n = {count} {canvas.label(results[0].meta['unit'])}"
        colour = TRAINED if alone else "#888888"
        axes.fill_between([], [], [], color=colour, alpha=0.3, lw=0, label=words)
    for kind, others in (random or {}).items():
        means = baseline(others, statistic)
        if means is not None and means.shape[1] != len(first.layers):
            raise ValueError(
                f"{kind} has {means.shape[1]} layers of {statistic!r}, but the result has "
                f"{len(first.layers)}. Give {kind} networks of the same depth."
            )
        _draw_random(axes, first.layers, kind, means)
    if any(is_crate_s(one.meta["config"]) for one in results) and statistic in PUBLISHED:
        values, spread = PUBLISHED[statistic]
        words = f"CRATE-S, ImageNet val, read off a figure, ± {spread:g}"
        ends = np.array(values) - spread, np.array(values) + spread
        look: Any = {"color": "#777777", "ls": (0, (6, 1.5, 1, 1.5)), "marker": "x", "lw": 1.0}
        line(axes, range(len(values)), np.array(values), ends, label=words, **look)
    level = chance(results, statistic)
    if level is not None:
        axes.plot(first.layers, level[1], color=CHANCE, ls=":", lw=1.5, label=level[0])
    return first


def _draw_random(axes: Any, layers: Any, kind: str, random: np.ndarray | None) -> None:
    """Draws the mean of networks of random weights, with a band from lowest to highest."""
    if random is not None:
        several = len(random) > 1
        words = f"{kind}, {len(random)} seeds: mean and range" if several else f"{kind}, 1 seed"
        look: Any = {"color": UNTRAINED, "ls": "--"}
        look = {"color": SHUFFLED, "ls": ":"} if kind == "shuffled" else look
        band = random.min(axis=0), random.max(axis=0)
        line(axes, layers, random.mean(axis=0), band, label=words, lw=1.5, **look)


def steps(
    result: WatchResult,
    statistic: str,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of "probe.statistic" by training step, a line for each layer.

    A line is the mean over samples; for a statistic per head, it is also the mean over heads. A
    ring marks a step at which a layer's line changes its course (p at most .05,
    `result.changes()`). A statistic per head has no rings, because its heads are tested one by one.

    Args:
        result: What `ci.watch` returns.
        statistic: Its name, such as "compression.official_rate".
        ax: As in `ci.viz.layers`.
        title: As in `ci.viz.layers`.
        dpi: As in `ci.viz.layers`.

    Raises:
        ValueError: If the result lacks the statistic.
    """
    checks.one_of("statistic", statistic, result.meta["statistics"])
    probe, name = statistic.split(".")
    tables: Any = [result.table(kind) for kind in ("layers", "heads", "changes")]
    in_layers, in_heads, changes = (
        table[(table["probe"] == probe) & (table["statistic"] == name)] for table in tables
    )
    means, of_heads = (
        rows.pivot_table(index="step", columns="layer", values="mean")
        for rows in (in_layers, in_heads)
    )
    means = means if means.size else of_heads
    if not means.size:
        raise ValueError(f"the result holds no value of {statistic!r} in any layer.")
    figure, axes = canvas.canvas(ax, 2.4, dpi)
    for layer, colour in zip(means.columns, _viridis(means.shape[1]), strict=True):
        axes.plot(means.index, means[layer], color=colour, lw=1.4, label=f"layer {layer}")
    turns = changes[changes["head"].isna() & (changes["p"] <= LEVEL)]
    if len(turns):
        heights = [means.loc[step, layer] for step, layer in turns[["step", "layer"]].values]
        look: Any = {"mfc": "none", "mec": "#b00020", "ms": 7}
        look["label"] = f"the course changes (p at most {LEVEL:g})"
        axes.plot(turns["step"].to_numpy(int), heights, "o", **look)
    canvas.set_layers(axes, canvas.axis_label(result, statistic), "updates")
    words = probes.statistic(result.meta, statistic).title
    return canvas.finished(figure, [axes], ax, title, f"{words}, along training")


def change_at_attention(step: Change, *kinds: Sequence[Change]) -> Figure:
    """Returns a matplotlib Figure of the change of R^c at attention in per cent, by layer.

    kinds: the changes of untrained copies, and of networks of shuffled weights.
    """
    figure, axes = canvas.canvas(None, 2.1, None)
    axes.plot(step.layers, np.zeros(len(step.layers)), color=CHANCE, ls=":", label="no change")
    for kind, others in zip(("untrained", "shuffled"), kinds, strict=True):
        random = 100 * np.stack([one.change for one in others]) if others else None
        _draw_random(axes, step.layers, kind, random)
    band = 100 * step.low, 100 * step.high
    look: Any = {"label": "this network", "color": TRAINED, "marker": "o"}
    line(axes, step.layers, 100 * step.change, band, **look)
    canvas.set_layers(axes, "change of R^c (%)")
    return canvas.finished(figure, [axes], None, "", "")
