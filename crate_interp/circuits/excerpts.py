"""What an atom fires on: the concepts of tokens (class, place, object, word) and their excerpts."""

import io
import string
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, UInt8
from PIL import Image
from torch import Tensor

from crate_interp.circuits.logits import answer_names
from crate_interp.config import CrateConfig
from crate_interp.core.run_options import tqdm
from crate_interp.core.safe_text import visible
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

    images has a row for each sample of the places: sample, rows, columns (of its patches), picture
    (the bytes of a WebP). contexts has a row for each place: sample, token, before, at, after. An
    image model fills images, a model of text contexts; the other table is empty. The samples are
    read from the data again.
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


def sample_picture(model: HookedModel, sample: Tensor) -> pd.DataFrame:
    """Returns the table "picture" of one sample: webp, rows, columns; no row for a text."""
    if model.cfg.kind == "text":
        empty = pd.DataFrame({"webp": [], "rows": [], "columns": []})
        return empty.astype({"webp": object})
    sides = zip(sample.shape[2:], model.cfg.patch_size, strict=True)
    rows, columns = (side // patch for side, patch in sides)
    file = as_webp(rgb(sample[0], model.cfg))
    return pd.DataFrame({"webp": [file], "rows": [rows], "columns": [columns]})


def token_words(model: HookedModel, sample: Tensor) -> list[str]:
    """Returns the tokens of a text as words, or their ids without a tokenizer; [] for a picture."""
    if model.cfg.kind != "text":
        return []
    words: list[Any] = sample[0].tolist()
    net: Any = model
    with suppress(ValueError):  # there is no tokenizer
        words = net.to_str_tokens(sample[0])
    return [visible(str(word)) for word in words]


def as_webp(picture: UInt8[np.ndarray, "height width 3"]) -> bytes:
    """Returns a picture as a WebP file; small pictures lose nothing."""
    image, buffer = Image.fromarray(picture), io.BytesIO()
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    image.save(buffer, "WEBP", lossless=max(picture.shape) <= _SMALL, quality=75)
    return buffer.getvalue()


_COMMON = 40  # tokens that are common enough to be a candidate
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
_OBJECT = 0.5  # a patch is on the object if its mask covers this share
# what a token of a text is made of -> its test
_SETS = {
    "a quotation mark": lambda word: any(sign in word for sign in "\"'“”‘’«»"),
    "punctuation": lambda word: bool(word.strip()) and not any(s.isalnum() for s in word),
    "a digit": lambda word: any(sign.isdigit() for sign in word),
    "a capital letter": lambda word: word.strip()[:1].isupper(),
    "the start of a word": lambda word: word[:1] == " " and word.strip()[:1].isalpha(),
    "the inside of a word": lambda word: word[:1] in string.ascii_lowercase,
    "a new line": lambda word: "\n" in word,
}


# a candidate: its name, its kind, and where it is: `[sample, pos]`, or `[sample]` for whole samples
Concept = tuple[str, str, Bool[Tensor, "_sample *_pos"]]


def special_tokens(model: HookedModel) -> int | None:
    """Returns how many tokens come before the patches of an image; None for a text."""
    net: Any = model
    return None if model.cfg.kind == "text" else 0 if net.cfg.class_layers else net.cfg.n_special


def concepts_of_samples(labels: Sequence[Any] | None, names: Sequence[str] | None) -> list[Concept]:
    """Returns the classes of whole samples, from the labels of the data."""
    if not labels or None in labels:
        return []
    found: list[Concept] = []
    for kind in sorted(set(labels), key=str):
        name = names[kind] if names is not None and isinstance(kind, int) else kind
        found.append((f"class {name}", "class", torch.tensor([one == kind for one in labels])))
    return found


def concepts_of_patches(
    model: HookedModel, count: int, pos: int, masks: UInt8[Tensor, "sample height width"] | None
) -> list[Concept]:
    """Returns places in the image, CLS, and patches on an object, for images of one size."""
    special = special_tokens(model) or 0
    rows, columns = model.cfg.grid
    patch = torch.arange(pos) - special
    found = [("CLS", patch < 0)] if special else []
    for i, row in enumerate(_ROWS):
        for j, column in enumerate(_COLUMNS):
            here = (patch // columns * 3 // rows == i) & (patch % columns * 3 // columns == j)
            name = "the middle" if i == j == 1 else f"patches at the {row} {column}"
            found.append((name, here & (patch >= 0)))
    concepts: list[Concept] = [(name, "position", on.expand(count, -1)) for name, on in found]
    if masks is not None:
        shown = ((masks > 0) & (masks < 255)).float()[:, None]
        cover = F.adaptive_avg_pool2d(shown, (rows, columns)).flatten(1) >= _OBJECT
        concepts.append(("patches on the object", "mask", F.pad(cover, (special, 0))))
    return concepts


def concepts_of_tokens(tokens: Int[Tensor, "sample pos"], words: Sequence[str]) -> list[Concept]:
    """Returns common tokens, the tokens after them, sets of tokens, and the first ones."""
    common = [token for token, _ in Counter(tokens.flatten().tolist()).most_common(_COMMON)]
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)
    found: list[Concept] = []
    for after, at in (("", tokens), ("after ", before)):
        found += [(f"{after}{words[token]!r}", "token", at == token) for token in common]
    # without a tokenizer words are numbers, whose digits say nothing
    sets = {} if all(word.isdigit() for word in words) else _SETS
    for name, test in sets.items():
        known = torch.tensor([bool(test(word)) for word in words])
        for after, at in (("", tokens), ("after ", before)):
            found.append((f"{after}{name}", "token set", known[at.clamp_min(0)] & (at >= 0)))
    pos = torch.arange(tokens.shape[1]).expand_as(tokens)
    firsts = {"the first token": pos == 0, "the first eight tokens": pos < 8}
    return found + [(name, "position", on) for name, on in firsts.items()]
