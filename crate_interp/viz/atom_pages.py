"""Pages of atoms: an atlas of what an atom responds to and does, and how often it is on.

An atlas is an index of all atoms and, for each layer, a page of its atoms' inputs. The page of
statistics has the firing rates by layer, and cards of the strongest atoms.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from crate_interp.circuits import Atlas
from crate_interp.core.files import write_text
from crate_interp.core.pictures import decoded
from crate_interp.core.safe_text import cell, visible
from crate_interp.questions.answers import LOSSES
from crate_interp.sweeps.atom_statistics import OCTAVES, AtomResult, histograms
from crate_interp.viz.canvas import TEXT, TRAINED, canvas
from crate_interp.viz.page import inline_svg, picture_uri, result_page, write_page

SHOWN = 24  # atoms that a page of an atlas shows at once
CARDS, _DENSE, _TOKENS = 8, 2, 4  # of the page of statistics: cards of a layer, tokens of a card
_ON_INDEX = {"images": 3, "windows": 2}  # patches or contexts of each atom on the index
_SIDE = 72  # pixels of a patch with those around it
_FLAT = 400.0  # the norm of a cut of 12 by 12 pixels whose colours vary by 20 of 255
_LINE_ENDS = str.maketrans({"\r": "", "\n": "\u21b5", "\t": "\u2192"})
_PARTS = ("before", "at", "after")  # of the text around a token

Excerpts = Mapping[str, pd.DataFrame]
Atom = dict[str, Any]


def atlas_pages(atlas: Atlas, out: str | Path) -> Path:
    """Writes index.html, a layer-L.html for each layer and the atlas (Atlas.save) into a folder.

    atoms.csv holds the atlas's main table. Returns the path of the index, which lists all atoms
    with their patches and can be sorted and filtered. The atom that the headline names comes first.
    Then come atoms whose effect on the loss was measured exactly, in order of this effect, and the
    other atoms, in order of their first-order effect; atoms that are on at most tokens come last.
    An image's patch is shown boxed, with the patches around it; CLS is shown as the entire image,
    with a note. A token of a text is shown with the 12 tokens before it and 4 after it. The page of
    a layer holds its first 24 atoms; it reads the others from layers/layer-L.js when they are asked
    for. images/ has the images that patches are cut from. The pages can be opened from the disk.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with atlas.saved_with_pages(out) as stage:
        _write(atlas, stage)
    return Path(out) / "index.html"


def _write(atlas: Atlas, out: Path) -> None:
    """Writes the pages, the images that patches are cut from and the table of atoms."""
    table: Any = atlas.table()
    write_text(out / "atoms.csv", table.map(cell).to_csv(index=False, float_format="%.4g"))
    images, counts = atlas.table("images"), histograms(atlas.table("sums"))
    if len(images):
        (out / "images").mkdir(exist_ok=True)
    for sample, picture in zip(images["sample"], images["picture"], strict=True):
        decoded(picture, "an image")
        (out / "images" / f"{int(sample)}.webp").write_bytes(picture)
    about = {"is_text": atlas.meta["unit"] == "windows", "measured": atlas.table("logits")}
    about["direct"] = any(atlas.table("directions")["raises"].tolist())
    data = {"text": about["is_text"], "unit": atlas.meta["unit"], "grid": [0, 0]}
    data |= {"shown": SHOWN, "octave": OCTAVES[0], "word": atlas.word()}
    if len(images):
        data["grid"] = images[["rows", "columns"]].iloc[0].tolist()
    _set_agreements(atlas, every := _atoms(atlas))
    some = [one for one in every if not one["state"]]
    about["alike"] = [(one["layer"], one["agreement"], one["dealt"]) for one in some]
    (out / "layers").mkdir(exist_ok=True)
    for layer in sorted({atom["layer"] for atom in every}):
        atoms = [atom for atom in every if atom["layer"] == layer]
        atoms.sort(key=partial(_order, lead=atlas.lead(layer)))
        cards = [_carried(atom, counts.get((layer, atom["atom"]), [])) for atom in atoms]
        page = result_page(
            atlas,
            "atlas-layer.html",
            f"what turns each {atlas.word()} of layer {layer} on?",
            said=re.split(r"(?<=\.) ", atlas.largest(layer), maxsplit=1),
            numbers={},
            layer=layer,
            data=data | {"layer": layer, "atoms": cards[:SHOWN], "count": len(cards)},
            **about,
        )
        write_text(out / f"layer-{layer}.html", page)
        # a page opened from the disk may not read a file of JSON, but may run a script
        rest = json.dumps(cards[SHOWN:], ensure_ascii=False, separators=(",", ":"))
        write_text(out / "layers" / f"layer-{layer}.js", f"more({rest});")
    every.sort(key=partial(_order, lead=atlas.lead()))
    counts = {kind: atlas.clear(kind) for kind in ("first_order", "ablation")}
    layers, agreement = atlas.layers(), atlas.table("agreement")
    if len(agreement):
        layers = layers.merge(agreement[["layer", "rank_correlation"]], on="layer", how="left")
    page = result_page(
        atlas,
        "atlas-index.html",
        f"what turns each {atlas.word()} on, and does it matter?",
        said=[atlas.tally(), *re.split(r"(?<=\.) ", atlas.largest(), maxsplit=1)],
        numbers={"Layers": layers},
        loss=LOSSES[atlas.meta["loss"]],
        counts=counts,
        ablated=int(table["ablated"].max()),
        data=data | {"atoms": [_listed(atom, _ON_INDEX[atlas.meta["unit"]]) for atom in every]},
        **about,
    )
    write_text(out / "index.html", page)


def _order(atom: Atom, lead: tuple[int, int]) -> tuple[bool, bool, bool, float, int, int]:
    """Returns an atom's sort key: the lead first, dense atoms last, exact and large effects first.

    An atom that is on at most tokens may have a large effect, but its tokens explain nothing.
    """
    place = atom["layer"], atom["atom"]
    return place != lead, atom["state"] == "dense", not atom["exact"], -abs(atom["effect"]), *place


def _atoms(atlas: Atlas) -> list[Atom]:
    """Returns a record of each atom: its row, its effect, its tokens, its neighbours."""
    texts = {
        (row["sample"], row["token"]): [row[part].translate(_LINE_ENDS) for part in _PARTS]
        for row in atlas.table("contexts").to_dict("records")
    }
    tokens: dict[tuple[int, int], list[dict[str, Any]]] = {}
    top: Any = atlas.table("top").sort_values(["layer", "atom", "rank"])
    for row in top.to_dict("records"):
        text = texts[row["sample"], row["token"]] if atlas.meta["unit"] == "windows" else []
        tokens.setdefault((row["layer"], row["atom"]), []).append(row | {"text": text})
    atoms = []
    table: Any = atlas.table()
    for row in table.to_dict("records"):
        exact = bool(row["ablated"] > 0)
        kind = "ablation" if exact else "first_order"
        facts = {"exact": exact, "tokens": tokens.get((row["layer"], row["atom"]), [])}
        facts |= {"effect": row[kind], "low": row[f"{kind}_low"], "high": row[f"{kind}_high"]}
        facts["neighbours"] = re.findall(r"L(\d+)A(\d+) (-?[\d.]+)", row["nearest"])
        atoms.append(row | facts)
    return atoms


def _set_agreements(atlas: Atlas, every: list[Atom]) -> None:
    """Sets how alike an atom's first inputs from different samples are: the mean over pairs.

    "dealt": the same for first inputs of random atoms of its layer, which is chance. For images it
    is the cosine of two cuts less their mean colours; flat cuts count less. For texts it is how
    often the tokens are the same.
    """
    images: Any = atlas.table("images")
    pictures = _pictures(images.to_dict("records"))

    @cache
    def mark(sample: int, token: int) -> np.ndarray:
        cut = np.asarray(_cut(pictures[sample], token).resize((12, 12)), float)
        colours = (cut - cut.mean(axis=(0, 1))).ravel()
        return colours / max(float(np.linalg.norm(colours)), _FLAT)

    def agreement(tokens: list[dict[str, Any]]) -> float:
        pairs: Any = [
            (mark(a["sample"], a["token"]), mark(b["sample"], b["token"])) if pictures else (a, b)
            for a, b in combinations(tokens, 2)
            if a["sample"] != b["sample"]
        ]
        alike = [a @ b if pictures else a["text"][1:2] == b["text"][1:2] for a, b in pairs]
        return float(np.mean(alike)) if alike else math.nan

    rng, lists = np.random.default_rng(0), {}
    for atom in every:
        lists.setdefault(atom["layer"], []).append(atom["tokens"])
    for atom in every:
        tokens, others = atom["tokens"][:_TOKENS], [*filter(None, lists[atom["layer"]])]
        picks = [others[rng.integers(len(others))] for _ in tokens]
        dealt = [those[at % len(those)] for at, those in enumerate(picks)]
        atom["agreement"], atom["dealt"] = agreement(tokens), agreement(dealt)


def _carried(atom: Atom, counts: list[int]) -> list[Any]:
    """Returns an atom as a list, the form that the script of a layer reads.

    counts: at how many tokens its value lies in each octave; the list has their heights, from 0 to
    9 and in proportion to the largest, as one text.
    """
    most = max(counts, default=0) or 1
    heights = "".join(str(-(-9 * count // most)) for count in counts)
    names = ("firing_rate", "effect", "low", "high")
    near = [[int(layer), int(other), float(cosine)] for layer, other, cosine in atom["neighbours"]]
    tokens = [
        [token["sample"], token["token"], _short(token["value"]), *map(visible, token["text"])]
        for token in atom["tokens"]
    ]
    logits = [visible(atom[name]) for name in ("raises", "lowers")]
    numbers = [_short(atom[name]) for name in names]
    return [atom["atom"], *numbers, atom["ablated"], atom["state"], *logits, near, tokens, heights]


def _listed(atom: Atom, count: int) -> list[Any]:
    """Returns an atom as a list, the form that the script of the index reads."""
    tokens = atom["tokens"][:count]
    texts = [[visible(part) for part in token["text"]] for token in tokens if token["text"]]
    numbers = [_short(atom[name]) for name in ("firing_rate", "effect", "low", "high")]
    # the logit that it moves most, of up to three
    logits = [visible(re.split(r", (?=')", atom[name])[0]) for name in ("raises", "lowers")]
    places = [[token["sample"], token["token"]] for token in tokens]
    start = [atom["layer"], atom["atom"], *numbers, int(atom["exact"]), atom["state"]]
    return [*start, *logits, places, texts, _short(atom["agreement"])]


def _short(value: float) -> float | None:
    # intervals over very few samples have infinite ends, and JSON has no infinity and no NaN
    return float(f"{value:.3g}") if math.isfinite(value) else None


def atoms_page(result: AtomResult, out: str | Path, *, excerpts: Excerpts | None = None) -> Path:
    """Writes atoms.html and the result (save) into a folder, and returns the path of the page.

    Each layer has the cards of the atoms with the largest share of its energy, and last of a few
    dense ones: how often an atom is on, a histogram of its values, and the tokens in which it is
    largest.

    Args:
        result: What `ci.atoms` returns.
        out: The folder.
        excerpts: The tables `images` and `contexts` of an atlas of the same data (`atlas.tables`),
            to show these tokens. Without these tables, tokens are named by sample and position.

    Raises:
        ValueError: If the folder cannot be written, or another process is writing it.
    """
    return write_page(
        result,
        out,
        "atoms.html",
        f"when its {result.word()}s are on",
        said=result.sentences(),
        numbers={"Layer by layer": result.layers()},
        rates=inline_svg(_rates(result), result.finding(), salt="rates"),
        layers=_cards(result, excerpts or {}),
        octave=OCTAVES[0],
    )


def _rates(result: AtomResult) -> Any:
    """Draws the firing rates of each layer's atoms, from the most often on to the least."""
    table: Any = result.table()
    layers = sorted(set(table["layer"]))
    figure, axes = canvas(None, 2.6, None)
    for at, layer in enumerate(layers):
        rates = np.sort(table[table["layer"] == layer]["firing_rate"])[::-1]
        places = np.linspace(0, 1, len(rates))
        strength = 0.25 + 0.75 * at / max(len(layers) - 1, 1)
        axes.plot(places, 100 * rates, color=TRAINED, alpha=strength, lw=1.4)
        x = 0.02 + 0.05 * at
        axes.text(x, 100 * np.interp(x, places, rates) + 1, str(layer), fontsize=TEXT, ha="left")
    axes.set_xlabel(f"{result.word()}s of a layer, the most often on first (share)", fontsize=TEXT)
    axes.set_ylabel("tokens at which it is on (%)", fontsize=TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _cards(result: AtomResult, excerpts: Excerpts) -> list[dict[str, Any]]:
    """Returns the cards of each layer."""
    table: Any = result.table()
    counts = histograms(result.table("sums"))
    kept = [excerpts.get(name, pd.DataFrame()) for name in ("images", "contexts")]
    images, contexts = (one.to_dict("records") for one in kept)
    pictures = _pictures(images)
    texts = {(row["sample"], row["token"]): [row[part] for part in _PARTS] for row in contexts}

    def token_of(sample: int, token: int, value: float) -> dict[str, Any]:
        picture = picture_uri(_cut(pictures[sample], token)) if sample in pictures else ""
        place = f"sample {sample}, token {token}"
        text = texts.get((sample, token))
        return {"value": value, "place": place, "picture": picture, "text": text}

    layers = []
    ranked: Any = table.sort_values("energy_share", ascending=False, kind="stable")
    for layer, rows in ranked.groupby("layer"):
        sparse, dense = (rows[rows["state"] == state] for state in ("", "dense"))
        best = pd.concat([sparse.head(CARDS), dense.head(_DENSE)])
        cards = []
        for row in best.to_dict("records"):
            top: Any = result.top(int(layer), int(row["atom"])).head(_TOKENS)
            places = top[["sample", "token", "value"]].to_dict("records")
            name, bars = f"L{layer}A{row['atom']}", counts.get((layer, row["atom"]), [])
            tokens = [token_of(**place) for place in places]
            cards.append({"name": name, "row": row, "bars": bars, "tokens": tokens})
        layers.append({"layer": layer, "cards": cards})
    return layers


def _pictures(rows: list[Atom]) -> dict[int, Atom]:
    """Returns the rows of images by sample, with their pictures decoded."""
    opened: Any = (decoded(row["picture"], "an image").convert("RGB") for row in rows)
    return {row["sample"]: row | {"picture": one} for row, one in zip(rows, opened, strict=True)}


def _cut(row: Atom, token: int) -> Image.Image:
    """Returns a patch with those around it; CLS (token 0) is the entire image."""
    picture = row["picture"]
    if token:
        width, height = picture.width / row["columns"], picture.height / row["rows"]
        y, x = divmod(token - 1, row["columns"])
        left, right = round((x - 1) * width), round((x + 2) * width)
        upper, lower = round((y - 1) * height), round((y + 2) * height)
        picture = picture.crop((left, upper, right, lower))
    return picture.resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
