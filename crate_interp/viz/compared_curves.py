"""Figures by layer of a comparison, of swapped nodes, and of a number of an audit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crate_interp import probes
from crate_interp.circuits.code_swaps_result import NATIVE, PCA, ROTATED, Concentration
from crate_interp.comparisons.result import Comparison
from crate_interp.core import checks
from crate_interp.results.sample_ranges import counted
from crate_interp.stats.intervals import LEVEL
from crate_interp.viz import canvas
from crate_interp.viz.canvas import CHANCE, INK, SMALL, TRAINED, UNTRAINED, line

_SIDES = (("a", "layer", TRAINED, "o"), ("b", "layer_b", UNTRAINED, "s"))
_BASES = {
    NATIVE: (TRAINED, "o", "code entries"),
    PCA: (INK, "s", "principal axes"),
    ROTATED: (UNTRAINED, "^", "random rotations"),
}


def audited_number(
    rows: pd.DataFrame, bounds: Sequence[float | None], percent: bool = False
) -> Figure:
    """Returns a matplotlib Figure of a number of an audit by layer, beside untrained networks.

    rows: its cells. A line is the mean over scalings; its band goes from the lowest to the highest.
    bounds: where dotted lines stand; None draws no line. percent: label the axis in per cent.
    """
    figure, axes = canvas.canvas(None, 2.1, None)
    by_layer: Any = rows.groupby("layer")[["value", "untrained"]].agg(["mean", "min", "max"])
    by_layer = by_layer[by_layer["value", "mean"].notna()]
    for bound in bounds:
        if bound is not None:
            level = np.full(len(by_layer), round(bound, 5) + 0.0)  # 1e-6 is 0
            axes.plot(by_layer.index, level, color=CHANCE, ls=":", lw=1.5, label="bound")
    looks: dict[str, Any] = {
        "untrained": {"color": UNTRAINED, "ls": "--", "label": "untrained"},
        "value": {"color": TRAINED, "marker": "o", "label": "this network"},
    }
    for kind, look in looks.items():
        mean, low, high = by_layer[kind].to_numpy(float).T
        if not np.isnan(mean).all():
            line(axes, by_layer.index, mean, (low, high), **look)
    if percent:
        axes.yaxis.set_major_formatter(canvas.percent)
    canvas.set_layers(axes)
    return canvas.finished(figure, [axes], None, "", "")


def compare(
    comparison: Comparison,
    statistic: str,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of "probe.statistic" by layer: sides a and b, and a - b.

    The upper panel shows both sides, the lower panel their difference. Bands are 95 % intervals:
    over samples if a side is one network, over networks if it has several. Dashed lines are the
    means of the untrained copies; the dashed line of the lower panel is the difference of these
    means. A filled dot marks a difference that holds (p <= 0.05, adjusted over layers), a hollow
    dot a difference that does not hold. If a and b differ in depth, the layers are those of a.

    Args:
        comparison: What `ci.compare` returns.
        statistic: Its name, such as "compression.official_rate".
        ax: As in `ci.viz.layers`; ax holds both panels.
        title: As in `ci.viz.layers`; ax holds both panels.
        dpi: As in `ci.viz.layers`; ax holds both panels.

    Raises:
        ValueError: With the nearest names, if the statistic was not compared.
    """
    meta, table = comparison.meta, comparison.table()
    if reason := meta["not_compared"].get(statistic):
        raise ValueError(f"{statistic!r} was not compared: {reason}.")
    checks.one_of("statistic", statistic, meta["statistics"])
    rows: Any = table[(table["probe"] + "." + table["statistic"]) == statistic]
    figure, (above, below) = canvas.two_panels(ax, dpi)
    at, lines = rows["layer"].to_numpy(float), {}
    for side, column, colour, marker in _SIDES:
        networks = meta[side]["networks"]
        words = canvas.label(meta[side]["name"])
        words += f", {counted(len(networks), 'networks')}" if len(networks) > 1 else ""
        ends = comparison.mean_ends(statistic, side, rows[column].to_numpy())
        line(above, at, rows[side], ends, label=words, color=colour, marker=marker)
        lines[canvas.label(meta[side]["name"])] = rows[side].to_numpy(float), colour
        if rows[f"untrained_{side}"].notna().any():
            look: Any = {"color": CHANCE, "marker": marker, "lw": 1.3, "ls": "--"}
            line(above, at, rows[f"untrained_{side}"], **look)
    if rows[["untrained_a", "untrained_b"]].notna().any(axis=None):
        above.plot([], [], color=CHANCE, lw=1.3, ls="--", label="untrained")
    canvas.name_lines(above, at, lines)
    below.axhline(0, color=CHANCE, ls=":", lw=1.2)
    band = rows["low"], rows["high"]
    line(below, at, rows["difference"], band, color=INK, lw=1.4, band_label="95 % interval")
    holds = rows["holds"].astype(bool).to_numpy()
    for chosen, face, words in ((holds, INK, "holds"), (~holds, "white", "does not hold")):
        if chosen.any():
            look = {"ms": 4, "mfc": face, "color": INK, "label": words}
            below.plot(at[chosen], rows["difference"][chosen], "o", **look)
    if rows["untrained"].notna().any():
        line(below, at, rows["untrained"], color=CHANCE, lw=1.3, ls="--")
    record = probes.statistic(meta, statistic)
    unit = canvas.label(record.unit)
    names = [canvas.label(meta[side]["name"]) for side in "ab"]
    minus = "first less second" if len("".join(names)) > 20 else " \N{MINUS SIGN} ".join(names)
    words = f"{minus}{f' ({unit})' if unit else ''}"
    same = meta["a"]["n_layers"] == meta["b"]["n_layers"]
    canvas.set_layers(above, canvas.axis_label(comparison, statistic, line=26), "", at, SMALL)
    canvas.set_layers(below, words, "layer" if same else "layer of a", at, SMALL)
    return canvas.finished(figure, [above, below], ax, title, record.title)


def concentration(
    result: Concentration,
    k: int | None = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure of how much k swapped nodes carry, by layer.

    The upper panel shows how much of the gap native, principal and randomly rotated axes carry;
    bars are 95 % intervals over pairs. The lower panel divides how far native axes move the gap by
    how far rotated axes do; dashed is this ratio in untrained copies. A dot marks a layer in which
    the two ratios differ. A ratio of 1 means no concentration.

    Args:
        result: What `ci.circuits.concentration` returns.
        k: One of the numbers of swapped nodes; None means the middle one.
        ax: As in `ci.viz.layers`; ax holds both panels.
        title: As in `ci.viz.layers`; ax holds both panels.
        dpi: As in `ci.viz.layers`; ax holds both panels.

    Raises:
        ValueError: For a k that was not measured.
    """
    known = result.meta["settings"]["k"]
    k = result.middle if k is None else k
    if k not in known:
        raise ValueError(f"k={k!r} was not measured: give one of {known}.")
    figure, (above, below) = canvas.two_panels(ax, dpi)
    shares: Any = result.table("shares")
    lines: Any = {}
    for aside, (basis, (colour, marker, words)) in enumerate(_BASES.items()):
        rows = shares[(shares["basis"] == basis) & (shares["k"] == k)]
        band = [rows[end].where(np.isfinite(rows[end])) for end in ("carried_low", "carried_high")]
        look: Any = {"label": words, "color": colour, "marker": marker, "ms": 3, "lw": 1.4}
        ends = np.abs(np.stack(band) - rows["carried"].to_numpy())
        at, ends = rows["layer"] + 0.09 * (aside - 1), np.nan_to_num(ends)
        above.errorbar(at, rows["carried"], ends, elinewidth=1, **look)
        lines[words] = rows["carried"].to_numpy(), colour
    canvas.name_lines(above, shares["layer"].unique(), lines)
    table: Any = result.table("contrasts")
    rows = table[(table["versus"] == ROTATED) & (table["k"] == k)]
    below.axhline(1, color=CHANCE, ls=":", lw=1.2)
    line(below, rows["layer"], rows["ratio"], color=TRAINED)
    below.plot(rows["layer"], rows["ratio"].where(rows["learned_p"] <= LEVEL), "o", color=TRAINED)
    if rows["untrained"].notna().any():
        line(below, rows["layer"], rows["untrained"], color=CHANCE, ls="--", label="untrained")
    above.yaxis.set_major_formatter(canvas.percent)
    canvas.set_layers(above, "way to the donor's", "", size=SMALL)
    canvas.set_layers(below, "entries / rotated", size=SMALL)
    for axes in (above, below):
        axes.set_xticks(rows["layer"])
    return canvas.finished(figure, [above, below], ax, title, f"Swapping {k} nodes of the code")
