"""Helpers that probes share: the tokens to measure, places in blocks, and cached work."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from crate_interp.measures.checks import qr
from crate_interp.measures.rates import head_codes
from crate_interp.models.autoencoder import CrateDecoderBlock
from crate_interp.models.layers.block import Layer


class StandIn:
    """A module with some attributes replaced; it keeps all others, which any probe may read."""

    def __init__(self, real: "nn.Module | StandIn", **replaced: "Tensor | StandIn") -> None:
        self.__dict__ |= {"_real": real, **replaced}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


Block = Layer | CrateDecoderBlock | StandIn
# "all", "patches" (without CLS and other special tokens), or positions
Tokens = str | Sequence[int]
Store = dict[str, Tensor | tuple[Tensor, ...]]


class LayerActs(dict[str, Tensor]):
    """One layer's activations on one batch, and values already computed from them.

    `made` holds values of the batch. `of_weights` holds values of the weights for the whole sweep,
    during which weights do not change.
    """

    def __init__(self, acts: Mapping[str, Tensor], of_weights: Store, store: Store | None = None):
        super().__init__(acts)
        self.of_weights = of_weights
        self.made: Store = {} if store is None else store

    def only(self, points: Iterable[str]) -> "LayerActs":
        """Returns the activations of some points; `made` and `of_weights` stay shared."""
        own = {point: self[point] for point in points if point in self}
        return LayerActs(own, self.of_weights, self.made)


def n_special(block: Block) -> int:
    """Returns how many tokens come before the patches, CLS first; 0 in models of text."""
    return getattr(block.attn.cfg, "n_special", 0)


def subspaces(block: Block) -> Float[Tensor, "head d_model d_head"] | None:
    """Returns U, or None if queries, keys and values are different codes.

    For a black box, returns the map that was chosen to be measured in place of U
    (crate_interp/bridge/bridged_layers.py).
    """
    return getattr(block.attn, "U", None)


def tied_subspaces(block: Block) -> Float[Tensor, "head d_model d_head"] | None:
    """Returns U if it is query, key and value at once, as the papers' claims require, else None."""
    return subspaces(block) if block.attn.cfg.tied else None


def dictionary(block: Block) -> Float[Tensor, "d_model d_mlp"] | None:
    """Returns D of the sparse step or of a decoder's layer; None for an MLP."""
    return getattr(block, "D", None) if hasattr(block, "D") else getattr(block.mlp, "D", None)


def around_attention(block: Block) -> tuple[str, str, str]:
    """Returns the stream's points before and after attention, and the point of its LayerNorm."""
    if hasattr(block, "mlp"):
        return "hook_resid_pre", "ln1.hook_normalized", "hook_resid_mid"
    # the decoder of a masked autoencoder
    return "hook_resid_mid", "ln2.hook_normalized", "hook_resid_post"


def as_attention_reads(
    block: Block, z: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos d_model"]:
    """Returns LN(z) by the norm before the layer's attention; hooks on this norm do not run."""
    return getattr(block, around_attention(block)[1].split(".")[0]).plain(z)


@dataclass(frozen=True)
class Frame:
    """The words that describe a scaling (frame): the form in which tokens are measured.

    title: words for the title of a statistic. tokens: words for the measured tokens, in which {z}
    stands for the tokens themselves. sides: words for how an audit treats the tokens before and
    after a step.
    """

    title: str
    tokens: str
    sides: str


FRAMES = {
    "stream": Frame("stream as it is", "{z} as it is", "both sides as they are"),
    "read": Frame(
        "stream as attention reads it",
        "LN({z}), by the LayerNorm before the layer's attention",
        "both sides through the LayerNorm that the step reads through",
    ),
    "unit": Frame(
        "stream at unit mean square",
        "{z} with a mean square of one",
        "both sides scaled to |Z|_F = sqrt(pos d_model)",
    ),
}


def in_frames(block: Block, z: Float[Tensor, "batch pos d_model"]) -> dict[str, Tensor]:
    """Returns tokens in each of `FRAMES`; in "unit" they have |Z|_F = sqrt(pos d_model)."""
    length = torch.linalg.matrix_norm(z, keepdim=True)
    stretch = (z.shape[-2] * z.shape[-1]) ** 0.5 / length.masked_fill(length == 0, 1)
    return {"stream": z, "read": as_attention_reads(block, z), "unit": z * stretch}


def orthonormal_basis(block: Block, acts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns Q `[head, d_model, d_head]` and R `[head, d_head, d_head]` with U_k = Q_k R_k."""
    u: Any = block.attn.U
    store: Store = getattr(acts, "of_weights", {})
    return _once(store, "qr", lambda: tuple(part.contiguous() for part in qr(u.detach())))


def stored_codes(
    block: Block, acts: Mapping[str, Tensor], point: str
) -> Float[Tensor, "batch head pos d_head"]:
    """Returns the codes Z U_k of all tokens Z at a point, with U_k as stored."""
    store: Store = getattr(acts, "of_weights", {})
    return head_codes(acts[point], _once(store, "U", lambda: block.attn.U.detach().contiguous()))


def orthonormal_codes(
    block: Block, acts: Mapping[str, Tensor], point: str
) -> Float[Tensor, "batch head pos d_head"]:
    """Returns the codes Z Q_k of all tokens Z at a point, with the orthonormal bases Q_k."""
    basis, _ = orthonormal_basis(block, acts)
    store: Store = getattr(acts, "made", {})
    return _once(store, f"codes of {point}", lambda: head_codes(acts[point], basis))


def check_tokens(name: str, tokens: Tokens) -> Tokens:
    """Returns the tokens to measure: "all", "patches", or a list of positions.

    Raises ValueError, with the argument's `name`, for anything else, and for repeated positions.
    """
    if tokens in ("all", "patches"):
        return tokens
    places: list[Any] = list(tokens) if isinstance(tokens, (list, tuple, range)) else []
    whole = places and all(type(place) is int for place in places)
    if not whole or len(set(places)) < len(places):
        raise ValueError(f"{name}={tokens!r}: give 'all', 'patches' or positions, each once.")
    return places


def picked(tensor: Tensor, tokens: Tokens, block: Block, axis: int = 1) -> Tensor:
    """Returns a tensor with only the tokens to measure. axis: the tensor's axis of tokens.

    For "all" and "patches" the result is a view of the tensor. Raises ValueError for positions that
    do not exist, for repeated positions, and for "patches" in a model of text.
    """
    if tokens == "all":
        return tensor
    if tokens == "patches":
        if not hasattr(block.attn.cfg, "n_special"):
            raise ValueError("tokens='patches' is for models of images: give 'all' or positions.")
        first = n_special(block)
        return tensor.narrow(axis, first, tensor.shape[axis] - first)
    count = tensor.shape[axis]
    places = [int(place) + count * (int(place) < 0) for place in tokens]
    if not set(places) <= set(range(count)) or len(set(places)) < len(places):
        raise ValueError(f"tokens={list(tokens)}: give positions from 0 to {count - 1}, each once.")
    return tensor.index_select(axis, tensor.new_tensor(places).long())


def _once(store: Store, key: str, make: Callable[[], Any]) -> Any:
    if key not in store:
        store[key] = make()
    return store[key]


def visible_keys(queries: Float[Tensor, "batch head query key"]) -> Int[Tensor, "query"]:
    """Returns how many keys each query of a causal pattern sees, at least 1.

    A key counts as masked if it has no mass in any head.
    """
    return (queries.amax(dim=(0, 1)) > 0).sum(dim=-1).clamp(min=1)
