"""Makes the picture of the README: what the embedded model's layers do, beside the same network untrained.

python demos/first_look.py [OUT.png]
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

import crate_interp as ci


def main(out: Path) -> None:
    model = ci.load("crate-tiny-fashion")
    result = ci.sweep(model, "embedded:fashion")
    untrained = [ci.sweep(ci.load("crate-tiny-fashion", revision="step-0"), "embedded:fashion")]
    images = model.preprocess(ci.data.embedded("fashion")[:3]["image"])
    _, cache = model.run_with_cache(images, names_filter=ci.hooks.every_layer(model, ci.hooks.PATTERN))
    with tempfile.TemporaryDirectory() as folder:
        left, right = Path(folder, "left.png"), Path(folder, "right.png")
        ci.viz.layers(result, "compression.official_rate", untrained).savefig(left, dpi=150)
        ci.viz.attention_on_image(cache, -2, images).savefig(right, dpi=150)
        beside(Image.open(left).convert("RGB"), Image.open(right).convert("RGB")).save(out, optimize=True)
    print(out)


def beside(left: Image.Image, right: Image.Image) -> Image.Image:
    """Both pictures on white, at one height."""
    right = right.resize((round(right.width * left.height / right.height), left.height), Image.Resampling.LANCZOS)
    page = Image.new("RGB", (left.width + right.width, left.height), "white")
    page.paste(left, (0, 0))
    page.paste(right, (left.width, 0))
    return page


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("first_look.png"))
