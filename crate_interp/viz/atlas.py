"""The pages of an atlas: an index, a page per layer, and the patches or contexts in which each atom was largest."""

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import UInt8
from PIL import Image, ImageDraw
from tqdm.auto import tqdm

from crate_interp.circuits import Atlas
from crate_interp.circuits.atlases import names_of
from crate_interp.files import writable, write, write_text
from crate_interp.models.digest import model_digest
from crate_interp.models.display import displayable
from crate_interp.sweeps.stream import samples_of
from crate_interp.viz.page import facts, page, table, text

SHOWN = 50  # atoms that the index names
TILE = 32  # pixels of a cut-out patch with what surrounds it
_BEFORE, _AFTER = 12, 4  # tokens of a context
_STYLE = """<style>
article { border-top: 1px solid var(--line); padding: .4rem 0; content-visibility: auto; contain-intrinsic-size: auto 7rem; }
article h3 { font-size: 1rem; margin: 0; } article p { margin: .1rem 0; font-size: .85rem; overflow-wrap: anywhere; }
article img { image-rendering: pixelated; height: 64px; max-width: 100%; object-fit: contain; object-position: left; background: none; }
article:target { background: #fc03; } mark { border-radius: 3px; padding: 0 .1em; } nav a { margin-right: .7rem; }
article li { font: .8rem/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; } article ol { margin: .2rem 0; }
</style>"""
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
) -> dict[tuple[int, int], str]:
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
    shown: dict[tuple[int, int], str] = {}
    for (layer, atom), strip in tiles.items():
        name = f"patches/L{layer}A{atom}.webp"
        write(
            out / name,
            lambda part, strip=strip: Image.fromarray(strip).save(
                part, "WEBP", quality=75, method=4
            ),
        )
        label = f"where atom {atom} of layer {layer} was largest"
        size = f'width="{2 * strip.shape[1]}" height="{2 * TILE}"'
        shown[layer, atom] = f'<img loading="lazy" src="{name}" alt="{label}" {size}>'
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
) -> dict[tuple[int, int], str]:
    """A list of the contexts of each atom, the token it was largest at marked."""
    names = names_of(model)
    names = (
        [f" {name}" for name in names] if all(name.isdigit() for name in names) else names
    )  # no tokenizer: ids
    lines: dict[tuple[int, int], list[str]] = {
        key: [""] * len(rows) for key, rows in places.items()
    }
    for sample, uses in tqdm(
        sorted(_by_sample(places).items()), desc="contexts", disable=not progress
    ):
        tokens = samples.read(sample, sample + 1)[0].tolist()
        for key, rank, at in uses:
            before = "".join(names[token] for token in tokens[max(0, at - _BEFORE) : at])
            after = "".join(names[token] for token in tokens[at + 1 : at + 1 + _AFTER])
            said = (_visible(words) for words in (before, names[tokens[at]], after))
            lines[key][rank] = "{}<mark>{}</mark>{}".format(*said)
    return {
        key: f"<ol>{''.join(f'<li>{line}</li>' for line in rows)}</ol>"
        for key, rows in lines.items()
        if rows
    }


def _visible(words: str) -> str:
    """Escaped text on one line."""
    return html.escape(words.replace("\r", "").replace("\n", "\u21b5").replace("\t", "\u2192"))


def _layer_page(atlas: Atlas, layer: int, shown: dict[tuple[int, int], str]) -> str:
    rows: Any = atlas.table[atlas.table["layer"] == layer]
    title = f"{_model_name(atlas)}: the atoms of layer {layer}"
    body = [_STYLE, f"<h1>{text(title)}</h1>", _links(atlas)]
    body += [
        _article(row, shown.get((layer, row.atom), "<p>It never fires on this data.</p>"))
        for row in rows.itertuples()
    ]
    return page(title, body)


def _article(row: Any, pictures: str) -> str:
    ablation = "" if pd.isna(row.ablation) else f", ablation {row.ablation:.2g} nats"
    state = f", {row.state}" if row.state else ""
    nearest = re.sub(
        r"L(\d+)A(\d+)",
        lambda found: f'<a href="layer-{found[1]}.html#a{found[2]}">{found[0]}</a>',
        html.escape(row.nearest),
    )
    told = f"fires in {row.firing_rate:.1%} of tokens, largest {row.max:.3g}{ablation}{state}"
    said = f"raises {html.escape(row.raises)}; lowers {html.escape(row.lowers)}"
    head = f'<article id="a{row.atom}"><h3>atom {row.atom}</h3>'
    return f"{head}<p>{told}</p>{pictures}<p>{said}</p><p>nearest: {nearest}</p></article>"


def _index(atlas: Atlas) -> str:
    meta = atlas.meta
    title = f"{_model_name(atlas)}: an atlas of its atoms"
    unit = "windows" if meta["kind"] == "text" else "images"
    words = (
        f"{len(atlas.table):,} atoms of {meta['n_layers']} layers on {meta['n_samples']:,} {unit}. For each atom: the tokens in which "
        "its code was largest; how often it fires; the logits that its direction moves most on the direct path (a logit lens, "
        "which later layers may re-code); the atoms of other layers with the largest cosine"
    )
    moved = f"; how far the model's answers move when it is set to 0 (mean Kullback-Leibler divergence over {meta['ablate']} {unit})"
    words += f"{moved if meta['ablate'] else ''}."
    header, lines = _most_needed(atlas)
    layers: Any = atlas.atoms.layers()
    summary = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in line]
        for line in layers.to_numpy(dtype=object)
    ]
    body = [_STYLE, f"<h1>{text(title)}</h1>", f"<p>{text(words)}</p>", _links(atlas)]
    body += ["<h2>Layers</h2>", table(list(layers.columns), summary)]
    if meta["ablate"]:
        body += [
            f"<h2>The {len(lines)} atoms that answers depend on most</h2>",
            _linked(table(header, lines)),
        ]
    pairs = [("model", str(meta["model_digest"])), ("data", str(meta["data_fingerprint"]))]
    return page(title, [*body, "<h2>Where the numbers come from</h2>", facts(pairs)])


def _most_needed(atlas: Atlas) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the atoms with the largest ablation effect."""
    table: Any = atlas.table
    rows: Any = table.sort_values("ablation", ascending=False, kind="stable").head(SHOWN)
    lines = []
    for row in rows.itertuples():
        ablation = "-" if pd.isna(row.ablation) else f"{row.ablation:.3g}"
        lines.append(
            [
                str(row.layer),
                str(row.atom),
                f"{row.firing_rate:.1%}",
                f"{row.max:.3g}",
                ablation,
                row.raises,
            ]
        )
    return ["layer", "atom", "fires", "largest", "ablation", "raises"], lines


def _linked(rows: str) -> str:
    """Layer and atom of each row as a link to the atom."""
    return re.sub(
        r"<tr><td>(\d+)</td><td>(\d+)</td>",
        r'<tr><td>\1</td><td><a href="layer-\1.html#a\2">\2</a></td>',
        rows,
    )


def _links(atlas: Atlas) -> str:
    layers = "".join(
        f'<a href="layer-{layer}.html">layer {layer}</a>' for layer in range(atlas.meta["n_layers"])
    )
    return f'<nav><a href="index.html">index</a>{layers}</nav>'


def _model_name(atlas: Atlas) -> str:
    return str(atlas.meta["model"] or "the model")
