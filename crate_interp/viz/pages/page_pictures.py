"""Pictures inside a page: images, maps, outlines of masks and figures, as PNG, JPEG or SVG."""

import base64
import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float
from PIL import Image

from crate_interp.core.safe_text import in_html
from crate_interp.viz.figures.canvas import quiet
from crate_interp.viz.figures.colours import INK, ON_A_PAGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# colours in a map's palette, too many to see steps; a map takes about half a kilobyte
_LEVELS = 32


def image_uri(picture: Float[np.ndarray, "..."], longest: int = 224) -> str:
    """Returns a picture `[height, width]` or `[height, width, 3]` (0 to 1) as a PNG data URI.

    The picture is made smaller if its longer side has more than `longest` pixels.
    """
    image = Image.fromarray((picture * 255).round().astype(np.uint8))
    scale = longest / max(image.size)
    if scale < 1:
        size = [max(1, round(side * scale)) for side in image.size]
        image = image.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    return _uri(image)


def map_tile(values: Float[np.ndarray, "h w"]) -> str:
    """Returns a map as a palette PNG with one pixel for each patch. values: 0 or more.

    Colours go from dark (0) to bright (the map's own largest value). The map hides the picture
    below it, whose bright places would look like attention.
    """
    import matplotlib

    levels = np.arange(_LEVELS) / (_LEVELS - 1)
    colours = matplotlib.colormaps["inferno"](0.2 + 0.8 * levels)[:, :3]
    scaled = values / max(float(values.max()), 1e-30)
    image = Image.fromarray((scaled * (_LEVELS - 1)).round().astype(np.uint8), mode=None)
    image = image.convert("P")
    image.putpalette((colours * 255).round().astype(np.uint8).tobytes())
    return _uri(image)


def outline(mask: Bool[np.ndarray, "h w"]) -> str:
    """Returns the border of a mask as an SVG path, in pixels of the mask.

    Each run of edges is one line of the path. Horizontal runs come first, row by row, then vertical
    runs.
    """
    parts = []
    for kind, values in (("h", mask), ("v", mask.T)):
        padded = np.pad(values.astype(np.int8), ((1, 1), (0, 0)))
        steps = np.diff(padded, axis=0) != 0  # [row of edges, place]
        for row, place, length in _runs(steps):
            start = f"{place} {row}" if kind == "h" else f"{row} {place}"
            parts.append(f"M{start}{kind}{length}")
    return "".join(parts)


def _runs(on: Bool[np.ndarray, "row place"]) -> list[tuple[int, int, int]]:
    """Returns the row, start and length of each run of True."""
    ends = np.diff(np.pad(on.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, stops = np.argwhere(ends == 1), np.argwhere(ends == -1)
    return [
        (int(row), int(start), int(stop - start))
        for (row, start), (_, stop) in zip(starts, stops, strict=True)
    ]


def _uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return png_uri(buffer.getvalue())


def png_uri(data: bytes) -> str:
    """Returns the bytes of a PNG file as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def figure_uri(figure: "Figure", dpi: int = 110) -> str:
    """Returns a matplotlib figure of photographs as a JPEG data URI, a quarter of a PNG's size."""
    buffer = io.BytesIO()
    with quiet():
        figure.savefig(buffer, format="jpeg", dpi=dpi, pil_kwargs={"quality": 85})
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def inline_svg(figure: "Figure", alt: str, salt: str) -> str:
    """Returns a matplotlib figure as SVG in the colours of the page's light or dark scheme.

    Words get the page's text colour. The colours in crate_interp/viz/figures/colours.py become
    colours of the page; all other colours stay. salt: a text that makes the ids in this figure
    differ from the ids in other figures of the page.
    """
    import matplotlib

    buffer = io.StringIO()
    with quiet(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        _recolour(figure)
        nothing = {"Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(?<=[:] )#[0-9a-f]{6}\b", lambda at: ON_A_PAGE.get(at[0], at[0]), svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    words = in_html(alt)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)


def _recolour(figure: Any) -> None:
    """Gives spines, ticks and words the colour INK.

    Words on heat maps, and words in one of the other colours of figures, keep their colour.
    """
    from matplotlib.colors import to_hex
    from matplotlib.text import Text

    kept = {id(text) for axes in figure.axes if axes.images for text in axes.texts}
    for axes in figure.axes:
        axes.tick_params(colors=INK)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK)
    for item in figure.findobj(Text):
        if id(item) not in kept and to_hex(item.get_color()) not in ON_A_PAGE:
            item.set_color(INK)
