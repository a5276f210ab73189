"""Points of ours that show what a bridge's points hold, and take edits back."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.models.layers.norm import is_hooked

Change = Callable[[Tensor], Tensor]


class Relay:
    """A forward hook on a bridge's point, which hands what it holds to a point of ours.

    The tensor is converted as the bridge converts it for its own hooks (heads apart), and then by
    `to`; what our point returns goes back by `back`. Nothing happens unless our point is hooked. It
    is an object and no closure, so that a copy of the model relays to the points of the copy.
    """

    def __init__(self, point: HookPoint, to: Change | None = None, back: Change | None = None):
        self.point, self.to, self.back = point, to, back

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """Hands an output to the hooks of our point; returns it if one of them changed it."""
        if not is_hooked(self.point):
            return None
        conversion: Any = getattr(module, "hook_conversion", None)
        seen = output if conversion is None else conversion.convert(output)
        shown = seen if self.to is None else self.to(seen)
        edited = self.point(shown)
        if edited is shown:
            return None
        edited = edited if self.back is None else self.back(edited)
        return edited if conversion is None else conversion.revert(edited)


class Plus:
    """Adds a tensor that is read anew each time; an object, so that it can be copied."""

    def __init__(self, read: "Bias", sign: int) -> None:
        self.read, self.sign = read, sign

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the activations with the bias added, or taken away."""
        bias = self.read()
        return x if bias is None else x + self.sign * bias


class Bias:
    """Reads the bias of one role of a bridge's attention, `[head, d_head]`, or None."""

    def __init__(self, attn: nn.Module, role: str, heads: int) -> None:
        self.attn, self.role, self.heads = (attn,), role, heads

    def __call__(self) -> Tensor | None:
        """Returns the bias as the heads have it, or None."""
        bias: Any = getattr(getattr(self.attn[0], self.role), "bias", None)
        return None if bias is None else bias.reshape(self.heads, -1)
