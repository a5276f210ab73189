"""The pages of an atlas: an index, and for each layer the tokens at which each atom was largest."""

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crate_interp.circuits import Atlas
from crate_interp.files import write, write_text
from crate_interp.viz.page import fingerprints, render

SHOWN = 50  # atoms that the index names
Token = tuple[int, int]  # sample, position


def atlas_pages(atlas: Atlas, out: str | Path) -> Path:
    """Writes index.html, a layer-L.html for each layer and the atlas (Atlas.save) into a folder.

    Beside them lies atoms.csv, the atlas's main table. Returns the path of the index. The pages
    open from the disk. An image's patch is shown with the patches around it, in a box, and CLS as
    the entire image; a token with 12 tokens before and 4 after it. The pictures of an atom lie side
    by side in a file of patches/, which loads when the page is scrolled to it.

    Raises ValueError if the folder cannot be written.
    """
    out = atlas.save(out)
    atoms: Any = atlas.table()
    write_text(out / "atoms.csv", atoms.to_csv(index=False))
    excerpts = _excerpts(atlas)
    for layer, rows in atoms.groupby("layer"):
        shown = _shown(atlas, layer, excerpts, out)
        page = render(
            "atlas-layer.html",
            title=f"{_model_name(atlas)}: the atoms of layer {layer}",
            meta=atlas.meta,
            atoms=[_atom(row, shown.get(row["atom"], {})) for row in rows.to_dict("records")],
        )
        write_text(out / f"layer-{layer}.html", page)
    write_text(out / "index.html", _index(atlas))
    return out / "index.html"


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
        name = f"patches/L{layer}A{atom}.webp"
        (out / "patches").mkdir(exist_ok=True)
        write(out / name, lambda part, it=strip: it.save(part, "WEBP", quality=75, method=4))
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
    tiles = [np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")) for picture in pictures]
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
    atoms, layers, ablations = atlas.table(), atlas.layers(), atlas.table("ablations")
    rows = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in line]
        for line in layers.to_numpy(dtype=object)
    ]
    ablated = max(ablations["samples"].tolist())
    needed = atoms.sort_values("ablation", ascending=False, kind="stable").head(SHOWN)
    return render(
        "atlas-index.html",
        title=f"{_model_name(atlas)}: an atlas of its atoms",
        meta=atlas.meta,
        n_atoms=len(atoms),
        ablated=ablated,
        layers={"header": list(layers.columns), "rows": rows},
        needed=needed.to_dict("records") if ablated else [],
        sources=[("model", str(atlas.meta["model_digest"])), ("data", fingerprints(atlas.meta))],
    )


def _is_text(atlas: Atlas) -> bool:
    return atlas.meta["unit"] == "windows"


def _model_name(atlas: Atlas) -> str:
    return atlas.meta["model"] or "the model"
