"""Opens the pages that the library makes in headless Chromium and keeps screenshots.

`make pictures` runs it. Fails without Chromium: a page that nobody has opened has not been tested.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import crate_interp as ci
from chromium import found, opened

TEXT = "In the beginning was the Word, and the Word was with God"


def pages(out: Path) -> dict[str, tuple[Path, list[str], int]]:
    """name -> (page, words that must be in it, canvases)."""
    model, lm = ci.load("crate-tiny-cutouts"), ci.load("crate-tiny-lm")
    images = model.preprocess(ci.data.embedded("cutouts")[:2]["image"])
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
        _, told = lm.run_with_cache(TEXT)
    view = ci.viz
    atlas = ci.atlas(model, "embedded:cutouts", limit=16, ablate=0, progress=False)
    index = view.atlas_pages(atlas, model, "embedded:cutouts", out / "atlas", progress=False)
    heads = [f"L3H{head}" for head in range(6)]
    return {
        "attention-image": (view.attention(cache, 3).save(out / "attention-image.html"), heads, 7),
        "attention-text": (
            view.attention(told, 2, tokens=TEXT).save(out / "attention-text.html"),
            ["L2H0", "L2H3"],
            5,
        ),
        "atoms-image": (
            view.activations(cache, range(8)).save(out / "atoms-image.html"),
            ["CLS", "Atom"],
            0,
        ),
        "atoms-text": (
            view.activations(told, range(8), tokens=TEXT).save(out / "atoms-text.html"),
            ["beg", "Layer"],
            0,
        ),
        "top-tokens": (
            view.top_tokens(told, range(5), tokens=[TEXT]).save(out / "top-tokens.html"),
            ["Topk", "sample 0"],
            0,
        ),
        "heads": (view.head_grid(cache, images).save(out / "heads.html"), ["head 5"], 0),
        "atlas": (index, ["layer 5"], 0),
        "atlas-layer": (index.parent / "layer-3.html", ["atom 7"], 0),
    }


def looked_at(name: str, page: Path, words: list[str], canvases: int, out: Path) -> list[str]:
    """What is wrong with a page; its screenshot is kept."""
    document, asked = opened(page)
    picture = out / f"{name}.png"
    opened(page, picture=picture)
    wrong = [f"{word!r} is not in it" for word in words if word not in document]
    if document.count("<canvas") != canvases:
        wrong.append(f"{document.count('<canvas')} canvases, not {canvases}")
    with Image.open(picture) as shot:
        colours = len(
            np.unique(np.asarray(shot.convert("RGB"))[150:].reshape(-1, 3), axis=0)
        )  # below the heading
    if colours < 20:
        wrong.append(f"it is blank: {colours} colours")
    return wrong + [f"it asked for {url}" for url in asked]


def main() -> bool:
    if found() is None:
        print("there is no Chromium: apt-get install chromium")
        return False
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pictures")
    out.mkdir(parents=True, exist_ok=True)
    right = True
    for name, (page, words, canvases) in pages(out).items():
        wrong = looked_at(name, page, words, canvases, out)
        right &= not wrong
        megabytes = page.stat().st_size / 1e6
        print(f"{name}: {'; '.join(wrong) or 'ok'}  {megabytes:.2f} MB  {out / name}.png")
    return right


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
