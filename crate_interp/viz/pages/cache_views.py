"""The page of a layer's attention, and how pages of a cache find its tokens and numbers.

Attention is not drawn by circuitsvis, which has one colour scale for all heads and rows. In a
language model, the first row has a single share of 1, next to which all other rows would be white.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.core.safe_text import LONGEST, visible
from crate_interp.models.cache import CrateCache
from crate_interp.models.hook_points import check_pattern
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable
from crate_interp.viz.pages.page import Html, render
from crate_interp.viz.pages.page_pictures import image_uri

Numbers = int | Sequence[int] | Int[np.ndarray, "n"] | Int[Tensor, "n"]
Tokens = str | Sequence[str] | Sequence[int] | Int[Tensor, "pos"] | Int[Tensor, "1 pos"]
Grid = int | tuple[int, int]
Images = Float[Tensor, "batch channels height width"]


def attention(
    cache: CrateCache,
    layer: int,
    *,
    sample: int = 0,
    tokens: Tokens | None = None,
    heads: Numbers | None = None,
    grid: Grid | None = None,
    images: Images | None = None,
) -> Html:
    """Returns a page with the attention patterns of a layer's heads.

    A matrix shows one head: a row is a query token, a column a key token. The reader chooses one
    colour scale per row, or one for all rows, in shares or in multiples of the even share. Pointing
    at a pair shows its share in words and highlights the tokens or patches that the row attends to;
    the arrow keys go from pair to pair.

    cache: from `model.run_with_cache(x)`, with attn.hook_pattern of the layer. tokens: the tokens
    as strings or ids, or the text itself. If None, the tokens of a text are read from hook_embed,
    or are numbered if hook_embed was not cached, and the tokens of an image are named "CLS" and
    "row,column". grid: rows and columns of patches, needed if the image does not have the model's
    own size. images: the images that the cache is of, to draw the attention of a patch over its
    image. heads: the numbers of the heads to show, None for all. Shares are stored in 255 steps of
    the largest share in their row: 12 heads of 197 tokens make 0.7 MB.

    Raises KeyError for a pattern that was not cached; ValueError for a layer, sample or head that
    does not exist, if `tokens` or `grid` do not fit the cache, and for ToST and CBT.
    """
    model = model_of(cache)
    check_pattern(model.cfg, "this page")
    pattern = held(cache, layer, "attn.hook_pattern", sample)  # [head, query, key]
    if pattern.shape[1] != pattern.shape[2]:
        raise ValueError(
            "the cache holds only some of the tokens. Call run_with_cache without pos_slice."
        )
    chosen = numbers("heads", heads, len(pattern))
    known = tokens_of(cache, sample) if tokens is None else tokens
    names = names_of(model, known, pattern.shape[1], grid)
    values = pattern[chosen].float().cpu().numpy()
    if not np.isfinite(values).all():
        raise ValueError(
            f"the pattern of layer {layer} holds NaN or Inf for sample {sample}, "
            "so it cannot be drawn."
        )
    number = layer % len(model.blocks)
    is_text = model.cfg.kind == "text"
    pattern = {
        "tokens": names,
        "heads": [f"L{number}H{head}" for head in chosen],
        "causal": bool(is_text and model.cfg.causal),
        "grid": None if is_text or tokens is not None else grid_of(model, grid),
    }
    picture = "" if images is None else picture_of(model, images, sample, cache)
    title = f"{name_of(cache)}: what each token attends to"
    return _matrix(title, values, pattern, sample, picture)


def _matrix(
    title: str,
    values: Float[np.ndarray, "head query key"],
    pattern: dict[str, Any],
    sample: int,
    picture: str,
) -> Html:
    """Returns a page with one matrix for each head."""
    finding, first = _finding(values, pattern["heads"], pattern["causal"])
    layer = pattern["heads"][0].split("H")[0].removeprefix("L")
    page = render(
        "attention.html",
        title=title,
        layer=layer,
        sample=sample,
        picture=picture,
        finding=finding,
        count=len(pattern["tokens"]),
        has_grid=pattern["grid"] is not None,
        pattern={**pattern, "first": first, **_packed(values)},
    )
    return Html(f"{title}, layer {layer}, sample {sample}", page)


def _packed(values: Float[np.ndarray, "head query key"]) -> dict[str, Any]:
    """Returns the shares in steps of 1/255 of their row's largest, and these largest shares."""
    largest = values.max(axis=2)
    steps = (values / largest.clip(min=1e-30)[..., None] * 255).round().astype(np.uint8)
    digits = [[float(f"{most:.4g}") for most in rows] for rows in largest]
    return {"bytes": base64.b64encode(steps.tobytes()).decode(), "largest": digits}


def _finding(
    values: Float[np.ndarray, "head query key"], names: list[str], causal: bool
) -> tuple[str, int]:
    """Returns a sentence on the head that looks at the fewest tokens, and its index in `names`."""
    safe = np.where(values > 0, values, 1.0)
    entropy = -(values * np.log(safe)).sum(axis=2)  # [head, query]
    keys = (
        np.arange(1, values.shape[1] + 1) if causal else np.full(values.shape[1], values.shape[2])
    )
    spread = np.exp(entropy.mean(axis=1))
    even = float(np.exp(np.log(keys).mean()))
    first, last = int(spread.argmin()), int(spread.argmax())
    words = (
        f"{names[first]} is the most selective head: a token looks at {spread[first]:.1f} tokens "
        "on average"
    )
    if first != last:
        words += f", and at {spread[last]:.1f} in {names[last]}, the most even head"
    return f"{words}. Even attention would be {even:.1f} (exp of the mean entropy).", first


def model_of(cache: CrateCache) -> Any:
    """Returns the model of a cache; raises ValueError for something else, and for a CLIP."""
    model = getattr(cache, "model", None)
    if model is None or model.towers:
        raise ValueError(
            "give the cache of model.run_with_cache(x); for a CLIP, its cache.visual or cache.text."
        )
    cache.check_weights()
    return model


def held(cache: CrateCache, layer: int, point: str, sample: int) -> Tensor:
    """Returns the activation at a point of a layer for one sample."""
    held = cache.at(point, layer)
    if not checks.is_int(sample) or not 0 <= sample < len(held):
        raise ValueError(f"sample={sample!r}: the cache has samples 0 to {len(held) - 1}.")
    return cache.at(point, layer, sample=int(sample)).detach()


def numbers(what: str, wanted: object, count: int) -> list[int]:
    """Returns the wanted numbers, negative ones counted from the end; None means all."""
    if wanted is None:
        return list(range(count))
    values: Any = getattr(wanted, "tolist", lambda: wanted)()
    values = list(values) if isinstance(values, (list, tuple, range)) else [values]
    if not values or not all(checks.is_int(value) and -count <= value < count for value in values):
        raise ValueError(f"{what}={wanted!r}: give numbers from 0 to {count - 1}.")
    return [int(value) % count for value in values]


def tokens_of(cache: CrateCache, sample: int) -> list[int] | None:
    """Returns the ids of a text's tokens, found from their embeddings, or None if that fails."""
    model: Any = cache.model
    if model.cfg.kind != "text" or "hook_embed" not in cache or not _has_tokenizer(model):
        return None
    held, table = cache.at("hook_embed", sample=sample).detach().float(), model.W_E.detach().float()
    if model.cfg.rotary:
        table = torch.nn.functional.rms_norm(table, table.shape[-1:], eps=model.cfg.ln_eps)
    ids = torch.cdist(held, table).argmin(dim=-1)
    same = torch.allclose(table[ids], held, rtol=1e-5, atol=1e-6)
    return ids.tolist() if same else None


def _has_tokenizer(model: Any) -> bool:
    """Tells whether the model has a tokenizer that is here or can be fetched."""
    try:
        return model.tokenizer is not None
    except CheckpointError:
        return False


def picture_of(model: HookedModel, images: object, sample: int, cache: CrateCache) -> str:
    """Returns an image of a cache as a data URI; raises ValueError if it is not of these images."""
    n = len(next(iter(cache.values())))
    if model.cfg.kind == "text" or not isinstance(images, Tensor) or images.ndim != 4:
        raise ValueError(
            f"images={checks.shown(images)}: give the batch of images that the cache is of."
        )
    if len(images) != n:
        raise ValueError(f"{len(images)} images were given, but the cache has {n} samples.")
    return image_uri(displayable(images[sample], model.cfg))


def grid_of(model: HookedModel, grid: Grid | None) -> tuple[int, int]:
    """Returns rows and columns of the patches of an image."""
    return model.cfg.known_grid if grid is None else checks.size("grid", grid)


def names_of(model: HookedModel, tokens: Any, count: int, grid: Grid | None) -> list[str]:
    """Returns the names of the tokens."""
    if tokens is None and model.cfg.kind != "text":
        rows, columns = grid_of(model, grid)
        names = ["CLS", *(f"{row},{column}" for row in range(rows) for column in range(columns))]
    elif tokens is None:
        names = [str(position) for position in range(count)]
    elif isinstance(tokens, (list, tuple)) and all(isinstance(token, str) for token in tokens):
        names = list(tokens)
    elif model.cfg.kind != "text":
        raise ValueError(
            f"tokens={tokens!r}: the tokens of an image are patches; give a list of names, or None."
        )
    else:
        words = model.to_str_tokens(torch.tensor(tokens) if isinstance(tokens, list) else tokens)
        names = words[0] if len(words) == 1 and isinstance(words[0], list) else words
    if len(names) != count:
        raise ValueError(
            f"there are {count} tokens, but {len(names)} names. Give the tokens= or grid= of the "
            "run that was cached."
        )
    return [visible(name, LONGEST) for name in names]


def name_of(cache: CrateCache) -> str:
    """Returns the name of a cache's model, or what family it is of."""
    return cache.model.cfg.model_name or f"{cache.model.cfg.family} model"
