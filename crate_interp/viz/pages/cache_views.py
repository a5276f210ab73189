"""Pages of a cache, each one file: attention, activations and top tokens.

Activations and top tokens are drawn by circuitsvis, whose JavaScript is inside the page, so no
internet is needed. Attention is drawn by this library, because circuitsvis has one colour scale for
all heads and rows. In a language model, the first row has a single share of 1, next to which all
other rows would be white.
"""

import base64
from collections.abc import Sequence
from functools import cache as once
from importlib.resources import files
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
from crate_interp.results.result import counted
from crate_interp.viz.pages.page import Html, render

# circuitsvis colours text, so a patch is drawn as five spaces, and a line break ends each row
_CELL = "\u00a0" * 5

Numbers = int | Sequence[int] | Int[np.ndarray, "n"] | Int[Tensor, "n"]
Tokens = str | Sequence[str] | Sequence[int] | Int[Tensor, "pos"] | Int[Tensor, "1 pos"]
Grid = int | tuple[int, int]


def attention(
    cache: CrateCache,
    layer: int,
    *,
    sample: int = 0,
    tokens: Tokens | None = None,
    heads: Numbers | None = None,
    grid: Grid | None = None,
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
    own size. heads: the numbers of the heads to show, None for all. Shares are stored in 255 steps
    of the largest share in their row: 12 heads of 197 tokens make 0.7 MB.

    Raises KeyError for a pattern that was not cached; ValueError for a layer, sample or head that
    does not exist, if `tokens` or `grid` do not fit the cache, and for ToST and CBT.
    """
    model = _model(cache)
    check_pattern(model.cfg, "this page")
    pattern = _held(cache, layer, "attn.hook_pattern", sample)  # [head, query, key]
    if pattern.shape[1] != pattern.shape[2]:
        raise ValueError(
            "the cache holds only some of the tokens. Call run_with_cache without pos_slice."
        )
    chosen = _numbers("heads", heads, len(pattern))
    known = _tokens_of(cache, sample) if tokens is None else tokens
    names = _names(model, known, pattern.shape[1], grid)
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
        "grid": None if is_text or tokens is not None else _grid(model, grid),
    }
    return _matrix(f"{_model_name(cache)}: what each token attends to", values, pattern, sample)


def _matrix(
    title: str, values: Float[np.ndarray, "head query key"], pattern: dict[str, Any], sample: int
) -> Html:
    """Returns a page with one matrix for each head."""
    finding, first = _finding(values, pattern["heads"], pattern["causal"])
    layer = pattern["heads"][0].split("H")[0].removeprefix("L")
    page = render(
        "attention.html",
        title=title,
        layer=layer,
        sample=sample,
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


def activations(
    cache: CrateCache,
    atoms: Numbers,
    *,
    layers: Numbers | None = None,
    point: str = "mlp.hook_post",
    sample: int = 0,
    tokens: Tokens | None = None,
    grid: Grid | None = None,
) -> Html:
    """Returns a page that colours each token by an atom's activation, drawn by circuitsvis.

    The reader chooses layer and atom. An image is drawn as its patches, row by row, with CLS above.
    atoms: the numbers of the atoms on the point's last axis. layers: the numbers of the layers,
    None for all. tokens, grid, sample: as in `attention`. Raises KeyError and ValueError as
    `attention` does.
    """
    chosen = _numbers("layers", layers, len(_model(cache).blocks))
    held = [_held(cache, layer, point, sample).flatten(1) for layer in chosen]  # [pos, atom]
    picked = _numbers("atoms", atoms, held[0].shape[1])
    known = _tokens_of(cache, sample) if tokens is None else tokens
    names = _cells(cache.model, known, len(held[0]), grid)
    values = torch.stack([layer[:, picked] for layer in held], dim=1)  # [pos, layer, atom]
    properties = {
        "tokens": names,
        "activations": _rounded(values),
        "firstDimensionName": "Layer",
        "secondDimensionName": "Atom",
        "firstDimensionLabels": [str(layer) for layer in chosen],
        "secondDimensionLabels": [str(atom) for atom in picked],
    }
    called = _places(cache.model, known, len(held[0]), grid)
    title = f"{_model_name(cache)}: where atoms are on"
    finding = _most_on(values, called, chosen, picked)
    return _page(title, f"{point}, sample {sample}", finding, "TextNeuronActivations", properties)


def top_tokens(
    cache: CrateCache,
    atoms: Numbers,
    *,
    layers: Numbers | None = None,
    point: str = "mlp.hook_post",
    tokens: Sequence[Tokens] | None = None,
    count: int = 10,
) -> Html:
    """Returns a page with a table of the tokens with the largest and smallest values of atoms.

    The reader chooses sample, layer and atom. The menu "Atom" shows an atom's place in `atoms`, not
    its number. tokens: a list with the tokens of each sample as strings or ids, or its text. count:
    the most rows to show.
    Raises KeyError and ValueError as `attention` does.
    """
    chosen = _numbers("layers", layers, len(_model(cache).blocks))
    count = checks.count("count", count)
    n = len(next(iter(cache.values())))
    given = [_tokens_of(cache, k) for k in range(n)] if tokens is None else list(tokens)
    if len(given) != n:
        raise ValueError(
            f"the length of tokens is {len(given)}, but the cache has {n} samples. Give one "
            "entry for each sample."
        )
    # circuitsvis would show only one atom of a single sample, so a single sample is passed twice
    samples = list(range(n)) if n > 1 else [0, 0]
    best = {"topkVals": [], "topkIdxs": [], "bottomkVals": [], "bottomkIdxs": []}
    names, seen, places, picked = [], [], [], []
    for sample in samples:
        held = [_held(cache, layer, point, sample).flatten(1) for layer in chosen]
        picked = _numbers("atoms", atoms, held[0].shape[1])
        values = torch.stack([layer[:, picked] for layer in held])  # [layer, pos, atom]
        rows = min(count, values.shape[1])
        top, low = values.topk(rows, dim=1), values.topk(rows, dim=1, largest=False)
        best["topkVals"].append(_rounded(top.values))
        best["topkIdxs"].append(top.indices.tolist())
        best["bottomkVals"].append(_rounded(low.values.flip(1)))
        best["bottomkIdxs"].append(low.indices.flip(1).tolist())
        names.append(_names(cache.model, given[sample], values.shape[1], None))
        seen.append(values.transpose(0, 1))
        places += _places(cache.model, given[sample], values.shape[1], None)
    properties = {
        "tokens": names,
        **best,
        "firstDimensionName": "Layer",
        "thirdDimensionName": "Atom",
        "sampleLabels": [f"sample {sample}" for sample in samples],
        "firstDimensionLabels": [str(layer) for layer in chosen],
    }
    title = f"{_model_name(cache)}: in which tokens atoms are largest"
    finding = _most_on(torch.cat(seen), places, chosen, picked)
    return _page(title, f"{point}, {counted(n, 'samples')}", finding, "TopkTokens", properties)


def _places(model: Any, tokens: Any, count: int, grid: Any) -> list[str]:
    """Returns each token's name in sentences: CLS, patch 1,2 or the token 'cat'."""
    names = _names(model, tokens, count, grid)
    if tokens is None and model.cfg.kind != "text":
        return [names[0], *(f"patch {name}" for name in names[1:])]
    return [f"the token \u201c{name}\u201d" for name in names]


def _most_on(
    values: Float[Tensor, "pos layer atom"], places: list[str], layers: list[int], atoms: list[int]
) -> str:
    """Returns a sentence on the largest value, its atom and token, and the share above 0."""
    on = values > 0
    if not on.any():
        return "None of these atoms is above 0 in any token."
    pos, layer, atom = np.unravel_index(int(values.argmax()), values.shape)
    largest, share = float(values[pos, layer, atom]), 100 * float(on.double().mean())
    return (
        f"Atom {atoms[atom]} of layer {layers[layer]} is on most strongly: {largest:.3g} at "
        f"{places[pos]}. Over all tokens {share:.3g}\u00a0% of the values are above 0."
    )


def _page(
    title: str, kicker: str, finding: str, component: str, properties: dict[str, Any]
) -> Html:
    """Returns a page with one component of circuitsvis."""
    page = render(
        "interactive.html",
        title=title,
        kicker=kicker,
        finding=finding,
        circuitsvis=_bundle(),
        component=component,
        properties=properties,
    )
    return Html(title, page)


@once
def _bundle() -> str:
    """Returns circuitsvis' JavaScript, from its package."""
    source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    return source.replace("</script>", "<\\/script>")


def _rounded(values: Tensor) -> Any:
    """Returns the numbers as nested lists, rounded to three digits."""
    nested = values.detach().double().cpu()
    if not bool(nested.isfinite().all()):
        raise ValueError("the cache holds NaN or Inf at these atoms, so they cannot be drawn.")
    scale = 10.0 ** (2 - nested.abs().clamp(min=1e-30).log10().floor())
    return ((nested * scale).round() / scale).tolist()


def _model(cache: Any) -> Any:
    model = getattr(cache, "model", None)
    if model is None or model.towers:
        raise ValueError(
            "give the cache of model.run_with_cache(x); for a CLIP, its cache.visual or cache.text."
        )
    cache.check_weights()
    return model


def _held(cache: CrateCache, layer: int, point: str, sample: int) -> Tensor:
    """Returns the activation at a point of a layer for one sample."""
    held = cache.at(point, layer)
    if not checks.is_int(sample) or not 0 <= sample < len(held):
        raise ValueError(f"sample={sample!r}: the cache has samples 0 to {len(held) - 1}.")
    return cache.at(point, layer, sample=int(sample)).detach()


def _numbers(what: str, wanted: Any, count: int) -> list[int]:
    """Returns the wanted numbers, negative ones counted from the end; None means all."""
    if wanted is None:
        return list(range(count))
    values = wanted.tolist() if hasattr(wanted, "tolist") else wanted
    values = list(values) if isinstance(values, (list, tuple, range)) else [values]
    if not values or not all(checks.is_int(value) and -count <= value < count for value in values):
        raise ValueError(f"{what}={wanted!r}: give numbers from 0 to {count - 1}.")
    return [int(value) % count for value in values]


def _tokens_of(cache: CrateCache, sample: int) -> list[int] | None:
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


def _grid(model: Any, grid: Any) -> tuple[int, int]:
    """Returns rows and columns of the patches of an image."""
    return model.cfg.known_grid if grid is None else checks.size("grid", grid)


def _names(model: Any, tokens: Any, count: int, grid: Any) -> list[str]:
    """Returns the names of the tokens."""
    if tokens is None and model.cfg.kind != "text":
        rows, columns = _grid(model, grid)
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


def _cells(model: Any, tokens: Any, count: int, grid: Any) -> list[str]:
    """Returns a text's tokens; for an image, blank cells, with a line break after each row."""
    if model.cfg.kind == "text" or tokens is not None:
        return _names(model, tokens, count, None)
    columns = _grid(model, grid)[1]
    _names(model, None, count, grid)
    return ["CLS\n", *(_CELL + "\n" * ((patch + 1) % columns == 0) for patch in range(count - 1))]


def _model_name(cache: CrateCache) -> str:
    return cache.model.cfg.model_name or f"{cache.model.cfg.family} model"
