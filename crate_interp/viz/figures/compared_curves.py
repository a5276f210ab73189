"""A comparison by layer: both sides' curves, their untrained twins, and the difference."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from crate_interp.comparisons.result import Comparison
from crate_interp.core import checks
from crate_interp.probes import built_in
from crate_interp.results.grouped_samples import counted
from crate_interp.viz.figures.canvas import SMALL, TEXT, WIDTH, finished, label, panels, set_frame
from crate_interp.viz.figures.colours import CHANCE, FIRST, INK, SECOND

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure


@dataclass(frozen=True)
class Compared:
    """A statistic of a comparison, for each layer of side a.

    rows: the columns of `Comparison.table()` as arrays. bands: for each side, the ends of the 95 %
    interval of its mean. The mean is over samples if the side is one network, else over the side's
    networks. The ends are NaN if nothing varies.
    """

    layers: Float[np.ndarray, "layer"]
    rows: dict[str, np.ndarray]
    bands: dict[str, tuple[np.ndarray, np.ndarray]]


def compared(result: Comparison, statistic: str) -> Compared:
    """Returns the data to draw for "probe.statistic".

    Raises ValueError if the statistic was not compared; the message gives the reason, or the
    nearest names.
    """
    known: list[str] = list(result.meta["statistics"])
    if statistic not in known:
        reason = result.meta["not_compared"].get(statistic)
        if reason:
            raise ValueError(f"{statistic!r} was not compared: {reason}.")
        hint = checks.did_you_mean(statistic, known, f"It has {', '.join(known)}.")
        raise ValueError(f"the comparison has no statistic {statistic!r}. {hint}")
    probe, _, name = statistic.partition(".")
    table: Any = result.table()
    own = table[(table["probe"] == probe) & (table["statistic"] == name)]
    rows = {column: own[column].to_numpy() for column in own.columns[2:]}
    bands = {
        side: result.mean_ends(statistic, side, rows[column])
        for side, column in (("a", "layer"), ("b", "layer_b"))
    }
    return Compared(rows["layer"].astype(float), rows, bands)


def compare(
    comparison: Comparison,
    statistic: str,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of "probe.statistic" by layer: sides a and b, and a - b.

    The upper panel shows both sides, the lower panel their difference. Bands are 95 % intervals:
    over samples if a side is one network, over networks if it has several. Dashed lines are the
    means of the untrained twins; the dashed line of the lower panel is the difference of these
    means. A filled dot marks a difference that holds (p <= 0.05, adjusted over layers), a hollow
    dot a difference that does not hold. If a and b differ in depth, the layers are those of a.

    ax, title, dpi: as in `ci.viz.layers`; ax holds both panels. Raises ValueError, with the nearest
    names, if the statistic was not compared.
    """
    drawn = compared(comparison, statistic)
    figure, grid = panels(ax, (2, 1), (WIDTH, 3.5), (0.3, 0.0), dpi)
    above, below = (row[0] for row in grid)
    _draw_sides(above, comparison, drawn)
    _draw_difference(below, drawn)
    record = built_in.statistic(comparison.meta, statistic)
    unit = label(record.unit)
    above.set_ylabel(", ".join(filter(None, (unit, label(record.direction)))), fontsize=SMALL)
    below.set_ylabel(f"a \N{MINUS SIGN} b{f' ({unit})' if unit else ''}", fontsize=SMALL)
    for axes in (above, below):
        _tidy(axes, drawn.layers)
    above.tick_params(labelbottom=False)
    depths = {comparison.meta[side]["n_layers"] for side in "ab"}
    below.set_xlabel("layer" if len(depths) == 1 else "layer of a", fontsize=TEXT)
    return finished(figure, [above, below], ax, title, record.title)


def _draw_sides(axes: Any, result: Comparison, drawn: Compared) -> None:
    for side, colour, marker in (("a", FIRST, "o"), ("b", SECOND, "s")):
        about = result.meta[side]
        count = len(about["networks"])
        several = f", {counted(count, 'networks')}" if count > 1 else ""
        words = f"{side}: {label(about['name'])}{several}"
        look: Any = {"color": colour, "lw": 1.6, "marker": marker, "ms": 3}
        axes.plot(drawn.layers, drawn.rows[side], label=words, **look)
        low, high = drawn.bands[side]
        if not np.isnan(low).all():
            axes.fill_between(drawn.layers, low, high, color=colour, alpha=0.22, lw=0)
        untrained = drawn.rows[f"untrained_{side}"]
        if not np.isnan(untrained).all():
            axes.plot(drawn.layers, untrained, color=colour, lw=1.3, ls="--")
    if not all(np.isnan(drawn.rows[f"untrained_{side}"]).all() for side in "ab"):
        axes.plot([], [], color=CHANCE, lw=1.3, ls="--", label="untrained")


def _draw_difference(axes: Any, drawn: Compared) -> None:
    rows = drawn.rows
    axes.axhline(0, color=CHANCE, ls=":", lw=1.2)
    axes.plot(drawn.layers, rows["difference"], color=INK, lw=1.4)
    if not np.isnan(rows["low"]).all():
        look: Any = {"color": INK, "alpha": 0.16, "lw": 0, "label": "95 % interval"}
        axes.fill_between(drawn.layers, rows["low"], rows["high"], **look)
    holds = rows["holds"].astype(bool)
    for chosen, face, words in ((holds, INK, "holds"), (~holds, "white", "does not hold")):
        if chosen.any():
            place = (drawn.layers[chosen], rows["difference"][chosen])
            look = {"marker": "o", "ms": 4, "mfc": face, "color": INK, "ls": "", "label": words}
            axes.plot(*place, **look)
    if not np.isnan(rows["untrained"]).all():
        axes.plot(drawn.layers, rows["untrained"], color=CHANCE, lw=1.3, ls="--")


def _tidy(axes: Any, layers: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.tick_params(labelsize=SMALL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(layers.min() - 0.2, layers.max() + 0.2)
    set_frame(axes)
