"""Pages of what parts of a network do for its answers: heads taken out, and nodes swapped."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from crate_interp.circuits.code_swaps_result import Concentration
from crate_interp.circuits.head_ablation import HeadAblation
from crate_interp.stats.intervals import LEVEL
from crate_interp.viz.figures.compared_curves import concentration
from crate_interp.viz.figures.heatmaps import head_ablation
from crate_interp.viz.pages.page import check_page, heat_map, inline_svg, write_page


def ablation_page(result: HeadAblation, out: str | Path, *, explorer: str | None = None) -> Path:
    """Writes ablation.html, heads.png and the result (save) into a folder.

    explorer: the name of a page of `ci.viz.explore` in the same folder; a click on a head opens it
    there. Returns the path of the page. Raises ValueError if the folder cannot be written, or
    another process is writing it, and for an `explorer` that is no name of a page.
    """
    check_page("explorer", explorer)
    table: Any = result.heads().sort_values("drop", key=np.abs, ascending=False, kind="stable")
    return write_page(
        result,
        out,
        "ablation.html",
        "what each head does for the answers",
        {"heads.png": head_ablation(result)},
        answer=result.finding(),
        numbers={"Every head": table},
        explorer=explorer,
        map=_map(result, explorer),
    )


def _map(result: HeadAblation, explorer: str | None) -> list[list[dict[str, Any]]]:
    """Returns a cell for each layer and head: its drop, and a link to the head in the explorer."""
    table: Any = result.heads().set_index(["layer", "head"])
    drops = table["drop"].unstack().to_numpy()
    most = max(float(np.abs(drops).max()), 1e-30)

    def cell(layer: int, head: int) -> dict[str, Any]:
        row = table.loc[layer, head]
        ends = result.interval_words(row["low"], row["high"])
        return {
            "text": f"{row['drop']:+.2g}",
            "note": f"L{layer}H{head}: {row['drop']:+.3g} ({ends})",
            "link": f"{explorer}#layer={layer}&head={head}" if explorer else "",
            "mark": "" if row["p"] <= LEVEL else "faint",
        }

    return heat_map(matplotlib.colormaps["RdBu_r"](0.5 + 0.5 * drops / most), cell)


def concentration_page(result: Concentration, out: str | Path) -> Path:
    """Writes concentration.html, concentration.png and the result (save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    numbers = {
        "Shares of the gap": result.table("shares"),
        "Native axes against others": result.table("contrasts"),
    }
    return write_page(
        result,
        out,
        "concentration.html",
        "how few nodes of the code carry an answer?",
        {"concentration.png": concentration(result)},
        answer=result.finding(),
        numbers=numbers,
        curves=inline_svg(concentration(result), result.finding(), salt="curves"),
    )
