"""The pictures on the pages of an atlas: sheets of patches of many atoms, and whole images."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from crate_interp.circuits import Atlas
from crate_interp.circuits.atlases.excerpts import ENTIRE, TILE
from crate_interp.core.pictures import decoded

BLOCK = 64  # atoms in one file of pictures: a row for each, the largest value on the left


def write_sheets(pictures: Mapping[int, list[bytes]], columns: int, out: Path, layer: int) -> None:
    """Writes patches/L{layer}-{block}.webp, for 64 atoms each, a column for each rank.

    Atom a has row a % 64 of block a // 64.
    """
    (out / "patches").mkdir(exist_ok=True)
    for block in sorted({atom // BLOCK for atom in pictures}):
        rows = [atom for atom in pictures if atom // BLOCK == block]
        tall = (max(rows) % BLOCK + 1) * TILE
        sheet = np.full((tall, columns * TILE, 3), 128, dtype=np.uint8)
        for atom in rows:
            top = atom % BLOCK * TILE
            for place, data in enumerate(pictures[atom]):
                tile = np.asarray(decoded(data, "a tile").convert("RGB").resize((TILE, TILE)))
                sheet[top : top + TILE, place * TILE : (place + 1) * TILE] = tile
        name = f"L{int(layer)}-{int(block)}.webp"
        Image.fromarray(sheet).save(out / "patches" / name, "WEBP", quality=75, method=4)


def write_images(atlas: Atlas, out: Path) -> None:
    """Writes images/{sample}.webp, the images whose patches are shown."""
    tiles = atlas.table("tiles")
    entire = tiles[tiles["token"] == ENTIRE]
    if len(entire):
        (out / "images").mkdir(exist_ok=True)
    for sample, picture in zip(entire["sample"], entire["picture"], strict=True):
        decoded(picture, "an image")
        (out / "images" / f"{int(sample)}.webp").write_bytes(picture)
