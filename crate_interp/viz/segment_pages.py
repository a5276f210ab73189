"""The page of a segmentation: the score next to its chance levels, and examples."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from crate_interp.core.pictures import decoded
from crate_interp.measures import mass_mask
from crate_interp.probes.segmentation_probe import RESOLUTIONS, RULES
from crate_interp.segmentation.result import BLIND, SegmentResult
from crate_interp.segmentation.scores import WITHOUT_NETWORK
from crate_interp.viz import page as parts
from crate_interp.viz.canvas import CHANCE, TEXT, TRAINED, UNTRAINED, as_written, canvas
from crate_interp.viz.page import write_page

_COLUMNS = [
    "layer", "head_layer", "head", "value", "low", "high", "other_image", "random", "untrained",
    "excess", "excess_low", "excess_high",
]  # fmt: skip
SHOWN = 2  # images of each group that are shown without a click


def segment_page(result: SegmentResult, out: str | Path) -> Path:
    """Writes segment.html and the result (SegmentResult.save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    settings = result.meta["probes"]["segmentation"]["settings"]
    words = ", ".join(f"{name} = {value}" for name, value in settings.items())
    scores: Any = result.table("scores")
    rules = {
        "mass": f"The fewest patches that hold {100 * settings['mass']:.0f}\u00a0% of the map",
        "top": f"{100 * settings['fraction']:.0f}\u00a0% of the patches, with the most attention",
    }
    numbers = {
        f"{rules[rule]}, {size} by {size}": scores[
            (scores["rule"] == rule) & (scores["resolution"] == size)
        ].drop(columns=["rule", "resolution"])
        for rule in RULES
        for size in RESOLUTIONS
    }
    fixed: Any = result.layers()
    fixed = fixed.loc[fixed["way"] == "fixed head", _COLUMNS]
    fixed = fixed.rename(columns={"value": "head's score", "excess": "less the best simple map"})
    return write_page(
        result,
        out,
        "segment.html",
        "do attention maps segment?",
        said=result.sentences(),
        numbers=numbers | {"Every head": result.table("heads")},
        settings=settings,
        levels=parts.inline_svg(_levels_chart(result), result.verdict(), salt="levels"),
        by_layer=fixed.assign(layer=fixed["layer"].astype(object).fillna("all")),
        map=_map(result),
        shown=SHOWN,
        examples=_examples(result, settings["mass"]),
        sources=[*parts.sources(result.meta), ("settings", words)],
    )


def _levels_chart(result: SegmentResult) -> Figure:
    """Draws the score with its interval and every chance level on one axis, highest first."""
    row = result.overall()
    words = {"value": result.named(), **WITHOUT_NETWORK, **BLIND}
    words["untrained"] = "the same network untrained"
    levels = sorted((name for name in words if not pd.isna(row[name])), key=lambda name: row[name])
    values = [row[name] for name in levels]
    colours = [{"value": TRAINED, "untrained": UNTRAINED}.get(name, CHANCE) for name in levels]
    figure, axes = canvas(None, 0.55 + 0.24 * len(levels), None)
    axes.axvspan(row["low"], row["high"], color=TRAINED, alpha=0.15, lw=0)
    bars = axes.barh(range(len(levels)), values, color=colours, height=0.4)
    axes.bar_label(bars, fmt="%.3f", padding=4, fontsize=TEXT)
    labels = [words[name].removeprefix("a map of ") for name in levels]
    axes.set_yticks(range(len(levels)), labels, fontsize=TEXT)
    axes.set_xlim(0, 1.22 * np.nanmax([*values, row["high"]]))
    axes.set_xlabel("Jaccard index (1 is best)", fontsize=TEXT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return as_written(figure)


def _map(result: SegmentResult) -> list[list[dict[str, Any]]]:
    """Returns the cells of a heat map of all heads, with the chosen heads ringed."""
    rows: Any = result.table("heads")
    rows = rows[(rows["rule"] == "mass") & (rows["resolution"] == "token")]
    wide = rows.pivot(index="layer", columns="head", values="value").to_numpy()
    low, high = float(wide.min()), float(wide.max())

    def cell(layer: int, head: int) -> dict[str, Any]:
        mark = "ringed" if (layer, head) in result.chosen() else ""
        return {"text": f"{wide[layer, head]:.2f}", "mark": mark}

    return parts.heat_map(
        matplotlib.colormaps["cividis"]((wide - low) / max(high - low, 1e-30)), cell
    )


def _examples(result: SegmentResult, mass: float) -> dict[str, list[dict[str, Any]]]:
    """Returns the page's data for the images of each group."""
    groups: dict[str, list[dict[str, Any]]] = {"best": [], "median": [], "worst": []}
    for row in result.table("examples").to_dict("records"):
        picture, true = (decoded(row[name], f"a {name}") for name in ("picture", "mask"))
        values = np.asarray(row["map"], dtype=np.float32)
        found = mass_mask(torch.from_numpy(values), mass).numpy()
        grid, label = (row["rows"], row["columns"]), row["label"]
        more = {
            "label": "" if label is None or label != label else f", label {label}",  # or NaN
            "ratio": picture.width / picture.height,
            "picture": parts.data_uri(row["picture"]),
            "true": {"path": parts.outline(np.asarray(true) > 0), "size": true.size},
            "map": parts.map_tile(values.reshape(grid)),
            "largest": values.max(),
            "found": {"path": parts.outline(found.reshape(grid)), "size": grid[::-1]},
        }
        groups.setdefault(row["group"], []).append(row | more)
    return groups
