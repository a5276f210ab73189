"""The pages of an atlas: an index, and for each layer the tokens at which each atom was largest."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crate_interp.circuits import Atlas
from crate_interp.circuits.effects import LOSSES
from crate_interp.files import write_text
from crate_interp.pictures import decoded
from crate_interp.viz.page import fingerprints, render
from crate_interp.words import cell, plain

SHOWN = 50  # atoms that were set to 0 and that the index names
Token = tuple[int, int]  # sample, position


def atlas_pages(atlas: Atlas, out: str | Path) -> Path:
    """Writes index.html, a layer-L.html for each layer and the atlas (Atlas.save) into a folder.

    Beside them lies atoms.csv, the atlas's main table. Returns the path of the index. The pages
    open from the disk. A page of a layer begins with the atoms of the largest first-order effect.
    An image's patch is shown with the patches around it, in a box, and CLS as the entire image; a
    token with 12 tokens before and 4 after it. The pictures of an atom lie side by side in a file
    of patches/, which loads when the page is scrolled to it.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with atlas.saved_with_pages(out) as stage:
        _write(atlas, stage)
    return Path(out) / "index.html"


def _write(atlas: Atlas, out: Path) -> None:
    """Writes the pages, the strips of patches and the table of atoms."""
    atoms: Any = atlas.table()
    write_text(out / "atoms.csv", atoms.map(cell).to_csv(index=False))
    excerpts = _excerpts(atlas)
    for layer, rows in atoms.groupby("layer"):
        rows = rows.sort_values("first_order", key=abs, ascending=False, kind="stable")
        shown = _shown(atlas, layer, excerpts, out)
        page = render(
            "atlas-layer.html",
            title=f"{_model_name(atlas)}: the atoms of layer {layer}",
            meta=atlas.meta,
            logits=_logits(atlas),
            atoms=[_atom(row, shown.get(row["atom"], {})) for row in rows.to_dict("records")],
        )
        write_text(out / f"layer-{int(layer)}.html", page)
    write_text(out / "index.html", _index(atlas))


def _excerpts(atlas: Atlas) -> dict[Token, dict[str, Any]]:
    """Returns the context of each token of a text, or the tile of each patch of an image."""
    rows = atlas.table("contexts" if _is_text(atlas) else "tiles").to_dict("records")
    return {(row["sample"], row["token"]): row for row in rows}


def _shown(
    atlas: Atlas, layer: int, excerpts: Mapping[Token, Any], out: Path
) -> dict[int, dict[str, Any]]:
    """Returns what to show of each atom of a layer; strips of tiles are written as files."""
    shown: dict[int, dict[str, Any]] = {}
    for atom, tokens in _places(atlas, layer):
        rows = [excerpts[token] for token in tokens]
        if _is_text(atlas):
            shown[atom] = {"contexts": [_on_one_line(row) for row in rows]}
            continue
        strip = _strip([row["picture"] for row in rows])
        name = f"patches/L{int(layer)}A{int(atom)}.webp"
        (out / "patches").mkdir(exist_ok=True)
        strip.save(out / name, "WEBP", quality=75, method=4)
        shown[atom] = {"strip": {"file": name, "width": strip.width, "height": strip.height}}
    return shown


def _places(atlas: Atlas, layer: int) -> Iterator[tuple[int, list[Token]]]:
    """Yields each atom of a layer with the tokens at which it was largest, the largest first."""
    top: Any = atlas.table("top")
    rows = top[top["layer"] == layer].sort_values(["atom", "rank"])
    for atom, own in rows.groupby("atom"):
        yield atom, list(zip(own["sample"].tolist(), own["token"].tolist(), strict=True))


def _strip(pictures: list[bytes]) -> Image.Image:
    """Returns square pictures side by side, with a white line between them."""
    tiles = [np.asarray(decoded(picture, "a tile").convert("RGB")) for picture in pictures]
    side = len(tiles[0])
    strip = np.full((side, side * len(tiles), 3), 255, dtype=np.uint8)
    for place, tile in enumerate(tiles):
        strip[:, place * side : (place + 1) * side - 1] = tile[:, :-1]
    return Image.fromarray(strip)


def _on_one_line(context: Mapping[str, Any]) -> list[str]:
    """Returns what comes before a token, the token, and what comes after it, on one line."""
    signs = str.maketrans({"\r": "", "\n": "\u21b5", "\t": "\u2192"})
    return [context[part].translate(signs) for part in ("before", "at", "after")]


def _atom(row: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Returns what the page shows of an atom: its row, its pictures or contexts, its neighbours."""
    neighbours = re.findall(r"L(\d+)A(\d+) (-?[\d.]+)", row["nearest"])
    return {"strip": None, "contexts": []} | row | shown | {"neighbours": neighbours}


def _index(atlas: Atlas) -> str:
    atoms: Any = atlas.table()
    tried = atoms[atoms["ablated"] > 0]
    needed = tried.sort_values("ablation", key=abs, ascending=False, kind="stable").head(SHOWN)
    return render(
        "atlas-index.html",
        title=f"{_model_name(atlas)}: an atlas of its atoms",
        meta=atlas.meta,
        headline=atlas.headline(),
        loss=LOSSES[atlas.meta["loss"]],
        logits=_logits(atlas),
        counts={kind: atlas.clear(kind) for kind in ("first_order", "ablation")},
        ablated=int(atoms["ablated"].max()),
        layers=_layers(atlas),
        needed=needed.to_dict("records"),
        sources=[("model", str(atlas.meta["model_digest"])), ("data", fingerprints(atlas.meta))],
    )


def _layers(atlas: Atlas) -> dict[str, list]:
    """Returns the table of layers, with the agreement of both effects where it was measured."""
    layers: Any = atlas.layers()
    agreement: Any = atlas.table("agreement")
    if len(agreement):
        layers = layers.merge(agreement[["layer", "rank_correlation"]], on="layer", how="left")
    rows = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in line]
        for line in layers.to_numpy(dtype=object)
    ]
    return {"header": [name.replace("_", " ") for name in layers.columns], "rows": rows}


def _logits(atlas: Atlas) -> str:
    """Returns how the logits were found that an atom raises or lowers, or "" if they were not."""
    measured: Any = atlas.table("logits")
    if len(measured):
        each = "mean over the tokens of a window, " if _is_text(atlas) else ""
        return (
            "the logits that it raises and lowers to first order, less the mean of all logits, "
            f"{each}with half the width of a 95 % interval (of "
            f"{measured['logit'].nunique()} logits, on {measured['n'].max():,} "
            f"{atlas.meta['unit']}; only intervals without 0)"
        )
    if not any(atlas.table("directions")["raises"].tolist()):
        return ""
    return (
        "the logits that its direction moves most on the direct path, for a code of 1 and a final "
        "norm of scale 1 (a logit lens: what later layers make of it is left out)"
    )


def _is_text(atlas: Atlas) -> bool:
    return atlas.meta["unit"] == "windows"


def _model_name(atlas: Atlas) -> str:
    return plain(atlas.meta["model"] or "the model")
