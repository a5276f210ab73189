"""The page of an evaluation of segmentation: scores beside chance, every head, and examples."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from crate_interp.files import write_text
from crate_interp.measures import mass_mask
from crate_interp.pictures import decoded
from crate_interp.probes.masks import RESOLUTIONS, RULES
from crate_interp.segmentation.result import CELL, SegmentResult
from crate_interp.viz.lettering import as_written
from crate_interp.viz.page import model_name, render, sources
from crate_interp.viz.pictures import inline_svg, map_tile, mask_tile, png_uri

if TYPE_CHECKING:
    import matplotlib.figure

_TRUE, _FOUND = (0.1, 0.75, 0.35), (0.25, 0.55, 1.0)  # colours of masks: the data's, the head's
_GREY = "#888888"


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
        headline=f"{result.headline()} {result.caution()}".strip(),
        meta=result.meta,
        settings=_settings(result),
        n_images=len(result.table("images")),
        sections=_sections(result),
        heads=_heads(result),
        examples=_examples(result),
        sources=_sources(result),
    )


def _settings(result: SegmentResult) -> dict[str, Any]:
    return result.meta["probes"]["segmentation"]["settings"]


def _sections(result: SegmentResult) -> list[dict[str, Any]]:
    """Returns the table of each rule and resolution, and its head fixed over all layers."""
    settings = _settings(result)
    rules = {
        "mass": f"The fewest patches that hold {settings['mass']:.0%} of the map",
        "top": f"The {settings['fraction']:.0%} of the patches attended to most",
    }
    return [
        {
            "rule": rules[rule],
            "resolution": resolution,
            "cells": result.cells(rule, resolution),
            "row": result.overall(rule, resolution),
        }
        for rule in RULES
        for resolution in RESOLUTIONS
    ]


def _heads(result: SegmentResult) -> dict[str, Any]:
    """Returns a chart and a table of every head of every layer."""
    rows: Any = result.table("heads")
    rows = rows[(rows["rule"] == "mass") & (rows["resolution"] == "token")]
    best = rows.loc[rows["value"].idxmax()]
    alt = (
        f"Jaccard index of every head by layer; highest: layer {best['layer']}, "
        f"head {best['head']}, {best['value']:.3f}"
    )
    wide = rows.pivot(index="layer", columns="head", values="value")
    return {
        "svg": inline_svg(_chart(result, rows), alt, salt="heads"),
        "header": ["layer", *(f"head {head}" for head in wide.columns)],
        "rows": [
            [str(layer), *(f"{value:.3f}" for value in line)]
            for layer, line in zip(wide.index, wide.to_numpy(), strict=True)
        ],
    }


def _chart(result: SegmentResult, rows: Any) -> "matplotlib.figure.Figure":
    """Draws the score of each head with its interval, and the chance levels."""
    import matplotlib
    from matplotlib.figure import Figure

    chart = Figure(figsize=(7, 3), layout="constrained")
    axes = chart.subplots()
    count = rows["head"].max() + 1
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count))
    for head, own in rows.groupby("head"):
        axes.errorbar(
            own["layer"] + (head / count - 0.5) * 0.6,
            own["value"],
            yerr=[own["value"] - own["low"], own["high"] - own["value"]],
            fmt="o",
            markersize=3,
            linewidth=0.8,
            color=colours[head],
            label=f"head {head}",
        )
    means = rows.groupby("layer")[list(CELL)].mean()
    for (column, words), style in zip(CELL.items(), ("-.", "--", ":"), strict=True):
        if not rows[column].isna().any():
            axes.plot(means.index, means[column], style, linewidth=1.1, label=words, color=_GREY)
    overall = result.overall()
    for column, words, width in (
        ("centre", "centred map", 1.6),
        ("all_foreground", "all foreground", 0.8),
    ):
        axes.axhline(overall[column], linewidth=width, color=_GREY, label=words)
    axes.set(xlabel="layer", ylabel="Jaccard index", xticks=means.index)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return as_written(chart)


def _examples(result: SegmentResult) -> list[dict[str, Any]]:
    """Returns the pictures of the images on which the fixed head scores highest and lowest."""
    mass = _settings(result)["mass"]
    return [_example(row, mass) for row in result.table("examples").to_dict("records")]


def _example(row: dict[str, Any], mass: float) -> dict[str, Any]:
    picture, true = (decoded(row[name], f"a {name}") for name in ("picture", "mask"))
    values = np.asarray(row["map"], dtype=np.float32)
    found = mass_mask(torch.from_numpy(values), mass).numpy()
    grid = (row["rows"], row["columns"])
    return row | {
        "label": "" if _missing(row["label"]) else f", label {row['label']}",
        "ratio": picture.width / picture.height,
        "picture": png_uri(row["picture"]),
        "true": mask_tile(np.asarray(true) > 0, _TRUE),
        "map": map_tile(values.reshape(grid)),
        "found": mask_tile(found.reshape(grid), _FOUND),
    }


def _missing(label: Any) -> bool:
    return label is None or (isinstance(label, float) and math.isnan(label))


def _sources(result: SegmentResult) -> list[tuple[str, str]]:
    settings = ", ".join(f"{name} = {value}" for name, value in _settings(result).items())
    return [*sources(result.meta), ("settings", settings)]
