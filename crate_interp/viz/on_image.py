"""What the CLS token attends to, drawn on the images."""

from typing import Any

import numpy as np
from torch import Tensor

from crate_hooks import full_name
from crate_interp import maps
from crate_interp.models.display import displayable


def attention_on_image(cache: Any, layer: int, images: Any, query: Any = 0) -> Any:
    """A matplotlib Figure: a row per image, the image, then the attention of each head laid over it.

    cache: an ActivationCache with `blocks.{layer}.attn.hook_pattern`; layer may be negative; images: the tensor
    `[batch, channels, height, width]` the model was run on. query: 0 for CLS, or (row, column) of a patch. Each panel is scaled to
    its own largest value, which its title gives as a share of the attention. Raises ValueError where cache and images do not
    belong together, KeyError where the pattern was not cached.
    """
    from matplotlib.figure import Figure

    pattern = maps_on(cache, layer, images, query=query)  # [batch, head, h, w]
    count, heads = pattern.shape[:2]
    size = 1.35
    figure = Figure(figsize=(size * (heads + 1), size * count * 1.18), layout="constrained")
    axes = figure.subplots(count, heads + 1, squeeze=False)
    for row in range(count):
        picture = displayable(images[row], cache.model.cfg)
        height, width = picture.shape[:2]
        for column in range(heads + 1):
            panel = axes[row, column]
            panel.set_axis_off()
            panel.imshow(picture, cmap="gray", extent=(0, width, height, 0))
            if column == 0:
                panel.set_title(f"image {row}", fontsize=7)
                continue
            grid = pattern[row, column - 1]
            extent = (0, width, height, 0)
            panel.imshow(
                grid,
                cmap="magma",
                alpha=0.65,
                vmin=0,
                vmax=grid.max(),
                extent=extent,
                interpolation="nearest",
            )
            panel.set_title(f"head {column - 1}, max {grid.max():.2f}", fontsize=7)
    layers = len(cache.model.blocks)
    who = "CLS attention" if query == 0 else f"Attention of {who_asks(query)}"
    figure.suptitle(f"{who}, layer {layer % layers} of 0 to {layers - 1}", fontsize=9)
    return figure


def who_asks(query: int | tuple[int, int]) -> str:
    """A query in words."""
    return (
        "CLS"
        if query == 0
        else f"the patch {query}"
        if isinstance(query, tuple)
        else f"token {query}"
    )


def maps_on(cache: Any, layer: int, images: Any, **options: Any) -> np.ndarray:
    """`ci.maps.attention` over the grid of these images `[batch, head, h, w]`; ValueError for images that are not the cache's."""
    if not isinstance(images, Tensor) or images.ndim != 4:
        got = f"shape {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"images are [batch, channels, height, width], what the model was run on; got {got}."
        )
    height, width = (
        side // patch
        for side, patch in zip(images.shape[2:], cache.model.cfg.patch_size, strict=True)
    )
    stored = cache.cache_dict.get(full_name("attn.hook_pattern", layer % len(cache.model.blocks)))
    if stored is not None and (len(stored), stored.shape[-1]) != (len(images), height * width + 1):
        raise ValueError(
            f"the cached pattern {list(stored.shape)} does not belong to images {list(images.shape)}: "
            f"wanted {len(images)} images of {height} x {width} patches and a CLS token."
        )
    found = maps.attention(cache, layer, grid=(height, width), **options)
    if len(found) != len(images):
        raise ValueError(
            f"the cache is of {len(found)} images, and {len(images)} are given: give what the model was run on."
        )
    return found.float().cpu().numpy()
