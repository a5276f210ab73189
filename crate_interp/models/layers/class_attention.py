"""The layers at the end of ToST, in which a CLS token reads the patches (CaiT, XCiT)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.layers.attention import SelfAttention
from crate_interp.models.layers.context import Context
from crate_interp.models.layers.norm import make_norm
from crate_interp.models.layers.sparse_steps import MLP


class ClassAttention(SelfAttention):
    """Attention in which only CLS, the first token, asks; a pattern is `[batch, head, 1, pos]`."""

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        for name in ("attn_in", "q_input", "k_input", "v_input"):  # inputs are never split here
            delattr(self, f"hook_{name}")

    def codes(
        self, x: Float[Tensor, "batch pos d_model"], context: Context | None
    ) -> Sequence[Float[Tensor, "batch _ head d_head"]]:
        """Returns the query of CLS, and the keys and values of all tokens."""
        query, key, value = super().codes(x, context)
        return query[:, :1], key, value


class ClassBlock(nn.Module):
    """One layer of class attention, as ToST's code runs it.

    `x = Z + gamma_1 (attention of y at CLS, y itself at the patches)` with y = LN(Z), then
    `Z+ = y' + (gamma_2 MLP(y') at CLS, y' at the patches)` with y' = LN(x). Two things are unlike
    CaiT's layer, and the published weights were trained with both: the patches move too, and the
    second LayerNorm replaces the stream, so that the patches are doubled. `hook_attn_out` and
    `hook_mlp_out` are what is added. Code: ToST `tost_vision/tost.py` `ClassAttentionBlock` with
    `tokens_norm=True`.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.ln1 = make_norm(cfg, cfg.ln_eps)
        self.attn = ClassAttention(cfg)
        self.ln2 = make_norm(cfg, cfg.ln_eps)
        self.mlp = MLP(cfg)
        self.hook_resid_pre = HookPoint()
        self.hook_attn_out = HookPoint()
        self.hook_resid_mid = HookPoint()
        self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(self, z: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Returns the stream after the layer; CLS comes first."""
        z = self.hook_resid_pre(z)
        y = self.ln1(z)
        moved = torch.cat([self.attn(y), self.attn.gamma * y[:, 1:]], dim=1)
        y = self.ln2(self.hook_resid_mid(z + self.hook_attn_out(moved)))
        added = torch.cat([self.mlp(y[:, :1]), y[:, 1:]], dim=1)
        return self.hook_resid_post(y + self.hook_mlp_out(added))
