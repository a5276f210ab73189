"""Pages of a cache: a layer's attention, where atoms are on, and where they are largest.

Their JavaScript is inside the page, so no internet is needed. circuitsvis shades the tokens of a
text. It draws no images, and has one colour scale for all rows of attention: in a language model
the first row has a single share of 1, next to which all other rows would be white. So these, and
tables, are drawn by this library.
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

from crate_interp.config.families import entry_word
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.core.safe_text import LONGEST, visible
from crate_interp.models.cache import CrateCache
from crate_interp.models.hook_points import check_pattern
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable
from crate_interp.results.sample_ranges import counted
from crate_interp.viz.page import Html, image_uri

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

    A row's largest share is stored with four digits, the others in 255 steps of the second: 12
    heads of 197 tokens make 0.8 MB.

    Args:
        cache: From `model.run_with_cache(x)`, with attn.hook_pattern of the layer.
        layer: The layer's number.
        sample: The sample's number in the cache.
        tokens: The tokens as strings or ids, or the text itself. If None, the tokens of a text are
            read from hook_embed, or are numbered if hook_embed was not cached, and the tokens of an
            image are named "CLS" and "row,column".
        heads: The numbers of the heads to show, None for all.
        grid: Rows and columns of patches, needed if the image does not have the model's own size.
        images: The images that the cache is of, to draw the attention of a patch over its image.

    Raises:
        KeyError: For a pattern that was not cached.
        ValueError: For a layer, sample or head that does not exist, if `tokens` or `grid` do not
            fit the cache, and for ToST and CBT.
    """
    model = model_of(cache)
    check_pattern(model.cfg, "this page")
    pattern = activation(cache, layer, "attn.hook_pattern", sample)  # [head, query, key]
    if pattern.shape[1] != pattern.shape[2]:
        raise ValueError("the cache lacks some tokens: call run_with_cache without pos_slice.")
    chosen = numbers("heads", heads, len(pattern))
    known = tokens_of(cache, sample) if tokens is None else tokens
    names = names_of(model, known, pattern.shape[1], grid)
    values = pattern[chosen].float().cpu().numpy()
    number = layer % len(model.blocks)
    labels = [f"L{number}H{head}" for head in chosen]
    shape = None if model.cfg.kind == "text" or tokens is not None else grid_of(model, grid)
    said, opened = _finding(values, labels, names, shape is not None)
    shown = {"tokens": names, "heads": labels, "grid": shape, **opened, **_packed(values)}
    shown["causal"] = bool(model.cfg.kind == "text" and model.cfg.causal)
    return Html.of(
        "attention.html",
        f"{name_of(cache)}: what each token attends to, layer {number}, sample {sample}",
        picture="" if images is None else picture_of(model, images, sample, cache),
        said=said,
        cfg=model.cfg,
        layer=number,
        sample=sample,
        pattern=shown,
    )


def _packed(values: Float[np.ndarray, "head query key"]) -> dict[str, Any]:
    """Returns each row's largest share and its place, and the others in steps of the second."""
    top, rest = values.argmax(axis=2), values.copy()
    np.put_along_axis(rest, top[..., None], 0, axis=2)
    largest, second = values.max(axis=2), rest.max(axis=2)
    steps = (rest / second.clip(min=1e-30)[..., None] * 255).round().astype(np.uint8)
    digits = {
        name: [[float(f"{most:.4g}") for most in rows] for rows in rows_of]
        for name, rows_of in (("largest", largest), ("second", second))
    }
    return {"bytes": base64.b64encode(steps.tobytes()).decode(), "top": top.tolist(), **digits}


def _finding(
    values: Float[np.ndarray, "head query key"], labels: list[str], tokens: list[str], image: bool
) -> tuple[list[str], dict[str, Any]]:
    """Returns sentences on the head that looks at the fewest tokens, and what the page opens with.

    first: the head's number. spread: how many tokens each head looks at; of an image the first
    token, CLS, and of a text each token on average. named: the token that most others
    look at, None in an image.
    """
    support = 1 / (values**2).sum(axis=2).clip(min=1e-30)  # [head, query]
    spread, count = support[:, 0] if image else support.mean(axis=1), len(tokens)
    counts = [f"{number:.{number < 9.95:d}f}" for number in spread]
    first, where = int(spread.argmin()), f"In head {labels[spread.argmin()]}"
    ties = [name for name, same in zip(labels, counts, strict=True) if same == counts[first]]
    fewest = f"the fewest of {counted(len(labels), 'heads')} in layer {labels[0][1:].split('H')[0]}"
    fewest += f" (tied: {', '.join(ties)})" if ties[1:] else ""
    looks = values[first].argmax(axis=1)
    found: dict[str, Any] = {"first": first, "spread": counts, "named": None}
    if image:
        whom = f"patch ({tokens[looks[0]].replace(',', ', ')})" if looks[0] else "itself"
        share = f"{100 * values[first, 0].max():.2g}\u00a0% of its attention"
        said = f"{where}, {tokens[0]} gives {whom} {share}: effectively {counts[first]} of {count}"
        mean = f"The average token of this head sees {support[first].mean():.0f}"
        return [f"{said} tokens.", f"That is {fewest}. {mean}."], found
    others, even = looks[looks != np.arange(count)], (values > 0).sum(axis=2).mean()
    said = f"{where}, every token looks most at itself."
    if len(others):
        votes, names = np.bincount(others, minlength=count), [token.strip() for token in tokens]
        found["named"] = key = int(votes.argmax())
        nth = "the first " * (names.index(names[key]) == key and names.count(names[key]) > 1)
        word = f"{nth}\u201c{names[key]}\u201d ({key}), and {count - len(others)} at themselves"
        said = f"{where}, {votes[key]} of {count} tokens look most at {word}."
    mean = f"The average token sees {counts[first]} of the {even:.3g} tokens that it could"
    return [said, f"{mean}, {fewest}."], found


def activations(
    cache: CrateCache,
    atoms: Numbers | None = None,
    *,
    layers: Numbers | None = None,
    point: str = "mlp.hook_post",
    sample: int = 0,
    tokens: Tokens | None = None,
    grid: Grid | None = None,
    images: Images | None = None,
) -> Html:
    """Returns a page that colours each patch or token by an atom's activation.

    The reader chooses layer and atom; the page opens on the atom that rises furthest above its
    mean, in units of its layer's root mean square, and shows the atoms with the largest activations
    of the layer first.

    Args:
        cache: From `model.run_with_cache(x)`.
        atoms: The numbers of the atoms on the point's last axis, None for all.
        layers: The numbers of the layers, None for all.
        point: The hook point of the code.
        sample: As in `attention`.
        tokens: As in `attention`.
        grid: As in `attention`.
        images: The images that the cache is of, to draw over; without them an image is drawn as its
            patches alone.

    Raises:
        KeyError or ValueError: As `attention` does.
    """
    model = model_of(cache)
    chosen = numbers("layers", layers, len(model.blocks))
    found = [activation(cache, layer, point, sample).flatten(1) for layer in chosen]  # [pos, atom]
    picked = numbers("atoms", atoms, found[0].shape[1])
    known = tokens_of(cache, sample) if tokens is None else tokens
    values = torch.stack([layer[:, picked] for layer in found], dim=1)  # [pos, layer, atom]
    called = _places(model, known, len(found[0]), grid)
    word = entry_word(model.cfg.sparse_step)
    title, kicker = f"{name_of(cache)}: where {word}s are on", f"{point}, sample {sample}"
    patches = model.cfg.n_special if model.cfg.kind != "text" and tokens is None else 0
    places = values[patches:]
    said, (_, *first) = _most_on(places, called[patches:], chosen, picked, word)
    data = {
        "tokens": names_of(model, known, len(found[0]), grid),
        "values": _rounded(values.permute(1, 2, 0)),  # [layer, atom, pos]
        "layers": chosen,
        "atoms": picked,
        "names": called,
        "first": first,
    }
    page, bundle, picture = "texts/atoms-text.html", _bundle(), ""
    if model.cfg.kind != "text" and tokens is None:
        page, bundle, data = "activations.html", "", data | {"grid": grid_of(model, grid)}
        picture = "" if images is None else picture_of(model, images, sample, cache)
    values_shown = {"kicker": kicker, "word": word, "picture": picture, "circuitsvis": bundle}
    return Html.of(page, title, said=said, data=data, still=None, **values_shown)


@once
def _bundle() -> str:
    """Returns circuitsvis' JavaScript, from its package."""
    source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    return source.replace("</script>", "<\\/script>")


def top_tokens(
    cache: CrateCache,
    atoms: Numbers | None = None,
    *,
    layers: Numbers | None = None,
    point: str = "mlp.hook_post",
    tokens: Sequence[Tokens] | None = None,
    count: int = 10,
) -> Html:
    """Returns a page with a table of the tokens with the largest and smallest values of atoms.

    The reader chooses sample and layer. The atom of the largest value comes first. Tokens of value
    0 are left out, and so are atoms that are off at every token; the page names or counts these.

    Args:
        cache: From `model.run_with_cache(x)`.
        atoms: The numbers of the atoms, None for all.
        layers: The numbers of the layers, None for all.
        point: The hook point of the code.
        tokens: A list with the tokens of each sample as strings or ids, or its text.
        count: The most tokens to show of each end.

    Raises:
        KeyError or ValueError: As `attention` does.
    """
    chosen = numbers("layers", layers, len(model_of(cache).blocks))
    count = checks.count("count", count)
    n = len(next(iter(cache.values())))
    words = [tokens_of(cache, k) for k in range(n)] if tokens is None else list(tokens)
    if len(words) != n:
        raise ValueError(f"got tokens of {len(words)} samples: give the tokens of each.")
    data: Any = {"layers": chosen, "count": count, "tokens": [], "values": [], "ranked": []}
    stacks, places = [], []
    for sample in range(n):
        found = [activation(cache, layer, point, sample).flatten(1) for layer in chosen]
        data["atoms"] = picked = numbers("atoms", atoms, found[0].shape[1])
        stacks.append(torch.stack([each[:, picked] for each in found], 1))  # [pos, layer, atom]
        data["tokens"].append(names_of(cache.model, words[sample], len(found[0]), None))
        places += _places(cache.model, words[sample], len(found[0]), None)
        ranked, size = stacks[-1].permute(1, 2, 0).sort(descending=True, stable=True), len(found[0])
        ends = [*range(min(count, size)), *range(max(count, size - count), size)]
        data["values"].append(_rounded(ranked.values[..., ends]))
        data["ranked"].append(ranked.indices[..., ends].tolist())
    word, values = entry_word(cache.model.cfg.sparse_step), torch.cat(stacks)
    data["most"] = float(values.abs().max()) or 1.0
    title = f"{name_of(cache)}: in which tokens {word}s are largest"
    said, (pos, layer, _) = _most_on(values, places, chosen, data["atoms"], word)
    data["first"] = [pos // len(stacks[0]), layer]
    kicker = f"{point}, {counted(n, 'samples')}"
    return Html.of("texts/top-tokens.html", title, kicker=kicker, said=said, word=word, data=data)


def _places(model: Any, tokens: Any, count: int, grid: Any) -> list[str]:
    """Returns each token's name in sentences: CLS, patch (row 1, column 2), the token 'cat'."""
    names = names_of(model, tokens, count, grid)
    if tokens is None and model.cfg.kind != "text":
        return [names[0], *("patch (row {}, column {})".format(*n.split(",")) for n in names[1:])]
    return [
        f"the token \u201c{name.strip() or name}\u201d".replace(" ", "\u00a0") for name in names
    ]


def _most_on(
    values: Tensor, places: list[str], layers: list[int], atoms: list[int], word: str
) -> tuple[list[str], tuple[int, int, int]]:
    """Returns sentences on the atom that stands out most, and the token, layer and atom.

    It has the largest value `[pos, layer, atom]` less its mean over tokens, in units of the root
    mean square of its layer.
    """
    on, mean = values > 0, values.mean(dim=0)
    scale = values.square().mean(dim=(0, 2)).sqrt().clamp(min=1e-30)[:, None]  # [layer, 1]
    layer, atom = divmod(int(((values.amax(dim=0) - mean) / scale).argmax()), len(atoms))
    pos, share = int(values[:, layer, atom].argmax()), 100 * float(on.double().mean())
    if not on.any():
        return [f"These {word}s are off: no value is above 0 in any token."], (pos, layer, atom)
    name = f"{word.capitalize()} {atoms[atom]} of layer {layers[layer]}"
    unit = "patches" if places[0].startswith("patch") else "tokens"  # CLS does not count
    said = [
        f"{name} (L{layers[layer]}A{atoms[atom]}) stands out most: "
        f"{values[pos, layer, atom]:.3g} at {places[pos]}, {mean[layer, atom]:.3g} on average.",
        f"It is on at {on[:, layer, atom].sum()} of {len(on)} {unit}. About "
        f"{on.sum(2).double().mean():.0f} of {counted(len(atoms), f'{word}s')} are on at a "
        f"token. Of all values {share:.3g}\u00a0% are above 0, with a median of "
        f"{float(values[on].median()):.2g}.",
    ]
    return said, (pos, layer, atom)


def _rounded(values: Tensor) -> Any:
    """Returns the numbers as nested lists, rounded to three digits."""
    nested = values.double().cpu()
    scale = 10.0 ** (2 - nested.abs().clamp(min=1e-30).log10().floor())
    return ((nested * scale).round() / scale).tolist()


def model_of(cache: CrateCache) -> Any:
    """Returns the model of a cache; raises ValueError for something else, and for a CLIP."""
    model = getattr(cache, "model", None)
    if model is None or model.towers:
        raise ValueError(
            "give the cache of model.run_with_cache(x); for a CLIP, its cache.visual or cache.text."
        )
    cache.check_weights()
    return model


def activation(cache: CrateCache, layer: int, point: str, sample: int) -> Tensor:
    """Returns the activation at a point of a layer for one sample.

    Raises ValueError for a sample that the cache lacks, and for NaN and Inf.
    """
    count = len(cache.at(point, layer))
    if not 0 <= sample < count:
        raise ValueError(f"sample={sample!r}: the cache has samples 0 to {count - 1}.")
    values = cache.at(point, layer, sample=sample).detach()
    if not values.isfinite().all():
        raise ValueError(f"{point} holds NaN or Inf in layer {layer} for sample {sample}.")
    return values


def numbers(what: str, values: Numbers | None, count: int) -> list[int]:
    """Returns numbers below `count`, negative ones counted from the end; None means all.

    Raises ValueError, naming `what`, if one is out of range.
    """
    some = np.atleast_1d(range(count) if values is None else values)
    if not some.size or some.dtype.kind not in "iu" or not all((-count <= some) & (some < count)):
        raise ValueError(f"{what}={checks.quote(values)}: give numbers from 0 to {count - 1}.")
    return (some % count).tolist()


def tokens_of(cache: CrateCache, sample: int) -> list[int] | None:
    """Returns the ids of a text's tokens, found from their embeddings, or None if that fails."""
    model: Any = cache.model
    if model.cfg.kind != "text" or "hook_embed" not in cache:
        return None
    try:
        if model.tokenizer is None:
            return None
    except CheckpointError:  # it is not here, and cannot be fetched
        return None
    embedded = cache.at("hook_embed", sample=sample).detach().float()
    table = model.W_E.detach().float()
    if model.cfg.rotary:
        table = torch.nn.functional.rms_norm(table, table.shape[-1:], eps=model.cfg.ln_eps)
    ids = torch.cdist(embedded, table).argmin(dim=-1)
    same = torch.allclose(table[ids], embedded, rtol=1e-5, atol=1e-6)
    return ids.tolist() if same else None


def picture_of(model: HookedModel, images: Images, sample: int, cache: CrateCache) -> str:
    """Returns an image of a cache as a data URI; raises ValueError if it is not of these images."""
    n = len(next(iter(cache.values())))
    if images.ndim != 4 or len(images) != n:
        raise ValueError(
            f"images={list(images.shape)}: give the batch of {n} images that the cache is of."
        )
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
    elif not isinstance(tokens, str) and all(isinstance(token, str) for token in tokens):
        names = list(tokens)
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
