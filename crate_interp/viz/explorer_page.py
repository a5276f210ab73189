"""The explorer: a page on which you point at a patch or token and see every head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped
from matplotlib.figure import Figure
from torch import Tensor

from crate_interp.circuits.circuit import Circuit
from crate_interp.core.safe_text import LONGEST, plain, visible
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.preprocess import displayable
from crate_interp.viz import canvas, packing, panels
from crate_interp.viz.attention_images import attention_on_image
from crate_interp.viz.cache_views import name_of
from crate_interp.viz.packing import Attention, map_kind
from crate_interp.viz.page import Html, check_page, image_uri

# Ends of the names of the points that the page shows besides maps and codes.
_REST = "mlp.hook_post hook_resid_pre hook_resid_mid hook_resid_post hook_pooled hook_mask".split()
_STEPS = 10_000  # of a probability on the page
_PICTURE = 448  # the most pixels on the longer side of the picture
_TOKENS = 32  # of a text, on the figure that stands for the page
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
    command: str | None = None,
) -> Html:
    """Returns a page on which you point at a patch or token and see what every head does with it.

    For each head, the page shows what the patch or token attends to, what attends to it, and which
    tokens have similar codes. It also shows the largest atoms of the patch or token, and where else
    these atoms are large. For images it adds MaskCut's masks and the principal components of the
    codes; for texts, the logit lens. With one U for queries and keys it says which codes of the
    layer below match where a head looks (`ci.circuits.why_attends`), and what each token costs
    (`ci.measures.token_rates`). The page is one file, runs no model and needs no internet. It holds
    codes in 16 bits and computes attention from them. The error of a share of attention is at most
    1 % of the largest share in its row; the page is checked for this when it is made.

    The cache must hold attn.hook_pattern of every layer. Other points each add a part to the page:
    attn.hook_q and attn.hook_k; mlp.hook_post; hook_resid_pre with the last hook_resid_post;
    hook_resid_mid; hook_pooled. The page names the parts that it leaves out.

    ToST has no pattern: its maps are the memberships attn.hook_pi, the same for every query. A map
    of CBT is the query's row of `A^T A`, scaled to sum to 1, with A from attn.hook_contract; the
    page also shows what the representative of the query's cell reads. The codes of both are
    attn.hook_u.

    Args:
        cache: From `model.run_with_cache(x)`, for a model of images or of text.
        inputs: The same x.
        circuit: A circuit to draw on the page; its heads get a ring.
        sample: The number of the sample in the cache.
        name: The sample's name on the page; None means "sample" and the number.
        graph: The name of a page of `ci.viz.graph` in the same folder, to link to.
        without: The table of `ci.circuits.switched_off(model, inputs[sample])`; the page then opens
            at the head without which the answer changes most, and shows the answer without a head,
            an atom or a patch.
        command: The command line that makes the page, for the page to print. None prints Python.

    Raises:
        KeyError: If the maps of a layer were not cached.
        ValueError: If cache, inputs and sample do not belong together, for NaN or Inf, if the
            circuit has heads that the model lacks, and for a table of another input.
    """
    check_page("graph", graph)
    view = panels.look(cache, inputs, sample)
    model = view.model
    if not view.everywhere(view.kind.point):
        raise KeyError(
            f"the cache lacks {view.kind.point} of a layer. Call run_with_cache(x), or cache only "
            f"what it shows: names_filter=lambda name: name.endswith({shown_points(model)!r})."
        )
    check_count(model, view.count)
    words = f"sample {int(sample)}" if name is None else visible(name, LONGEST)
    effects = None if without is None else _without(view, without)
    attention = [_attention(view, layer) for layer in range(len(model.blocks))]
    answer, said = panels.answer(view), "What every head looks at"
    picture = view.grid and image_uri(displayable(view.inputs[view.sample], model.cfg), _PICTURE)
    if answer is not None:
        sees = "The model sees" if view.grid else "After this text the model expects"
        said = f"{sees} \u201c{answer[0].strip()}\u201d, with probability {_percent(answer[1])}."
    data = _data(view, attention, effects)
    return Html.of(
        "explore.html",
        f"{plain(name_of(cache))}: {words}",
        said=[said, *_without_lead(effects, data["start"])],
        still=_still(view, data["start"]),
        meta={"config": model.cfg.to_dict()},
        graph=graph,
        model=plain(name_of(cache)),
        command=command,
        given=words,
        view=view,
        picture=picture,
        data=data | {"circuit": panels.circuit_data(circuit, model), "without": effects},
        blobs=[
            (f"{part}-{layer}", text)
            for layer, each in enumerate(attention)
            for part, text in (
                each.parts | panels.tops(view, layer) | panels.matches(view, layer)
            ).items()
        ],
        hidden=int(view.cache.at("hook_mask")[sample].sum()) if view.has("hook_mask") else 0,
        has_answers=panels.has_answers(model),
        short=[at for at, reach in enumerate(panels.reaches(view)) if reach < view.count],
        stored=[at for at, each in enumerate(attention) if "rows" in each.parts],
        error=max(each.error for each in attention),
    )


def _percent(share: float) -> str:
    """Returns a probability in percent, as the page's scripts write it."""
    return f"{100 * share:.1f}\u00a0%"


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
    return (kind.point, *kind.codes, *_REST)


def _data(
    view: panels.View, attention: list[Attention], without: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the data that the page's script reads first."""
    alike = None  # the page's word for the vectors that it compares by cosine
    if any("codes" in each.parts for each in attention):
        alike = "codes" if view.codes(0)[1] is None else "queries"
    tokens = None if view.grid else view.inputs[view.sample].tolist()
    answers, start = None, _start(view)
    if view.has_lens:
        answers = panels.answer_names(view, sorted(set(view.lens[0].ravel().tolist())))
    return {
        "kind": "text" if view.grid is None else "image",
        "layers": len(attention),
        "heads": view.model.cfg.n_heads,
        "count": view.count,
        "grid": view.grid,
        "causal": view.causal,
        "names": None if tokens is None else panels.token_texts(view.model, tokens),
        "sees": panels.reaches(view),
        "most": [each.most for each in attention],
        "special": view.special,
        "alike": alike,
        "map": view.kind.name,
        "start": start | ({} if without is None else _most_effect(without)),
        "overlays": panels.overlays(view),
        "costs": panels.costs(view),
        "answers": answers,
        "goesOn": None if tokens is None else tokens[1:] if view.causal else tokens,
    }


def _still(view: panels.View, start: dict[str, int]) -> Figure:
    """Returns a figure of every head's map where the page opens."""
    layer, query = start["layer"], start["query"]
    if view.grid is not None:  # the page opens at the first token
        image, first = view.inputs[[view.sample]], 0 if view.special else (0, 0)
        return attention_on_image(view.cache.alone(view.sample), layer, image, first)
    maps = view.at(view.kind.point, layer)
    maps = maps[:, query] if view.kind.name == "attention" else maps
    words = panels.token_texts(view.model, view.inputs[view.sample].tolist())
    most = query if view.causal else min(query + _TOKENS // 2, view.count - 1)
    seen = slice(max(0, most - _TOKENS + 1), most + 1)
    figure, axes = canvas.canvas(None, 0.2 * len(maps) + 1.2, None)
    figure.set_figwidth(canvas.PAGE)
    axes.imshow(maps[:, seen], aspect="auto", cmap="magma", vmin=0)
    names = [canvas.label(word)[:12] for word in words[seen]]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", parse_math=False)
    axes.set_yticks(range(len(maps)), [f"L{layer}H{head}" for head in range(len(maps))])
    axes.tick_params(labelsize=canvas.SMALL)
    return canvas.as_written(figure)


def _without(view: panels.View, table: pd.DataFrame) -> dict[str, Any]:
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
    known, own = panels.answer(view), rows["nothing"][-1][-1]
    names = panels.answer_names(view, sorted(set(table["answer"].tolist())))
    if len(patches) not in (0, view.count - view.special) or (
        known and (names[own[1]] != known[0] or abs(own[0] - _STEPS * known[1]) > 10)
    ):
        raise ValueError(
            "without= is of another input or model: give "
            "ci.circuits.switched_off(model, inputs[sample])."
        )
    heads = [list(layer.values()) for layer in rows["head"].values()]
    found = {"heads": heads, "atoms": rows["atom"], "patches": patches, "own": own[:2]}
    return found | {"names": names}


def _without_lead(without: dict[str, Any] | None, start: dict[str, Any]) -> list[str]:
    """Returns what the answer becomes without the head at which the page opens."""
    if without is None or "off" not in start:
        return []
    layer, head = start["layer"], start["head"]
    (before, best), (after, top, share) = without["own"], without["heads"][layer][head]
    old, new = (without["names"][number].strip() or "\u2205" for number in (best, top))
    moves = "falls to" if after < before else "rises to" if after > before else "stays at"
    now, words = _percent(after / _STEPS), f"Without head L{layer}H{head} the answer"
    if top == best:
        return [f"{words} is still \u201c{old}\u201d; its probability {moves} {now}."]
    share = _percent(share / _STEPS)
    return [f"{words} becomes \u201c{new}\u201d, {share}; \u201c{old}\u201d {moves} {now}."]


def _attention(view: panels.View, layer: int) -> Attention:
    """Returns the maps of one layer for the sample, as text."""
    maps = view.at(view.kind.point, layer)
    codes, keys = view.codes(layer)
    if view.kind.name != "attention":
        parts = {} if codes is None else {"codes": packing.planes(codes)}
        if view.kind.name == "shared":
            return packing.pack_contraction(maps, parts)
        return packing.pack_rows(maps[:, None], parts)
    return packing.pack_attention(maps, codes, keys, view.causal)


def _start(view: panels.View) -> dict[str, int]:
    """Returns where the page opens: layer, head and token.

    It is the place of the largest share of attention. For an image, the attending token is CLS, or
    the first patch if there is no CLS; for a text of which the page says the next token, it is the
    last token. Shares are taken relative to the even share, since a large share among three tokens
    says little. A token's attention to itself or to the first token does not count. If maps are
    memberships, the place is that of the largest, or the head of the last token's largest.
    """
    layers = range(len(view.model.blocks))
    last = slice(view.count - 1 if view.has_lens and view.causal else 0, None)
    layer = int(np.argmax([_relative(view, at)[:, last].max() for at in layers]))
    head, query, *_ = _largest(_relative(view, layer)[:, last])
    query += last.start
    return {"layer": layer, "head": head, "query": query}


def _most_effect(without: dict[str, Any]) -> dict[str, Any]:
    """Returns where the page opens if it knows the answer without each head: with one head off.

    It is the head without which the probability of the model's answer changes most.
    """
    shares = np.array([[row[0] for row in layer] for layer in without["heads"]])
    if not shares.size:
        return {}
    layer, head = _largest(np.abs(shares - without["own"][0]))
    return {"layer": layer, "head": head, "off": "head"}


def _relative(view: panels.View, layer: int) -> Float[np.ndarray, "head query *pos"]:
    """Returns a layer's maps relative to the even share; shares that do not count are 0.

    For an image, only the map of the first token counts. Memberships stay as they are.
    """
    maps = view.at(view.kind.point, layer)
    if view.kind.name == "membership":
        return maps
    if view.kind.name == "attention":
        shares = (maps[:, :1] if view.grid else maps).copy()
    else:
        row = maps[:, :, :1].swapaxes(1, 2) @ maps  # [head, 1, pos]
        shares = row / row.sum(axis=2, keepdims=True).clip(min=1e-30)
    queries = range(shares.shape[1])
    shares[:, :, : 1 if view.grid is None else view.special] = 0
    shares[:, queries, queries] = 0
    tokens = np.arange(view.count) + 1 if view.causal else view.count
    sees = np.broadcast_to(np.minimum(tokens, panels.reaches(view)[layer]), view.count)
    return shares * sees[queries, None]


def _largest(values: np.ndarray) -> list[int]:
    """Returns the place of the largest number."""
    return [int(place) for place in np.unravel_index(int(values.argmax()), values.shape)]
