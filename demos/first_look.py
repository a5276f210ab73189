"""Makes the picture of the README: two figures of the embedded model's report, side by side.

python demos/first_look.py [OUT.png]
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

import crate_interp as ci


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = ci.report(ci.load("crate-tiny-fashion"), "embedded:fashion", folder)
        figures = page.parent / "figures"
        left = Image.open(figures / "compression.official_rate.png").convert("RGB")
        right = Image.open(figures / "attention-layer-4.png").convert("RGB")
        beside(left, right).save(out, optimize=True)
    print(out)


def beside(left: Image.Image, right: Image.Image) -> Image.Image:
    """Returns both pictures on white, the second a third taller because its words are small."""
    height = left.height * 4 // 3
    width = round(right.width * height / right.height)
    right = right.resize((width, height), Image.Resampling.LANCZOS)
    page = Image.new("RGB", (left.width + right.width, height), "white")
    page.paste(left, (0, (height - left.height) // 2))
    page.paste(right, (left.width, 0))
    return page


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("first_look.png"))
