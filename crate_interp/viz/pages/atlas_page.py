"""The pages of an atlas: an index of all atoms, and for each layer a page of its atoms' inputs."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crate_interp.circuits import Atlas
from crate_interp.circuits.atlases.atom_effects import LOSSES
from crate_interp.circuits.atlases.excerpts import ENTIRE, TILE
from crate_interp.core.files import write_text
from crate_interp.core.pictures import decoded
from crate_interp.core.safe_text import cell, visible
from crate_interp.results.result import model_name
from crate_interp.stats.significance import LEVEL, signs
from crate_interp.viz.pages.page import fingerprints, render

SHOWN = 60  # atoms that the index shows at once
_OPEN = 32  # atoms of a layer that are shown without a click; all would make the page too long
_ON_INDEX = {"images": 3, "windows": 1}  # pictures or contexts of each atom on the index
_LINE_ENDS = str.maketrans({"\r": "", "\n": "\u21b5", "\t": "\u2192"})
Token = tuple[int, int]  # sample, position
BLOCK = 64  # atoms in one file of pictures; each has a row, with its largest value on the left


def atlas_pages(atlas: Atlas, out: str | Path) -> Path:
    """Writes index.html, a layer-L.html for each layer and the atlas (Atlas.save) into a folder.

    atoms.csv holds the atlas's main table. Returns the path of the index, which lists all atoms
    with their pictures and can be sorted and filtered. Atoms whose effect on the loss was measured
    exactly come first, in order of this effect; then the other atoms, in order of their first-order
    effect. An image's patch is shown boxed, with the patches around it; CLS is shown as the entire
    image, with a note. A token of a text is shown with the 12 tokens before it and 4 after it. Each
    file in patches/ has the pictures of 64 atoms; images/ has the entire images. The pages can be
    opened from the disk.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with atlas.saved_with_pages(out) as stage:
        _write(atlas, stage)
    return Path(out) / "index.html"


def _write(atlas: Atlas, out: Path) -> None:
    """Writes the pages, the sheets of patches and the table of atoms."""
    atoms: Any = atlas.table()
    write_text(out / "atoms.csv", atoms.map(cell).to_csv(index=False))
    excerpts = _excerpts(atlas)
    if not _is_text(atlas):
        write_images(atlas, out)
    listed = []
    for layer, rows in atoms.groupby("layer"):
        shown = _shown(atlas, layer, excerpts, out)
        records = [_atom(row, shown.get(row["atom"], [])) for row in rows.to_dict("records")]
        records.sort(key=_order)
        listed += records
        page = render(
            "atlas-layer.html",
            title=f"{model_name(atlas.meta)}: the atoms of layer {layer}",
            layer=layer,
            meta=atlas.meta,
            is_text=_is_text(atlas),
            block=BLOCK,
            columns=atlas.meta["settings"]["top"],
            finding=atlas.largest(int(layer)),
            logits=_logits(atlas),
            grid=_grid(atlas),
            atoms=records,
            open=_OPEN,
        )
        write_text(out / f"layer-{int(layer)}.html", page)
    write_text(out / "index.html", _index(atlas, sorted(listed, key=_order)))


def _order(atom: Mapping[str, Any]) -> tuple[bool, float, int, int]:
    """Returns an atom's sort key: exact effects first, and then the larger effect first."""
    return not atom["exact"], -abs(atom["effect"]), atom["layer"], atom["atom"]


def _excerpts(atlas: Atlas) -> dict[Token, dict[str, Any]]:
    """Returns the context of each token of a text, or the tile of each patch of an image."""
    rows = atlas.table("contexts" if _is_text(atlas) else "tiles").to_dict("records")
    return {(row["sample"], row["token"]): row for row in rows}


def _shown(
    atlas: Atlas, layer: int, excerpts: Mapping[Token, Any], out: Path
) -> dict[int, list[dict[str, Any]]]:
    """Returns the tokens to show for each atom of a layer, and writes sheets of tiles as files."""
    shown: dict[int, list[dict[str, Any]]] = {}
    pictures: dict[int, list[bytes]] = {}
    for atom, tokens in _places(atlas, layer):
        most = tokens[0]["value"]
        shown[atom] = [token | {"share": token["value"] / most} for token in tokens]
        rows = [excerpts[token["sample"], token["token"]] for token in tokens]
        if _is_text(atlas):
            for token, row in zip(shown[atom], rows, strict=True):
                parts = (row[part].translate(_LINE_ENDS) for part in ("before", "at", "after"))
                token["text"] = list(parts)
        else:
            pictures[atom] = [row["picture"] for row in rows]
    if pictures:
        write_sheets(pictures, atlas.meta["settings"]["top"], out, layer)
    return shown


def _places(atlas: Atlas, layer: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields each atom of a layer with its top tokens, the one with the largest value first."""
    top: Any = atlas.table("top")
    rows = top[top["layer"] == layer].sort_values(["atom", "rank"])
    for atom, own in rows.groupby("atom"):
        yield atom, own[["sample", "token", "value"]].to_dict("records")


def _atom(row: dict[str, Any], tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the page's data for an atom: its row, its effect, its tokens, its neighbours."""
    exact = row["ablated"] > 0
    kind = "ablation" if exact else "first_order"
    effect, low, high = (row[f"{kind}{end}"] for end in ("", "_low", "_high"))
    return row | {
        "name": f"L{row['layer']}A{row['atom']}",
        "exact": bool(exact),
        "effect": effect,
        "low": low,
        "high": high,
        "clear": bool(signs(low, high)),
        "tokens": tokens,
        "on_cls": sum(token["token"] == 0 for token in tokens),
        "neighbours": re.findall(r"L(\d+)A(\d+) (-?[\d.]+)", row["nearest"]),
    }


def _index(atlas: Atlas, atoms: list[dict[str, Any]]) -> str:
    counts = {kind: atlas.clear(kind) for kind in ("first_order", "ablation")}
    table: Any = atlas.table()
    return render(
        "atlas-index.html",
        title=f"{model_name(atlas.meta)}: an atlas of its atoms",
        meta=atlas.meta,
        is_text=_is_text(atlas),
        block=BLOCK,
        finding=_finding(atlas, counts),
        largest=atlas.largest(),
        loss=LOSSES[atlas.meta["loss"]],
        logits=_logits(atlas),
        counts=counts,
        ablated=int(table["ablated"].max()),
        layers=_layers(atlas),
        columns=atlas.meta["settings"]["top"],
        atoms=[_listed(atom, _ON_INDEX[atlas.meta["unit"]]) for atom in atoms],
        shown=SHOWN,
        sources=[("model", str(atlas.meta["model_digest"])), ("data", fingerprints(atlas.meta))],
    )


def _finding(atlas: Atlas, counts: Mapping[str, tuple[int, int]]) -> str:
    """Returns a sentence on how many atoms change the loss, and how many would by chance."""
    tried = counts["ablation"][1] > 0
    clear, every = counts["ablation" if tried else "first_order"]
    what = "atoms that were set to 0" if tried else "atoms"
    how = "" if tried else ", to first order"
    return (
        f"{clear:,} of {every:,} {what} change the loss{how}: the 95 % interval of the change "
        f"excludes 0. By chance, {LEVEL * every:,.0f} would."
    )


def _listed(atom: Mapping[str, Any], count: int) -> list[Any]:
    """Returns an atom as a list, the form that the script of the index reads."""
    tokens = atom["tokens"][:count]
    texts = [[visible(part) for part in token["text"]] for token in tokens if "text" in token]
    numbers = [_short(atom[name]) for name in ("firing_rate", "effect", "low", "high")]
    logits = [visible(atom[name]) for name in ("raises", "lowers")]
    on_cls = [int(token["token"] == 0) for token in tokens]
    start = [atom["layer"], atom["atom"], *numbers, int(atom["exact"]), atom["state"]]
    return [*start, *logits, on_cls, texts]


def _short(value: float) -> float | None:
    # intervals over very few samples have infinite ends, and JSON has no infinity and no NaN
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _layers(atlas: Atlas) -> dict[str, list]:
    """Returns the table of layers, with the agreement of the two effects if it was measured."""
    layers: Any = atlas.layers()
    agreement: Any = atlas.table("agreement")
    if len(agreement):
        layers = layers.merge(agreement[["layer", "rank_correlation"]], on="layer", how="left")
    rows = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in line]
        for line in layers.to_numpy(dtype=object)
    ]
    return {"header": [name.replace("_", " ") for name in layers.columns], "rows": rows}


def _grid(atlas: Atlas) -> list[int]:
    """Returns the rows and columns of an image's patches, or zeros if they are unknown."""
    config = atlas.meta["config"]
    if _is_text(atlas) or config.get("interpolate_pos"):
        return [0, 0]
    sides = zip(config["image_size"], config["patch_size"], strict=True)
    return [side // patch for side, patch in sides]


def _logits(atlas: Atlas) -> str:
    """Returns words on how the logits that an atom moves were found; "" without logits."""
    measured: Any = atlas.table("logits")
    if len(measured):
        each = "mean over the tokens of a window, " if _is_text(atlas) else ""
        return (
            "the logits that the atom raises and lowers to first order, relative to the mean of "
            f"all logits, {each}with half the width of a 95 % interval (measured for "
            f"{measured['logit'].nunique()} logits on {measured['n'].max():,} "
            f"{atlas.meta['unit']}; shown if the interval excludes 0)"
        )
    if not any(atlas.table("directions")["raises"].tolist()):
        return ""
    return (
        "the logits that the atom's direction changes most on the direct path, for a code of 1 "
        "and a final norm of scale 1 (a logit lens: what later layers do with it is left out)"
    )


def _is_text(atlas: Atlas) -> bool:
    return atlas.meta["unit"] == "windows"


def write_sheets(pictures: Mapping[int, list[bytes]], columns: int, out: Path, layer: int) -> None:
    """Writes patches/L{layer}-{block}.webp: a row for each of 64 atoms, a column for each rank.

    Atom a is in row a % 64 of block a // 64.
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
