"""The page of atom statistics: how often atoms are on by layer, and cards of the strongest."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from crate_interp.core.files import write_text
from crate_interp.core.pictures import decoded
from crate_interp.results.result import model_name
from crate_interp.sweeps.atom_statistics import AtomResult
from crate_interp.sweeps.atom_sums import OCTAVES, histograms
from crate_interp.viz.figures.canvas import TEXT, canvas
from crate_interp.viz.figures.colours import TRAINED
from crate_interp.viz.pages.page import render, sources
from crate_interp.viz.pages.page_pictures import inline_svg, png_uri

CARDS, _TOKENS = 8, 4  # cards of each layer, tokens of each card
_SIDE = 72  # pixels of a patch with those around it

Excerpts = Mapping[str, pd.DataFrame]


def atoms_page(result: AtomResult, out: str | Path, *, excerpts: Excerpts | None = None) -> Path:
    """Writes atoms.html and the result (save) into a folder, and returns the path of the page.

    Each layer has the cards of the atoms with the largest share of its energy, without dead and
    dense ones: how often an atom is on, a histogram of its values, and the tokens in which it is
    largest. excerpts: the tables `images` and `contexts` of an atlas of the same data
    (`atlas.tables`), to show these tokens; without them they are named by sample and position.
    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        write_text(stage / "atoms.html", _page(result, excerpts or {}))
    return Path(out) / "atoms.html"


def _page(result: AtomResult, excerpts: Excerpts) -> str:
    finding, table = result.finding(), result.layers()
    rows = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in line]
        for line in table.to_numpy(dtype=object)
    ]
    return render(
        "atoms.html",
        title=f"{model_name(result.meta)}: when its atoms are on",
        meta=result.meta,
        finding=finding,
        rates=inline_svg(_rates(result), finding, salt="rates"),
        layers=_cards(result, excerpts),
        header=[name.replace("_", " ") for name in table.columns],
        rows=rows,
        legend=result.legend().splitlines(),
        sources=sources(result.meta),
    )


def _rates(result: AtomResult) -> Any:
    """Draws the firing rates of each layer's atoms, from the most often on to the least."""
    table: Any = result.table()
    layers = sorted(set(table["layer"]))
    figure, axes = canvas(None, 2.6, None)
    for at, layer in enumerate(layers):
        rates = np.sort(table[table["layer"] == layer]["firing_rate"])[::-1]
        places = np.linspace(0, 1, len(rates))
        strength = 0.25 + 0.75 * at / max(len(layers) - 1, 1)
        axes.plot(places, 100 * rates, color=TRAINED, alpha=strength, lw=1.4)
        axes.annotate(
            str(layer), (0.02 + 0.05 * at, 100 * np.interp(0.02 + 0.05 * at, places, rates)),
            fontsize=TEXT, xytext=(0, 3), textcoords="offset points",
        )  # fmt: skip
    axes.set_xlabel("atoms of a layer, the most often on first (share)", fontsize=TEXT)
    axes.set_ylabel("tokens at which it is on (%)", fontsize=TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _cards(result: AtomResult, excerpts: Excerpts) -> list[dict[str, Any]]:
    """Returns the cards of each layer."""
    table: Any = result.table()
    counts = histograms(result.table("sums"))
    pictures = {row["sample"]: row for row in _rows(excerpts, "images")}
    texts = {(row["sample"], row["token"]): row for row in _rows(excerpts, "contexts")}
    shown = []
    for layer, rows in table[table["state"] == ""].groupby("layer"):
        best = rows.sort_values("energy_share", ascending=False, kind="stable").head(CARDS)
        cards = []
        for row in best.to_dict("records"):
            heights = counts.get((layer, row["atom"]), [])
            top = result.top(int(layer), int(row["atom"])).head(_TOKENS).to_dict("records")
            cards.append(
                {"name": f"L{layer}A{row['atom']}", "row": row, "bars": _bars(heights)}
                | {"tokens": [_token(one, pictures, texts) for one in top]}
            )
        shown.append({"layer": layer, "cards": cards})
    return shown


def _rows(excerpts: Excerpts, name: str) -> list[dict[str, Any]]:
    return excerpts[name].to_dict("records") if name in excerpts else []


def _bars(counts: list[int]) -> dict[str, Any] | None:
    """Returns the heights of a histogram in per cent, and the values at its ends."""
    on = [at for at, count in enumerate(counts) if count]
    if not on:
        return None
    inside = counts[on[0] : on[-1] + 1]
    ends = [f"{2.0 ** (OCTAVES[0] + at):.2g}" for at in (on[0], on[-1] + 1)]
    return {"heights": [round(100 * count / max(inside)) for count in inside], "ends": ends}


def _token(one: Mapping[str, Any], pictures: Mapping, texts: Mapping) -> dict[str, Any]:
    """Returns a token's value with what shows it: a cut of its image, its text, or its place."""
    sample, token = one["sample"], one["token"]
    found: dict[str, Any] = {"value": one["value"], "place": f"sample {sample}, token {token}"}
    found |= {"picture": "", "text": None}
    if sample in pictures:
        found["picture"] = _cut(pictures[sample], token)
    if (sample, token) in texts:
        found["text"] = [texts[sample, token][part] for part in ("before", "at", "after")]
    return found


def _cut(row: Mapping[str, Any], token: int) -> str:
    """Returns a patch with those around it as a data URI; CLS (token 0) is the entire image."""
    picture = decoded(row["picture"], "an image").convert("RGB")
    if token:
        width, height = picture.width / row["columns"], picture.height / row["rows"]
        y, x = divmod(token - 1, row["columns"])
        left, upper, right, lower = (
            round(side)
            for side in ((x - 1) * width, (y - 1) * height, (x + 2) * width, (y + 2) * height)
        )
        picture = picture.crop((left, upper, right, lower))
    buffer = io.BytesIO()
    picture.resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(buffer, "PNG", optimize=True)
    return png_uri(buffer.getvalue())
