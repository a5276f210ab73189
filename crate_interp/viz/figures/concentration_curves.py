"""A concentration by layer: the share that few nodes carry in each basis, and the ratio."""

from typing import TYPE_CHECKING, Any

import numpy as np

from crate_interp.circuits.code_swaps_result import NATIVE, PCA, ROTATED, Concentration
from crate_interp.core import checks
from crate_interp.viz.figures.canvas import SMALL, TEXT, WIDTH, finished, panels, set_frame
from crate_interp.viz.figures.colours import CHANCE, INK, TRAINED, UNTRAINED

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_LOOKS = {
    NATIVE: (TRAINED, "o", "native axes"),
    PCA: (INK, "s", "principal axes"),
    ROTATED: (UNTRAINED, "^", "random rotations"),
}


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
        raise ValueError(f"k={checks.shown(k)} was not measured: give one of {known}.")
    figure, grid = panels(ax, (2, 1), (WIDTH, 3.5), (0.3, 0.0), dpi)
    above, below = (row[0] for row in grid)
    shares: Any = result.table("shares")
    for basis, (colour, marker, words) in _LOOKS.items():
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
        set_frame(axes)
    above.tick_params(labelbottom=False)
    below.set_xlabel("layer", fontsize=TEXT)
    return finished(figure, [above, below], ax, title, f"Swapping {k} nodes of the code")
