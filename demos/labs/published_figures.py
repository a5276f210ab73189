"""What attention maps of the authors' CRATE-B/8 say, read back from their published figures.

    python demos/labs/published_figures.py --notebook FILE [--pictures DIR] --out DIR

FILE: emergencia_referencia/crate_emergence.ipynb of PepeRoConde/TFG, with its outputs. It has no
licence, so it is not shipped; without it this lab reads nothing. Nothing in it runs: its PNG
outputs are rows of a picture and maps of CLS (layer 10, 60 x 60 patches) in viridis. Each map is
drawn from its least to its largest value, so its least value and its scale are lost.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from drawing import interval, level, panels, tidy, titled
from lab import LabResult, Steps, claim, main, result, values
from matplotlib import colormaps
from PIL import Image
from scipy.stats import rankdata

import crate_interp as ci
from crate_interp.circuits.head_places import HeadMeaning, kendalls_w
from crate_interp.core.pictures import decoded, header, quoted
from crate_interp.measures import input_maps, jaccard, mass_mask, random_jaccard

GRID, HEADS, CHOSEN = 60, 6, [0, 1, 3, 4]  # CHOSEN: the heads in the second half of the figures
LARGEST, PIXELS, FIGURES = 32 * 2**20, 4 * 10**6, 64  # of a file, of a picture, of a notebook
APART, SAME = 4, 0.99  # most of 255 from viridis; least correlation of maps drawn twice
VIRIDIS = colormaps["viridis"](np.arange(256), bytes=True)[:, :3].astype(float)  # as drawn
WANTED = "a Jupyter notebook with PNG outputs, crate_emergence.ipynb"
AUTHORS, TINY = "CRATE-B/8", "crate-tiny-pictures"
SETS = ("six animals, four heads", "eight pictures, all heads", "without the picture in both")


def refused(came: str, wanted: str = WANTED) -> ValueError:
    return ValueError(f"{came}: give {wanted}.")


def rgb(png: bytes, what: str) -> Image.Image:
    """Returns a PNG picture on white; one that says it is too large is not decoded."""
    if png[:8] != b"\x89PNG\r\n\x1a\n":
        raise refused(f"{what} does not begin as a PNG file does")
    _, (width, height) = header(BytesIO(png), what)
    if width * height > PIXELS:
        raise refused(f"{what} says it has {width} x {height} pixels", "4 million at most")
    image = decoded(png, what).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def figures(path: Path) -> list[np.ndarray]:
    """Returns the PNG outputs of a notebook, uint8 [height, width, 3] each."""
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise refused(f"{quoted(path)} is not a file of at most {LARGEST >> 20} MiB")
    try:
        cells = json.loads(path.read_bytes())["cells"]
        outputs = [one for cell in cells for one in cell.get("outputs", ())]
        texts = [one["data"]["image/png"] for one in outputs if "image/png" in one.get("data", ())]
        pngs = [base64.b64decode("".join("".join(one).split()), validate=True) for one in texts]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise refused(f"{quoted(path)} is not a notebook, or its outputs are broken") from None
    if not 0 < len(pngs) <= FIGURES:
        raise refused(f"{quoted(path)} has {len(pngs)} PNG outputs", f"1 to {FIGURES} of them")
    return [np.asarray(rgb(png, f"PNG output {at}")) for at, png in enumerate(pngs)]


def parts(figure: np.ndarray) -> list[np.ndarray]:
    """Returns the panels of a figure, from left to right."""
    ink = (figure < 250).any(axis=2)
    rows, edges = np.flatnonzero(ink.any(axis=1)), np.diff(np.r_[0, ink.any(axis=0), 0])
    ends = zip(np.flatnonzero(edges)[::2], np.flatnonzero(edges)[1::2], strict=True)
    spans = [(a, b) for a, b in ends if b - a >= 2 * GRID]
    if len(spans) not in (1 + HEADS, 1 + len(CHOSEN)) or np.ptp(rows) < 2 * GRID:
        raise refused(f"a PNG output has {len(spans)} panels of 120 pixels or more", "7 or 5")
    side = int(np.median([b - a for a, b in spans[1:]]))  # the edge of the picture may be white
    return [figure[rows[0] : rows[-1] + 1, max(0, b - side) : b] for _, b in spans]


def read(panel: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the colours of a map [60, 60] as steps of 255, and their distance to viridis."""
    at = np.arange(GRID) + 0.5
    centres = [(at * side / GRID).astype(int) for side in panel.shape[:2]]
    apart = np.abs(panel[np.ix_(*centres)].astype(float)[:, :, None] - VIRIDIS).mean(axis=-1)
    steps, rest = apart.argmin(axis=-1), float(apart.min(axis=-1).mean())
    if rest > APART or np.ptp(steps) == 0:
        raise refused(f"a panel lies {rest:.1f} of 255 from viridis, or has one colour", "a map")
    return steps, rest


def agreement(name: str, maps: Sequence, place: int) -> list[list]:
    """Returns head_meaning's numbers of maps by picture, and jackknifed (n W - 1) / (n - 1)."""
    at = (np.arange(maps[0].shape[-1]) + 0.5) / maps[0].shape[-1]
    rows = [("model", sample, 0, head, m.sum(1) @ at / m.sum(), m.sum(0) @ at / m.sum())
            for sample, each in enumerate(maps) for head, m in enumerate(each)]  # fmt: skip
    names = ["network", "sample", "layer", "head", "row", "column"]
    meta = {"settings": {"parts": {}, "seed": 0}}
    table: Any = HeadMeaning({"places": pd.DataFrame(rows, columns=names)}, meta).table()
    ranks = rankdata(np.array([row[4] for row in rows]).reshape(len(maps), -1).round(6), axis=1)
    every = [ranks, *(np.delete(ranks, k, axis=0) for k in range(len(ranks)))]
    whole, *others = [(len(r) * kendalls_w(r) - 1) / (len(r) - 1) for r in every]
    alike = len(maps) * whole - (len(maps) - 1) * np.array(others)
    return [[f"{key}, {row['axis']}", name, 0, place, row[key]]
            for row in table.to_dict("records") for key in ("w", "shuffled_95", "p")] + [
            ["alike", name, k, place, value] for k, value in enumerate(alike)]  # fmt: skip


def looks(maps: np.ndarray, pixels: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Yields what the maps [head, row, column] of a picture [channel, height, width] say."""
    flat, side = maps.reshape(len(maps), -1), maps.shape[-1]
    k = flat.shape[1] // 100
    top = np.argsort(-flat, axis=1, kind="stable")[:, :k]
    yield "mass", (np.take_along_axis(flat, top, 1).sum(1) / flat.sum(1)).mean()
    yield "same", np.mean([len({*a} & {*b}) / k for a, b in combinations(top.tolist(), 2)])
    for cells in {side, GRID // 4} if side == GRID else {side}:  # 15 is near the other's 16
        simple = input_maps(pixels[None], (pixels.shape[1] // cells,) * 2)[0]
        known = np.c_[rankdata(simple.numpy(), axis=1).T, np.ones(cells**2)]
        coarse = maps.reshape(len(maps), cells, side // cells, cells, -1).mean(axis=(2, 4))
        ranks = rankdata(coarse.reshape(len(maps), -1), axis=1).T
        rest = ranks - known @ np.linalg.lstsq(known, ranks, rcond=None)[0]
        yield f"explained, {cells} x {cells}", (1 - rest.var(axis=0) / ranks.var(axis=0)).mean()
        if cells == side:  # simple[1]: contrast to the border
            masks, border = mass_mask(torch.tensor(flat)), mass_mask(simple[1])
            areas, area = masks.double().mean(dim=1).tolist(), float(border.double().mean())
            yield "overlap", float(jaccard(masks, border).mean())
            yield "overlap by chance", np.mean([random_jaccard(each, area) for each in areas])


def of_maps(name: str, maps: Any, images: Any, place: int, chosen: Sequence[int]) -> list[list]:
    """Returns the rows of numbers of what the maps of chosen pictures say."""
    return [[what, name, k, place, float(value)]
            for k in chosen for what, value in looks(maps[k], images[k])]  # fmt: skip


def tensors(rows: list, folder: Path | None) -> list[torch.Tensor]:
    """Returns the pictures of the figures in the size that the network saw, from files if given."""
    paths, found = sorted(folder.rglob("*.png")) if folder else [None] * len(rows), []
    if len(paths) != len(rows):
        raise refused(f"{len(paths)} PNG files for {len(rows)} figures", "a picture for each")
    for path, panel in zip(paths, [Image.fromarray(row[0]) for row in rows], strict=True):
        image = rgb(path.read_bytes(), quoted(path)) if path else panel
        both = (np.asarray(each.resize((32, 32)), dtype=float).ravel() for each in (image, panel))
        if np.corrcoef(*both)[0, 1] < 0.9:
            raise refused(f"{quoted(path or '')} is not the picture of its figure", "the pictures")
        pixels = np.asarray(image.resize((8 * GRID,) * 2, Image.Resampling.BILINEAR)) / 255
        found.append(torch.from_numpy(pixels).permute(2, 0, 1))
    return found


def of_tiny() -> list[list]:
    """Returns the numbers of the embedded network by layer, its maps drawn as the authors' are."""
    model, rows = ci.load(TINY), []
    images = model.preprocess(ci.data.embedded("pictures")["image"])
    _, cache = model.run_with_cache(images)
    images, every = images.double(), range(len(images))
    for layer in range(model.cfg.n_layers):
        whole = ci.maps.attention(cache, layer).detach().double().numpy()
        least, most = (f(whole, axis=(2, 3), keepdims=True) for f in (np.min, np.max))
        maps = (whole - least) / (most - least)
        rows += of_maps(TINY, maps, images, layer, every) + agreement(TINY, maps, layer)
        kept = [row for row in of_maps(TINY, whole, images, layer, every) if row[0] == "mass"]
        rows += [["mass, least value kept", *row[1:]] for row in kept]
    return rows


def run(form: str, steps: Steps, notebook: Path | None, pictures: Path | None) -> LabResult:
    """Returns the claims about the authors' maps; without a notebook it says so and ends."""
    if notebook is None:
        print(f"Nothing is read without --notebook: give {WANTED}.")
        raise SystemExit(0)
    rows, told = [parts(each) for each in figures(notebook)], []
    images = tensors(rows, pictures)
    full = [at for at, row in enumerate(rows) if len(row) > HEADS]
    part = [at for at, row in enumerate(rows) if len(row) <= HEADS]
    if min(len(full) - 1, len(part)) < 3:
        raise refused(f"{len(full)} figures of {HEADS} maps, {len(part)} of {len(CHOSEN)}")
    back = [[read(panel) for panel in row[1:]] for row in rows]
    maps = [np.stack([each for each, _ in row]) / 255 for row in back]
    alike, again, other = max(
        (np.corrcoef(maps[a][CHOSEN].ravel(), maps[b].ravel())[0, 1], a, b)
        for a in full for b in part)  # fmt: skip
    if alike < SAME:
        raise refused(f"no two figures show the same maps (correlation {alike:.2f})")
    told += [["twice", AUTHORS, 0, 0, float(alike)]]
    for add in (0, 1):  # a colour stands for values of up to a step more
        told += [row for name, ids in zip(SETS, (part, full, {*full} - {again}), strict=True)
                 for row in agreement(name, [maps[at] + add / 255 for at in ids], add)]  # fmt: skip
    told += [["residual", AUTHORS, at, 0, each] for at, (_, each) in enumerate(sum(back, []))]
    told += of_maps(AUTHORS, maps, images, 10, [at for at in range(len(maps)) if at != other])
    cases = {name: values(told, "alike", name, 0) for name in SETS}
    claims = [claim("published_figures.chosen", cases.pop(SETS[0]), baseline=0),
              claim("published_figures.all", cases[SETS[1]], cases=cases, baseline=0),
              claim("published_figures.sinks", values(told, "mass"), baseline=0.01)]  # fmt: skip
    found = result("published_figures", form, claims, told + of_tiny())
    table = found.table("numbers").groupby(["quantity", "setting", "place"], sort=False)["value"]
    print(table.agg(["mean", "min", "max", "count"]).to_string(float_format="{:.4f}".format))
    return found


def draw(found: LabResult) -> Any:
    """Draws how far pictures agree, and how much a hundredth of the patches gets."""
    (figure, axes), rows = panels(2, size=(8, 3.6)), found.table("numbers").to_numpy().tolist()
    cases = {"alike": [(name, 0) for name in SETS], "mass": [(AUTHORS, 10)]}
    words = "rank correlation of two pictures", "share on 1 % of the patches"
    for axis, what, label in zip(axes, cases, words, strict=True):
        places = cases[what] + [(TINY, layer) for layer in range(6)]
        for at, (name, place) in enumerate(places):
            interval(axis, at, values(rows, what, name, place), color=f"C{7 * (name == TINY)}")
        tidy(axis, 0, ylabel=label, xticks=range(len(places)))
        names = [f"layer {place}" if name == TINY else name for name, place in places]
        axis.set_xticklabels(names, rotation=30, ha="right", fontsize=7)
    level(axes[0], 0)
    axes[1].set_ylim(0)
    return titled(figure, found)


if __name__ == "__main__":
    try:
        main(run, draw, notebook="a file that you fetched", pictures="its folders of pictures")
    except ValueError as error:
        raise SystemExit(str(error)) from None
