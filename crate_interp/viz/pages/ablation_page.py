"""The page of a head ablation: a heat map that opens heads in the explorer, and all numbers."""

from pathlib import Path
from typing import Any

import numpy as np

from crate_interp.circuits import HeadAblation
from crate_interp.core import checks
from crate_interp.core.files import write_text
from crate_interp.results.result import model_name
from crate_interp.stats.significance import LEVEL
from crate_interp.viz.figures.heatmaps import head_ablation, ink_on
from crate_interp.viz.pages.page import is_page, render, sources

_COLUMNS = ["head", "base", "ablated", "drop", "95 % interval", "p alone", "p"]


def ablation_page(result: HeadAblation, out: str | Path, *, explorer: str | None = None) -> Path:
    """Writes ablation.html, heads.png and the result (save) into a folder.

    explorer: the name of a page of `ci.viz.explore` in the same folder; a click on a head opens it
    there. Returns the path of the page. Raises ValueError if the folder cannot be written, or
    another process is writing it, and for an `explorer` that is no name of a page.
    """
    if explorer is not None and not is_page(explorer):
        shown = checks.shown(explorer)
        raise ValueError(f"explorer={shown}: give the name of a page beside this one.")
    with result.saved_with_pages(out) as stage:
        head_ablation(result).savefig(stage / "heads.png")
        write_text(stage / "ablation.html", _page(result, explorer))
    return Path(out) / "ablation.html"


def _page(result: HeadAblation, explorer: str | None) -> str:
    settings = result.meta["settings"]
    return render(
        "ablation.html",
        title=f"{model_name(result.meta)}: what each head does for the answers",
        meta=result.meta,
        finding=result.finding(),
        caution=result.caution(),
        explorer=explorer,
        unit="nats of loss" if settings["metric"] == "loss" else "accuracy",
        map=_map(result),
        header=_COLUMNS,
        rows=_rows(result),
        legend=result.legend().splitlines(),
        sources=sources(result.meta),
    )


def _map(result: HeadAblation) -> list[list[dict[str, Any]]]:
    """Returns a cell for each layer and head: its drop, its colours and its place."""
    import matplotlib
    from matplotlib.colors import to_hex

    table: Any = result.heads()
    most = max(float(table["drop"].abs().max()), 1e-30)
    cells: dict[int, list[dict[str, Any]]] = {}
    for row in table.sort_values(["layer", "head"]).itertuples():
        colour = matplotlib.colormaps["RdBu_r"](0.5 + 0.5 * row.drop / most)
        ends = result.interval_words(row.low, row.high)
        cells.setdefault(row.layer, []).append(
            {"drop": row.drop, "layer": row.layer, "head": row.head, "ground": to_hex(colour)}
            | {"ink": ink_on(list(colour)), "shown": row.p <= LEVEL, "ends": ends}
        )
    return [cells[layer] for layer in sorted(cells)]


def _rows(result: HeadAblation) -> list[list[str]]:
    table: Any = result.heads().sort_values("drop", key=np.abs, ascending=False, kind="stable")
    return [
        [f"L{row.layer}H{row.head}", f"{row.base:.4g}", f"{row.ablated:.4g}", f"{row.drop:+.3g}"]
        + [
            result.interval_words(row.low, row.high, before=""),
            f"{row.p_alone:.2g}",
            f"{row.p:.2g}",
        ]
        for row in table.itertuples()
    ]
