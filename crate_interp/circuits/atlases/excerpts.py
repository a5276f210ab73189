"""The surroundings of a token: an image's patch with its neighbours, or a piece of text."""

import io
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from crate_interp.circuits.atlases.atom_directions import answer_names
from crate_interp.config import CrateConfig
from crate_interp.core.progress import tqdm
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable

TILE = 48  # side, in pixels, of the tile that shows a patch and its surroundings
ENTIRE = -1  # the token number of a row that holds the entire picture
_SIDE = 112  # longer side, in pixels, of an entire picture
_BEFORE, _AFTER = 12, 4  # how many tokens a context shows before and after its own token


def excerpts(
    places: pd.DataFrame, model: HookedModel, samples: Samples, progress: bool
) -> dict[str, pd.DataFrame]:
    """Returns the tables `tiles` and `contexts` for places, a table of samples and tokens.

    tiles (images): sample, token, picture (the bytes of a WebP). contexts (text): sample, token,
    before, at, after. Each place has one row, in `tiles` for an image model and in `contexts` for a
    language model; the other table is empty. Each image has a further row with token -1, which
    holds the entire picture. The samples are read from the data again.
    """
    wanted: Any = places[["sample", "token"]].drop_duplicates()
    wanted = wanted.sort_values(["sample", "token"])
    by_sample = {sample: own.tolist() for sample, own in wanted.groupby("sample")["token"]}
    text = model.cfg.kind == "text"
    names = _readable(model) if text else []
    rows: list[tuple] = []
    bar = tqdm(by_sample.items(), desc="contexts" if text else "patches", disable=not progress)
    for sample, tokens in bar:
        inputs = samples.read(sample, sample + 1)[0]
        if text:
            ids = inputs.tolist()
            rows += [(sample, token, *_context(ids, token, names)) for token in tokens]
        else:
            picture = _rgb(inputs, model.cfg)
            patch = model.cfg.patch_size
            rows.append((sample, ENTIRE, _webp(_entire(picture), lossless=False)))
            rows += [(sample, token, _webp(_tile(picture, token, patch))) for token in tokens]
    tiles, contexts = ["sample", "token", "picture"], ["sample", "token", "before", "at", "after"]
    return {
        "tiles": pd.DataFrame([] if text else rows, columns=tiles),
        "contexts": pd.DataFrame(rows if text else [], columns=contexts),
    }


def _readable(model: HookedModel) -> list[str]:
    """Returns the string of each token id; without a tokenizer, a space and the id."""
    names = answer_names(model)
    return [f" {name}" for name in names] if all(name.isdigit() for name in names) else names


def _context(ids: list[int], at: int, names: list[str]) -> tuple[str, str, str]:
    before = "".join(names[token] for token in ids[max(0, at - _BEFORE) : at])
    after = "".join(names[token] for token in ids[at + 1 : at + 1 + _AFTER])
    return before, names[ids[at]], after


def _rgb(image: Tensor, cfg: CrateConfig) -> UInt8[np.ndarray, "height width 3"]:
    picture = (displayable(image, cfg) * 255).round().astype(np.uint8)
    return picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=-1)


def _tile(
    picture: UInt8[np.ndarray, "height width 3"], token: int, patch: tuple[int, int]
) -> Image.Image:
    """Returns a boxed patch and the patches around it; for CLS, the entire picture."""
    if token == 0:
        return Image.fromarray(picture).resize((TILE, TILE), Image.Resampling.BILINEAR)
    columns = picture.shape[1] // patch[1]
    top, left = (token - 1) // columns * patch[0], (token - 1) % columns * patch[1]
    edges = ((patch[0], patch[0]), (patch[1], patch[1]), (0, 0))
    padded = np.pad(picture, edges, constant_values=128)
    around = padded[top : top + 3 * patch[0], left : left + 3 * patch[1]]
    small = around.shape[0] < TILE
    enlarge = Image.Resampling.NEAREST if small else Image.Resampling.BILINEAR
    tile = Image.fromarray(around).resize((TILE, TILE), enlarge)
    edge = TILE // 3
    box = (edge - 1, edge - 1, TILE - edge, TILE - edge)
    ImageDraw.Draw(tile).rectangle(box, outline=(255, 120, 0))
    return tile


def _entire(picture: UInt8[np.ndarray, "height width 3"]) -> Image.Image:
    image = Image.fromarray(picture)
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    return image


def _webp(tile: Image.Image, lossless: bool = True) -> bytes:
    buffer = io.BytesIO()
    tile.save(buffer, "WEBP", lossless=lossless, quality=80)
    return buffer.getvalue()
