"""Figures of two panels by layer: a comparison, and a concentration."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from crate_interp.circuits.code_swaps_result import NATIVE, PCA, ROTATED, Concentration
from crate_interp.comparisons.result import Comparison
from crate_interp.core import checks
from crate_interp.probes import built_in
from crate_interp.results.sample_ranges import counted
from crate_interp.viz.figures import canvas
from crate_interp.viz.figures.canvas import CHANCE, INK, SMALL, TRAINED, UNTRAINED

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_SIDES = {"a": (TRAINED, "o"), "b": (UNTRAINED, "s")}  # the untrained twins of both are dashed
_BASES = {
    NATIVE: (TRAINED, "o", "native axes"),
    PCA: (INK, "s", "principal axes"),
    ROTATED: (UNTRAINED, "^", "random rotations"),
}


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
    if reason := result.meta["not_compared"].get(statistic):
        raise ValueError(f"{statistic!r} was not compared: {reason}.")
    checks.one_of("statistic", statistic, result.meta["statistics"])
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
    figure, (above, below) = canvas.two_panels(ax, dpi)
    _draw_sides(above, comparison, drawn)
    _draw_difference(below, drawn)
    record = built_in.statistic(comparison.meta, statistic)
    unit = canvas.label(record.unit)
    words = ", ".join(filter(None, (unit, canvas.label(record.direction))))
    above.set_ylabel(words, fontsize=SMALL)
    below.set_ylabel(f"a \N{MINUS SIGN} b{f' ({unit})' if unit else ''}", fontsize=SMALL)
    for axes in (above, below):
        canvas.set_layers(axes)
        axes.set_xlim(drawn.layers.min() - 0.2, drawn.layers.max() + 0.2)
    above.tick_params(labelbottom=False)
    depths = {comparison.meta[side]["n_layers"] for side in "ab"}
    below.set_xlabel("layer" if len(depths) == 1 else "layer of a", fontsize=canvas.TEXT)
    return canvas.finished(figure, [above, below], ax, title, record.title)


def _draw_sides(axes: Any, result: Comparison, drawn: Compared) -> None:
    for side, (colour, marker) in _SIDES.items():
        about = result.meta[side]
        count = len(about["networks"])
        several = f", {counted(count, 'networks')}" if count > 1 else ""
        words = f"{side}: {canvas.label(about['name'])}{several}"
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


def concentration(
    result: Concentration,
    k: int | None = None,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    title: str | None = None,
    dpi: float | None = None,
) -> "matplotlib.figure.Figure":
    """Returns a matplotlib Figure of how much k swapped nodes carry, by layer.

    The upper panel shows how much of the gap native, principal and randomly rotated axes carry;
    bands are 95 % intervals over pairs. The lower panel shows how far native axes move the gap over
    how far rotated ones do; dashed is the same ratio in untrained twins, and 1 is no concentration.
    k: one of the numbers of swapped nodes; None means the middle one. ax, title, dpi: as in
    `ci.viz.layers`; ax holds both panels. Raises ValueError for a k that was not measured.
    """
    known = result.meta["settings"]["k"]
    k = result.middle if k is None else k
    if k not in known:
        raise ValueError(f"k={k!r} was not measured: give one of {known}.")
    figure, (above, below) = canvas.two_panels(ax, dpi)
    shares: Any = result.table("shares")
    for basis, (colour, marker, words) in _BASES.items():
        rows = shares[(shares["basis"] == basis) & (shares["k"] == k)]
        look: Any = {"color": colour, "lw": 1.6, "marker": marker, "ms": 3, "label": words}
        above.plot(rows["layer"], rows["carried"], **look)
        names = ("carried_low", "carried_high")
        ends = [rows[name].where(np.isfinite(rows[name])) for name in names]
        above.fill_between(rows["layer"], *ends, color=colour, alpha=0.2, lw=0)
    table: Any = result.table("contrasts")
    rows = table[(table["versus"] == ROTATED) & (table["k"] == k)]
    below.axhline(1, color=CHANCE, ls=":", lw=1.2)
    below.plot(rows["layer"], rows["ratio"], color=TRAINED, lw=1.6, marker="o", ms=3)
    if rows["untrained"].notna().any():
        look = {"color": CHANCE, "lw": 1.3, "ls": "--", "label": "untrained"}
        below.plot(rows["layer"], rows["untrained"], **look)
    above.set_ylabel("carried of the gap", fontsize=SMALL)
    below.set_ylabel("native / rotated", fontsize=SMALL)
    for axes in (above, below):
        axes.tick_params(labelsize=SMALL)
        axes.set_xticks(rows["layer"])
        canvas.set_frame(axes)
    above.tick_params(labelbottom=False)
    below.set_xlabel("layer", fontsize=canvas.TEXT)
    return canvas.finished(figure, [above, below], ax, title, f"Swapping {k} nodes of the code")
