"""The authors' CRATE-B/8, read back from its published figures: numbers of heads and of sinks.

    python demos/labs/published_figures.py NOTEBOOK

NOTEBOOK: emergencia_referencia/crate_emergence.ipynb of the repository PepeRoConde/TFG, with its
outputs. It has no licence, so it is not shipped. Nothing in it runs: its PNG outputs are rows of a
picture and attention maps of CLS (layer 10, 60 x 60 patches) in viridis. Each map was drawn from
its least to its largest value, so what is read lacks its least value and its scale.
"""

import argparse
import base64
import binascii
import json
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from PIL import Image
from scipy.stats import rankdata

from crate_interp.circuits.head_places import HeadMeaning
from crate_interp.core import pictures
from crate_interp.measures import input_maps

GRID, PATCH, HEADS, CHOSEN = 60, 8, 6, (0, 1, 3, 4)
LARGEST, PIXELS, FIGURES = 32 * 2**20, 4 * 10**6, 64  # of a notebook, of a figure, of figures
VIRIDIS = np.round(255 * np.array([colormaps["viridis"](at)[:3] for at in range(256)]))
TYPE = "type python demos/labs/published_figures.py crate_emergence.ipynb"


def refused(came: str, wanted: str) -> SystemExit:
    return SystemExit(f"{came}: give {wanted}; {TYPE}.")


def figures(path: Path) -> list[np.ndarray]:
    """Returns the PNG outputs of a notebook, uint8 [height, width, 3] each."""
    wanted = "a Jupyter notebook with PNG outputs"
    if not path.is_file():
        raise refused(f"{pictures.quoted(path)} is not a file", wanted)
    if path.stat().st_size > LARGEST:
        raise refused(f"{pictures.quoted(path)} has over {LARGEST >> 20} MiB", wanted)
    try:
        cells = json.loads(path.read_bytes())["cells"]
        outputs = [one for cell in cells for one in cell.get("outputs", ())]
        texts = [one["data"]["image/png"] for one in outputs if "image/png" in one.get("data", ())]
        data = [base64.b64decode("".join(text), validate=False) for text in texts]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, binascii.Error):
        raise refused(f"{pictures.quoted(path)} is not a notebook", wanted) from None
    if not 0 < len(data) <= FIGURES:
        raise refused(f"{pictures.quoted(path)} has {len(data)} PNG outputs", f"1 to {FIGURES}")
    found = []
    for number, each in enumerate(data):
        what = f"PNG output {number}"
        try:
            if each[:8] != b"\x89PNG\r\n\x1a\n":
                raise refused(f"{what} does not begin as a PNG file does", wanted)
            _, (width, height) = pictures.header(BytesIO(each), what)
            if width * height > PIXELS:
                raise refused(f"{what} says it has {width} x {height} pixels", "4 million at most")
            image = pictures.decoded(each, what).convert("RGBA")
        except ValueError as error:
            raise refused(str(error).rstrip("."), wanted) from None
        white = Image.new("RGBA", image.size, "white")
        found.append(np.asarray(Image.alpha_composite(white, image).convert("RGB")))
    return found


def panels(figure: np.ndarray) -> list[np.ndarray]:
    """Returns the square panels of a figure, from left to right."""
    ink = (figure < 250).any(axis=2)
    rows, columns = np.flatnonzero(ink.any(axis=1)), ink.any(axis=0)
    edges = np.flatnonzero(np.diff(np.r_[0, columns, 0]))
    spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= 2 * GRID]
    if len(spans) < 2:
        raise refused("a PNG output has no panels of 120 pixels or more", "rows of panels")
    side = int(np.median([b - a for a, b in spans[1:]]))
    return [figure[rows[0] : rows[0] + side, b - side : b] for _, b in spans]


def read(panel: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns a map [60, 60] from 0 to 1, and how far its colours lie from viridis, of 255."""
    centres = [((np.arange(GRID) + 0.5) * side / GRID).astype(int) for side in panel.shape[:2]]
    colours = panel[np.ix_(*centres)].astype(float)
    apart = np.abs(colours[:, :, None] - VIRIDIS).mean(axis=-1)
    return apart.argmin(axis=-1) / 255, float(apart.min(axis=-1).mean())


def meaning(maps: dict[tuple[int, int], np.ndarray]) -> Any:
    """Returns Kendall's W of the centres of maps by (picture, head), beside shuffled heads."""
    at = (np.arange(GRID) + 0.5) / GRID
    rows = [
        ("model", sample, 10, head, m.sum(1) @ at / m.sum(), m.sum(0) @ at / m.sum())
        for (sample, head), m in maps.items()
    ]
    names = ["network", "sample", "layer", "head", "row", "column"]
    meta = {"settings": {"parts": {}, "seed": 0}}
    return HeadMeaning({"places": pd.DataFrame(rows, columns=names)}, meta).table()


def explained(maps: np.ndarray, panel: np.ndarray, cells: int) -> float:
    """Returns the share of the ranks of maps that the five maps of the picture explain."""
    image = Image.fromarray(panel).resize((GRID * PATCH, GRID * PATCH), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(image) / 255).permute(2, 0, 1)[None]
    simple = input_maps(pixels, (GRID * PATCH // cells,) * 2)[0].numpy()
    known = np.c_[rankdata(simple, axis=1).T, np.ones(cells**2)]
    shares = []
    for each in maps:
        ranks = rankdata(each.reshape(cells, GRID // cells, cells, -1).mean(axis=(1, 3)))
        rest = ranks - known @ np.linalg.lstsq(known, ranks, rcond=None)[0]
        shares.append(1 - rest.var() / ranks.var())
    return float(np.mean(shares))


def strongest(maps: np.ndarray) -> tuple[float, float]:
    """Returns the share of a hundredth of the patches, and how many of them two heads share."""
    flat, k = maps.reshape(len(maps), -1), GRID**2 // 100
    top = [set(np.argsort(-each, kind="stable")[:k].tolist()) for each in flat]
    mass = np.mean(
        [each[list(ids)].sum() / each.sum() for each, ids in zip(flat, top, strict=True)]
    )
    return float(mass), float(np.mean([len(a & b) / k for a, b in combinations(top, 2)]))


def main(path: Path) -> None:
    """Prints what the maps of a notebook say."""
    rows = [panels(each) for each in figures(path)]
    readings = [[read(panel) for panel in row[1:]] for row in rows]
    maps = [np.stack([each for each, _ in row]) for row in readings]
    residuals = [rest for row in readings for _, rest in row]
    print(f"{len(residuals)} maps in {len(maps)} figures, read back from figures; distance to "
          f"viridis {min(residuals):.2f} to {max(residuals):.2f} of 255")  # fmt: skip
    full = {at: each for at, each in enumerate(maps) if len(each) == HEADS}
    part = {at: each for at, each in enumerate(maps) if len(each) == len(CHOSEN)}
    sets = {"all heads": {(p, h): m for p, each in full.items() for h, m in enumerate(each)},
            "chosen heads": {(p, h): m for p, each in part.items()
                             for h, m in zip(CHOSEN, each, strict=True)}}  # fmt: skip
    for (a, each), (b, other) in ((x, y) for x in full.items() for y in part.items()):
        pairs = [np.corrcoef(each[h].ravel(), o.ravel())[0, 1]
                 for h, o in zip(CHOSEN, other, strict=True)]  # fmt: skip
        if min(pairs) > 0.9:
            gap = 255 * np.abs(each[list(CHOSEN)] - other).mean()
            print(f"figures {a} and {b} show the same maps: correlation {min(pairs):.3f} or more, "
                  f"difference {gap:.1f} of 255")  # fmt: skip
            sets["all heads, without the picture shown twice"] = {
                key: m for key, m in sets["all heads"].items() if key[0] != a
            }
    for name, chosen in sets.items():
        if chosen:
            print(f"\n{name}\n{meaning(chosen).drop(columns=['network']).to_string(index=False)}")
    table = pd.DataFrame(
        [(at, len(each), *strongest(each), explained(each, rows[at][0], 60),
          explained(each, rows[at][0], 15)) for at, each in enumerate(maps)],
        columns=["figure", "heads", "mass_1%", "same_1%", "explained_60", "explained_15"],
    )  # fmt: skip
    print(f"\n{table.to_string(index=False, float_format='{:.3f}'.format)}")
    print(table.iloc[:, 2:].agg(["mean", "min", "max"]).to_string(float_format="{:.3f}".format))
    print("Even attention has .010 on a hundredth, random heads share .010 of it.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    main(parser.parse_args().notebook)
