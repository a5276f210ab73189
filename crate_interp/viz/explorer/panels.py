"""The parts of the explorer other than attention: names, picture, atoms, masks, lens and circuit.

If the cache lacks what a panel needs, the page leaves the panel out and says why.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.circuits import Circuit
from crate_interp.circuits.circuit import LAST, number_of, place_of
from crate_interp.core import checks
from crate_interp.core.safe_text import LONGEST, plain, visible
from crate_interp.measures import maskcut, pca_map
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.context import window_sizes
from crate_interp.models.preprocess import displayable
from crate_interp.models.text.text_and_tokens import check_tokens
from crate_interp.viz.explorer.map_kinds import MapKind, map_kind
from crate_interp.viz.explorer.packing import pack_ranked, pack_tops
from crate_interp.viz.pages.page_pictures import image_uri

ATOMS, ANSWERS = 16, 5  # how many atoms and next tokens a page stores for each token
_MASKS, _COMPONENTS, _EDGES = 3, 3, 200
_TOWERS = ("clipa-visual", "clipa-text")  # towers return features, which are not answers
_PICTURE = 448  # the most pixels on the longer side of the picture


@dataclass(frozen=True)
class Seen:
    """One sample of a cache, and the batch of inputs that the sample is in."""

    cache: CrateCache
    model: HookedModel
    inputs: Tensor
    sample: int
    count: int  # of tokens
    grid: tuple[int, int] | None  # rows and columns of patches; None for a text

    @property
    def causal(self) -> bool:
        """Whether a token sees only itself and the tokens before it."""
        return self.model.cfg.kind == "text" and self.model.cfg.causal

    @property
    def kind(self) -> MapKind:
        """What the maps of the heads are."""
        return map_kind(self.model)

    @property
    def special(self) -> int:
        """How many tokens come before the patches: 1 (CLS) or 0; 0 for a text."""
        return 0 if self.grid is None else self.model.cfg.n_special

    @property
    def model_name(self) -> str:
        """The model's name on the page."""
        return plain(self.model.cfg.model_name or f"{self.model.cfg.family} model")

    def has(self, point: str, layer: int | None = None) -> bool:
        """Tells whether the cache holds a point."""
        name = point if layer is None else f"blocks.{layer}.{point}"
        return name in self.cache.cache_dict

    def everywhere(self, point: str) -> bool:
        """Tells whether the cache holds a point in every layer."""
        return all(self.has(point, layer) for layer in range(len(self.model.blocks)))

    def at(self, point: str, layer: int) -> Float[np.ndarray, "..."]:
        """Returns the sample's activation at a point; raises ValueError for NaN and Inf."""
        values = self.cache.at(point, layer)[self.sample].detach().float().cpu().numpy()
        words = "NaN, Inf or a share below 0" if point == self.kind.point else "NaN or Inf"
        if not np.isfinite(values).all() or ("share" in words and (values < 0).any()):
            raise ValueError(
                f"{point} holds {words} in layer {layer} for sample {self.sample}, so it "
                "cannot be drawn."
            )
        return values

    def codes(self, role: int, layer: int) -> Float[np.ndarray, "head pos d_head"] | None:
        """Returns the codes of the queries (0) or keys (-1), or None if they were not cached."""
        point = self.kind.codes[role]
        if not self.has(point, layer):
            return None
        codes = self.at(point, layer).swapaxes(0, 1)
        # in some black boxes several heads share one key, which is repeated here
        return np.repeat(codes, self.model.cfg.n_heads // len(codes), axis=0)

    @property
    def has_lens(self) -> bool:
        """Whether the logit lens can read the stream of every layer."""
        last = len(self.model.blocks) - 1
        cached = self.everywhere("hook_resid_pre") and self.has("hook_resid_post", last)
        answers = self.grid is None and self.model.cfg.family not in _TOWERS
        return cached and answers and not self.model.training

    @cached_property
    def lens(self) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest next tokens by the lens, and their probabilities: `[layer, pos, rank]`."""
        with torch.inference_mode():
            found = self.cache.logit_lens(
                positions=None,
                batch_slice=[self.sample],
                top_k=min(ANSWERS, self.model.cfg.d_vocab),
                return_type="probs",
            )
        ids, values = found.readout.top_ids, found.values
        if not values.isfinite().all():
            raise ValueError(
                "the logit lens reads NaN or Inf in hook_resid_pre or hook_resid_post."
            )
        return ids[1:, 0].cpu().numpy(), values[1:, 0].detach().float().cpu().numpy()


def look(cache: CrateCache, inputs: object, sample: int) -> Seen:
    """Returns one sample of a cache.

    Raises ValueError if `cache` is no cache of images or texts, if the inputs do not fit the cache,
    and if the cache lacks the sample.
    """
    model = getattr(cache, "model", None)
    if not isinstance(cache, CrateCache) or not isinstance(model, HookedModel) or model.towers:
        raise ValueError(
            "give the cache of model.run_with_cache(x); for a CLIP, its cache.visual or cache.text."
        )
    net: Any = model
    given = _tensor(net, inputs)
    point = map_kind(net).point
    first = next((value for name, value in cache.items() if _is_map(name, point)), None)
    if not cache.has_batch_dim:
        cache.at(point, 0)  # raises the error for a cache without a batch axis
    shape = list(given.shape)
    if model.cfg.kind == "text":
        grid, count = None, shape[1]
    else:
        rows, columns = (
            side // patch for side, patch in zip(shape[2:], model.cfg.patch_size, strict=True)
        )
        if model.cfg.n_special > 1:
            raise ValueError(
                f"the network has {model.cfg.n_special} tokens before its patches, but the page "
                "has room for CLS only. Use ci.maps.attention(cache, layer) instead."
            )
        grid, count = (rows, columns), rows * columns + model.cfg.n_special
    sizes = [] if first is None else [len(first), first.shape[-1]]
    if first is not None and point == "attn.hook_pattern":
        sizes += [first.shape[2]]
    if sizes not in ([], [shape[0], count], [shape[0], count, count]):
        assert first is not None
        raise ValueError(
            f"the cached {point} {list(first.shape)} does not belong to inputs {shape}, "
            f"which have {shape[0]} samples of {count} tokens. Give the inputs that the model was "
            "run on, and a cache made without pos_slice."
        )
    if not checks.is_int(sample) or not 0 <= sample < shape[0]:
        raise ValueError(
            f"sample={checks.shown(sample)}: the cache has samples 0 to {shape[0] - 1}."
        )
    cache.check_weights()
    if cache.is_padded and cache.mask is not None:
        real = cache.mask[sample].to(given.device)
        given, cache = given[int(sample)][real][None], cache.alone(int(sample))
        return Seen(cache, model, given, 0, given.shape[1], grid)
    return Seen(cache, model, given, int(sample), count, grid)


def _is_map(name: str, point: str) -> bool:
    """Tells whether a name is that of the heads' maps in a layer, but not of class attention."""
    return name.startswith("blocks.") and name.endswith(point)


def _tensor(model: Any, inputs: object) -> Tensor:
    """Returns inputs as a batch; raises ValueError for inputs that the model cannot take."""
    text = model.cfg.kind == "text"
    if text and not isinstance(inputs, Tensor):
        inputs = model.to_tokens(inputs)
    if text and isinstance(inputs, Tensor) and inputs.ndim == 1:
        inputs = inputs[None]
    if not isinstance(inputs, Tensor) or inputs.ndim != (2 if text else 4):
        got = f"shape {list(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        wanted = "tokens [batch, pos]" if text else "images [batch, channels, height, width]"
        raise ValueError(
            f"inputs must be {wanted}, but got {got}. Give the inputs that the model was run on."
        )
    if text:
        check_tokens(inputs, model.cfg, inputs.shape[1])
    elif not inputs.isfinite().all():
        raise ValueError("inputs hold NaN or Inf: give the images that the model was run on.")
    return inputs


def reaches(seen: Seen) -> list[int]:
    """Returns one number per layer: how many tokens a token can see, itself included."""
    if seen.grid is not None:
        return [seen.count] * len(seen.model.blocks)
    back = window_sizes(seen.model.cfg)
    return [seen.count if size is None else min(seen.count, size + 1) for size in back]


def token_names(seen: Seen) -> list[str] | None:
    """Returns the tokens of a text as the page shows them, or None for an image."""
    return None if seen.grid else _named(seen.model, seen.inputs[seen.sample].tolist())


def _named(model: Any, ids: list[int]) -> list[str]:
    """Returns the text of each token id, or the id itself if the model has no tokenizer."""
    try:
        names = model.to_str_tokens(torch.tensor(ids))
    except ValueError:
        names = [str(token) for token in ids]
    return [visible(name, LONGEST) for name in names]


def picture(seen: Seen) -> str | None:
    """Returns the image as a data URI; None for a text."""
    if seen.grid is None:
        return None
    return image_uri(displayable(seen.inputs[seen.sample], seen.model.cfg), _PICTURE)


def ratio(seen: Seen) -> float:
    """Returns the width of the image divided by its height; 1 for a text."""
    return 1.0 if seen.grid is None else seen.inputs.shape[3] / seen.inputs.shape[2]


def answer(seen: Seen) -> tuple[str, float] | None:
    """Returns the likeliest class or next token with its probability, or None if unknown."""
    if seen.model.cfg.family in _TOWERS or not seen.model.has_logits:
        return None
    if seen.grid is None:
        if not seen.has_lens:
            return None
        places, shares = seen.lens
        (name,) = _named(seen.model, [int(places[-1, -1, 0])])
        return name.replace("\n", "\u21b5") or "\u2205", float(shares[-1, -1, 0])
    if not seen.has("hook_pooled"):
        return None
    pooled = seen.cache.at("hook_pooled")[seen.sample].detach()
    shares = (pooled @ seen.model.W_U + seen.model.b_U).detach().float().softmax(dim=-1)
    if not shares.isfinite().all():
        raise ValueError(f"hook_pooled holds NaN or Inf for sample {seen.sample}.")
    best = int(shares.argmax())
    return answer_names(seen, [best])[best], float(shares[best])


def answer_names(seen: Seen, numbers: Sequence[int]) -> dict[int, str]:
    """Returns the name of each class, or the text of each token id."""
    if seen.grid is None:
        return dict(zip(numbers, _named(seen.model, list(numbers)), strict=True))
    labels = seen.model.cfg.labels
    if labels is None:
        return {number: f"class {number}" for number in numbers}
    return {number: visible(labels[number], LONGEST) for number in numbers}


def lens_names(seen: Seen) -> dict[int, str] | None:
    """Returns the text of each token id that the logit lens names; None if there is no lens."""
    if not seen.has_lens:
        return None
    return answer_names(seen, sorted(set(seen.lens[0].ravel().tolist())))


def largest_gain(seen: Seen) -> tuple[int, int] | None:
    """Returns (layer, token) of the largest rise of the probability of the token's final answer.

    The lens holds the likeliest answers only; an answer that it lacks counts as 0. Returns None
    without a lens, and for a single token or layer.
    """
    if not seen.has_lens or min(seen.lens[0].shape[:2]) < 2:
        return None
    places, shares = seen.lens  # [layer, pos, rank]
    final = np.where(places == places[-1, :, :1], shares, 0).sum(axis=2)  # [layer, pos]
    gains = np.diff(final, axis=0)[:, 1:]  # the first token sees no other
    layer, token = np.unravel_index(int(gains.argmax()), gains.shape)
    return int(layer) + 1, int(token) + 1


def next_tokens(seen: Seen) -> list[int] | None:
    """Returns the next token of every token except the last; None for an image."""
    return None if seen.grid else seen.inputs[seen.sample, 1:].tolist()


def tops(seen: Seen, layer: int) -> dict[str, str]:
    """Returns a layer's largest atoms and the answers of its logit lens as packed texts."""
    parts = {}
    if seen.everywhere("mlp.hook_post"):
        values = seen.at("mlp.hook_post", layer).reshape(seen.count, -1)
        parts["atoms"] = pack_tops(values, np.abs(values).sum(axis=1), ATOMS)
    if seen.has_lens:
        places, shares = (each[layer] for each in seen.lens)
        parts["lens"] = pack_ranked(places, shares, shares.sum(axis=1))
    return parts


def overlays(seen: Seen) -> list[dict[str, Any]] | None:
    """Returns the masks and principal components of each layer; None for a text or without codes.

    Both are computed from the concatenated codes of all heads at the patches. masks: for each
    patch, the number of its mask, or 0 for no mask. components: for each component, its values at
    the patches, in 1/100 of the component's largest value.
    """
    if seen.grid is None or not _has_codes(seen):
        return None
    return [_overlay(seen, layer, seen.grid) for layer in range(len(seen.model.blocks))]


def _overlay(seen: Seen, layer: int, grid: tuple[int, int]) -> dict[str, Any]:
    codes = seen.codes(-1 if seen.has(seen.kind.codes[-1], layer) else 0, layer)
    assert codes is not None
    features = (
        torch.from_numpy(codes[:, seen.special :].copy()).transpose(0, 1).flatten(1)
    )  # [patch, d]
    numbers = torch.zeros(len(features), dtype=torch.long)
    if len(features) > 1:
        for number, mask in enumerate(maskcut(features, grid, n_masks=_MASKS), start=1):
            numbers[mask.flatten()] = number
    found = pca_map(features[None], grid, min(_COMPONENTS, features.shape[1]))[0].flatten(1)
    scaled = found / found.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) * 100
    return {"masks": numbers.tolist(), "components": scaled.round().long().tolist()}


def _has_codes(seen: Seen) -> bool:
    return any(seen.everywhere(point) for point in seen.kind.codes)


def left_out(seen: Seen) -> Iterator[tuple[str, str]]:
    """Yields each part that the page does not show, and the reason."""
    if not _has_codes(seen):
        what = "Similar codes" if seen.grid is None else "Similar codes, masks and components"
        yield what, f"the cache lacks {seen.kind.codes[0]}"
    if not seen.everywhere("mlp.hook_post"):
        none = seen.model.cfg.attn_only
        yield "Atoms", "its layers are attention alone" if none else "the cache lacks mlp.hook_post"
    if seen.model.cfg.family in _TOWERS or not seen.model.has_logits:
        return
    if seen.grid is None and not seen.has_lens:
        lacks = "the cache lacks hook_resid_pre, or the last hook_resid_post"
        yield "The logit lens", "call model.eval() first" if seen.model.training else lacks
    if seen.grid is not None and not seen.has("hook_pooled"):
        yield "The model's answer", "the cache lacks hook_pooled"


def hidden_patches(seen: Seen) -> int:
    """Returns how many patches of the picture a masked autoencoder did not see."""
    return int(seen.cache.at("hook_mask")[seen.sample].sum()) if seen.has("hook_mask") else 0


def circuit_data(circuit: Circuit | None, model: HookedModel) -> dict[str, Any] | None:
    """Returns a circuit's nodes with their columns, and its largest edges; None without a circuit.

    Raises ValueError if `circuit` is no Circuit, or has a head or atom that the model lacks.
    """
    if circuit is None:
        return None
    if not isinstance(circuit, Circuit):
        raise ValueError(f"circuit={checks.shown(circuit)}: give a ci.circuits.Circuit.")
    edges = sorted(circuit.edges, key=lambda edge: -abs(edge.weight))
    shown = Circuit(edges[:_EDGES])
    layers, heads, atoms = len(model.blocks), model.cfg.n_heads, model.cfg.d_mlp
    nodes = []
    for name in shown.nodes():
        layer, kind = place_of(name)
        number = number_of(name) if name.startswith("L") else None
        if number is not None and (layer >= layers or number >= (heads, atoms)[kind]):
            raise ValueError(
                f"the circuit has {name}, but the model has {layers} layers of {heads} heads and "
                f"{atoms} atoms. Give a circuit of this model."
            )
        place = {-1: -1, LAST: layers}.get(layer, layer)
        nodes.append({"name": name, "layer": place, "kind": kind, "number": number})
    lines = [[edge.source, edge.target, float(edge.weight)] for edge in shown.edges]
    note = plain(circuit.note) if circuit.note else ""
    return {"nodes": nodes, "edges": lines, "note": note, "all": len(circuit.edges)}
