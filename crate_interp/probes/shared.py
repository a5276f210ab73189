"""What probes share: which tokens they measure, where a block keeps things, and work done once for several of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import qr
from crate_interp.measures.rates import head_codes

Tokens = str | Sequence[int]  # "all", "patches" (without CLS), or positions


class LayerActs(dict[str, Tensor]):
    """One layer's activations on one batch, and what has been made of them.

    `made` lives as long as the batch, `of_weights` as long as the sweep: weights do not change while it runs.
    """

    def __init__(
        self,
        acts: Mapping[str, Tensor],
        of_weights: dict[str, Any],
        made: dict[str, Any] | None = None,
    ):
        super().__init__(acts)
        self.of_weights = of_weights
        self.made: dict[str, Any] = {} if made is None else made

    def only(self, points: Any) -> "LayerActs":
        """The activations of some points, sharing what has been made."""
        return LayerActs(
            {point: self[point] for point in points if point in self}, self.of_weights, self.made
        )


def has_cls(block: Any) -> bool:
    """Whether the first token is CLS: in models of images."""
    return block.attn.cfg.kind in ("vision", "mae")


def subspaces(block: Any) -> Float[Tensor, "head d_model d_head"] | None:
    """U, or None where queries, keys and values are three codes."""
    return getattr(block.attn, "U", None)


def dictionary(block: Any) -> Float[Tensor, "d_model d_mlp"] | None:
    """D of the sparse step, or of a decoder's layer; None for an MLP."""
    return getattr(block, "D", None) if hasattr(block, "D") else getattr(block.mlp, "D", None)


def orthonormal_basis(block: Any, acts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Q `[head, d_model, d_head]` and R `[head, d_head, d_head]` with U_k = Q_k R_k."""
    store = acts.of_weights if isinstance(acts, LayerActs) else {}
    return _once(
        store, "qr", lambda: tuple(part.contiguous() for part in qr(block.attn.U.detach()))
    )


def stored_codes(
    block: Any, acts: Mapping[str, Tensor], point: str
) -> Float[Tensor, "batch head pos d_head"]:
    """What a point holds `[batch, pos, d_model]`, in the coordinates of U_k as stored; all tokens."""
    store = acts.of_weights if isinstance(acts, LayerActs) else {}
    return head_codes(acts[point], _once(store, "U", lambda: block.attn.U.detach().contiguous()))


def orthonormal_codes(
    block: Any, acts: Mapping[str, Tensor], point: str
) -> Float[Tensor, "batch head pos d_head"]:
    """What a point holds `[batch, pos, d_model]`, in the orthonormal bases Q_k; all tokens."""
    store = acts.made if isinstance(acts, LayerActs) else {}
    basis, _ = orthonormal_basis(block, acts)
    return _once(store, f"codes of {point}", lambda: head_codes(acts[point], basis))


def check_tokens(tokens: Any) -> Tokens:
    """ValueError for what does not say which tokens to measure."""
    if tokens in ("all", "patches"):
        return tokens
    right = (
        isinstance(tokens, (list, tuple, range))
        and len(tokens) > 0
        and all(type(place) is int for place in tokens)
    )
    if not right:
        raise ValueError(
            f"tokens={tokens!r}: give 'all', 'patches' (without CLS) or positions such as [1, 5, -1]."
        )
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"tokens={tokens!r}: a position comes twice.")
    return list(tokens)


def picked(tensor: Tensor, tokens: Tokens, block: Any, axis: int = 1) -> Tensor:
    """The tokens to measure along an axis; a view where they are all, or all but CLS."""
    if tokens == "all":
        return tensor
    if tokens == "patches":
        if not has_cls(block):
            raise ValueError(
                "tokens='patches' leaves out CLS, and this model has none: give 'all' or positions."
            )
        return tensor.narrow(axis, 1, tensor.shape[axis] - 1)
    count = tensor.shape[axis]
    wrong = [place for place in tokens if not -count <= int(place) < count]
    if wrong:
        raise ValueError(
            f"tokens has the position {wrong[0]}, and there are {count} tokens, 0 to {count - 1}."
        )
    places = [int(place) % count for place in tokens]
    if len(set(places)) < len(places):
        raise ValueError(f"tokens={list(tokens)} names a position twice, of {count}.")
    return tensor.index_select(axis, tensor.new_tensor(places).long())


def _once(store: dict[str, Any], key: str, make: Callable[[], Any]) -> Any:
    if key not in store:
        store[key] = make()
    return store[key]
