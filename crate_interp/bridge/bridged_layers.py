"""Views of a bridge's layers under our names: points that relay, and weights to read.

A view holds no parameters. They belong to the bridge's module, which is kept in a tuple so that it
is not a submodule of the view.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.layers.block import Layer
from crate_interp.models.layers.norm import is_hooked

Change = Callable[[Tensor], Tensor]


def _relayed(
    point: HookPoint, to: Change, back: Change, module: nn.Module, inputs: Any, output: Tensor
) -> Tensor | None:
    """Passes a bridge's activation to one of our points, as a forward hook on the bridge's point.

    The tensor is converted as the bridge converts it for its own hooks (split into heads), and then
    by `to`; the result of our point is converted back by `back`. Nothing happens unless our point
    is hooked. Returns the output if a hook changed it. The hook is a partial and not a closure, so
    that a copy of the model relays to the copy's points.
    """
    if not is_hooked(point):
        return None
    conversion: Any = getattr(module, "hook_conversion", None)
    shown = to(output if conversion is None else conversion.convert(output))
    edited = point(shown)
    if edited is shown:
        return None
    edited = back(edited)
    return edited if conversion is None else conversion.revert(edited)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _plus_bias(attn: tuple[nn.Module], role: str, heads: int, sign: int, x: Tensor) -> Tensor:
    """Adds `sign` times the bias of an attention map (`role`, such as "v"), if it has one now."""
    bias: Any = getattr(getattr(attn[0], role), "bias", None)
    return x if bias is None else x + sign * bias.reshape(heads, -1)


ROLES = {"query": "q", "key": "k", "value": "v"}
# our name -> place in the bridge's layer
_OF_BLOCK = {
    f"hook_{name}": f"hook_{name}"
    for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
}
_OF_ATTENTION = {
    "hook_q": "q.hook_out", "hook_k": "k.hook_out", "hook_v": "v.hook_out",
    "hook_pattern": "hook_pattern", "hook_z": "o.hook_in",
}  # fmt: skip
_ROTATED = {"hook_q": "hook_rot_q", "hook_k": "hook_rot_k"}
_OF_MLP = {"hook_pre": "hook_pre", "hook_post": "hook_post"}
_OF_NORM = {"hook_scale": "hook_scale", "hook_normalized": "hook_out"}


def at_path(module: nn.Module, path: str) -> Any:
    """Returns the object at a path of names. Raises AttributeError, with the path, if missing."""
    place: Any = module
    for name in path.split("."):
        place = getattr(place, name, None)
        if place is None:
            raise AttributeError(f"{getattr(module, 'name', None) or 'the layer'} has no {path}")
    return place


def eps_of(norm: Any) -> float:
    """Returns the number that a norm of transformers adds to the variance."""
    return float(getattr(norm, "eps", None) or norm.variance_epsilon)


def _relay(view: nn.Module, module: nn.Module, points: dict[str, str]) -> None:
    """Gives a view points that relay the points of a bridge's module."""
    for name, path in points.items():
        own = HookPoint()
        setattr(view, name, own)
        at_path(module, path).register_forward_hook(partial(_relayed, own, _as_it_is, _as_it_is))


class BridgedNorm(nn.Module):
    """A norm of a bridge. `hook_normalized` is after the affine map, as in our own norms."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self._norm: tuple[Any, ...] = (norm,)
        _relay(self, norm, _OF_NORM)

    inner = property(lambda self: self._norm[0].original_component)  # as transformers made it
    weight = property(lambda self: self.inner.weight)
    bias = property(lambda self: getattr(self.inner, "bias", None))
    eps = property(lambda self: eps_of(self.inner))

    def plain(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Returns x after the norm, without firing a hook point."""
        return self.inner.forward(x)

    forward = plain  # for code that applies the norm directly, such as a logit lens


class BridgedAttention(nn.Module):
    """The attention of a layer. U holds the columns of the map that `cfg.subspaces` names.

    Which map stands in for U is a choice, since nothing ties queries, keys and values. `hook_u`
    holds `LN(Z) U_k`, the chosen role without its bias. If several query heads share a key and
    value, keys and values have one head for each group, and U does too unless subspaces is "query";
    W_K and W_V are repeated, as in TransformerLens. `hook_q` and `hook_k` come after the rotation
    by positions, as in our own models.
    """

    def __init__(self, cfg: CrateConfig, block: nn.Module) -> None:
        super().__init__()
        self.cfg = cfg
        attn = at_path(block, "attn")
        self._block, self._attn = (block,), (attn,)
        _relay(self, attn, _OF_ATTENTION | (_ROTATED if getattr(cfg, "rotations", False) else {}))
        self.hook_u = HookPoint()
        role = ROLES[cfg.subspaces]
        ways = (partial(_plus_bias, (attn,), role, len(self.U), sign) for sign in (-1, 1))
        relay = partial(_relayed, self.hook_u, *ways)
        at_path(attn, f"{role}.hook_out").register_forward_hook(relay)

    def _repeated(self, weight: Float[Tensor, "group d_model d_head"]) -> Tensor:
        return weight.repeat_interleave(self.cfg.n_heads // len(weight), dim=0)

    # [head, d_model, d_head]; keys and values once for each query head
    U = property(lambda self: getattr(self._attn[0], f"W_{ROLES[self.cfg.subspaces].upper()}"))
    W_Q = property(lambda self: self._attn[0].W_Q)
    W_K = property(lambda self: self._repeated(self._attn[0].W_K))
    W_V = property(lambda self: self._repeated(self._attn[0].W_V))
    # [head, d_head, d_model], with the layer's scale if it has one
    W_O = property(lambda self: _scaled(self._block[0], "attn_scale", self._attn[0].W_O))

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The output bias; zeros if there is none."""
        bias = self._attn[0].b_O
        bias = self.W_O.new_zeros(self.cfg.d_model) if bias is None else bias
        return _scaled(self._block[0], "attn_scale", bias)


class BridgedMLP(nn.Module):
    """The MLP of a layer: `hook_pre` before its activation, `hook_post` before W_out."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        mlp = at_path(block, "mlp")
        self._block, self._mlp = (block,), (mlp,)
        _relay(self, mlp, _OF_MLP)

    def lasso(self) -> str:
        """Returns why an MLP has no lasso."""
        return "the layer has an MLP, no dictionary"

    # the first map (in a gated MLP, the one that is not the gate); the second, with any scale
    W_in = property(lambda self: self._mlp[0].W_in)
    W_out = property(lambda self: _scaled(self._block[0], "mlp_scale", self._mlp[0].W_out))

    @property
    def b_out(self) -> Float[Tensor, "d_model"]:
        """The bias of the second map; zeros if there is none."""
        bias = self._mlp[0].b_out
        bias = torch.zeros_like(self.W_out[0]) if bias is None else bias
        return _scaled(self._block[0], "mlp_scale", bias)


def _scaled(block: nn.Module, name: str, x: Tensor) -> Tensor:
    """Returns a map into the stream, times LayerScale's lambda if the layer has this scale."""
    scale: Any = getattr(block, name, None)
    return x if scale is None else x * scale.original_component.lambda1


class BridgedBlock(Layer):
    """A layer of a bridge: attention, then an MLP; each reads the normed stream and adds to it.

    Unlike in our own layers, an edit of `hook_resid_mid` reaches the MLP but not the stream,
    because the bridge's point lies at the norm before the MLP.
    """

    hook_out_is_single_residual_stream = True  # read by TransformerLens' logit lens

    def __init__(self, cfg: CrateConfig, block: nn.Module) -> None:
        super().__init__()
        self._block = (block,)
        _relay(self, block, _OF_BLOCK)
        self.ln1 = BridgedNorm(at_path(block, "ln1"))
        self.attn = BridgedAttention(cfg, block)
        self.ln2 = BridgedNorm(at_path(block, "ln2"))
        self.mlp = BridgedMLP(block)
