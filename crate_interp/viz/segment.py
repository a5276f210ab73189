"""The page of an evaluation of segmentation: scores beside chance, every head, and examples."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from crate_hooks import full_name
from crate_interp.data import Samples
from crate_interp.files import writable, write_text
from crate_interp.measures import mass_mask
from crate_interp.models.digest import model_digest
from crate_interp.models.display import displayable
from crate_interp.probes.masks import IGNORED, RESOLUTIONS, RULES
from crate_interp.segmentation.result import CELL, SegmentResult
from crate_interp.sweeps.stream import samples_of
from crate_interp.viz.on_image import maps_on
from crate_interp.viz.page import model_name, render, sources
from crate_interp.viz.pictures import image_uri, inline_svg, map_tile, mask_tile

if TYPE_CHECKING:
    import matplotlib.figure

SHOWN = 4  # images that go best, and as many that go worst
_TRUE, _FOUND = (0.1, 0.75, 0.35), (0.25, 0.55, 1.0)  # colours of masks: the data's, the head's
_GREY = "#888888"


def segment_page(result: SegmentResult, model: Any, data: Any, out: str | Path) -> Path:
    """Writes segment.html and the result's tables (SegmentResult.save) into `out`, and returns the path of the page.

    model, data: what `ci.segment` was given; the images that go best and worst are run once more for their pictures. Raises ValueError
    for a model or data that the result is not of, and where `out` cannot be written.
    """
    out = writable(out)
    samples = samples_of(model, data, result.meta["n_samples"])
    _check_same(result, model, samples)
    result.save(out)
    page = render(
        "segment.html",
        title=f"{model_name(result.meta)}: do attention maps segment?",
        headline=sentence(result),
        meta=result.meta,
        settings=_settings(result),
        n_images=len(result.images),
        sections=_sections(result),
        heads=_heads(result),
        examples=_examples(result, model, samples),
        sources=_sources(result),
    )
    write_text(out / "segment.html", page)
    return out / "segment.html"


def _check_same(result: SegmentResult, model: Any, samples: Samples) -> None:
    for what, own, given in (
        ("model", result.meta["model_digest"], model_digest(model)),
        ("data", result.meta["data_fingerprint"], samples.fingerprint),
    ):
        if own != given:
            raise ValueError(
                f"the result is of another {what}: give the {what} that ci.segment was given."
            )


def sentence(result: SegmentResult) -> str:
    """The score of the head fixed over all layers and each chance level, in one sentence."""
    row = result.overall()
    where = "the layer and head that are best on the other half of the images"
    untrained = (
        "" if math.isnan(row["untrained"]) else f"untrained networks {row['untrained']:.3f}, "
    )
    other = (
        ""
        if math.isnan(row["other_image"])
        else f"the same maps on the mask of another image {row['other_image']:.3f}, "
    )
    return (
        f"Jaccard index {row['value']:.3f} (95 % interval {row['low']:.3f} to {row['high']:.3f}) with {where}. Chance: {other}a centred "
        f"map {row['centre']:.3f}, all foreground {row['all_foreground']:.3f}, {untrained}the same maps in random order "
        f"{row['random']:.3f}."
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
    rows: Any = result.heads
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
    return chart


def _examples(result: SegmentResult, model: Any, samples: Samples) -> list[dict[str, Any]]:
    """The images on which the fixed head scores highest and lowest."""
    ranked: Any = result.images.sort_values(["score", "sample"], ascending=[False, True])
    groups = {"best": ranked.head(SHOWN), "worst": ranked.iloc[SHOWN:].tail(SHOWN).iloc[::-1]}
    return [
        {"group": group} | _example(row, model, samples, result.meta)
        for group, rows in groups.items()
        for row in rows.itertuples()
    ]


def _example(row: Any, model: Any, samples: Samples, meta: dict[str, Any]) -> dict[str, Any]:
    image = samples.read(row.sample, row.sample + 1).to(model.cfg.device)
    assert samples.masks is not None
    true = samples.masks(row.sample, row.sample + 1)[0].numpy()
    settings = meta["probes"]["segmentation"]["settings"]
    options = {key: settings[key] for key in ("query", "scaled", "cls_key")}
    names = [
        full_name(point, row.layer) for point in ("attn.hook_pattern", "attn.hook_q", "attn.hook_k")
    ]
    run: dict[str, Any] = {"mask_ratio": 0.0} if model.cfg.kind == "mae" else {}
    with torch.no_grad():
        _, cache = model.run_with_cache(image, names_filter=names, **run)
    found = maps_on(cache, row.layer, image, **options)[0, row.head]  # [h, w]
    mask = mass_mask(torch.from_numpy(found).flatten(), settings["mass"]).numpy()
    picture = displayable(image[0], model.cfg)
    return {
        "sample": row.sample,
        "label": "" if _missing(row.label) else f", label {row.label}",
        "layer": row.layer,
        "head": row.head,
        "score": row.score,
        "ratio": picture.shape[1] / picture.shape[0],
        "picture": image_uri(picture),
        "true": mask_tile((true != 0) & (true != IGNORED), _TRUE),
        "map": map_tile(found),
        "mask": mask_tile(mask.reshape(found.shape), _FOUND),
    }


def _missing(label: Any) -> bool:
    return label is None or (isinstance(label, float) and math.isnan(label))


def _sources(result: SegmentResult) -> list[tuple[str, str]]:
    pairs = [pair for pair in sources(result.meta | {"seconds": 0}) if pair[0] != "seconds"]
    settings = ", ".join(f"{name} = {value}" for name, value in _settings(result).items())
    return [*pairs, ("settings", settings)]
