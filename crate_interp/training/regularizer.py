"""Sparse rate reduction as a term of a training loss."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.core import checks
from crate_interp.measures import l0_norm, l1_norm, sparse_rate_reduction
from crate_interp.models.hooked import HookedModel, check_gradients
from crate_interp.models.layers.block import Layer
from crate_interp.probes.layer_reading import subspaces

# functions that count the nonzero entries, or approximate that count
_PENALTIES = {"l0": l0_norm, "l1": l1_norm}


class SRRRegularizer:
    """Adds the sparse rate reduction of chosen layers to a loss.

    `weight * sum_l mean_batch [lambd |Z^l|_0 + R^c(Z^l | U^l; eps) - R(Z^l; eps)]`, where Z^l =
    f^l(sg(Z^{l-1})) is the output of layer l for its detached input: the gradient reaches only the
    weights of layer l. arXiv 2411.17182 eq. 14; lower is better.

        with ci.SRRRegularizer(model, weight=1e-3) as penalty:
            for x, y in batches:
                loss = torch.nn.functional.cross_entropy(model(x), y) + penalty()

    The layers' inputs come from the last forward with gradients, so the network runs once. Each
    chosen layer runs once more, and its hooks fire a second time.

    `last` holds each layer's term in the last call, before the weight.

    Args:
        model: A model whose layers have U.
        weight: The weight of the term in the loss. 0 adds a zero without a gradient, and does not
            change a bit of the training.
        layers: "last" (the paper's choice in practice), "random" (one layer at each call, drawn by
            `seed` and not by torch's global generator), or numbers such as [1, 3].
        eps: The precision, above 0.
        lambd: The weight of the sparsity term.
        penalty: "l0" counts entries that are not zero; its gradient is zero everywhere, so it
            changes only the value of the loss. "l1" is a surrogate with a gradient. The paper
            states neither its penalty, nor its eps, nor whether the count is a share;
            normalise=True makes it a share.
        normalise: Whether the penalty is a share of the entries.
        seed: Draws the layers.

    Raises:
        ValueError: For a weight or lambd below 0 or not finite, eps <= 0, layers that do not exist,
            and models whose layers have no U.
        RuntimeError: If it is called outside its `with`, or without a new forward.
        ValueError: If it is called in inference mode.
    """

    def __init__(
        self,
        model: HookedModel,
        weight: float = 1e-3,
        *,
        layers: Literal["last", "random"] | Sequence[int] = "last",
        eps: float = 0.1,
        lambd: float = 0.1,
        penalty: Literal["l0", "l1"] = "l0",
        normalise: bool = False,
        seed: int = 0,
    ) -> None:
        self.weight = float(checks.non_negative("weight", weight))
        self.lambd = float(checks.non_negative("lambd", lambd))
        self.eps = float(checks.positive("eps", eps))
        checks.one_of("penalty", penalty, tuple(_PENALTIES))
        blocks: Any = model.blocks
        self._model = model
        self.blocks: list[Layer] = list(blocks)
        if any(subspaces(block) is None for block in self.blocks):
            raise ValueError(f"layers of family {model.cfg.family!r} have no U_k: give a CRATE.")
        count = len(self.blocks)
        named = {"last": [count - 1], "random": range(count)}
        chosen: Any = named.get(layers, [layers]) if isinstance(layers, (str, int)) else layers
        right = chosen and all(checks.is_int(one) and 0 <= one < count for one in chosen)
        if not right or len(set(chosen)) < len(chosen):
            words = f"different numbers from 0 to {count - 1}"
            raise ValueError(f"layers={layers!r}: give 'last', 'random' or {words}.")
        self.layers = sorted(chosen)
        self.penalty, self.normalise = penalty, checks.flag("normalise", normalise)
        self.one = layers == "random"
        self.last: dict[int, float] = {}
        self._draws = random.Random(checks.count("seed", seed, least=0))
        self._seen: dict[int, tuple[tuple, dict]] = {}
        self._handles: list = []
        self._again = False  # whether a layer is running again, on its recorded input

    def __repr__(self) -> str:
        names = ("weight", "layers", "eps", "lambd", "penalty", "normalise")
        return f"SRRRegularizer({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __enter__(self) -> "SRRRegularizer":
        if self._handles:
            raise RuntimeError("this regulariser is open already: use one `with` at a time.")

        def record(block: nn.Module, args: tuple, kwargs: dict, layer: int) -> None:
            if not self._again and args and args[0].requires_grad:
                self._seen[layer] = args, kwargs

        for layer in self.layers:
            hook = partial(record, layer=layer)
            block = self.blocks[layer]
            self._handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()

    def __call__(self) -> Float[Tensor, ""]:
        """Returns the term for the last forward, to be added to the loss."""
        check_gradients("SRRRegularizer", self._model)
        if not self._seen:
            words = "there was no forward with gradients since the last call"
            raise RuntimeError(f"{words}: use `with ci.SRRRegularizer(model)` around it.")
        seen, self._seen = self._seen, {}
        chosen = [self._draws.choice(self.layers)] if self.one else self.layers
        if not self.weight:
            return next(iter(seen.values()))[0][0].new_zeros(())
        terms = {layer: self._term(layer, *seen[layer]) for layer in chosen}
        self.last = {layer: float(term.detach()) for layer, term in terms.items()}
        return self.weight * torch.stack(list(terms.values())).sum()

    def _term(self, layer: int, args: tuple, kwargs: dict) -> Float[Tensor, ""]:
        block = self.blocks[layer]
        self._again = True
        try:
            z = block(args[0].detach(), *args[1:], **kwargs)
        finally:
            self._again = False
        u, size = subspaces(block), _PENALTIES[self.penalty]
        assert u is not None  # checked before
        return sparse_rate_reduction(z, u, self.eps, self.lambd, size, self.normalise).mean()
