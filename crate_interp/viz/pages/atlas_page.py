"""The pages of an atlas: an index of all atoms, and for each layer a page of its atoms' inputs."""

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from crate_interp.circuits import Atlas
from crate_interp.circuits.atlases.atom_effects import LOSSES
from crate_interp.core.files import write_text
from crate_interp.core.pictures import decoded
from crate_interp.core.safe_text import cell, visible
from crate_interp.results.result import model_name
from crate_interp.stats.significance import LEVEL
from crate_interp.sweeps.atom_sums import OCTAVES, histograms
from crate_interp.viz.pages.page import fingerprints, render

SHOWN = 60  # atoms that a page shows at once
_ON_INDEX = {"images": 3, "windows": 1}  # patches or contexts of each atom on the index
_LINE_ENDS = str.maketrans({"\r": "", "\n": "\u21b5", "\t": "\u2192"})
Token = tuple[int, int]  # sample, position


def atlas_pages(atlas: Atlas, out: str | Path) -> Path:
    """Writes index.html, a layer-L.html for each layer and the atlas (Atlas.save) into a folder.

    atoms.csv holds the atlas's main table. Returns the path of the index, which lists all atoms
    with their patches and can be sorted and filtered. The atom that the headline names comes first.
    Then come atoms whose effect on the loss was measured exactly, in order of this effect, and the
    other atoms, in order of their first-order effect; atoms that are on at most tokens come last.
    An image's patch is shown boxed, with the patches around it; CLS is shown as the entire image,
    with a note. A token of a text is shown with the 12 tokens before it and 4 after it. The page of
    a layer holds its first 60 atoms; it reads the others from layers/layer-L.js when they are asked
    for. images/ has the images that patches are cut from. The pages can be opened from the disk.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with atlas.saved_with_pages(out) as stage:
        _write(atlas, stage)
    return Path(out) / "index.html"


def _write(atlas: Atlas, out: Path) -> None:
    """Writes the pages, the images and the table of atoms."""
    atoms: Any = atlas.table()
    write_text(out / "atoms.csv", atoms.map(cell).to_csv(index=False, float_format="%.4g"))
    _write_images(atlas, out)
    contexts, listed, counts = _contexts(atlas), [], histograms(atlas.table("sums"))
    (out / "layers").mkdir(exist_ok=True)
    for layer, rows in atoms.groupby("layer"):
        shown = _shown(atlas, layer, contexts)
        records = [_atom(row, shown.get(row["atom"], [])) for row in rows.to_dict("records")]
        records.sort(key=partial(_order, lead=atlas.lead(int(layer))))
        listed += records
        cards = [_carried(record, counts.get((layer, record["atom"]), [])) for record in records]
        page = render(
            "atlas-layer.html",
            title=f"{model_name(atlas.meta)}: the atoms of layer {layer}",
            layer=layer,
            meta=atlas.meta,
            is_text=_is_text(atlas),
            finding=atlas.largest(int(layer)),
            logits=_logits(atlas),
            data=_data(atlas) | {"layer": layer, "atoms": cards[:SHOWN], "count": len(cards)},
        )
        write_text(out / f"layer-{int(layer)}.html", page)
        # a page opened from the disk may not read a file of JSON, but may run a script
        rest = json.dumps(cards[SHOWN:], ensure_ascii=False, separators=(",", ":"))
        write_text(out / "layers" / f"layer-{int(layer)}.js", f"more({rest});")
    write_text(
        out / "index.html", _index(atlas, sorted(listed, key=partial(_order, lead=atlas.lead())))
    )


def _order(
    atom: Mapping[str, Any], lead: tuple[int, int]
) -> tuple[bool, bool, bool, float, int, int]:
    """Returns an atom's sort key: the lead first, dense atoms last, exact and large effects first.

    An atom that is on at most tokens may have a large effect, but its tokens explain nothing.
    """
    place = atom["layer"], atom["atom"]
    return place != lead, atom["state"] == "dense", not atom["exact"], -abs(atom["effect"]), *place


def _contexts(atlas: Atlas) -> dict[Token, list[str]]:
    """Returns what surrounds each token of a text: the text before, at and after it."""
    rows = atlas.table("contexts").to_dict("records")
    parts = ("before", "at", "after")
    return {
        (row["sample"], row["token"]): [row[part].translate(_LINE_ENDS) for part in parts]
        for row in rows
    }


def _shown(
    atlas: Atlas, layer: int, contexts: Mapping[Token, list[str]]
) -> dict[int, list[dict[str, Any]]]:
    """Returns the tokens to show for each atom of a layer, those with the largest values first."""
    top: Any = atlas.table("top")
    rows = top[top["layer"] == layer].sort_values(["atom", "rank"])
    shown: dict[int, list[dict[str, Any]]] = {}
    for row in rows[["atom", "sample", "token", "value"]].to_dict("records"):
        text = contexts[row["sample"], row["token"]] if _is_text(atlas) else []
        shown.setdefault(row["atom"], []).append(row | {"text": text})
    return shown


def _atom(row: dict[str, Any], tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the page's data for an atom: its row, its effect, its tokens, its neighbours."""
    exact = row["ablated"] > 0
    kind = "ablation" if exact else "first_order"
    effect, low, high = (row[f"{kind}{end}"] for end in ("", "_low", "_high"))
    return row | {
        "exact": bool(exact),
        "effect": effect,
        "low": low,
        "high": high,
        "tokens": tokens,
        "neighbours": re.findall(r"L(\d+)A(\d+) (-?[\d.]+)", row["nearest"]),
    }


def _carried(atom: Mapping[str, Any], counts: list[int]) -> list[Any]:
    """Returns an atom as a list, the form that the script of a layer reads.

    counts: at how many tokens its value lies in each octave; the list has their heights, from 0 to
    9 and in proportion to the largest, as one text.
    """
    most = max(counts, default=0) or 1
    heights = "".join(str(-(-9 * count // most)) for count in counts)
    names = ("firing_rate", "effect", "low", "high", "first_order")
    near = [[int(layer), int(other), float(cosine)] for layer, other, cosine in atom["neighbours"]]
    tokens = [
        [token["sample"], token["token"], _short(token["value"]), *map(visible, token["text"])]
        for token in atom["tokens"]
    ]
    logits = [visible(atom[name]) for name in ("raises", "lowers")]
    numbers = [_short(atom[name]) for name in names]
    return [atom["atom"], *numbers, atom["ablated"], atom["state"], *logits, near, tokens, heights]


def _data(atlas: Atlas) -> dict[str, Any]:
    """Returns what every page's script needs: the form of the data, and the grid of patches."""
    images: Any = atlas.table("images")
    grid = images[["rows", "columns"]].iloc[0].tolist() if len(images) else [0, 0]
    facts = {"text": _is_text(atlas), "unit": atlas.meta["unit"], "grid": grid}
    return facts | {"shown": SHOWN, "octave": OCTAVES[0]}


def _index(atlas: Atlas, atoms: list[dict[str, Any]]) -> str:
    counts = {kind: atlas.clear(kind) for kind in ("first_order", "ablation")}
    table: Any = atlas.table()
    listed = [_listed(atom, _ON_INDEX[atlas.meta["unit"]]) for atom in atoms]
    return render(
        "atlas-index.html",
        title=f"{model_name(atlas.meta)}: an atlas of its atoms",
        meta=atlas.meta,
        is_text=_is_text(atlas),
        finding=_finding(atlas, counts),
        largest=atlas.largest(),
        loss=LOSSES[atlas.meta["loss"]],
        logits=_logits(atlas),
        counts=counts,
        ablated=int(table["ablated"].max()),
        layers=_layers(atlas),
        data=_data(atlas) | {"atoms": listed},
        sources=[("model", str(atlas.meta["model_digest"])), ("data", fingerprints(atlas.meta))],
    )


def _finding(atlas: Atlas, counts: Mapping[str, tuple[int, int]]) -> str:
    """Returns a sentence on how many atoms change the loss, and how many would by chance."""
    tried = counts["ablation"][1] > 0
    clear, every = counts["ablation" if tried else "first_order"]
    what = "tested atoms" if tried else "atoms"
    how = "" if tried else ", to first order"
    return (
        f"Removing {clear:,} of {every:,} {what} measurably changes the loss{how}; about "
        f"{LEVEL * every:,.0f} would by chance."
    )


def _listed(atom: Mapping[str, Any], count: int) -> list[Any]:
    """Returns an atom as a list, the form that the script of the index reads."""
    tokens = atom["tokens"][:count]
    texts = [[visible(part) for part in token["text"]] for token in tokens if token["text"]]
    numbers = [_short(atom[name]) for name in ("firing_rate", "effect", "low", "high")]
    # the logit that it moves most, of up to three
    logits = [visible(re.split(r", (?=')", atom[name])[0]) for name in ("raises", "lowers")]
    places = [[token["sample"], token["token"]] for token in tokens]
    start = [atom["layer"], atom["atom"], *numbers, int(atom["exact"]), atom["state"]]
    return [*start, *logits, places, texts]


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


def _write_images(atlas: Atlas, out: Path) -> None:
    """Writes images/{sample}.webp, the images whose patches are shown."""
    images: Any = atlas.table("images")
    if len(images):
        (out / "images").mkdir(exist_ok=True)
    for sample, picture in zip(images["sample"], images["picture"], strict=True):
        decoded(picture, "an image")
        (out / "images" / f"{int(sample)}.webp").write_bytes(picture)
