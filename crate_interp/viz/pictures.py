"""Images and maps as small PNG data, to be laid over each other in a page without a script."""

import base64
import html
import io
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from PIL import Image

_LEVELS = 32  # of a map's palette: finer than the eye tells on a patch, and a tile stays near half a kilobyte


def image_uri(picture: np.ndarray, longest: int = 224) -> str:
    """A displayable picture as a PNG data URI, its longer side at most `longest` pixels."""
    image = Image.fromarray((picture * 255).round().astype(np.uint8))
    scale = longest / max(image.size)
    if scale < 1:
        image = image.resize(
            [max(1, round(side * scale)) for side in image.size], Image.Resampling.LANCZOS
        )
    return _uri(image)


def map_tile(values: Float[np.ndarray, "h w"]) -> str:
    """A map of numbers >= 0 as a palette PNG, a pixel per patch: from nearly clear (0) to bright (its own largest value)."""
    import matplotlib

    levels = np.arange(_LEVELS) / (_LEVELS - 1)
    colours = matplotlib.colormaps["inferno"](0.2 + 0.8 * levels)[:, :3]
    scaled = values / max(float(values.max()), 1e-30)
    return _palette((scaled * (_LEVELS - 1)).round(), colours, 0.25 + 0.6 * levels)


def mask_tile(mask: Bool[np.ndarray, "h w"], colour: tuple[float, float, float]) -> str:
    """A mask as a palette PNG: half transparent where it is on, clear where not."""
    return _palette(mask, np.array([(0, 0, 0), colour]), np.array([0, 0.55]))


def figure(picture: str, overlay: str | None, words: str, label: str, css: str) -> str:
    """A focusable picture `picture` (a CSS class with the image as its background) with a tile over it."""
    over = f'<img alt="" src="{overlay}">' if overlay else ""
    said = html.escape(label, quote=True)
    drawn = f'<div class="{picture}" role="img" tabindex="0" aria-label="{said}">{over}</div>'
    return f'<figure class="{css}">{drawn}<figcaption>{html.escape(words)}</figcaption></figure>'


def _palette(index: np.ndarray, colours: np.ndarray, opacity: np.ndarray) -> str:
    image = Image.fromarray(index.astype(np.uint8), mode=None).convert("P")
    image.putpalette((colours * 255).round().astype(np.uint8).tobytes())
    return _uri(image, transparency=(opacity * 255).round().astype(np.uint8).tobytes())


def _uri(image: Image.Image, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True, **options)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
