"""LayerNorm with the two hook points of TransformerLens, and the test that tells whether a point is hooked."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint


def is_hooked(point: HookPoint) -> bool:
    """Whether any forward or backward hook hangs on the point, TransformerLens' or torch's own."""
    return bool(point._forward_hooks or point._backward_hooks)


class HookedLayerNorm(nn.LayerNorm):
    """`(x - mean) / scale * weight + bias` with scale = sqrt(var + eps), observed and editable.

    `hook_scale` `[..., 1]` is computed only where it is hooked, and torch's fused kernel makes the output unless
    the hook changed the scale: observing changes no bit. `hook_normalized` `[..., d_model]` is after the affine map.
    A backward hook on `hook_scale` sees a gradient only if the forward hook returned another value.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, input: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        out = self._rescaled(input) if is_hooked(self.hook_scale) else super().forward(input)
        return self.hook_normalized(out)

    def _rescaled(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        scale = (variance + self.eps).sqrt()
        edited = self.hook_scale(scale.clone())
        if torch.equal(edited, scale):
            return super().forward(x)
        return (x - mean) / edited * self.weight + self.bias
