"""The page of a segmentation: the score next to its chance levels, and examples."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from crate_interp.core.files import write_text
from crate_interp.core.pictures import decoded
from crate_interp.measures import mass_mask
from crate_interp.probes.segmentation_probe import RESOLUTIONS, RULES
from crate_interp.results.result import model_name
from crate_interp.segmentation.result import BLIND, SegmentResult, number
from crate_interp.segmentation.scores import WITHOUT_NETWORK
from crate_interp.viz.figures.canvas import TEXT, as_written, canvas
from crate_interp.viz.figures.colours import CHANCE, TRAINED, UNTRAINED
from crate_interp.viz.figures.heatmaps import ink_on
from crate_interp.viz.pages.page import render, sources
from crate_interp.viz.pages.page_pictures import inline_svg, map_tile, outline, png_uri

if TYPE_CHECKING:
    import matplotlib.figure

SHOWN = 2  # images of each group that are shown without a click
_TABLE = ("other_image", "random", "untrained")


def segment_page(result: SegmentResult, out: str | Path) -> Path:
    """Writes segment.html and the result (SegmentResult.save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        write_text(stage / "segment.html", _page(result))
    return Path(out) / "segment.html"


def _page(result: SegmentResult) -> str:
    return render(
        "segment.html",
        title=f"{model_name(result.meta)}: do attention maps segment?",
        finding=f"{result.verdict()}; {result.worth()}.",
        beside=_beside(result),
        caution=result.caution(),
        meta=result.meta,
        settings=_settings(result),
        n_images=len(result.table("images")),
        levels=inline_svg(_levels_chart(result), result.verdict(), salt="levels"),
        by_layer=_by_layer(result),
        sections=_sections(result),
        heads=_heads(result),
        shown=SHOWN,
        examples=_examples(result),
        sources=_sources(result),
    )


def _settings(result: SegmentResult) -> dict[str, Any]:
    return result.meta["probes"]["segmentation"]["settings"]


def _beside(result: SegmentResult) -> str:
    """Returns a sentence on what else scores as high as the best head."""
    row = result.overall()
    blind = max(BLIND, key=lambda name: -1.0 if _missing(row[name]) else row[name])
    twins = "" if _missing(row["untrained"]) else f", untrained {row['untrained']:.3f}"
    return (
        f"Beside it: {result.against()}; best blind guess ({BLIND[blind]}) {row[blind]:.3f}{twins}."
    )


def _levels_chart(result: SegmentResult) -> "matplotlib.figure.Figure":
    """Draws the score with its interval and every chance level on one axis, highest first."""
    row = result.overall()
    words = {"value": result.named(), **WITHOUT_NETWORK, **BLIND}
    words["untrained"] = "the same network untrained"
    levels = sorted((name for name in words if not _missing(row[name])), key=lambda name: row[name])
    figure, axes = canvas(None, 0.55 + 0.24 * len(levels), None)
    for place, name in enumerate(levels):
        value = row[name]
        colour = {"value": TRAINED, "untrained": UNTRAINED}.get(name, CHANCE)
        if name == "value":
            axes.plot([row["low"], row["high"]], [place, place], color=colour, lw=4, alpha=0.45)
            axes.axvspan(row["low"], row["high"], color=colour, alpha=0.1, lw=0)
        dashes = {"value": "-", "untrained": "--"}.get(name, ":")
        axes.plot([0, value], [place, place], color=colour, lw=0.8, ls=dashes)
        marker = "o" if name in ("value", "untrained", *BLIND) else "s"
        axes.plot(value, place, marker=marker, ms=6 if name == "value" else 4.5, color=colour)
        axes.annotate(
            f"{value:.3f}", (max(value, row["high"] if name == "value" else 0), place),
            xytext=(6, 0), textcoords="offset points", va="center", fontsize=TEXT,
            fontweight="bold" if name == "value" else "normal",
        )  # fmt: skip
    labels = [words[name].removeprefix("a map of ") for name in levels]
    axes.set_yticks(range(len(levels)), labels, fontsize=TEXT)
    axes.set_xlim(0, max(row[name] for name in levels) * 1.22)
    axes.set_xlabel("Jaccard index (1 is best)", fontsize=TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return as_written(figure)


def _by_layer(result: SegmentResult) -> tuple[list[str], list[list[str]]]:
    """Returns the table of the fixed head, layer by layer and over all layers."""
    table: Any = result.layers()
    rows = table[table["way"] == "fixed head"].to_dict("records")
    header = ["layer", "head", "Jaccard index", "95 % interval"]
    header += ["on another image's mask", "in random order", "untrained", "beyond the strongest"]
    return header, [
        [
            "all" if _missing(row["layer"]) else str(row["layer"]),
            "-" if _missing(row["head"]) else f"L{int(row['head_layer'])}H{int(row['head'])}",
            f"{row['value']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            *(number(row[name]) for name in _TABLE),
            f"{row['excess']:+.3f} ({row['excess_low']:+.3f} to {row['excess_high']:+.3f})",
        ]
        for row in rows
    ]


def _sections(result: SegmentResult) -> list[dict[str, Any]]:
    """Returns, per rule and resolution, the table and the row of the head fixed over all layers."""
    settings = _settings(result)
    rules = {
        "mass": f"The fewest patches that hold {settings['mass']:.0%} of the map",
        "top": f"The {settings['fraction']:.0%} of the patches with the most attention",
    }
    return [
        {
            "rule": rules[rule],
            "resolution": resolution,
            "cells": result.cells(rule, resolution),
            "row": result.overall(rule, resolution),
            "others": result.others(rule, resolution),
        }
        for rule in RULES
        for resolution in RESOLUTIONS
    ]


def _heads(result: SegmentResult) -> dict[str, Any]:
    """Returns the cells of a heat map of all heads, with the chosen heads ringed, and a table."""
    import matplotlib
    from matplotlib.colors import to_hex

    rows: Any = result.table("heads")
    rows = rows[(rows["rule"] == "mass") & (rows["resolution"] == "token")]
    wide = rows.pivot(index="layer", columns="head", values="value").to_numpy()
    low, high = float(wide.min()), float(wide.max())
    colours = matplotlib.colormaps["cividis"]((wide - low) / max(high - low, 1e-30))
    cells = [
        {
            "value": wide[place],
            "ground": to_hex(colours[place]),
            "ink": ink_on(colours[place].tolist()),
            "ringed": place in result.chosen(),
        }
        for place in np.ndindex(wide.shape)
    ]
    texts = rows.assign(text=[_with_interval(row) for row in rows.to_dict("records")])
    lines = texts.pivot(index="layer", columns="head", values="text")
    return {
        "map": [
            cells[start : start + wide.shape[1]] for start in range(0, wide.size, wide.shape[1])
        ],
        "header": ["layer", *(f"head {head}" for head in lines.columns)],
        "rows": [
            [str(layer), *line] for layer, line in zip(lines.index, lines.to_numpy(), strict=True)
        ],
    }


def _with_interval(row: dict[str, Any]) -> str:
    return f"{row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def _examples(result: SegmentResult) -> dict[str, list[dict[str, Any]]]:
    """Returns the page's data for the images of each group."""
    mass = _settings(result)["mass"]
    groups: dict[str, list[dict[str, Any]]] = {"best": [], "median": [], "worst": []}
    for row in result.table("examples").to_dict("records"):
        groups.setdefault(row["group"], []).append(_example(row, mass))
    return groups


def _example(row: dict[str, Any], mass: float) -> dict[str, Any]:
    picture, true = (decoded(row[name], f"a {name}") for name in ("picture", "mask"))
    values = np.asarray(row["map"], dtype=np.float32)
    found = mass_mask(torch.from_numpy(values), mass).numpy()
    grid = (row["rows"], row["columns"])
    return row | {
        "label": "" if _missing(row["label"]) else f", label {row['label']}",
        "ratio": picture.width / picture.height,
        "picture": png_uri(row["picture"]),
        "true": {"path": outline(np.asarray(true) > 0), "size": true.size},
        "map": map_tile(values.reshape(grid)),
        "largest": values.max(),
        "found": {"path": outline(found.reshape(grid)), "size": grid[::-1]},
    }


def _missing(value: Any) -> bool:
    return value is None or value != value


def _sources(result: SegmentResult) -> list[tuple[str, str]]:
    settings = ", ".join(f"{name} = {value}" for name, value in _settings(result).items())
    return [*sources(result.meta), ("settings", settings)]
