"""CBSA, the attention of CBT: tokens are contracted into representatives, and broadcast back."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.layers.attention import Attention, SelfAttention, SubspaceCodes
from crate_interp.models.layers.context import Context
from crate_interp.models.layers.norm import make_norm
from crate_interp.models.layers.sparse_steps import MLP

SIDE = 8  # the representatives are a square of 8 x 8


class CBSA(SubspaceCodes, Attention):
    """Contract-and-broadcast self-attention with 64 representatives.

    With the codes w = Z U_k `[pos, d_head]` of a head and representatives r, the codes pooled to 8
    x 8: contraction `A = softmax(r w^T / sqrt(p))` `[rep, pos]`, `r' = r + step_rep A w`; broadcast
    `step_x A^T softmax(r' r'^T / sqrt(p)) r'`, then the output map. Paper: arXiv 2509.16875; code:
    CBSA `CBSA_image_classification/models.py` `CBSA`.

    The code pools all tokens but the last, laid out as a square. CLS comes first, so the square
    holds CLS and all patches but the last one, each patch one place late. The published weights
    were trained so, and here it is the same.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        inner = cfg.n_heads * cfg.d_head
        self.u_proj = nn.Linear(cfg.d_model, inner, bias=cfg.code_bias)
        self.out_proj = nn.Linear(inner, cfg.d_model, bias=cfg.output_bias)
        self.step_x = nn.Parameter(torch.randn(cfg.n_heads, 1, 1))
        self.step_rep = nn.Parameter(torch.randn(cfg.n_heads, 1, 1))
        self.hook_u = HookPoint()
        self.hook_rep = HookPoint()
        self.hook_contract = HookPoint()
        self.hook_rep_post = HookPoint()
        self.hook_rep_pattern = HookPoint()
        self.hook_z = HookPoint()
        self.hook_result = HookPoint()

    W_V = SubspaceCodes.U

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], context: Context | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Returns the attention of the normalised stream.

        Raises ValueError if the number of tokens, less one, is no square.
        """
        u = self._codes(x)
        rep = self.hook_rep(self.pooled(u)).transpose(1, 2)  # [batch, head, rep, d_head]
        codes, scale = u.transpose(1, 2), self.cfg.d_head**-0.5  # [batch, head, pos, d_head]
        contract = self.hook_contract((rep @ codes.mT * scale).softmax(dim=-1))
        rep = rep + self.step_rep * (contract @ codes)
        rep = self.hook_rep_post(rep.transpose(1, 2)).transpose(1, 2)
        pattern = self.hook_rep_pattern((rep @ rep.mT * scale).softmax(dim=-1))
        heads = self.step_x * (contract.mT @ (pattern @ rep))
        return self._written(self.hook_z(heads.transpose(1, 2)))  # [batch, pos, head, d_head]

    def pooled(
        self, u: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch rep head d_head"]:
        """Returns the mean codes in each cell of an 8 x 8 grid over the square of tokens."""
        side = _side(u.shape[1])
        square = u[:, :-1].flatten(2).mT.unflatten(-1, (side, side))  # [batch, d, h, w]
        pooled = F.adaptive_avg_pool2d(square, SIDE)
        return pooled.flatten(2).mT.unflatten(-1, u.shape[2:])  # [batch, rep, head, d_head]

    def reading(
        self, contract: Float[Tensor, "batch head rep pos"]
    ) -> Float[Tensor, "batch head rep pos"]:
        """Returns the weight of each token's code in a representative r', `P + step_rep A`.

        P pools; contract: A. It has the dtype of A.
        """
        eye = torch.eye(contract.shape[-1], dtype=contract.dtype, device=contract.device)
        pooling = self.pooled(eye[None, :, None])[0, :, 0]  # [rep, pos]
        return pooling + self.step_rep.detach().to(contract) * contract


def _side(count: int) -> int:
    """Returns the side of the square of all tokens but one; raises ValueError if there is none."""
    side = math.isqrt(count)
    if side * side != count - 1:
        raise ValueError(
            f"{count} tokens: CBSA lays all tokens but one out as a square, so it needs "
            f"{side * side} + 1 of them: give images as high as they are wide."
        )
    return side


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
