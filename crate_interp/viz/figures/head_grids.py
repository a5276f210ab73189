"""Every head of every layer over an image, as one page without a script."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.models.cache import CrateCache
from crate_interp.models.preprocess import displayable
from crate_interp.viz.figures.attention_images import Query, maps_on, who_asks
from crate_interp.viz.pages.page import Html, render
from crate_interp.viz.pages.page_pictures import image_uri, map_tile


def head_grid(
    cache: CrateCache,
    images: Float[Tensor, "batch channels height width"],
    *,
    layers: Sequence[int] | None = None,
    query: Query = 0,
    scaled: bool = True,
    cls_key: bool = True,
) -> Html:
    """Returns a page with a slider over layers: a query's attention, a map per head and image.

    cache: of `model.run_with_cache(images)`, with attn.hook_pattern of the layers (attn.hook_q and
    hook_k if scaled or cls_key is False). layers: their numbers, None for all. query: 0 for CLS, or
    (row, column) of a patch. Every map is scaled to its own largest value, which is written below.
    A notebook shows the page, and `.save(path)` writes it as one file that needs no network. The
    arrow keys move the slider, the tab key visits the maps.

    Raises ValueError or KeyError as `ci.maps.attention` does, and ValueError if the cache is not of
    these images or `layers` are not layers of the model.
    """
    model = cache.model
    chosen = _layers(layers, cache)
    found = [
        maps_on(cache, layer, images, query=query, scaled=scaled, cls_key=cls_key)
        for layer in chosen
    ]
    grid = found[0].shape[2:]
    finding, first = _finding(found, chosen, 1 / (grid[0] * grid[1] + cls_key))
    title = f"{model.cfg.model_name or 'Attention'}: what {who_asks(query)} attends to"
    page = render(
        "heads.html",
        title=title,
        finding=finding,
        first=first,
        scaled=scaled,
        cls_key=cls_key,
        grid=grid,
        ratio=images.shape[3] / images.shape[2],
        pictures=[image_uri(displayable(image, model.cfg)) for image in images],
        layers=[
            {"number": layer, "images": [[_head(values) for values in heads] for heads in maps]}
            for layer, maps in zip(chosen, found, strict=True)
        ],
    )
    return Html(title, page)


def _finding(found: list[np.ndarray], layers: list[int], even: float) -> tuple[str, int]:
    """Returns the head, and its layer, with the largest share on a single patch."""
    largest = np.stack([maps.max(axis=(2, 3)).mean(axis=0) for maps in found])  # [layer, head]
    place, head = np.unravel_index(largest.argmax(), largest.shape)
    images = len(found[0])
    mean = f", mean over {images} images" if images > 1 else ""
    words = (
        f"L{layers[place]}H{head} singles out a patch most of {largest.size} heads: it gives one "
        f"{largest.max():.2f} of its attention{mean}; even attention would give each {even:.2g}."
    )
    return words, layers[place]


def _head(values: np.ndarray) -> dict[str, str]:
    """Returns the picture of one map `[h, w]`, and its largest value."""
    return {"uri": map_tile(values), "largest": f"{values.max():.2g}"}


def _layers(layers: Any, cache: CrateCache) -> list[int]:
    """Returns the numbers of the layers, each once, from 0.

    Raises ValueError if there is no such layer.
    """
    if cache.model.towers:
        raise ValueError("a CLIP is two models: show its image tower, cache.visual.")
    count = len(cache.model.blocks)
    wanted = range(count) if layers is None else layers
    wanted = list(wanted) if isinstance(wanted, (list, tuple, range)) else []
    if not wanted or not all(checks.is_int(layer) and -count <= layer < count for layer in wanted):
        raise ValueError(
            f"layers={layers!r}: give a list of numbers from 0 to {count - 1}, or None for all."
        )
    return list(dict.fromkeys(layer % count for layer in wanted))
