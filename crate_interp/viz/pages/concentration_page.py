"""The page of a concentration: how few nodes carry an answer, layer by layer, and all numbers."""

from pathlib import Path
from typing import Any

from crate_interp.circuits import Concentration
from crate_interp.core.files import write_text
from crate_interp.results.result import model_name
from crate_interp.viz.figures.concentration_curves import concentration
from crate_interp.viz.pages.page import render, sources
from crate_interp.viz.pages.page_pictures import inline_svg

_TABLES = {"shares": "Shares of the gap", "contrasts": "Native axes against others"}


def concentration_page(result: Concentration, out: str | Path) -> Path:
    """Writes concentration.html, concentration.png and the result (save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        concentration(result).savefig(stage / "concentration.png")
        write_text(stage / "concentration.html", _page(result))
    return Path(out) / "concentration.html"


def _page(result: Concentration) -> str:
    finding = result.finding()
    return render(
        "concentration.html",
        title=f"{model_name(result.meta)}: how few nodes of the code carry an answer?",
        meta=result.meta,
        finding=finding,
        caution=result.caution(),
        curves=inline_svg(concentration(result), finding, salt="curves"),
        legend=result.legend().splitlines(),
        tables=[(title, *_cells(result, name)) for name, title in _TABLES.items()],
        sources=sources(result.meta),
    )


def _cells(result: Concentration, name: str) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of a table, with three digits."""
    table: Any = result.table(name)
    rows = table.to_numpy(dtype=object)
    return [column.replace("_", " ") for column in table.columns], [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row]
        for row in rows
    ]
