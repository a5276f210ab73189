"""Opens every page of the library in Chromium and keeps screenshots. `make pictures`.

Each page is opened at both widths of tests/browser.py in a light and in a dark scheme, as it comes
and with everything that folds opened. It fails on what is wider than the window, on texts whose
contrast with their ground is below 4.5, on a request that leaves, on a complaint of a script, on a
page that lacks words that it must have, and without Chromium: a page that nobody has opened has
not been tested. `--docs` keeps small pictures of the pages for the documentation.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import crate_interp as ci
from browser import SCHEMES, WIDTHS, disorder, launched, low_contrast, opened, overflow, scrolled
from chromium import found

ROOT = Path(__file__).parent.parent
TEXT = "the Lord said unto Moses, Speak unto the children of"  # the answer is a word
Pages = dict[str, tuple[Path, list[str]]]  # name -> the page, and words that must be in it

# pages that show nothing but numbers without scripts
SCRIPTED = ("attention-image", "attention-text", "atlas", "atlas-layer")

DRAWING = Path(__file__).with_name("drawing.js").read_text()
OPEN_ALL = """() => {
  for (const fold of document.querySelectorAll('details')) fold.open = true;
}"""


def views(out: Path) -> Pages:
    """Returns the pages of caches."""
    model, lm = ci.load("crate-tiny-pictures"), ci.load("crate-tiny-lm")
    images = model.preprocess(ci.data.embedded("pictures")[5:7]["image"])
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
        _, texts = lm.run_with_cache(TEXT)
    view, off = ci.viz, ci.circuits.switched_off(model, images[0])
    cuts = ci.circuits.switched_off(lm, lm.to_tokens(TEXT))
    edges = ("embed L0H1 0.4", "L0H1 L2H0 0.9", "L2H0 logits 0.7", "L0H1 L3H3 -0.3")
    parts = [edge.split() for edge in edges]
    drawn = ci.circuits.Circuit([ci.circuits.Edge(a, b, float(c)) for a, b, c in parts])
    pages: dict[str, tuple[Any, list[str]]] = {
        "attention-image": (view.attention(cache, 3, images=images), ["L3H0", "L3H5"]),
        "attention-text": (view.attention(texts, 2, tokens=TEXT), ["L2H0", "L2H3"]),
        "atoms-image": (view.activations(cache, images=images), ["CLS", "atom"]),
        "atoms-text": (view.activations(texts, tokens=TEXT), ["children", "The largest atoms"]),
        "top-tokens": (view.top_tokens(texts, tokens=[TEXT]), ["sample 0"]),
        "heads": (view.head_grid(cache, images), ["head 5"]),
        "explorer-image": (view.explore(cache, images, without=off), ["The model sees", "patch ("]),
        "explorer-text": (view.explore(texts, TEXT, circuit=drawn, without=cuts), ["continues"]),
    }
    pages["graph-image"] = (view.graph(ci.graph(model, images[0])), ["How sure?"])
    pages["graph-text"] = (view.graph(ci.graph(lm, TEXT)), ["Attributions predict"])
    return {name: (page.save(out / f"{name}.html"), words) for name, (page, words) in pages.items()}


def results(out: Path, limit: int = 128, untrained: int = 5) -> Pages:
    """Returns the pages of results of so many samples, beside so many untrained networks."""
    model, data = ci.load("crate-tiny-pictures"), "embedded:pictures"
    few: dict[str, Any] = {"limit": limit, "progress": False}
    repeats = ci.ablate_heads(ci.load("crate-tiny-induction"), "embedded:repeats", progress=False)
    ablation = ci.viz.ablation_page(repeats, out / "ablation")
    found = ci.atlas(model, data, **few)
    atlas = ci.viz.atlas_pages(found, out / "atlas")
    atoms = ci.viz.atoms_page(ci.atoms(model, data, **few), out / "atoms", excerpts=found.tables)
    swapped = ci.circuits.concentration(model, data, **dict(few, limit=8, untrained=untrained))
    concentration = ci.viz.concentration_page(swapped, out / "concentration")
    image = model.preprocess(ci.data.embedded("pictures")[5:6]["image"])
    reason = ci.circuits.why_attends(model, image, layer=3, head=1, query=0)
    why = ci.viz.why_page(reason, out / "why")
    segment = ci.viz.segment_page(ci.segment(model, data, **few), out / "segment")
    report = ci.report(model, data, out / "report", untrained=untrained, audit=True, **few)
    start = ci.load(ROOT / "demos" / "weights" / "crate-tiny-pictures", revision="step-500")
    few["limit"] = min(limit, 64)
    compared = ci.compare(model, start, data, names=("trained", "step 500"), **few)
    compare = ci.viz.compare_page(compared, out / "compare")
    return {
        "compare": (compare, ["adjusted for the layers"]),
        "concentration": (concentration, ["code entries"]),
        "ablation": (ablation, ["Every head"]),
        "atoms": (atoms, ["L5A"]),
        "atlas": (atlas, ["layer 5"]),
        "atlas-layer": (atlas.parent / "layer-3.html", ["layer 3"]),
        "segment": (segment, ["Jaccard"]),
        "why": (why, ["The strongest pairs"]),
        "report": (report, ["Negative controls", "audit/audit.html"]),
        "audit": (report.parent / "audit" / "audit.html", ["Neumann"]),
    }


def looked_at(browser: Any, page: Path, words: list[str], picture: Path) -> Iterator[str]:
    """Yields what is wrong with a page, and keeps a screenshot for each width and scheme."""
    yield from disorder(browser, page, still=picture.name not in SCRIPTED)
    for width in WIDTHS:
        for scheme in SCHEMES:
            with opened(browser, page, width, scheme) as shown:
                one = f"{picture}-{width}-{scheme}"
                shown.page.wait_for_timeout(300)
                scrolled(shown.page)
                shown.page.screenshot(path=f"{one}.png", full_page=True)
                box = shown.page.evaluate(DRAWING)
                shown.page.screenshot(path=f"{one}-drawing.png", full_page=True, clip=box)
                wrong = _measured(shown.page)
                text = shown.page.content()
                wrong += [f"{word!r} is not in it" for word in words if word not in text]
                shown.page.evaluate(OPEN_ALL)
                unfolded = _measured(shown.page)
                wrong += [f"unfolded: {text}" for text in unfolded if text not in wrong]
                wrong += [f"it asked for {url}" for url in shown.asked]
                wrong += [text for text in shown.wrong if "GL Driver Message" not in text]
            yield from (f"{width} {scheme}: {text}" for text in wrong)


def _measured(page: Any) -> list[str]:
    return overflow(page) + low_contrast(page)


def kept_for_docs(out: Path, names: Iterable[str]) -> None:
    """Writes the first screen of each page, light and wide, as a picture for the documentation."""
    folder = ROOT / "demos" / "docs" / "pages" / "assets" / "pages"
    for name in names:
        with Image.open(out / f"{name}-{WIDTHS[1]}-light-drawing.png") as shot:
            small = shot.convert("RGB").resize((720, 480), Image.Resampling.LANCZOS)
            fade = Image.linear_gradient("L").resize((720, 60))  # the page goes on
            small.paste("white", (0, 420, 720, 480), fade)
            small.save(folder / f"{name}.webp", quality=60)


def main() -> bool:
    if found() is None:
        print("there is no Chromium: apt-get install chromium")
        return False
    out = Path(next((word for word in sys.argv[1:] if word != "--docs"), "runs/pictures"))
    out.mkdir(parents=True, exist_ok=True)
    right = True
    pages = views(out) | results(out)
    with launched() as browser:
        for name, (page, words) in pages.items():
            started = time.perf_counter()
            wrong = list(looked_at(browser, page, words, out / name))
            right &= not wrong
            size, seconds = page.stat().st_size / 1e6, time.perf_counter() - started
            print(f"{name}: {size:.2f} MB, {seconds:.0f} s, {'ok' if not wrong else ''}")
            for text in wrong:
                print(f"  {text}")
    if "--docs" in sys.argv:
        kept_for_docs(out, pages)
    print(f"screenshots: {out}/NAME-WIDTH-SCHEME.png")
    return right


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
