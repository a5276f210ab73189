"""The pages of an atlas: an index, a page per layer, and the patches or contexts in which each atom was largest."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw
from tqdm.auto import tqdm

from crate_interp.circuits import Atlas
from crate_interp.circuits.atlases import names_of
from crate_interp.files import writable, write, write_text
from crate_interp.models.digest import model_digest
from crate_interp.models.display import displayable
from crate_interp.sweeps.stream import samples_of
from crate_interp.viz.page import render

SHOWN = 50  # atoms that the index names
TILE = 32  # pixels of a cut-out patch with what surrounds it
_BEFORE, _AFTER = 12, 4  # tokens of a context
Places = dict[
    tuple[int, int], list[tuple[int, int, float]]
]  # (layer, atom) -> (sample, token, value), largest first


def atlas_pages(
    atlas: Atlas, model: Any, data: Any, out: str | Path, *, progress: bool = True
) -> Path:
    """Writes index.html, layer-L.html for each layer, atoms.csv and the cut-out patches into `out`; returns the index's path.

    model, data: what `ci.atlas` was given; samples are read again, batch by batch, to cut out what is shown. The pages open from
    the disk; pictures load as they are scrolled to. An image's patch is shown with the patches around it, in a box, and CLS as
    the whole image; a token with 12 tokens before and 4 after it. Raises ValueError for another model or data, and where `out`
    cannot be written.
    """
    out = writable(out)
    samples = samples_of(model, data, atlas.meta["n_samples"])
    for what, own, given in (
        ("model", atlas.meta["model_digest"], model_digest(model)),
        ("data", atlas.meta["data_fingerprint"], samples.fingerprint),
    ):
        if own != given:
            raise ValueError(
                f"the atlas is of another {what}: give the {what} that ci.atlas was given."
            )
    places = _places(atlas)
    if model.cfg.kind == "text":
        shown = _contexts(places, model, samples, progress)
    else:
        (out / "patches").mkdir(exist_ok=True)
        shown = _strips(places, model, samples, out, progress)
    for layer in range(atlas.meta["n_layers"]):
        write_text(out / f"layer-{layer}.html", _layer_page(atlas, layer, shown))
    write_text(out / "atoms.csv", atlas.table.to_csv(index=False))
    write_text(out / "index.html", _index(atlas))
    return out / "index.html"


def _places(atlas: Atlas) -> Places:
    """Where each atom was largest, of the tokens in which it was on."""
    found: Places = {}
    for layer, sums in atlas.atoms.sums.items():
        first = atlas.meta["samples"][0][0]
        for atom in range(sums.top_values.shape[1]):
            rows = zip(
                sums.top_samples[:, atom],
                sums.top_tokens[:, atom],
                sums.top_values[:, atom],
                strict=True,
            )
            found[layer, atom] = [(int(s) - first, int(t), float(v)) for s, t, v in rows if v > 0]
    return found


def _by_sample(places: Places) -> dict[int, list[tuple[tuple[int, int], int, int]]]:
    """sample -> what it is needed for: (layer, atom), rank, token."""
    needed: dict[int, list[tuple[tuple[int, int], int, int]]] = {}
    for key, rows in places.items():
        for rank, (sample, token, _) in enumerate(rows):
            needed.setdefault(sample, []).append((key, rank, token))
    return needed


def _strips(
    places: Places, model: Any, samples: Any, out: Path, progress: bool
) -> dict[tuple[int, int], Any]:
    """A picture of the patches of each atom side by side, written as a file; its place in a page."""
    tiles: dict[tuple[int, int], UInt8[np.ndarray, "height wide 3"]] = {
        key: np.full((TILE, TILE * len(rows), 3), 255, dtype=np.uint8)
        for key, rows in places.items()
        if rows
    }
    for sample, uses in tqdm(
        sorted(_by_sample(places).items()), desc="patches", disable=not progress
    ):
        image = samples.read(sample, sample + 1)[0]
        picture = (displayable(image, model.cfg) * 255).round().astype(np.uint8)
        picture = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=-1)
        cut: dict[int, np.ndarray] = {}
        for key, rank, token in uses:
            if token not in cut:
                cut[token] = _tile(picture, token, model.cfg.patch_size)
            tiles[key][:, rank * TILE : (rank + 1) * TILE - 1] = cut[token][
                :, :-1
            ]  # a line between them
    shown: dict[tuple[int, int], Any] = {}
    for (layer, atom), strip in tiles.items():
        name = f"patches/L{layer}A{atom}.webp"
        write(
            out / name,
            lambda part, strip=strip: Image.fromarray(strip).save(
                part, "WEBP", quality=75, method=4
            ),
        )
        size = {"width": strip.shape[1], "height": strip.shape[0]}
        shown[layer, atom] = {"strip": {"file": name, **size}}
    return shown


def _tile(
    picture: UInt8[np.ndarray, "height width 3"], token: int, patch: tuple[int, int]
) -> UInt8[np.ndarray, "side side 3"]:
    """A patch in a box and one patch on each side of it; the whole picture for CLS."""
    if token == 0:
        return np.asarray(Image.fromarray(picture).resize((TILE, TILE), Image.Resampling.BILINEAR))
    columns = picture.shape[1] // patch[1]
    top, left = (token - 1) // columns * patch[0], (token - 1) % columns * patch[1]
    padded = np.pad(
        picture, ((patch[0], patch[0]), (patch[1], patch[1]), (0, 0)), constant_values=128
    )
    around = padded[top : top + 3 * patch[0], left : left + 3 * patch[1]]
    enlarge = Image.Resampling.NEAREST if around.shape[0] < TILE else Image.Resampling.BILINEAR
    tile = Image.fromarray(around).resize((TILE, TILE), enlarge)
    edge = TILE // 3
    ImageDraw.Draw(tile).rectangle(
        (edge - 1, edge - 1, TILE - edge, TILE - edge), outline=(255, 120, 0)
    )
    return np.asarray(tile)


def _contexts(
    places: Places, model: Any, samples: Any, progress: bool
) -> dict[tuple[int, int], Any]:
    """A list of the contexts of each atom, the token it was largest at marked."""
    names = names_of(model)
    names = (
        [f" {name}" for name in names] if all(name.isdigit() for name in names) else names
    )  # no tokenizer: ids
    lines: dict[tuple[int, int], list[Any]] = {
        key: [()] * len(rows) for key, rows in places.items()
    }
    for sample, uses in tqdm(
        sorted(_by_sample(places).items()), desc="contexts", disable=not progress
    ):
        tokens = samples.read(sample, sample + 1)[0].tolist()
        for key, rank, at in uses:
            before = "".join(names[token] for token in tokens[max(0, at - _BEFORE) : at])
            after = "".join(names[token] for token in tokens[at + 1 : at + 1 + _AFTER])
            lines[key][rank] = [_visible(words) for words in (before, names[tokens[at]], after)]
    return {key: {"contexts": rows} for key, rows in lines.items()}


def _visible(words: str) -> str:
    """Returns text on one line."""
    return words.replace("\r", "").replace("\n", "\u21b5").replace("\t", "\u2192")


def _layer_page(atlas: Atlas, layer: int, shown: dict[tuple[int, int], Any]) -> str:
    rows: Any = atlas.table[atlas.table["layer"] == layer]
    return render(
        "atlas-layer.html",
        title=f"{_model_name(atlas)}: the atoms of layer {layer}",
        meta=atlas.meta,
        atoms=[_atom(row, shown.get((layer, row["atom"]), {})) for row in rows.to_dict("records")],
    )


def _atom(row: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Returns what the page shows of an atom: its row, its pictures or contexts, its neighbours."""
    neighbours = re.findall(r"L(\d+)A(\d+) (-?[\d.]+)", row["nearest"])
    return {"strip": None, "contexts": []} | row | shown | {"neighbours": neighbours}


def _index(atlas: Atlas) -> str:
    meta = atlas.meta
    layers: Any = atlas.atoms.layers()
    rows = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in line]
        for line in layers.to_numpy(dtype=object)
    ]
    needed = atlas.table.sort_values("ablation", ascending=False, kind="stable").head(SHOWN)
    return render(
        "atlas-index.html",
        title=f"{_model_name(atlas)}: an atlas of its atoms",
        meta=meta,
        unit="windows" if meta["kind"] == "text" else "images",
        n_atoms=len(atlas.table),
        layers={"header": list(layers.columns), "rows": rows},
        needed=needed.to_dict("records") if meta["ablate"] else [],
        sources=[("model", str(meta["model_digest"])), ("data", str(meta["data_fingerprint"]))],
    )


def _model_name(atlas: Atlas) -> str:
    return str(atlas.meta["model"] or "the model")
