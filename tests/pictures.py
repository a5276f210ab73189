"""Opens the pages of the library in headless Chromium and keeps screenshots. `make pictures`.

Fails without Chromium: a page that nobody has opened has not been tested.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import crate_interp as ci
from chromium import found, opened

TEXT = "In the beginning was the Word, and the Word was with God"


def views(out: Path) -> dict[str, tuple[Path, list[str], int]]:
    """Returns the pages of caches: name -> (page, words that must be in it, canvases)."""
    model, lm = ci.load("crate-tiny-cutouts"), ci.load("crate-tiny-lm")
    images = model.preprocess(ci.data.embedded("cutouts")[:2]["image"])
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
        _, texts = lm.run_with_cache(TEXT)
    view, atoms = ci.viz, range(8)
    pages = {
        "attention-image": (view.attention(cache, 3), [f"L3H{head}" for head in range(6)], 7),
        "attention-text": (view.attention(texts, 2, tokens=TEXT), ["L2H0", "L2H3"], 5),
        "atoms-image": (view.activations(cache, atoms), ["CLS", "Atom"], 0),
        "atoms-text": (view.activations(texts, atoms, tokens=TEXT), ["beg", "Layer"], 0),
        "top-tokens": (view.top_tokens(texts, range(5), tokens=[TEXT]), ["Topk", "sample 0"], 0),
        "heads": (view.head_grid(cache, images), ["head 5"], 0),
    }
    return {
        name: (page.save(out / f"{name}.html"), words, canvases)
        for name, (page, words, canvases) in pages.items()
    }


def results(out: Path) -> dict[str, tuple[Path, list[str], int]]:
    """Returns the pages of results, in the same form."""
    model, data = ci.load("crate-tiny-cutouts"), "embedded:cutouts"
    few = {"limit": 16, "progress": False}
    atlas = ci.viz.atlas_pages(ci.atlas(model, data, ablate=8, **few), out / "atlas")
    segment = ci.viz.segment_page(ci.segment(model, data, **few), out / "segment")
    report = ci.report(model, data, out / "report", untrained=1, audit=True, **few)
    return {
        "atlas": (atlas, ["layer 5"], 0),
        "atlas-layer": (atlas.parent / "layer-3.html", ["atom 7"], 0),
        "segment": (segment, ["Jaccard index", "Worst"], 0),
        "report": (report, ["Negative controls", "audit/audit.html"], 0),
        "audit": (report.parent / "audit" / "audit.html", ["Neumann"], 0),
    }


def looked_at(name: str, page: Path, words: list[str], canvases: int, out: Path) -> list[str]:
    """Returns what is wrong with a page, and keeps its screenshot."""
    document, asked = opened(page)
    picture = out / f"{name}.png"
    opened(page, picture=picture)
    wrong = [f"{word!r} is not in it" for word in words if word not in document]
    if document.count("<canvas") != canvases:
        wrong.append(f"{document.count('<canvas')} canvases, not {canvases}")
    with Image.open(picture) as shot:
        below_the_heading = np.asarray(shot.convert("RGB"))[150:].reshape(-1, 3)
    colours = len(np.unique(below_the_heading, axis=0))
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
    for name, (page, words, canvases) in (views(out) | results(out)).items():
        wrong = looked_at(name, page, words, canvases, out)
        right &= not wrong
        size = f"{page.stat().st_size / 1e6:.2f} MB"
        print(f"{name}: {'; '.join(wrong) or 'ok'}  {size}  {out / name}.png")
    return right


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
