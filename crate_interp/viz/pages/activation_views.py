"""Pages of the activations of atoms: over an image, over a text, and the tokens with the largest.

Texts and tables are drawn by circuitsvis, whose JavaScript is inside the page, so no internet is
needed. It draws no images: those are drawn by this library.
"""

from collections.abc import Sequence
from functools import cache as once
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.models.cache import CrateCache
from crate_interp.results.grouped_samples import counted
from crate_interp.viz.pages.cache_views import (
    Grid,
    Images,
    Numbers,
    Tokens,
    grid_of,
    held,
    model_of,
    name_of,
    names_of,
    numbers,
    picture_of,
    tokens_of,
)
from crate_interp.viz.pages.page import Html, render


def activations(
    cache: CrateCache,
    atoms: Numbers,
    *,
    layers: Numbers | None = None,
    point: str = "mlp.hook_post",
    sample: int = 0,
    tokens: Tokens | None = None,
    grid: Grid | None = None,
    images: Images | None = None,
) -> Html:
    """Returns a page that colours each patch or token by an atom's activation.

    The reader chooses layer and atom; the page opens on those of the largest activation. atoms: the
    numbers of the atoms on the point's last axis. layers: the numbers of the layers, None for all.
    images: the images that the cache is of, to draw over; without them an image is drawn as its
    patches alone. tokens, grid, sample: as in `attention`. Raises KeyError and ValueError as
    `attention` does.
    """
    model = model_of(cache)
    chosen = numbers("layers", layers, len(model.blocks))
    found = [held(cache, layer, point, sample).flatten(1) for layer in chosen]  # [pos, atom]
    picked = numbers("atoms", atoms, found[0].shape[1])
    known = tokens_of(cache, sample) if tokens is None else tokens
    values = torch.stack([layer[:, picked] for layer in found], dim=1)  # [pos, layer, atom]
    called = _places(model, known, len(found[0]), grid)
    title, kicker = f"{name_of(cache)}: where atoms are on", f"{point}, sample {sample}"
    finding = _most_on(values, called, chosen, picked)
    _, first, best = np.unravel_index(int(values.argmax()), values.shape)
    if model.cfg.kind != "text" and tokens is None:
        shown = {
            "values": _rounded(values.permute(1, 2, 0)),  # [layer, atom, pos]
            "layers": chosen,
            "atoms": picked,
            "names": called,
            "grid": grid_of(model, grid),
            "first": [int(first), int(best)],
        }
        picture = "" if images is None else picture_of(model, images, sample, cache)
        about = {"title": title, "kicker": kicker, "finding": finding, "picture": picture}
        return Html(title, render("activations.html", **about, data=shown))
    # circuitsvis opens on what comes first
    layer_order = [int(first), *(at for at in range(len(chosen)) if at != first)]
    atom_order = [int(best), *(at for at in range(len(picked)) if at != best)]
    properties = {
        "tokens": names_of(model, known, len(found[0]), grid),
        "activations": _rounded(values[:, layer_order][:, :, atom_order]),
        "firstDimensionName": "Layer",
        "secondDimensionName": "Atom",
        "firstDimensionLabels": [str(chosen[at]) for at in layer_order],
        "secondDimensionLabels": [str(picked[at]) for at in atom_order],
    }
    return _page(title, kicker, finding, "TextNeuronActivations", properties)


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
    chosen = numbers("layers", layers, len(model_of(cache).blocks))
    count = checks.count("count", count)
    n = len(next(iter(cache.values())))
    given = [tokens_of(cache, k) for k in range(n)] if tokens is None else list(tokens)
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
        found = [held(cache, layer, point, sample).flatten(1) for layer in chosen]
        picked = numbers("atoms", atoms, found[0].shape[1])
        values = torch.stack([layer[:, picked] for layer in found])  # [layer, pos, atom]
        rows = min(count, values.shape[1])
        top, low = values.topk(rows, dim=1), values.topk(rows, dim=1, largest=False)
        best["topkVals"].append(_rounded(top.values))
        best["topkIdxs"].append(top.indices.tolist())
        best["bottomkVals"].append(_rounded(low.values.flip(1)))
        best["bottomkIdxs"].append(low.indices.flip(1).tolist())
        names.append(names_of(cache.model, given[sample], values.shape[1], None))
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
    title = f"{name_of(cache)}: in which tokens atoms are largest"
    finding = _most_on(torch.cat(seen), places, chosen, picked)
    return _page(title, f"{point}, {counted(n, 'samples')}", finding, "TopkTokens", properties)


def _places(model: Any, tokens: Any, count: int, grid: Any) -> list[str]:
    """Returns each token's name in sentences: CLS, patch 1,2 or the token 'cat'."""
    names = names_of(model, tokens, count, grid)
    if tokens is None and model.cfg.kind != "text":
        return [names[0], *(f"patch {name}" for name in names[1:])]
    return [f"the token \u201c{name}\u201d" for name in names]


def _most_on(
    values: Float[Tensor, "pos layer atom"], places: list[str], layers: list[int], atoms: list[int]
) -> str:
    """Returns a sentence on the largest value, its atom and token, and the share above 0."""
    on = values > 0
    if not on.any():
        return "These atoms are off: no value is above 0 in any token."
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
