"""Views of circuitsvis as pages that are one file and ask for nothing: attention, activations on tokens or patches, top tokens."""

import base64
import html
import json
from collections.abc import Sequence
from functools import cache as once
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp import checks
from crate_interp.viz.page import Html

_CELL = (
    "\u00a0" * 5
)  # circuitsvis colours text: a patch is five spaces, and a line break ends a row of them
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; worker-src blob:; connect-src 'none'"
)
# bytes -> heads x queries x keys, each head in steps of its largest value / 255
_UNPACK = """
function unpack(text, count, largest) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return largest.map((most, head) => Array.from({length: count}, (_, query) => Array.from(
    bytes.subarray((head * count + query) * count, (head * count + query + 1) * count), step => +(step * most / 255).toPrecision(3))));
}"""


def attention(
    cache: Any,
    layer: int,
    *,
    sample: int = 0,
    tokens: Any = None,
    heads: Any = None,
    grid: Any = None,
) -> Html:
    """The attention patterns of a layer's heads, which query attends to which key: circuitsvis' AttentionHeads.

    cache: of `model.run_with_cache(x)`, with attn.hook_pattern of the layer. tokens: what to call the tokens, as strings, ids or
    the text itself; None numbers them. Of an image they are "CLS" and "row,column" (grid: rows and columns, where the image
    is not of the model's own size). heads: some of them, None for all. Values are told in 255 steps of a head's largest: 12 heads
    of 197 tokens make 2 MB. Raises KeyError for a pattern that was not cached, ValueError for layers, samples, heads and
    tokens there are not.
    """
    pattern = _held(cache, layer, "attn.hook_pattern", sample)  # [head, query, key]
    if pattern.shape[1] != pattern.shape[2]:
        raise ValueError(
            "the cache holds some of the tokens only: run_with_cache without pos_slice."
        )
    chosen = _numbers("heads", heads, len(pattern))
    names = _names(cache.model, tokens, pattern.shape[1], grid)
    values = pattern[chosen].float().cpu().numpy()
    if not np.isfinite(values).all():
        raise ValueError(
            f"the pattern of layer {layer} holds NaN or Inf for sample {sample}: nothing can be drawn of it."
        )
    largest = values.max(axis=(1, 2)).clip(min=1e-30)
    steps = (values / largest[:, None, None] * 255).round().astype(np.uint8)
    number = layer % len(cache.model.blocks)
    props = {
        "tokens": names,
        "maxValue": float(largest.max()),
        "attentionHeadNames": [f"L{number}H{head}" for head in chosen],
        "maskUpperTri": bool(cache.model.cfg.kind == "text" and cache.model.cfg.causal),
    }
    packed = json.dumps(
        [
            base64.b64encode(steps.tobytes()).decode(),
            len(names),
            [float(f"{most:.4g}") for most in largest],
        ]
    )
    title = f"{_called(cache.model)}: attention of layer {number}, sample {sample}"
    return _page(title, [("AttentionHeads", props, f"{{attention: unpack(...{packed})}}")])


def activations(
    cache: Any,
    atoms: Any,
    *,
    layers: Any = None,
    point: str = "mlp.hook_post",
    sample: int = 0,
    tokens: Any = None,
    grid: Any = None,
) -> Html:
    """How strongly some atoms of some layers are on in each token, with a choice of layer and atom: circuitsvis' activations on text.

    An image is drawn as its patches, row by row, CLS above them. atoms: numbers of entries of the point's last axis. layers: None
    for all. tokens, grid, sample: as in `attention`. Raises as `attention`.
    """
    chosen = _numbers("layers", layers, len(_model(cache).blocks))
    held = [_held(cache, layer, point, sample).flatten(1) for layer in chosen]  # [pos, atom]
    picked = _numbers("atoms", atoms, held[0].shape[1])
    names = _cells(cache.model, tokens, len(held[0]), grid)
    values = torch.stack([layer[:, picked] for layer in held], dim=1)  # [pos, layer, atom]
    props = {
        "tokens": names,
        "activations": _rounded(values),
        "firstDimensionName": "Layer",
        "secondDimensionName": "Atom",
        "firstDimensionLabels": [str(layer) for layer in chosen],
        "secondDimensionLabels": [str(atom) for atom in picked],
    }
    return _page(
        f"{_called(cache.model)}: {point}, sample {sample}",
        [("TextNeuronActivations", props, "{}")],
    )


def top_tokens(
    cache: Any,
    atoms: Any,
    *,
    layers: Any = None,
    point: str = "mlp.hook_post",
    tokens: Any = None,
    count: int = 10,
) -> Html:
    """The tokens of each sample in which atoms are largest and smallest: circuitsvis' table of top tokens.

    The third choice, "Atom", counts through `atoms` in the order given. tokens: a list of strings, ids or text for each sample. count:
    rows at most. Raises as `attention`.
    """
    chosen = _numbers("layers", layers, len(_model(cache).blocks))
    if not checks.is_int(count) or count < 1:
        raise ValueError(f"count={count!r}: give a whole number of at least 1.")
    n = len(next(iter(cache.values())))
    told = [None] * n if tokens is None else list(tokens)
    samples = (
        list(range(n)) if n > 1 else [0, 0]
    )  # of a single sample circuitsvis shows a single atom
    if len(told) != n:
        raise ValueError(
            f"tokens are of {len(told)} samples, the cache of {n}: give a list for each sample."
        )
    names, best = [], {"topkVals": [], "topkIdxs": [], "bottomkVals": [], "bottomkIdxs": []}
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
        names.append(_names(cache.model, told[sample], values.shape[1], None))
    props = {
        "tokens": names,
        **best,
        "firstDimensionName": "Layer",
        "thirdDimensionName": "Atom",
        "sampleLabels": [f"sample {sample}" for sample in samples],
        "firstDimensionLabels": [str(layer) for layer in chosen],
    }
    return _page(f"{_called(cache.model)}: top tokens of {point}", [("TopkTokens", props, "{}")])


def _page(title: str, views: Sequence[tuple[str, dict[str, Any], str]]) -> Html:
    """circuitsvis' own bundle once, then each view: its component, its properties, and more of them as JavaScript."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    body += [f'<div id="view-{number}"></div>' for number in range(len(views))]
    body.append(f"<script>{_bundle()}</script>")
    calls = [
        f'CircuitsVis.render("view-{number}", CircuitsVis.{component}, {{...{_json(props)}, ...{more}}});'
        for number, (component, props, more) in enumerate(views)
    ]
    body.append(f"<script>{_UNPACK}\n{chr(10).join(calls)}</script>")
    return Html(
        title, body, f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    )  # it counts in the head alone


@once
def _bundle() -> str:
    """circuitsvis' JavaScript, from its package: neither it nor the page asks the network."""
    source = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    return source.replace("</script>", "<\\/script>")


def _json(value: Any) -> str:
    """JSON that cannot end the script it stands in."""
    return (
        json.dumps(value)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _rounded(values: Tensor) -> Any:
    """Nested lists of three digits."""
    nested = values.detach().double().cpu()
    if not bool(nested.isfinite().all()):
        raise ValueError("the cache holds NaN or Inf there: nothing can be coloured by it.")
    scale = 10.0 ** (2 - nested.abs().clamp(min=1e-30).log10().floor())
    return ((nested * scale).round() / scale).tolist()


def _model(cache: Any) -> Any:
    model = getattr(cache, "model", None)
    if model is None or model.cfg.kind not in ("vision", "mae", "text"):
        raise ValueError(
            "give the cache of model.run_with_cache(x); of a CLIP cache.visual or cache.text."
        )
    return model


def _held(cache: Any, layer: Any, point: str, sample: Any) -> Tensor:
    """What a point of a layer holds of one sample."""
    count = len(_model(cache).blocks)
    if not checks.is_int(layer) or not -count <= layer < count:
        raise ValueError(f"layer={layer!r}: the model has layers 0 to {count - 1}.")
    name = full_name(point, layer % count)
    if name not in cache.cache_dict:
        raise KeyError(
            f"the cache lacks {name!r}: run_with_cache(x, names_filter=[{name!r}, ...]), or cache all."
        )
    held = cache[name]
    if not cache.has_batch_dim:
        raise ValueError(
            "the cache has no batch axis: run_with_cache without remove_batch_dim=True."
        )
    if not checks.is_int(sample) or not 0 <= sample < len(held):
        raise ValueError(f"sample={sample!r}: the cache has samples 0 to {len(held) - 1}.")
    return held[sample].detach()


def _numbers(what: str, wanted: Any, count: int) -> list[int]:
    if wanted is None:
        return list(range(count))
    values = wanted.tolist() if hasattr(wanted, "tolist") else wanted
    values = list(values) if isinstance(values, (list, tuple, range)) else [values]
    if not values or not all(checks.is_int(value) and -count <= value < count for value in values):
        raise ValueError(f"{what}={wanted!r}: give numbers from 0 to {count - 1}.")
    return [int(value) % count for value in values]


def _names(model: Any, tokens: Any, count: int, grid: Any) -> list[str]:
    """What the tokens are called."""
    if tokens is None and model.cfg.kind != "text":
        rows, columns = model.cfg.grid if grid is None else checks.size("grid", grid)
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
        found = model.to_str_tokens(torch.tensor(tokens) if isinstance(tokens, list) else tokens)
        names = found[0] if len(found) == 1 and isinstance(found[0], list) else found
    if len(names) != count:
        raise ValueError(
            f"there are {count} tokens and {len(names)} names: give tokens= or grid= of the run that was cached."
        )
    return list(names)


def _cells(model: Any, tokens: Any, count: int, grid: Any) -> list[str]:
    """Tokens of a text, or cells whose line breaks make the grid of patches."""
    if model.cfg.kind == "text" or tokens is not None:
        return _names(model, tokens, count, None)
    columns = (model.cfg.grid if grid is None else checks.size("grid", grid))[1]
    _names(model, None, count, grid)
    return ["CLS\n", *(_CELL + "\n" * ((patch + 1) % columns == 0) for patch in range(count - 1))]


def _called(model: Any) -> str:
    return model.cfg.model_name or f"{model.cfg.family} model"
