"""What the CLS token attends to, drawn on the images."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from crate_hooks import full_name


def attention_on_image(cache: Any, layer: int, images: Any) -> Any:
    """A matplotlib Figure: a row per image, the image, then the CLS token's attention of each head laid over it.

    cache: an ActivationCache with `blocks.{layer}.attn.hook_pattern`; layer may be negative; images: the tensor
    `[batch, channels, height, width]` the model was run on. Each panel is scaled to its own largest value, which its
    title gives as a share of the attention. Raises ValueError where cache and images do not belong together, KeyError
    where the pattern was not cached.
    """
    from matplotlib.figure import Figure

    if not isinstance(images, Tensor) or images.ndim != 4:
        got = f"shape {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images are [batch, channels, height, width], what the model was run on; got {got}.")
    pattern = _cls_attention(cache, layer, images)  # [batch, head, h, w]
    count, heads = pattern.shape[:2]
    size = 1.35
    figure = Figure(figsize=(size * (heads + 1), size * count * 1.18), layout="constrained")
    axes = figure.subplots(count, heads + 1, squeeze=False)
    for row in range(count):
        picture = _displayable(images[row])
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
                grid, cmap="magma", alpha=0.65, vmin=0, vmax=grid.max(), extent=extent, interpolation="nearest"
            )
            panel.set_title(f"head {column - 1}, max {grid.max():.2f}", fontsize=7)
    layers = len(cache.model.blocks)
    figure.suptitle(f"CLS attention, layer {layer % layers} of 0 to {layers - 1}", fontsize=9)
    return figure


def _cls_attention(cache: Any, layer: int, images: Tensor) -> np.ndarray:
    """The CLS query's attention to the patches `[batch, head, h, w]`."""
    model = cache.model
    count = len(model.blocks)
    if not -count <= layer < count:
        raise ValueError(f"layer={layer}: the model has layers 0 to {count - 1}.")
    name = full_name("attn.hook_pattern", layer % count)
    if name not in cache.cache_dict:
        raise KeyError(f"the cache lacks {name!r}: run_with_cache(images, names_filter=[{name!r}]), or cache all.")
    pattern = cache[name]
    height, width = images.shape[2] // model.cfg.patch_size[0], images.shape[3] // model.cfg.patch_size[1]
    if pattern.ndim != 4 or len(pattern) != len(images) or pattern.shape[-1] != height * width + 1:
        raise ValueError(
            f"the cached pattern {list(pattern.shape)} does not belong to images {list(images.shape)}: "
            f"wanted {len(images)} images of {height} x {width} patches and a CLS token."
        )
    patches = pattern[:, :, 0, 1:].float().cpu()  # [batch, head, patch]
    return patches.unflatten(-1, (height, width)).numpy()


def _displayable(image: Shaped[Tensor, "channels height width"]) -> np.ndarray:
    """The image scaled to 0..1: preprocessing cannot always be undone, contrast can always be kept."""
    pixels = image.detach().float().cpu()
    low, high = pixels.min(), pixels.max()
    pixels = (pixels - low) / torch.clamp(high - low, min=1e-12)
    return pixels[0].numpy() if len(pixels) != 3 else pixels.permute(1, 2, 0).numpy()
