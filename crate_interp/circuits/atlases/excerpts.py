"""What surrounds the tokens in which atoms fire most: entire images, or pieces of text."""

import io
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from crate_interp.circuits.atlases.atom_logits import answer_names
from crate_interp.config import CrateConfig
from crate_interp.core.progress import tqdm
from crate_interp.data import Samples
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable

_SIDE = 448  # longest side, in pixels, of a stored image
_SMALL = 64  # images whose sides are at most this long are stored without loss
_BEFORE, _AFTER = 12, 4  # how many tokens a context shows before and after its own token


def excerpts(
    places: pd.DataFrame, model: HookedModel, samples: Samples, progress: bool
) -> dict[str, pd.DataFrame]:
    """Returns the tables `images` and `contexts` for places, a table of samples and tokens.

    images (image models): sample, rows, columns (of its patches), picture (the bytes of a WebP);
    one row for each sample of the places. contexts (text): sample, token, before, at, after; one
    row for each place. The other table is empty. The samples are read from the data again.
    """
    wanted: Any = places[["sample", "token"]].drop_duplicates()
    text = model.cfg.kind == "text"
    names = answer_names(model) if text else []
    if all(name.isdigit() for name in names):  # without a tokenizer, a space and the id
        names = [f" {name}" for name in names]
    rows: list[tuple] = []
    by_sample = wanted.sort_values(["sample", "token"]).groupby("sample")["token"]
    for sample, tokens in tqdm(by_sample, "contexts" if text else "images", disable=not progress):
        inputs = samples.read(sample, sample + 1)[0]
        if text:
            words = [names[token] for token in inputs.tolist()]
            for at in tokens.tolist():
                before, after = words[max(0, at - _BEFORE) : at], words[at + 1 : at + 1 + _AFTER]
                rows.append((sample, at, "".join(before), words[at], "".join(after)))
        else:
            picture, patch = rgb(inputs, model.cfg), model.cfg.patch_size
            grid = (side // one for side, one in zip(picture.shape, patch, strict=False))
            rows.append((sample, *grid, as_webp(picture)))
    images = ["sample", "rows", "columns", "picture"]
    contexts = ["sample", "token", "before", "at", "after"]
    return {
        "images": pd.DataFrame([] if text else rows, columns=images),
        "contexts": pd.DataFrame(rows if text else [], columns=contexts),
    }


def rgb(image: Tensor, cfg: CrateConfig) -> UInt8[np.ndarray, "height width 3"]:
    """Returns an image as colours that can be shown."""
    picture = (displayable(image, cfg) * 255).round().astype(np.uint8)
    return picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=-1)


def as_webp(picture: UInt8[np.ndarray, "height width 3"]) -> bytes:
    """Returns a picture as a WebP file; small pictures lose nothing."""
    image, buffer = Image.fromarray(picture), io.BytesIO()
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    image.save(buffer, "WEBP", lossless=max(picture.shape) <= _SMALL, quality=75)
    return buffer.getvalue()
