"""Pictures of what a token attends to in images: a figure of one layer, a page of every head."""

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from crate_interp.core.safe_text import plain
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable
from crate_interp.probes import maps
from crate_interp.probes.segmentation_probe import head_maps, points_of
from crate_interp.viz.cache_views import model_of, name_of, numbers
from crate_interp.viz.canvas import PAGE, SMALL, TITLE, as_written, panels, set_title
from crate_interp.viz.page import Html, image_uri, map_tile

_PANEL = 1.05  # inches

_SHARE = {"tssa": "membership"}  # kind of attention -> what a patch has, if it is not a share

Query = int | tuple[int, int]  # the number of a token (0 is CLS), or (row, column) of a patch


def attention_on_image(
    cache: CrateCache,
    layer: int,
    images: Float[Tensor, "batch channels height width"],
    query: Query = 0,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    dpi: float | None = None,
) -> Figure:
    """Returns a matplotlib Figure with a row for each image: the image, then each head's attention.

    A model without a pattern shows the maps that `ci.maps.attention` gives: memberships in ToST.
    Each map is scaled to its brightest patch. The text below a map gives the share of attention on
    this patch (max) and the share on CLS, which the map does not show.

    Args:
        cache: From `model.run_with_cache(images)`, with `blocks.{layer}.attn.hook_pattern`.
        layer: The layer's number; negative numbers count from the end.
        images: The images of the cache.
        query: 0 for CLS, or (row, column) of a patch.
        ax: As in `ci.viz.layers`; ax holds all panels.
        title: As in `ci.viz.layers`; ax holds all panels.
        dpi: As in `ci.viz.layers`; ax holds all panels.

    Raises:
        ValueError: If the cache is not of these images.
        KeyError: If the pattern was not cached.
    """
    pattern = maps_on(cache, layer, images, query=query)  # [batch, head, h, w]
    on_cls = _on_cls(cache, layer, images, query)  # [batch, head], or None
    count, heads = pattern.shape[:2]
    size = min(_PANEL, PAGE / (heads + 1))
    tall = size * images.shape[2] / images.shape[3]
    inches = (size * (heads + 1), (tall + 0.32) * count + 0.3)
    figure, axes = panels(ax, (count, heads + 1), inches, (0.34 / tall, 0.06), dpi)
    for row in range(count):
        picture = displayable(images[row], cache.model.cfg)
        height, width = picture.shape[:2]
        extent = (0, width, height, 0)
        for column, panel in enumerate(axes[row]):
            panel.set(xticks=[], yticks=[], anchor="N")
            panel.spines[:].set_visible(False)
            if row == 0:
                panel.set_title(f"head {column - 1}" if column else "", fontsize=SMALL, pad=3)
            if column == 0:
                panel.imshow(picture, cmap="gray", extent=extent)
                panel.set_xlabel(f"image {row}", fontsize=SMALL, labelpad=2)
                continue
            grid, look = pattern[row, column - 1], {"cmap": "magma", "interpolation": "nearest"}
            # drawn without the picture, whose bright places would look like attention
            panel.imshow(grid, vmin=0, vmax=grid.max(), extent=extent, **look)
            words = f"max {grid.max():.2g}"
            if on_cls is not None:
                words += f"\nCLS {on_cls[row, column - 1]:.2g}"
            panel.set_xlabel(words, fontsize=SMALL, labelpad=2)
    words = _title(cache, layer, query, pattern.shape[2] * pattern.shape[3])
    if ax is not None:
        set_title(ax, title, words, pad=16)
        return as_written(figure, ax)
    letters = int(inches[0] * 72 / (0.6 * TITLE))  # how many fit on a line as wide as the figure
    figure.suptitle(fill(plain(words if title is None else title), letters), fontsize=TITLE)
    return as_written(figure)


def _title(cache: CrateCache, layer: int, query: Query, patches: int) -> str:
    """Returns the title of a figure, which says what the numbers below the maps are."""
    cfg, layers = cache.model.cfg, len(cache.model.blocks)
    share = _SHARE.get(cfg.facts["attention"], "share")
    of_cls = f"; CLS: the {share} of CLS" if cfg.n_special else ""
    return (
        f"{map_heading(cache.model, query)}, layer {layer % layers} of 0 to {layers - 1} "
        f"(max: the {share} of the brightest patch; an even {share} is "
        f"{even_share(cache.model, patches + cfg.n_special):.2g}{of_cls})"
    )


def even_share(model: HookedModel, tokens: int) -> float:
    """Returns the value of each token if all tokens had equal shares; heads share memberships."""
    return 1 / (model.cfg.n_heads if model.cfg.facts["attention"] == "tssa" else tokens)


def _on_cls(cache: CrateCache, layer: int, images: Any, query: Query) -> np.ndarray | None:
    """Returns the value of each head's map at CLS, `[batch, head]`; None if there is no CLS."""
    special = cache.model.cfg.n_special
    if not special:
        return None
    place: Any = query
    if isinstance(query, tuple):
        place = special + query[0] * (images.shape[3] // cache.model.cfg.patch_size[1]) + query[1]
    (point,) = points_of(cache.model.cfg.facts["attention"], True)
    maps_with_cls = head_maps({point: cache.at(point, layer)}, 0, place, True, True)
    return maps_with_cls[..., 0].float().cpu().numpy()


def map_heading(model: HookedModel, query: Query) -> str:
    """Returns what the maps of a query show, such as "What CLS attends to"."""
    kind = model.cfg.facts["attention"]
    if kind == "tssa":
        return "How far each patch belongs to the subspace of each head"
    verb = "shares representatives with" if kind == "cbsa" else "attends to"
    if isinstance(query, tuple):
        return f"What the patch {query} {verb}"
    return f"What {'CLS' if query == 0 else f'token {query}'} {verb}"


def maps_on(
    cache: CrateCache,
    layer: int,
    images: Float[Tensor, "batch channels height width"],
    **options: Any,
) -> Float[np.ndarray, "batch head h w"]:
    """Returns `ci.maps.attention` over the grid of patches of these images.

    options: other arguments of `ci.maps.attention`. Raises ValueError if the cache is not of these
    images.
    """
    if cache.model.unit != "images":
        raise ValueError("the cache has no patches. Give the cache of a model of images.")
    whole = options.get("scaled", True) and options.get("cls_key", True)
    point = points_of(cache.model.cfg.facts["attention"], whole)[-1]
    shape = cache.at(point, layer).shape
    height, width = np.array(images.shape[2:]) // cache.model.cfg.patch_size
    count = height * width + cache.model.cfg.n_special
    if (shape[0], shape[-1 if whole else 1]) != (len(images), count):
        raise ValueError(
            f"the cached {point} {list(shape)} does not belong to images {list(images.shape)}: "
            "give the images of _, cache = model.run_with_cache(images)."
        )
    values = maps.attention(cache, layer, grid=(int(height), int(width)), **options)
    return values.float().cpu().numpy()


def head_grid(
    cache: CrateCache,
    images: Float[Tensor, "batch channels height width"],
    *,
    layers: Sequence[int] | None = None,
    query: Query = 0,
    scaled: bool = True,
    cls_key: bool = True,
) -> Html:
    """Returns a page with a map of a query's attention for each head and image, layer by layer.

    Every map is scaled to its own largest value, which is written below the map; in each layer, the
    head with an image's largest value is outlined. A notebook shows the page, and `.save(path)`
    writes it as one file that needs no internet. On the page, a slider picks the layer. The arrow
    keys move the slider, the tab key goes from map to map.

    Args:
        cache: From `model.run_with_cache(images)`, with attn.hook_pattern of the layers or, if
            `scaled` or `cls_key` is False, with attn.hook_q and attn.hook_k.
        images: The images that the cache is of.
        layers: The numbers of the layers, None for all.
        query: 0 for CLS, or (row, column) of a patch.
        scaled: Whether the scores are divided by sqrt(d_head).
        cls_key: Whether the softmax runs over CLS too.

    Raises:
        ValueError or KeyError: As `ci.maps.attention` does.
        ValueError: If the cache is not of these images or `layers` are not layers of the model.
    """
    model = model_of(cache)
    chosen = list(dict.fromkeys(numbers("layers", layers, len(model.blocks))))
    every = [  # of each layer, [batch, head, h, w]
        maps_on(cache, layer, images, query=query, scaled=scaled, cls_key=cls_key)
        for layer in chosen
    ]
    grid = every[0].shape[2:]
    kind = model.cfg.facts["attention"]
    what = {"tssa": "membership", "cbsa": "share"}.get(kind, "attention")
    special = model.cfg.n_special
    even = even_share(model, grid[0] * grid[1] + (special if cls_key else 0))
    said, opened = _finding(every, chosen, even, what)
    heading = map_heading(model, query)
    title = f"{name_of(cache)}: {heading[0].lower()}{heading[1:]}"
    return Html.of(
        "heads.html",
        title,
        said=said,
        opened=opened,
        what=what,
        kind=kind,
        special=special,
        scaled=scaled,
        cls_key=cls_key,
        grid=grid,
        ratio=images.shape[3] / images.shape[2],
        query=query,
        name=name_of(cache),
        pictures=[image_uri(displayable(image, model.cfg)) for image in images],
        layers=list(zip(chosen, every, strict=True)),
        tile_of=map_tile,
    )


def _finding(
    every: list[np.ndarray], layers: list[int], even: float, what: str
) -> tuple[list[str], int]:
    """Returns sentences on the head with the largest share on one patch, and the head's layer."""
    each = np.stack([values.max(axis=(2, 3)) for values in every], axis=1)  # [image, layer, head]
    heads, shares = each.shape[2], each.reshape(len(each), -1)
    names = [f"L{layer}H{head}" for layer in layers for head in range(heads)]
    percents = [f"{100 * share:.0f}\u00a0%" for share in shares.max(axis=1)]
    winners, image = shares.argmax(axis=1), int(shares.max(axis=1).argmax())
    best = winners[image]
    words = f"Of {len(names)} heads, {names[best]} gives one patch of image {image} the largest "
    words += f"{what}: {percents[image]}."
    others, doubt = np.flatnonzero(winners != best), "In every image it is this head."
    if len(others):
        other = others[shares[others].max(axis=1).argmax()]
        doubt = f"In image {other} it is {names[winners[other]]}: {percents[other]}."
        if len(each) > 2:
            doubt = f"In {len(others)} of {len(each) - 1} other images it is another head. {doubt}"
    even_map = f"An even map gives every patch {100 * even:.2g}\u00a0%."
    return [words, f"{doubt} {even_map}" if len(each) > 1 else even_map], layers[best // heads]
