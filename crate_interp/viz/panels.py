"""The parts of the explorer other than attention: names, picture, atoms, masks, lens and circuit.

If the cache lacks what a panel needs, the page leaves the panel out and says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.circuits.attention_reasons import Place, role_of
from crate_interp.circuits.circuit import LAST, Circuit, number_of, place_of
from crate_interp.circuits.graphs.derivatives import directions
from crate_interp.core.safe_text import LONGEST, plain, visible
from crate_interp.measures import maskcut, pca_map, token_rates
from crate_interp.measures.rates import head_codes
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.context import window_sizes
from crate_interp.models.text.text_and_tokens import check_tokens
from crate_interp.viz.cache_views import activation, model_of
from crate_interp.viz.packing import MapKind, map_kind, pack_ranked, pack_tops, planes

ATOMS, ANSWERS = 16, 5  # how many atoms and next tokens a page stores for each token
_MASKS, _COMPONENTS, _EDGES = 3, 3, 200
_EPS, _DEAR, _BITS = 0.1, 1024, 10


Codes = Float[np.ndarray, "head pos d_head"]


@dataclass(frozen=True)
class View:
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

    def has(self, point: str, layer: int | None = None) -> bool:
        """Tells whether the cache holds a point."""
        name = point if layer is None else f"blocks.{layer}.{point}"
        return name in self.cache.cache_dict

    def everywhere(self, point: str) -> bool:
        """Tells whether the cache holds a point in every layer."""
        return all(self.has(point, layer) for layer in range(len(self.model.blocks)))

    def at(self, point: str, layer: int) -> Float[np.ndarray, "..."]:
        """Returns the sample's activation at a point; raises ValueError for NaN and Inf."""
        return activation(self.cache, layer, point, self.sample).float().cpu().numpy()

    def codes(self, layer: int) -> tuple[Codes | None, Codes | None]:
        """Returns the codes of the queries, and those of the keys if they differ.

        Codes that were not cached are taken to be the same as the others.
        """
        codes = [
            # in some black boxes several heads share one key, which is repeated here
            np.repeat(values, self.model.cfg.n_heads // len(values), axis=0)
            for point in self.kind.codes
            if self.has(point, layer)
            for values in (self.at(point, layer).swapaxes(0, 1),)
        ]
        if not codes:
            return None, None
        return codes[0], None if np.array_equal(codes[0], codes[-1]) else codes[-1]

    @property
    def has_codes(self) -> bool:
        """Whether the codes of every layer were cached."""
        return any(self.everywhere(point) for point in self.kind.codes)

    @property
    def has_lens(self) -> bool:
        """Whether the logit lens can read the stream of every layer."""
        last = len(self.model.blocks) - 1
        cached = self.everywhere("hook_resid_pre") and self.has("hook_resid_post", last)
        answers = self.grid is None and has_answers(self.model)
        return cached and answers and not self.model.training

    @cached_property
    def lens(self) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest tokens by the lens, and their probabilities: `[layer, pos, rank]`."""
        with torch.inference_mode():
            found = self.cache.logit_lens(
                positions=None,
                batch_slice=[self.sample],
                top_k=min(ANSWERS, self.model.cfg.d_vocab),
                return_type="probs",
            )
        ids, values = found.readout.top_ids, found.values
        return ids[1:, 0].cpu().numpy(), values[1:, 0].detach().float().cpu().numpy()


def look(cache: CrateCache, inputs: object, sample: int) -> View:
    """Returns one sample of a cache.

    Raises ValueError if `cache` is not a cache of images or texts, if the inputs do not fit the
    cache, and if the cache lacks the sample.
    """
    model = model_of(cache)
    inputs, text = _batch(model, inputs), model.cfg.kind == "text"
    grid, count = None, inputs.shape[1]
    if not text:
        if model.cfg.n_special > 1:
            raise ValueError(
                "the page has room for CLS only, but the network has further tokens before its "
                "patches. Use ci.maps.attention(cache, layer) instead."
            )
        rows, columns = np.array(inputs.shape[2:]) // model.cfg.patch_size
        grid, count = (int(rows), int(columns)), int(rows * columns) + model.cfg.n_special
    point = map_kind(model).point
    names = [name for name in cache if name.startswith("blocks.") and name.endswith(point)]
    for first in names[:1]:
        shape = cache.at(first).shape
        queries = shape[2] if point == "attn.hook_pattern" else count
        if (len(inputs), count, count) != (shape[0], queries, shape[-1]):
            raise ValueError(
                f"the cached {point} {list(shape)} does not belong to inputs {list(inputs.shape)}: "
                "give the inputs that the model was run on, and a cache made without pos_slice."
            )
    if not 0 <= sample < len(inputs):
        raise ValueError(f"sample={sample!r}: the cache has samples 0 to {len(inputs) - 1}.")
    if cache.is_padded and cache.mask is not None:
        real = cache.mask[sample].to(inputs.device)
        inputs, cache = inputs[sample][real][None], cache.alone(sample)
        return View(cache, model, inputs, 0, inputs.shape[1], grid)
    return View(cache, model, inputs, sample, count, grid)


def _batch(model: Any, inputs: Any) -> Tensor:
    """Returns inputs as a batch; raises ValueError for inputs that the model cannot take."""
    text = model.cfg.kind == "text"
    if text and not isinstance(inputs, Tensor):
        inputs = model.to_tokens(inputs)
    if text and inputs.ndim == 1:
        inputs = inputs[None]
    if not isinstance(inputs, Tensor) or inputs.ndim != (2 if text else 4):
        wanted = "tokens [batch, pos]" if text else "images [batch, channels, height, width]"
        got = type(inputs).__name__
        raise ValueError(f"inputs must be {wanted} that the model was run on, but got {got}.")
    if text:
        check_tokens(inputs, model.cfg, inputs.shape[1])
    return inputs


def reaches(view: View) -> list[int]:
    """Returns one number per layer: how many tokens a token can see, itself included."""
    if view.grid is not None:
        return [view.count] * len(view.model.blocks)
    back = window_sizes(view.model.cfg)
    return [view.count if size is None else min(view.count, size + 1) for size in back]


def token_texts(model: Any, ids: list[int]) -> list[str]:
    """Returns the text of each token id, or the id itself if the model has no tokenizer."""
    try:
        names = model.to_str_tokens(torch.tensor(ids))
    except ValueError:
        names = [str(token) for token in ids]
    return [visible(name, LONGEST) for name in names]


def has_answers(model: HookedModel) -> bool:
    """Tells whether a model answers with a class or a token; towers return features."""
    return model.cfg.family not in ("clipa-visual", "clipa-text") and model.has_logits


def answer(view: View) -> tuple[str, float] | None:
    """Returns the likeliest class or next token with its probability, or None if unknown."""
    if not has_answers(view.model):
        return None
    if view.causal and view.has_lens:
        best, share = (each[-1, -1, 0] for each in view.lens)
    elif view.grid is not None and view.has("hook_pooled"):
        pooled = view.cache.at("hook_pooled")[view.sample].detach()
        shares = (pooled @ view.model.W_U + view.model.b_U).detach().float().softmax(dim=-1)
        share, best = shares.max(dim=-1)
    else:
        return None
    name = answer_names(view, [int(best)])[int(best)]
    return name.replace("\n", "\u21b5") or "\u2205", float(share)


def answer_names(view: View, numbers: Sequence[int]) -> dict[int, str]:
    """Returns the name of each class, or the text of each token id."""
    if view.grid is None:
        return dict(zip(numbers, token_texts(view.model, list(numbers)), strict=True))
    labels = view.model.cfg.labels
    if labels is None:
        return {number: f"class {number}" for number in numbers}
    return {number: visible(labels[number], LONGEST) for number in numbers}


def tops(view: View, layer: int) -> dict[str, str]:
    """Returns a layer's largest atoms and the answers of its logit lens as packed texts."""
    parts = {}
    if view.everywhere("mlp.hook_post"):
        values = view.at("mlp.hook_post", layer).reshape(view.count, -1)
        parts["atoms"] = pack_tops(values, np.abs(values).sum(axis=1), ATOMS)
    if view.has_lens:
        places, shares = (each[layer] for each in view.lens)
        parts["lens"] = pack_ranked(places, shares, shares.sum(axis=1))
    return parts


@torch.no_grad()
def matches(view: View, layer: int) -> dict[str, str]:
    """Returns what the page needs to say why heads of a layer look there, as packed texts.

    match: the code `[head, atom, d_head]` that an entry of 1 of each atom of the layer below gives
    a token whose norm has the scale 1, for the atoms that the page stores, by number; rounded to a
    power of 2, at most 1/1,024 of the largest entry, so that low bits are 0 and compress well.
    scale: the norm's scale of each token times the root of d_head. Empty where layers have no
    single U (ToST, black boxes), where rotary positions turn it, and in the first layer, which
    reads no codes.
    """
    model = view.model
    points = view.has("hook_resid_pre", layer) and view.everywhere("mlp.hook_post")
    if not layer or model.cfg.facts["attention"] != "mssa" or model.cfg.rotary or not points:
        return {}
    values = torch.from_numpy(view.at("mlp.hook_post", layer - 1)).reshape(view.count, -1)
    stored = values.sort(dim=1, descending=True, stable=True).indices[:, :ATOMS].unique()
    written = directions(model, layer - 1)[stored].double()
    stream = torch.from_numpy(view.at("hook_resid_pre", layer)).to(written)
    ones = torch.ones_like(stream[:, 0])
    places = [Place(layer, head, 0, 0) for head in range(model.cfg.n_heads)]
    roles = [role_of(model, place, stream, ones, "key") for place in places]
    scale = (model.cfg.d_head**0.5 / roles[0].weights).cpu().numpy()
    codes = np.stack([role.of(written).cpu().numpy() for role in roles])
    step = 2.0 ** np.floor(np.log2(np.abs(codes).max(initial=1e-30)) - _BITS)
    return {"match": planes((codes / step).round() * step), "scale": planes(scale)}


def overlays(view: View) -> list[dict[str, Any]] | None:
    """Returns the masks and principal components of each layer; None for a text or without codes.

    Both are computed from the concatenated codes of all heads at the patches. masks: for each
    patch, the number of its mask, or 0 for no mask. components: for each component, its values at
    the patches, in 1/100 of the component's largest value.
    """
    if view.grid is None or not view.has_codes:
        return None
    overlays = []
    for layer in range(len(view.model.blocks)):
        codes: Any = [each for each in view.codes(layer) if each is not None][-1]  # of the keys
        patches = torch.from_numpy(codes[:, view.special :].copy())  # [head, patch, d_head]
        features = patches.transpose(0, 1).flatten(1)
        numbers = torch.zeros(len(features), dtype=torch.long)
        if len(features) > 1:
            masks = maskcut(features, view.grid, n_masks=_MASKS)
            for number, mask in enumerate(masks, start=1):
                numbers[mask.flatten()] = number
        count = min(_COMPONENTS, features.shape[1])
        parts = pca_map(features[None], view.grid, count)[0].flatten(1)
        scaled = parts / parts.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) * 100
        components = scaled.round().long().tolist()
        overlays.append({"masks": numbers.tolist(), "components": components})
    return overlays


@torch.no_grad()
def costs(view: View) -> list[dict[str, list[float]]] | None:
    """Returns what each token costs in each layer, in nats; None if not cached.

    R: how much the coding rate of the stream after attention (hook_resid_mid, eps .1) falls without
    the token; Rc: the same of R^c, summed over heads, in layers with subspaces U. None for inputs
    of more than 1,024 tokens, too.
    """
    if not view.everywhere("hook_resid_mid") or view.count > _DEAR:
        return None
    found = []
    for layer, block in enumerate(view.model.blocks):
        z, u = torch.from_numpy(view.at("hook_resid_mid", layer)), getattr(block.attn, "U", None)
        rates = {"R": token_rates(z, _EPS)}
        if u is not None:
            rates["Rc"] = token_rates(head_codes(z, u.detach().to(z)), _EPS).sum(dim=0)
        found.append(
            {name: [float(f"{x:.3g}") for x in one.tolist()] for name, one in rates.items()}
        )
    return found


def circuit_data(circuit: Circuit | None, model: HookedModel) -> dict[str, Any] | None:
    """Returns a circuit's nodes with their columns, and its largest edges; None without a circuit.

    Raises ValueError if the circuit has a head or atom that the model lacks.
    """
    if circuit is None:
        return None
    edges = sorted(circuit.edges, key=lambda edge: -abs(edge.weight))
    largest = Circuit(edges[:_EDGES])
    layers, sizes = len(model.blocks), (model.cfg.n_heads, model.cfg.d_mlp)
    nodes = []
    for name in largest.nodes():
        layer, kind = place_of(name)
        number = number_of(name) if name.startswith("L") else None
        if number is not None and (layer >= layers or number >= sizes[kind]):
            raise ValueError(f"the circuit has {name}, but the model does not.")
        place = layers if layer == LAST else layer
        nodes.append({"name": name, "layer": place, "kind": kind, "number": number})
    lines = [[edge.source, edge.target, float(edge.weight)] for edge in largest.edges]
    note = plain(circuit.note) if circuit.note else ""
    return {"nodes": nodes, "edges": lines, "note": note, "all": len(circuit.edges)}
