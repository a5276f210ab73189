"""A statistic by layer: the model, its heads, its spread, and the same network untrained."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from crate_interp.sweeps.result import SweepResult
from crate_interp.viz.curves import Curve, baseline, curve
from crate_interp.viz.lettering import as_written, label
from crate_interp.viz.published import PUBLISHED, is_crate_s

if TYPE_CHECKING:
    import matplotlib.figure

# apart for colour-blind eyes, and readable on white and on black
_MODEL, _UNTRAINED = "#2a7ab9", "#c4682b"


def layers(
    result: SweepResult | Sequence[SweepResult],
    statistic: str,
    untrained: Sequence[SweepResult] | None = None,
    labels: Sequence[str] | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of "probe.statistic" by layer, of one result or of several.

    Line and band are the mean and one standard deviation over samples. Thin lines are heads, if
    there is a single result and it has them. The dashed line and its band are mean, lowest and
    highest of `untrained`, results of the same network with random weights. labels: a name for each
    result; None takes the model's. Beside a CRATE-S the published curve of
    `compression.official_rate` or `sparsity.zero_fraction` is drawn, and labelled as read off a
    figure (crate_interp/viz/published.py).

    Raises ValueError if a result lacks the statistic, if there is no result, and if `untrained` has
    another number of layers.
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
    figure, axes = _figure(results[0], statistic)
    for one, name, colour in zip(drawn, names, _colours(len(drawn)), strict=True):
        _draw(axes, one, name, colour, None if len(drawn) > 1 else _spread(results[0], statistic))
    if random is not None:
        mean, low, high = random.mean(axis=0), random.min(axis=0), random.max(axis=0)
        words = f"untrained, {len(random)} seed{'s' * (len(random) > 1)}"
        axes.plot(drawn[0].layers, mean, color=_UNTRAINED, lw=1.5, ls="--", label=words)
        axes.fill_between(drawn[0].layers, low, high, color=_UNTRAINED, alpha=0.25, lw=0)
    if any(is_crate_s(one.meta["config"]) for one in results) and statistic in PUBLISHED:
        _draw_published(axes, statistic)
    _finish(figure, axes)
    return as_written(figure)


def beside(
    first: SweepResult, statistic: str, second: SweepResult, other: str
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of two statistics by layer, one above the other.

    For example `linear.accuracy` of a linear probe over `compression.subspace_rate_mid` of a sweep.
    Raises ValueError if a result lacks its statistic.
    """
    from matplotlib.figure import Figure

    drawn = [curve(first, statistic), curve(second, other)]
    figure = Figure(figsize=(4.8, 4.6), layout="constrained")
    rows = figure.subplots(2, 1, sharex=True)
    pairs = zip(rows, drawn, (first, second), (statistic, other), strict=True)
    for axes, one, result, name in pairs:
        _draw(axes, one, label(result.meta["model"] or "model"), _MODEL, _spread(result, name))
        axes.set_title(label(name), fontsize=10)
        axes.set_ylabel(_unit(result, name))
        _tidy(axes)
    if statistic == "linear.accuracy":
        for name, style in (("linear.permuted", "--"), ("linear.chance", ":")):
            rows[0].plot(
                drawn[0].layers,
                curve(first, name).mean,
                color=_UNTRAINED,
                ls=style,
                label=name.split(".")[1],
            )
    rows[1].set_xlabel("layer")
    named = {
        words: handle
        for axes in rows
        for handle, words in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    return as_written(figure)


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
        [_MODEL]
        if count == 1
        else [matplotlib.colormaps["viridis"](x) for x in np.linspace(0, 0.85, count)]
    )


def _spread(result: SweepResult, statistic: str) -> tuple[float, str]:
    """Returns what the band of a single curve shows: a share of the deviation, and its name."""
    if not statistic.startswith("linear."):
        return 1.0, f"± 1 std over {result.meta['unit']}"
    # of a value that is 0 or 1 the deviation says no more than the mean: the error of the mean does
    table: Any = result.layers()
    return float(table["n"].max()) ** -0.5, "± 1 standard error"


def _draw(
    axes: Any, drawn: Curve, name: str, colour: Any, spread: tuple[float, str] | None
) -> None:
    """Draws a curve. With a `spread` (it is the only curve) it gets its heads and a band."""
    if drawn.heads is not None and spread:
        axes.plot(drawn.layers, drawn.heads, color=colour, lw=0.7, alpha=0.6)
        axes.plot([], [], color=colour, lw=0.7, alpha=0.6, label="one head each")
    words = _named(name, drawn.heads is not None)
    axes.plot(drawn.layers, drawn.mean, color=colour, lw=2, marker="o", ms=4, label=words)
    if spread and not np.isnan(drawn.std).all():
        low, high = drawn.mean - spread[0] * drawn.std, drawn.mean + spread[0] * drawn.std
        axes.fill_between(drawn.layers, low, high, color=colour, alpha=0.2, lw=0, label=spread[1])


def _draw_published(axes: Any, statistic: str) -> None:
    values, spread = PUBLISHED[statistic]
    line = np.array(values)
    words = f"CRATE-S, ImageNet val, read off a figure, ± {spread:g}"
    look: Any = {"color": "#777777", "ls": ":", "marker": "x", "ms": 4}
    places = range(len(line))
    axes.plot(places, line, lw=1, label=words, **look)
    axes.fill_between(places, line - spread, line + spread, color="#777777", alpha=0.2, lw=0)


def heads(result: SweepResult, statistic: str) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of a statistic per head: layers down, heads across.

    Raises ValueError if the result lacks the statistic, or if it has one value for all heads.
    """
    drawn = curve(result, statistic)
    if drawn.heads is None:
        raise ValueError(
            f"{statistic!r} has one value per layer, not per head: draw it with ci.viz.layers."
        )
    figure, axes = _figure(result, statistic)
    image = axes.imshow(drawn.heads, aspect="auto", cmap="viridis")
    axes.set(xlabel="head", ylabel="layer")
    axes.set_xticks(range(drawn.heads.shape[1]))
    axes.set_yticks(range(len(drawn.layers)), [f"{layer:g}" for layer in drawn.layers])
    for (row, column), value in np.ndenumerate(drawn.heads):
        shade = "white" if image.norm(value) < 0.6 else "black"
        axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=shade, fontsize=7)
    figure.colorbar(image, label=_unit(result, statistic))
    return as_written(figure)


def _figure(result: SweepResult, statistic: str) -> tuple[Any, Any]:
    # not pyplot: a library must neither choose a backend nor keep figures open
    from matplotlib.figure import Figure

    # small, so that its words stay readable on a phone
    figure = Figure(figsize=(4.8, 3.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(label(statistic), fontsize=10)
    axes.set_ylabel(_unit(result, statistic))
    return figure, axes


def _finish(figure: Any, axes: Any) -> None:
    axes.set_xlabel("layer")
    _tidy(axes)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )


def _tidy(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.margins(x=0.03)


def _named(name: str, has_heads: bool) -> str:
    return f"{name}, mean over heads" if has_heads else name


def _unit(result: SweepResult, statistic: str) -> str:
    return label(result.meta["statistics"][statistic][0] or "no unit")
