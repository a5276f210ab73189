"""Every head of every layer over an image, as one page without a script."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from crate_interp import checks
from crate_interp.models.display import displayable
from crate_interp.viz.on_image import maps_on, who_asks
from crate_interp.viz.page import Html, text
from crate_interp.viz.pictures import figure, image_uri, map_tile

STYLE = """<style>
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .5rem; }
.tiles figure, figure.tile { margin: 0; } .tiles figcaption { font-size: .75rem; text-align: center; }
.tile div { aspect-ratio: var(--ratio, 1); background-size: 100% 100%; border-radius: 3px; overflow: hidden; }
.tile div img { width: 100%; height: 100%; max-width: none; background: none; display: block; image-rendering: pixelated; }
.tiles.four { grid-template-columns: repeat(4, minmax(0, 12rem)); } .tiles figcaption { overflow-wrap: anywhere; }
.tile div:focus-visible { outline: 3px solid Highlight; transform: scale(1.9); z-index: 2; position: relative; }
.tile:first-child div { transform-origin: left; } .tile:last-child div { transform-origin: right; }
@supports not selector(:has(a)) { .layer { display: block !important; } }
.layer { display: none; } fieldset { border: 0; padding: 0; margin: 1rem 0; } fieldset label { margin-right: .5rem; }
</style>"""


def head_grid(
    cache: Any,
    images: Any,
    *,
    layers: Any = None,
    query: Any = 0,
    scaled: bool = True,
    cls_key: bool = True,
) -> Html:
    """A page with a slider over layers: what one query attends to, each head a map over each image.

    cache: of `model.run_with_cache(images)`, images `[batch, channels, height, width]`, with attn.hook_pattern of the layers
    (attn.hook_q and hook_k where scaled or cls_key is False). layers: their numbers, None for all. query: 0 for CLS, or (row,
    column) of a patch. Every map is scaled to its own largest value, which is written below it. Returns an Html: shown by a
    notebook, `.save(path)` writes one file that needs no network; the arrow keys move the slider, the tab key visits the maps.
    Raises as `ci.maps.attention`, and ValueError for images that are not the cache's.
    """
    model = cache.model
    chosen = _layers(layers, model)
    options: Any = dict(query=query, scaled=scaled, cls_key=cls_key)
    found = [maps_on(cache, layer, images, **options) for layer in chosen]
    grid = found[0].shape[2:]
    pictures = [image_uri(displayable(image, model.cfg)) for image in images]
    title = f"{model.cfg.model_name or 'Attention'}: what {who_asks(query)} attends to"
    body = [
        STYLE,
        _rules(pictures, images.shape[3] / images.shape[2], chosen),
        f"<h1>{html.escape(title)}</h1>",
    ]
    body.append(f"<p>{text(_how(scaled, cls_key, grid))}</p>")
    return Html(
        title,
        [
            *body,
            *slider(
                chosen, [_layer(values, layer) for values, layer in zip(found, chosen, strict=True)]
            ),
        ],
    )


def _layers(layers: Any, model: Any) -> list[int]:
    """The numbers of the layers, each once, from 0; ValueError where there is no such layer."""
    if model.cfg.kind == "clip":
        raise ValueError("a CLIP is two models: show its tower of images, cache.visual.")
    count = len(model.blocks)
    wanted = (
        list(range(count))
        if layers is None
        else list(layers)
        if isinstance(layers, (list, tuple, range))
        else []
    )
    if not wanted or not all(checks.is_int(layer) and -count <= layer < count for layer in wanted):
        raise ValueError(
            f"layers={layers!r}: give a list of numbers from 0 to {count - 1}, or None for all."
        )
    return list(dict.fromkeys(layer % count for layer in wanted))


def slider(chosen: Sequence[int], parts: Sequence[str]) -> list[str]:
    """Parts of a page of which one is shown: radio buttons, which arrow keys move, and style rules."""
    middle = len(chosen) // 2
    buttons = "".join(
        f'<label><input class="pick" type="radio" name="layer" id="layer-{layer}"{" checked" * (place == middle)}>{layer}</label> '
        for place, layer in enumerate(chosen)
    )
    sections = "".join(
        f'<section class="layer show-{layer}">{part}</section>'
        for layer, part in zip(chosen, parts, strict=True)
    )
    return [f"<form><fieldset><legend>layer</legend>{buttons}</fieldset>{sections}</form>"]


def _rules(pictures: Sequence[str], ratio: float, chosen: Sequence[int]) -> str:
    shown = [
        f"form:has(#layer-{layer}:checked) .show-{layer} {{ display: block; }}" for layer in chosen
    ]
    images = [
        f'.picture-{place} {{ background-image: url("{uri}"); }}'
        for place, uri in enumerate(pictures)
    ]
    return f"<style>:root {{ --ratio: {ratio:.4f}; }}\n" + "\n".join([*shown, *images]) + "</style>"


def _layer(found: np.ndarray, layer: int) -> str:
    """The maps `[batch, head, h, w]` of one layer: an image a row of tiles."""
    rows: list[str] = []
    for place, heads in enumerate(found):
        tiles = [figure(f"picture-{place}", None, f"image {place}", f"image {place}", "tile")]
        for head, values in enumerate(heads):
            most = f"{values.max():.2g}"
            label = f"image {place}, layer {layer}, head {head}: largest share {most}"
            tiles.append(
                figure(f"picture-{place}", map_tile(values), f"head {head}, {most}", label, "tile")
            )
        rows.append(f'<div class="tiles">{"".join(tiles)}</div>')
    return "".join(rows)


def _how(scaled: bool, cls_key: bool, grid: tuple[int, int]) -> str:
    logits = "the model's own logits" if scaled else "logits without the factor 1/sqrt(d_head)"
    keys = "over CLS and the patches" if cls_key else "over the patches alone"
    return (
        f"Softmax {keys} of {logits}; {grid[0]} x {grid[1]} patches. Brighter patches get more; every map is scaled to its own largest "
        f"share, the number below it. Even attention would give each patch {1 / (grid[0] * grid[1] + cls_key):.2g}."
    )
