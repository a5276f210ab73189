"""Norms with TransformerLens' two hook points, and the test for whether a point is hooked."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.runtimes import readable


class HookedPart(nn.Module):
    """A part of a layer; its hook points are attributes."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def add_points(self, *names: str) -> None:
        """Gives the part hook points, in this order."""
        for name in names:
            self.add_module(name, HookPoint())


def is_hooked(point: HookPoint) -> bool:
    """Tells whether a point has any forward or backward hook, TransformerLens' or torch's own."""
    return bool(point._forward_hooks or point._backward_hooks)


def hooked_scale(point: HookPoint, scale: Tensor) -> tuple[Tensor, bool]:
    """Returns a scale after the point's hooks, and whether torch's fused kernel may be used.

    The kernel may be used if the hooks changed neither values nor gradient. It may not be used if a
    hook detached the scale (to make it a constant), if there is a backward hook (which needs the
    scale's own gradient), or if the values cannot be compared (`readable`).
    """
    edited = point(scale.clone())
    same = readable(edited) and torch.equal(edited, scale)
    same = same and edited.requires_grad == scale.requires_grad
    return edited, same and not (point._backward_hooks and scale.requires_grad)


class HookedLayerNorm(nn.LayerNorm):
    """`(x - mean) / scale * weight + bias` with scale = sqrt(var + eps), observed and editable.

    The scale at `hook_scale` `[..., 1]` is computed only if that point is hooked. torch's fused
    kernel makes the output unless a hook changed the scale, so reading the scale leaves the output
    the same to the bit. If a hook returns a detached scale, or one from another run, that
    scale is a constant for gradients. `hook_normalized` `[..., d_model]` is after the affine map.
    """

    def __init__(self, width: int, eps: float, bias: bool = True) -> None:
        super().__init__(width, eps=eps, bias=bias)
        self.hook_scale, self.hook_normalized = HookPoint(), HookPoint()

    @property
    def w(self) -> Float[Tensor, "d_model"]:
        """The weight, under TransformerLens' name."""
        return self.weight

    @property
    def b(self) -> Float[Tensor, "d_model"]:
        """The bias, under TransformerLens' name; zeros if there is none."""
        return torch.zeros_like(self.weight) if self.bias is None else self.bias

    def forward(self, input: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns tokens centred and scaled, with weight and bias."""
        if not is_hooked(self.hook_scale):
            return self.hook_normalized(self.plain(input))
        variance, mean = torch.var_mean(input, dim=-1, correction=0, keepdim=True)
        edited, seen = hooked_scale(self.hook_scale, (variance + self.eps).sqrt())
        if seen:
            return self.hook_normalized(self.plain(input))
        out = (input - mean) / edited * self.weight
        return self.hook_normalized(out if self.bias is None else out + self.bias)

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns the same as `forward` without hooks, and fires no hook point."""
        return super().forward(x)


class MaskedTokenNorm(HookedLayerNorm):
    """`LN(GELU(dense(x)))`: what CRATE-BERT's masked-token head makes of the stream.

    `hook_scale` and `hook_normalized` are those of the LayerNorm, after the map and the GELU.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.dense = nn.Linear(width, width)

    def forward(self, input: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns what the map to the tokens reads."""
        return super().forward(F.gelu(self.dense(input)))


class HookedRMSNorm(nn.Module):
    """`x / scale` with scale = sqrt(mean(x^2) + eps); nothing is learned.

    The hook points and their rules are those of HookedLayerNorm.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.hook_scale, self.hook_normalized = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns tokens divided by their root mean square."""
        if not is_hooked(self.hook_scale):
            return self.hook_normalized(self.plain(x))
        scale = (x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt()
        edited, seen = hooked_scale(self.hook_scale, scale)
        return self.hook_normalized(self.plain(x) if seen else x / edited)

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns the same as `forward` without hooks, and fires no hook point."""
        return F.rms_norm(x, (self.width,), eps=self.eps)


class NoNorm(nn.Module):
    """The identity, with the hook points of a norm and a scale of one."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_scale, self.hook_normalized = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns tokens unchanged, unless a hook edits the scale, which is one."""
        if is_hooked(self.hook_scale):
            edited, seen = hooked_scale(self.hook_scale, torch.ones_like(x[..., :1]))
            x = x if seen else x / edited
        return self.hook_normalized(x)

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns x unchanged and fires no hook point."""
        return x


HookedNorm = HookedLayerNorm | HookedRMSNorm | NoNorm


def make_norm(cfg: CrateConfig, eps: float) -> HookedLayerNorm | HookedRMSNorm:
    """Returns the kind of norm that the config's family uses, for the width of the stream."""
    if cfg.normalization_type == "RMS":
        return HookedRMSNorm(cfg.d_model, eps)
    return HookedLayerNorm(cfg.d_model, eps, bias=cfg.norm_bias)
