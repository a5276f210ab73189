"""The explorer: a page on which you point at a patch or token and see every head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped
from torch import Tensor

from crate_interp.circuits import Circuit
from crate_interp.core import checks
from crate_interp.core.safe_text import LONGEST, visible
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.viz.explorer import panels
from crate_interp.viz.explorer.map_kinds import map_kind
from crate_interp.viz.explorer.packing import (
    Attention,
    pack_attention,
    pack_contraction,
    pack_rows,
    planes,
    words_of,
)
from crate_interp.viz.pages.page import Html, is_page, render

# Ends of the names of the points that the page shows besides maps and codes.
_OTHERS = ("mlp.hook_post", "hook_resid_pre", "hook_resid_post", "hook_pooled", "hook_mask")
_STEPS = 10_000  # of a probability on the page
_MOST_SHARES = 200_000_000  # the most attention shares that a browser can hold

Inputs = Shaped[Tensor, "*batch"] | str | Sequence[str]


def explore(
    cache: CrateCache,
    inputs: Inputs,
    *,
    circuit: Circuit | None = None,
    sample: int = 0,
    name: str | None = None,
    graph: str | None = None,
    without: pd.DataFrame | None = None,
) -> Html:
    """Returns a page on which you point at a patch or token and see what every head does with it.

    For each head, the page shows what the patch or token attends to, what attends to it, and which
    tokens have similar codes. It also shows the largest atoms of the patch or token, and where else
    these atoms are large. For images it adds MaskCut's masks and the principal components of the
    codes; for texts, the logit lens. The page is one file, runs no model and needs no internet. It
    holds codes in 16 bits and computes attention from them. The error of a share of
    attention is at most 1 % of the largest share in its row; the page is checked for this when it
    is made.

    cache: from `model.run_with_cache(x)`, for a model of images or of text. inputs: the same x.
    circuit: a circuit to draw on the page; its heads get a ring. sample: the number of the sample
    in the cache. name: the sample's name on the page; None means "sample" and the number. graph:
    the name of a page of `ci.viz.graph` in the same folder, to link to. without:
    the table of `ci.circuits.switched_off(model, inputs[sample])`; a click then shows the answer
    without a head, an atom or a patch.

    The cache must hold attn.hook_pattern of every layer. Other points each add a part to the page:
    attn.hook_q and attn.hook_k; mlp.hook_post; hook_resid_pre with the last hook_resid_post;
    hook_pooled. The page names the parts that it leaves out.

    ToST has no pattern: its maps are the memberships attn.hook_pi, the same for every query. A map
    of CBT is the query's row of `A^T A`, scaled to sum to 1, with A from attn.hook_contract; the
    page also shows what the representative of the query's cell reads. The codes of both are
    attn.hook_u.

    Raises KeyError if the maps of a layer were not cached; ValueError if cache, inputs and sample
    do not belong together, for NaN or Inf, if the circuit has heads that the model lacks, and for
    a table of another input.
    """
    seen = panels.look(cache, inputs, sample)
    layers = range(len(seen.model.blocks))
    missing = [layer for layer in layers if not seen.has(seen.kind.point, layer)]
    if missing:
        raise KeyError(_what_to_cache(seen, missing))
    check_count(seen.model, seen.count)
    drawing = panels.circuit_data(circuit, seen.model)
    given = f"sample {int(sample)}" if name is None else visible(name, LONGEST)
    if graph is not None and not is_page(graph):
        raise ValueError(f"graph={checks.shown(graph)}: give the name of a page beside this one.")
    off = None if without is None else _without(seen, without)
    return _page(seen, given, graph, {"circuit": drawing, "without": off})


def check_count(model: HookedModel, count: int) -> None:
    """Raises ValueError if the maps of an input with `count` tokens are more than a page shows."""
    layers, heads = len(model.blocks), model.cfg.n_heads
    queries = {"membership": 1, "shared": 64}.get(map_kind(model).name, count)
    if layers * heads * queries * count > _MOST_SHARES:
        raise ValueError(
            f"{layers} layers of {heads} heads and {count} tokens are more than a page can show: "
            "give a shorter text or a smaller picture."
        )


def shown_points(model: HookedModel) -> tuple[str, ...]:
    """Returns the ends of the names of the points that the page of a model shows."""
    kind = map_kind(model)
    return (kind.point, *kind.codes, *_OTHERS)


def _page(seen: panels.Seen, given: str, graph: str | None, more: dict[str, Any]) -> Html:
    attention = [_attention(seen, layer) for layer in range(len(seen.model.blocks))]
    blobs = [
        (f"{part}-{layer}", text)
        for layer, each in enumerate(attention)
        for part, text in (each.parts | panels.tops(seen, layer)).items()
    ]
    title = f"{seen.model_name}: {given}"
    page = render(
        "explore.html",
        title=title,
        meta={"config": seen.model.cfg.to_dict()},
        graph=graph,
        given=given,
        of=len(seen.inputs),
        answer=panels.answer(seen),
        picture=panels.picture(seen),
        data=_data(seen, attention) | more,
        blobs=blobs,
        notes=_notes(seen, attention),
        count=seen.count,
        width=seen.model.cfg.d_head,
        error=max(each.error for each in attention),
        ratio=panels.ratio(seen),
    )
    return Html(title, page)


def _data(seen: panels.Seen, attention: list[Attention]) -> dict[str, object]:
    """Returns the data that the page's script reads first."""
    return {
        "kind": "text" if seen.grid is None else "image",
        "layers": len(attention),
        "heads": seen.model.cfg.n_heads,
        "count": seen.count,
        "grid": seen.grid,
        "causal": seen.causal,
        "names": panels.token_names(seen),
        "sees": panels.reaches(seen),
        "most": [each.most for each in attention],
        "special": seen.special,
        "alike": (alike := _alike(seen, attention)),
        **seen.kind.words(alike),
        "start": _start(seen),
        "overlays": panels.overlays(seen),
        "answers": panels.lens_names(seen),
        "goesOn": panels.next_tokens(seen),
    }


def _without(seen: panels.Seen, table: pd.DataFrame) -> dict[str, Any]:
    """Returns a table of `ci.circuits.switched_off` as the page's script reads it.

    Rows are [probability of the model's own answer, number of the likeliest answer, its
    probability], probabilities in 1/10,000: `heads` by layer and head, `atoms` by layer and number,
    `patches` in order. Raises ValueError if the table is of another input.
    """
    rows: dict[str, Any] = {"head": {}, "atom": {}, "patch": {}, "nothing": {}}
    for kind, layer, number, *(own, best, share) in table.itertuples(index=False):
        rows[kind].setdefault(int(layer), {})[int(number)] = [
            round(_STEPS * own), int(best), round(_STEPS * share),
        ]  # fmt: skip
    patches = list(rows["patch"].get(-1, {}).values())
    known, own = panels.answer(seen), rows["nothing"][-1][-1]
    names = panels.answer_names(seen, sorted(set(table["answer"].tolist())))
    if len(patches) not in (0, seen.count - seen.special) or (
        known and (names[own[1]] != known[0] or abs(own[0] - _STEPS * known[1]) > 10)
    ):
        raise ValueError(
            "without= is of another input or model: give "
            "ci.circuits.switched_off(model, inputs[sample])."
        )
    heads = [list(layer.values()) for layer in rows["head"].values()]
    found = {"heads": heads, "atoms": rows["atom"], "patches": patches, "own": own[:2]}
    return found | {"names": names}


def _what_to_cache(seen: panels.Seen, missing: list[int]) -> str:
    named = [f"blocks.{layer}.{seen.kind.point}" for layer in missing]
    points = shown_points(seen.model)
    words = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
    return (
        f"the cache lacks {words}. Call run_with_cache(x), which caches everything, or "
        f"run_with_cache(x, names_filter=lambda name: name.endswith({points!r})), which caches "
        "what this page shows."
    )


def _attention(seen: panels.Seen, layer: int) -> Attention:
    """Returns the maps of one layer for the sample, as text."""
    maps, codes, keys = seen.at(seen.kind.point, layer), seen.codes(0, layer), seen.codes(-1, layer)
    if seen.kind.name != "attention":
        parts = {} if codes is None else {"codes": planes(codes)}
        if seen.kind.name == "shared":
            return pack_contraction(maps, parts)
        return pack_rows(maps[:, None], parts)
    if codes is None or keys is None:
        codes = keys = codes if codes is not None else keys
    one = codes is None or keys is None or np.array_equal(codes, keys)
    return pack_attention(maps, codes, None if one else keys, seen.causal)


def _start(seen: panels.Seen) -> dict[str, int]:
    """Returns where the page opens: layer, head and token.

    In a text with a logit lens it is the token and layer at which the model's own answer gains most
    probability. Otherwise it is the place of the largest share of attention; for an image, the
    attending token is CLS, or the first patch if there is no CLS. Shares are taken relative to the
    even share, since a large share among three tokens says little. A token's attention to itself or
    to the first token does not count. If maps are memberships, the place is that of the largest.
    """
    if seen.kind.name == "membership":
        every = np.stack([seen.at(seen.kind.point, at) for at in range(len(seen.model.blocks))])
        return dict(zip(("layer", "head", "query"), _largest(every), strict=True))
    jump = panels.largest_gain(seen)
    if jump is not None:
        layer, query = jump
        head = _largest(_relative(seen, layer)[:, query])[0]
        return {"layer": layer, "head": head, "query": query}
    best: tuple[float, dict[str, int]] = (-1.0, {"layer": 0, "head": 0, "query": 0})
    for layer in range(len(seen.model.blocks)):
        shares = _relative(seen, layer)
        head, query, _ = _largest(shares)
        if float(shares.max()) > best[0]:
            best = (float(shares.max()), {"layer": layer, "head": head, "query": query})
    return best[1]


def _relative(seen: panels.Seen, layer: int) -> Float[np.ndarray, "head query pos"]:
    """Returns a layer's maps relative to the even share; shares that do not count are 0."""
    shares, tokens = _shares(seen, layer), np.arange(seen.count)
    asked = range(shares.shape[1])
    shares[:, :, : 1 if seen.grid is None else seen.special] = 0
    shares[:, asked, asked] = 0
    sees = np.minimum(tokens + 1 if seen.causal else seen.count, panels.reaches(seen)[layer])
    return shares * np.broadcast_to(sees, seen.count)[asked, None]


def _largest(values: np.ndarray) -> list[int]:
    """Returns the place of the largest number."""
    return [int(place) for place in np.unravel_index(int(values.argmax()), values.shape)]


def _shares(seen: panels.Seen, layer: int) -> Float[np.ndarray, "head query pos"]:
    """Returns the maps of a layer's heads, for an image those of its first token alone."""
    maps = seen.at(seen.kind.point, layer)
    if seen.kind.name == "attention":
        return (maps[:, :1] if seen.grid else maps).copy()
    row = maps[:, :, :1].swapaxes(1, 2) @ maps  # [head, 1, pos]
    return row / row.sum(axis=2, keepdims=True).clip(min=1e-30)


def _alike(seen: panels.Seen, attention: list[Attention]) -> str | None:
    """Returns the page's word for the vectors that it compares by cosine.

    The word is "codes" if queries and keys are the same, "queries" if they differ, and None if the
    page holds no codes.
    """
    if not any("codes" in each.parts for each in attention):
        return None
    queries, keys = seen.codes(0, 0), seen.codes(-1, 0)
    one = queries is None or keys is None or np.array_equal(queries, keys)
    return "codes" if one else "queries"


def _notes(seen: panels.Seen, attention: list[Attention]) -> list[str]:
    """Returns sentences on what the page does not show, and on how its numbers are made."""
    notes = [f"{part} left out: {why}." for part, why in panels.left_out(seen)]
    hidden = panels.hidden_patches(seen)
    if hidden:
        notes.append(f"The model did not see {hidden} of the {seen.count - seen.special} patches.")
    reaches = panels.reaches(seen)
    short = [layer for layer, reach in enumerate(reaches) if reach < seen.count]
    if short:
        before = min(reaches) - 1
        notes.append(
            f"In {words_of(short)} a token sees only itself and the {before} tokens before it."
        )
    stored = [layer for layer, each in enumerate(attention) if "rows" in each.parts]
    if stored and seen.kind.name == "attention":
        notes.append(
            f"The attention of {words_of(stored)} is stored in 255 steps of each row's largest "
            "share, because the softmax of the cached codes, rounded to 16 bits, differs from it."
        )
    return notes
