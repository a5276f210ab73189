"""Work that several probes of one layer need, done once."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from crate_interp.measures.checks import qr
from crate_interp.measures.rates import head_codes


class LayerActs(dict[str, Tensor]):
    """One layer's activations on one batch, and what has been made of them.

    `made` lives as long as the batch, `of_weights` as long as the sweep: weights do not change while it runs.
    """

    def __init__(self, acts: Mapping[str, Tensor], of_weights: dict[str, Any], made: dict[str, Any] | None = None):
        super().__init__(acts)
        self.of_weights = of_weights
        self.made: dict[str, Any] = {} if made is None else made

    def only(self, points: Any) -> "LayerActs":
        """The activations of some points, sharing what has been made."""
        return LayerActs({point: self[point] for point in points}, self.of_weights, self.made)


def orthonormal_basis(block: Any, acts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Q `[head, d_model, d_head]` and R `[head, d_head, d_head]` with U_k = Q_k R_k."""
    store = acts.of_weights if isinstance(acts, LayerActs) else {}
    return _once(store, "qr", lambda: qr(block.attn.U))


def mid_codes(block: Any, acts: Mapping[str, Tensor]) -> Float[Tensor, "batch head pos d_head"]:
    """Z^{l+1/2} in the orthonormal bases Q_k."""
    store = acts.made if isinstance(acts, LayerActs) else {}
    basis, _ = orthonormal_basis(block, acts)
    return _once(store, "mid codes", lambda: head_codes(acts["hook_resid_mid"], basis))


def _once(store: dict[str, Any], key: str, make: Callable[[], Any]) -> Any:
    if key not in store:
        store[key] = make()
    return store[key]
