"""The page of an evaluation of segmentation: scores beside chance, every head, and the images it goes best and worst on."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crate_hooks import full_name
from crate_interp.data import Samples
from crate_interp.files import writable, write_text
from crate_interp.measures import mass_mask
from crate_interp.models.digest import model_digest
from crate_interp.models.display import displayable
from crate_interp.probes.masks import IGNORED, RESOLUTIONS, RULES
from crate_interp.segmentation.result import CELL, SegmentResult, number
from crate_interp.sweeps.stream import samples_of
from crate_interp.viz.grids import STYLE
from crate_interp.viz.on_image import maps_on
from crate_interp.viz.page import captioned, facts, inline_svg, page, sources, table, text
from crate_interp.viz.pictures import figure, image_uri, map_tile, mask_tile

SHOWN = 4  # images that go best, and as many that go worst
_TRUE, _FOUND = (0.1, 0.75, 0.35), (0.25, 0.55, 1.0)
_RULES = {
    "mass": "the fewest patches that hold {:.0%} of the map",
    "top": "the {:.0%} of the patches attended to most",
}


def segment_page(result: SegmentResult, model: Any, data: Any, out: str | Path) -> Path:
    """Writes segment.html and the result's tables (SegmentResult.save) into `out`, and returns the path of the page.

    model, data: what `ci.segment` was given; the images that go best and worst are run once more for their pictures. Raises ValueError
    for a model or data that the result is not of, and where `out` cannot be written.
    """
    out = writable(out)
    samples = samples_of(model, data, result.meta["n_samples"])
    _check_same(result, model, samples)
    result.save(out)
    title = f"{result.meta['model'] or result.meta['config']['family'] + ' model'}: do attention maps segment?"
    body = [STYLE, f"<h1>{text(title)}</h1>", *_opening(result), *_tables(result), *_heads(result)]
    body += _examples(result, model, samples)
    pairs = [pair for pair in sources(result.meta | {"seconds": 0}) if pair[0] != "seconds"]
    settings = result.meta["probes"]["segmentation"]["settings"]
    pairs.append(("settings", ", ".join(f"{name} = {value}" for name, value in settings.items())))
    body += ["<h2>Where the numbers come from</h2>", facts(pairs)]
    write_text(out / "segment.html", page(title, body))
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


def _opening(result: SegmentResult) -> list[str]:
    meta = result.meta
    n, seeds = len(result.images), meta["untrained"]
    without = (
        f" {meta['without_object']} more have no object and no score."
        if meta["without_object"]
        else ""
    )
    settings = meta["probes"]["segmentation"]["settings"]
    who = "the CLS token" if settings["query"] == 0 else f"token {settings['query']}"
    words = (
        f"{n:,} images with an object, {meta['n_layers']} layers, {meta['config']['n_heads']} heads.{without} The mask of a head is the "
        f"fewest patches that hold {settings['mass']:.0%} of what {who} attends to; the Jaccard index compares it with the mask of the "
        "data, patch by patch. Each cell: the score, then in brackets the score of the same maps on the mask of the next image, of the "
        f"same maps with their patches in random order, and of {seeds} network{'s' * (seeds != 1)} of random weights. Best head for "
        "each image is how scores are published: the mask itself chooses the head, and in the brackets the best is chosen too. A head "
        "is named where both halves of the images chose the same. Intervals are over images, with the chosen heads as they are."
    )
    return [f"<p><b>{text(sentence(result))}</b></p>", f"<p>{text(words)}</p>"]


def _tables(result: SegmentResult) -> list[str]:
    settings = result.meta["probes"]["segmentation"]["settings"]
    parts: list[str] = []
    for rule in RULES:
        share = settings["mass" if rule == "mass" else "fraction"]
        for resolution in RESOLUTIONS:
            row = result.overall(rule, resolution)
            words = (
                f"All layers, fixed head: {row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f}); mask of another "
                f"image {number(row['other_image'])}, centred map {row['centre']:.3f}, all foreground {row['all_foreground']:.3f}, "
                f"random order {row['random']:.3f}."
            )
            heading = f"<h2>{text(_RULES[rule].format(share).capitalize())}, {resolution} by {resolution}</h2>"
            parts += [heading, table(*result.cells(rule, resolution)), f"<p>{text(words)}</p>"]
    return parts


def _heads(result: SegmentResult) -> list[str]:
    """A chart of every head of every layer, and what chance has."""
    import matplotlib
    from matplotlib.figure import Figure

    rows: Any = result.heads
    rows = rows[(rows["rule"] == "mass") & (rows["resolution"] == "token")]
    chart = Figure(figsize=(7, 3), layout="constrained")
    axes = chart.subplots()
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, rows["head"].max() + 1))
    for head, own in rows.groupby("head"):
        axes.errorbar(
            own["layer"] + (head / (rows["head"].max() + 1) - 0.5) * 0.6,
            own["value"],
            yerr=[own["value"] - own["low"], own["high"] - own["value"]],
            fmt="o",
            markersize=3,
            linewidth=0.8,
            color=colours[head],
            label=f"head {head}",
        )
    by_layer = rows.groupby("layer")
    layers = np.array(sorted(set(rows["layer"])))
    for (column, words), style in zip(CELL.items(), ("-.", "--", ":"), strict=True):
        if not rows[column].isna().any():
            axes.plot(
                layers, by_layer[column].mean(), style, linewidth=1.1, label=words, color="#888888"
            )
    axes.axhline(result.overall()["centre"], linewidth=1.6, color="#888888", label="centred map")
    axes.axhline(
        result.overall()["all_foreground"], linewidth=0.8, color="#888888", label="all foreground"
    )
    axes.set(xlabel="layer", ylabel="Jaccard index", xticks=layers)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    best = rows.loc[rows["value"].idxmax()]
    alt = f"Jaccard index of every head by layer; highest: layer {best['layer']}, head {best['head']}, {best['value']:.3f}"
    words = "Every head: mean over images with its 95 % interval, mass rule, patches. The highest of many heads is high by chance too."
    wide = rows.pivot(index="layer", columns="head", values="value")
    cells = [
        [str(layer), *(f"{value:.3f}" for value in line)]
        for layer, line in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    header = ["layer", *(f"head {head}" for head in wide.columns)]
    return [
        "<h2>Every head</h2>",
        captioned(inline_svg(chart, alt, salt="heads"), text(words)),
        table(header, cells),
    ]


def _examples(result: SegmentResult, model: Any, samples: Samples) -> list[str]:
    """The images on which the fixed head scores highest and lowest."""
    ranked: Any = result.images.sort_values(["score", "sample"], ascending=[False, True])
    groups = {"Best": ranked.head(SHOWN), "Worst": ranked.iloc[SHOWN:].tail(SHOWN).iloc[::-1]}
    groups = {title: rows for title, rows in groups.items() if len(rows)}
    mass = result.meta["probes"]["segmentation"]["settings"]["mass"]
    parts, rules = [], []
    for title, rows in groups.items():
        parts.append(
            f"<h2>{title}</h2><p>The image with the mask of the data, the map of the head, and the mask made of it.</p>"
        )
        for row in rows.itertuples():
            pictures, rule = _example(row, model, samples, mass, result.meta)
            parts.append(f'<div class="tiles four">{"".join(pictures)}</div>')
            rules.append(rule)
    return [f"<style>{''.join(dict.fromkeys(rules))}</style>", *parts]


def _example(
    row: Any, model: Any, samples: Samples, mass: float, meta: dict[str, Any]
) -> tuple[list[str], str]:
    image = samples.read(row.sample, row.sample + 1).to(model.cfg.device)
    assert samples.masks is not None
    true = samples.masks(row.sample, row.sample + 1)[0].numpy()
    options = {
        key: meta["probes"]["segmentation"]["settings"][key]
        for key in ("query", "scaled", "cls_key")
    }
    names = [
        full_name(point, row.layer) for point in ("attn.hook_pattern", "attn.hook_q", "attn.hook_k")
    ]
    run: dict[str, Any] = {"mask_ratio": 0.0} if model.cfg.kind == "mae" else {}
    with torch.no_grad():
        _, cache = model.run_with_cache(image, names_filter=names, **run)
    found = maps_on(cache, row.layer, image, **options)[0, row.head]  # [h, w]
    mask = mass_mask(torch.from_numpy(found).flatten(), mass).numpy().reshape(found.shape)
    name, label = f"sample-{row.sample}", "" if _missing(row.label) else f", label {row.label}"
    picture = displayable(image[0], model.cfg)
    rule = f'.{name} {{ background-image: url("{image_uri(picture)}"); --ratio: {picture.shape[1] / picture.shape[0]:.4f}; }}\n'
    what = f"image {row.sample}{label}"
    layer = f"layer {row.layer}, head {row.head}"
    tiles = [
        figure(name, None, what, what, "tile"),
        figure(
            name,
            mask_tile((true != 0) & (true != IGNORED), _TRUE),
            "mask of the data",
            f"{what}: mask of the data",
            "tile",
        ),
        figure(name, map_tile(found), layer, f"{what}: attention of {layer}", "tile"),
        figure(
            name,
            mask_tile(mask, _FOUND),
            f"Jaccard {row.score:.3f}",
            f"{what}: mask of {layer}, Jaccard {row.score:.3f}",
            "tile",
        ),
    ]
    return tiles, rule


def _missing(label: Any) -> bool:
    return label is None or (isinstance(label, float) and math.isnan(label))
