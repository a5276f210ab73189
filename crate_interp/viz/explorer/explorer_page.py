"""The explorer: a page on which you point at a patch or token and see every head."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Shaped
from torch import Tensor

from crate_interp.circuits import Circuit
from crate_interp.core.safe_text import LONGEST, visible
from crate_interp.models.cache import CrateCache
from crate_interp.viz.explorer import panels
from crate_interp.viz.explorer.packing import Attention, pack_attention, words_of
from crate_interp.viz.pages.page import Html, render

# Ends of the names of the points that the page shows: attention, codes, atoms, the stream.
POINTS = (
    "attn.hook_pattern", "attn.hook_q", "attn.hook_k", "mlp.hook_post", "hook_resid_pre",
    "hook_resid_post", "hook_pooled", "hook_mask",
)  # fmt: skip
_MOST_SHARES = 200_000_000  # the most attention shares that a browser can hold

Inputs = Shaped[Tensor, "*batch"] | str | Sequence[str]


def explore(
    cache: CrateCache,
    inputs: Inputs,
    *,
    circuit: Circuit | None = None,
    sample: int = 0,
    name: str | None = None,
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
    in the cache. name: the sample's name on the page; None means "sample" and the number.

    The cache must hold attn.hook_pattern of every layer. Other points each add a part to the page:
    attn.hook_q and attn.hook_k; mlp.hook_post; hook_resid_pre with the last hook_resid_post;
    hook_pooled. The page names the parts that it leaves out.

    Raises KeyError if a pattern was not cached; ValueError if cache, inputs and sample do not
    belong together, for NaN or Inf, and if the circuit has heads that the model lacks.
    """
    seen = panels.look(cache, inputs, sample)
    layers = len(seen.model.blocks)
    missing = [layer for layer in range(layers) if not seen.has("attn.hook_pattern", layer)]
    if missing:
        raise KeyError(_what_to_cache(missing))
    if layers * seen.model.cfg.n_heads * seen.count**2 > _MOST_SHARES:
        raise ValueError(
            f"{layers} layers of {seen.model.cfg.n_heads} heads and {seen.count} tokens are more "
            "than a page can show: give a shorter text or a smaller picture."
        )
    drawing = panels.circuit_data(circuit, seen.model)
    given = f"sample {int(sample)}" if name is None else visible(name, LONGEST)
    return _page(seen, given, drawing)


def _page(seen: panels.Seen, given: str, circuit: dict[str, object] | None) -> Html:
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
        given=given,
        answer=panels.answer(seen),
        picture=panels.picture(seen),
        data=_data(seen, attention) | {"circuit": circuit},
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
        "alike": _alike(seen, attention),
        "start": _start(seen),
        "overlays": panels.overlays(seen),
        "answers": panels.lens_names(seen),
        "goesOn": panels.next_tokens(seen),
    }


def _what_to_cache(missing: list[int]) -> str:
    named = [f"blocks.{layer}.attn.hook_pattern" for layer in missing]
    words = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
    return (
        f"the cache lacks {words}. Call run_with_cache(x), which caches everything, or "
        f"run_with_cache(x, names_filter=lambda name: name.endswith({POINTS!r})), which caches "
        "what this page shows."
    )


def _attention(seen: panels.Seen, layer: int) -> Attention:
    """Returns the attention of one layer for the sample, as text."""
    pattern = seen.at("attn.hook_pattern", layer)
    codes, keys = seen.codes("q", layer), seen.codes("k", layer)
    if codes is None or keys is None:
        codes = keys = codes if codes is not None else keys
    one = codes is None or keys is None or np.array_equal(codes, keys)
    return pack_attention(pattern, codes, None if one else keys, seen.causal)


def _start(seen: panels.Seen) -> dict[str, int]:
    """Returns where the page opens: the token, layer and head with the largest share of attention.

    Shares are taken relative to the even share, since a large share among three tokens says little.
    For an image, the attending token is CLS. A token's attention to itself or to the first token
    does not count.
    """
    tokens = np.arange(seen.count)
    sees = [
        np.minimum(tokens + 1 if seen.causal else seen.count, reach)
        for reach in panels.reaches(seen)
    ]
    best: tuple[float, dict[str, int]] = (-1.0, {"layer": 0, "head": 0, "query": 0})
    for layer in range(len(seen.model.blocks)):
        shares = seen.at("attn.hook_pattern", layer).copy()
        shares[:, :, 0] = 0
        shares[:, range(seen.count), range(seen.count)] = 0
        shares *= np.broadcast_to(sees[layer], seen.count)[:, None]
        shares = shares[:, :1] if seen.grid else shares
        head, query, _ = np.unravel_index(int(shares.argmax()), shares.shape)
        if float(shares.max()) > best[0]:
            place = {"layer": layer, "head": int(head), "query": int(query)}
            best = (float(shares.max()), place)
    return best[1]


def _alike(seen: panels.Seen, attention: list[Attention]) -> str | None:
    """Returns the page's word for the vectors that it compares by cosine.

    The word is "codes" if queries and keys are the same, "queries" if they differ, and None if the
    page holds no codes.
    """
    if not any("codes" in each.parts for each in attention):
        return None
    queries, keys = seen.codes("q", 0), seen.codes("k", 0)
    one = queries is None or keys is None or np.array_equal(queries, keys)
    return "codes" if one else "queries"


def _notes(seen: panels.Seen, attention: list[Attention]) -> list[str]:
    """Returns sentences on what the page does not show, and on how its numbers are made."""
    notes = [f"{part} left out: {why}." for part, why in panels.left_out(seen)]
    hidden = panels.hidden_patches(seen)
    if hidden:
        notes.append(f"The model did not see {hidden} of the {seen.count - 1} patches.")
    reaches = panels.reaches(seen)
    short = [layer for layer, reach in enumerate(reaches) if reach < seen.count]
    if short:
        before = min(reaches) - 1
        notes.append(
            f"In {words_of(short)} a token sees only itself and the {before} tokens before it."
        )
    stored = [layer for layer, each in enumerate(attention) if "rows" in each.parts]
    if stored:
        notes.append(
            f"The attention of {words_of(stored)} is stored in 255 steps of each row's largest "
            "share, because the softmax of the cached codes, rounded to 16 bits, differs from it."
        )
    return notes
