"""The plain transformer layer that CRATE is compared with: untied attention and a two-layer MLP."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.compat.offload import at_hand
from crate_interp.models.layers.attention import Attention, attend, sum_of_results
from crate_interp.models.layers.context import Context
from crate_interp.models.layers.norm import HookedNorm, is_hooked
from crate_interp.models.layers.sparse_step import SparseStep


class SelfAttention(Attention):
    """Multi-head attention with query, key and value of their own; there is no hook_u and no U.

    Code: crate-lm/crate-lm `gpt.py` `CausalSelfAttention`; CRATE-alpha `clipa_model.py`, text
    tower. The hook points are those of TransformerLens.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg
        inner = cfg.n_heads * cfg.d_head
        self.qkv_proj = nn.Linear(cfg.d_model, 3 * inner, bias=cfg.bias)
        self.out_proj = nn.Linear(inner, cfg.d_model, bias=cfg.bias)
        self.hook_q = HookPoint()
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_attn_in = HookPoint()
        self.hook_q_input = HookPoint()
        self.hook_k_input = HookPoint()
        self.hook_v_input = HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_pattern = HookPoint()
        self.hook_z = HookPoint()
        self.hook_result = HookPoint()

    def _role(self, index: int) -> Float[Tensor, "head d_model d_head"]:
        rows = at_hand(self.qkv_proj).unflatten(0, (3, self.cfg.n_heads, self.cfg.d_head))[index]
        return rows.transpose(1, 2)  # [head, d_model, d_head]

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        """The maps to the queries, `[head, d_model, d_head]`."""
        return self._role(0)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        """The maps to the keys, `[head, d_model, d_head]`."""
        return self._role(1)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        """The maps to the values, `[head, d_model, d_head]`."""
        return self._role(2)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """The output maps, `[head, d_head, d_model]`."""
        return at_hand(self.out_proj).T.reshape(self.cfg.n_heads, self.cfg.d_head, self.cfg.d_model)

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The bias of the output, `[d_model]`; zeros where there is none."""
        if self.out_proj.bias is None:
            return at_hand(self.out_proj).new_zeros(self.cfg.d_model)
        return at_hand(self.out_proj, "bias")

    def forward(
        self,
        z: Float[Tensor, "batch pos d_model"],
        norm: HookedNorm | None = None,
        context: Context | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Returns the attention of norm(z), or of a z that is normalised already.

        The norm is an argument where inputs are split, which are normalised once per role.
        """
        inputs = None if norm is None else self.split_inputs(z)
        split = (
            self._roles(z if norm is None else norm(z))
            if norm is None or inputs is None
            else self._split_roles(inputs, norm)
        )
        points: Any = (self.hook_q, self.hook_k, self.hook_v)
        # a hooked role gets memory of its own: the three are views of one tensor, which may not be
        # edited in place
        q, k, v = (
            point(role.clone() if is_hooked(point) else role)
            for point, role in zip(points, split, strict=True)
        )
        heads = self.hook_z(attend(self, q, k, v, context))
        return (
            sum_of_results(self, heads)
            if self.cfg.use_attn_result
            else self.out_proj(heads.flatten(2))
        )

    def _roles(self, x: Float[Tensor, "batch pos d_model"]) -> list[Tensor]:
        """Returns queries, keys and values, each `[batch, pos, head, d_head]`."""
        shape = (3, self.cfg.n_heads, self.cfg.d_head)
        return list(self.qkv_proj(x).unflatten(-1, shape).unbind(dim=2))

    def _split_roles(self, inputs: tuple[Tensor, ...], norm: HookedNorm) -> list[Tensor]:
        pattern = "batch pos head d_model, head d_model d_head -> batch pos head d_head"
        return [
            einsum(norm(given), self._role(index), pattern) + bias
            for index, (given, bias) in enumerate(zip(inputs, self._biases(), strict=True))
        ]

    def _biases(self) -> Float[Tensor, "role head d_head"]:
        shape = (3, self.cfg.n_heads, self.cfg.d_head)
        if self.qkv_proj.bias is None:
            return at_hand(self.qkv_proj).new_zeros(shape)
        return at_hand(self.qkv_proj, "bias").view(shape)

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        """The biases of the queries, `[head, d_head]`."""
        return self._biases()[0]

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:
        """The biases of the keys, `[head, d_head]`."""
        return self._biases()[1]

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        """The biases of the values, `[head, d_head]`."""
        return self._biases()[2]


class MLP(SparseStep):
    """`W_out act(W_in y + b) + b`, where act is ReLU (gpt-baseline) or a GELU (CLIP's text tower).

    The GELU is the tanh form.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.fc_in = nn.Linear(cfg.d_model, cfg.d_mlp, bias=cfg.bias)
        self.fc_out = nn.Linear(cfg.d_mlp, cfg.d_model, bias=cfg.bias)
        self.gelu = cfg.sparse_step == "mlp-gelu"
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, y: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Returns what the MLP adds to the stream."""
        pre = self.hook_pre(self.fc_in(y))
        return self.fc_out(
            self.hook_post(F.gelu(pre, approximate="tanh") if self.gelu else F.relu(pre))
        )

    def lasso(self) -> str:
        """Returns why there is no lasso."""
        return "the layer has an MLP, no dictionary"

    def linear(self, y: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Returns `W_out W_in y` in rows."""
        return (y @ self.W_in) @ self.W_out

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """The map to the hidden units, `[d_model, d_mlp]`."""
        return at_hand(self.fc_in).T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """The map from the hidden units, `[d_mlp, d_model]`."""
        return at_hand(self.fc_out).T

    @property
    def b_in(self) -> Float[Tensor, "d_mlp"]:
        """The bias of the hidden units, `[d_mlp]`; zeros where there is none."""
        if self.fc_in.bias is None:
            return torch.zeros_like(at_hand(self.fc_in)[:, 0])
        return at_hand(self.fc_in, "bias")

    @property
    def b_out(self) -> Float[Tensor, "d_model"]:
        """The bias of the output, `[d_model]`; zeros where there is none."""
        if self.fc_out.bias is None:
            return torch.zeros_like(at_hand(self.fc_out)[:, 0])
        return at_hand(self.fc_out, "bias")
