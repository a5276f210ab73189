"""A plain ViT with the hook points of a HookedCrate, for comparison with a CRATE.

Everything outside the layers is a HookedCrate's: patch embedding, CLS token, positions, last norm,
unembedding. A layer is pre-norm attention with separate queries, keys and values, then a GELU MLP
(arXiv 2010.11929).
"""

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp import CrateConfig, HookedCrate


class Attention(nn.Module):
    """Multi-head attention with three codes and the scale 1/sqrt(d_head)."""

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=False)
        self.out = nn.Linear(cfg.d_model, cfg.d_model)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.hook_z = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """Returns what attention adds to the stream."""
        # [batch, pos, role, head, d_head]
        codes = self.qkv(x).unflatten(-1, (3, self.cfg.n_heads, self.cfg.d_head))
        q, k, v = codes.unbind(2)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.cfg.d_head**-0.5
        pattern = self.hook_pattern(self.hook_attn_scores(scores).softmax(dim=-1))
        return self.out(self.hook_z(torch.einsum("bhqk,bkhd->bqhd", pattern, v)).flatten(2))


class Block(nn.Module):
    """z + attention(LN z), then z + MLP(LN z)."""

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(cfg.d_model), nn.LayerNorm(cfg.d_model)
        self.attn = Attention(cfg)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.d_model, 4 * cfg.d_model),
            nn.GELU(),
            nn.Linear(4 * cfg.d_model, cfg.d_model),
        )
        self.hook_resid_pre, self.hook_resid_mid = HookPoint(), HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(self, z: Tensor) -> Tensor:
        """Returns the stream after attention and the MLP."""
        z = self.hook_resid_pre(z)
        z = self.hook_resid_mid(z + self.attn(self.ln1(z)))
        return self.hook_resid_post(z + self.mlp(self.ln2(z)))


class PlainViT(HookedCrate):
    """A HookedCrate with the layers of a ViT.

    Sweeps and the probes of attention and segmentation read it.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        self.blocks = nn.ModuleList(Block(self.cfg) for _ in range(cfg.n_layers))
        self.setup()  # the hook points of the new layers
