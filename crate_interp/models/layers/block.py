"""One layer: compress, then sparsify. A plain transformer's layer has the same parts."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.config import CrateConfig
from crate_interp.models.layers import Stream
from crate_interp.models.layers.attention import MSSA, SelfAttention
from crate_interp.models.layers.context import Context
from crate_interp.models.layers.norm import HookedPart, is_hooked, make_norm
from crate_interp.models.layers.patternless import CBSA, TSSA
from crate_interp.models.layers.sparse_steps import MLP, STEPS, SparseStep

# `attention` of a family -> its class
ATTENTIONS = {"mssa": MSSA, "tssa": TSSA, "cbsa": CBSA, "self": SelfAttention}


class Layer(HookedPart):
    """A layer, as the measures read it: norm, attention, second norm, sparse step or MLP."""

    attn: Any
    mlp: Any
    ln1: Any
    ln2: Any


class CrateBlock(Layer):
    """One layer: `Z^{l+1/2} = Z^l + MSSA(LN(Z^l))`, then the sparse step.

    In crate, crate-mae and crate-lm the code, or its decoding, replaces the stream, `Z^{l+1} =
    step(LN(Z^{l+1/2}))`; in the other families the step's output is added, `Z^{l+1} = Z^{l+1/2} +
    step(LN(Z^{l+1/2}))`. If the output replaces the stream, `hook_mlp_out` is the difference
    `Z^{l+1} - Z^{l+1/2}`, so that TransformerLens' sums of contributions add up. An edit of this
    difference reaches the stream. In aot there is no step, and attention is the whole layer.
    """

    hook_out_is_single_residual_stream = True  # read by TransformerLens' logit lens

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg, self.residual = cfg, cfg.residual
        self.ln1 = make_norm(cfg, cfg.ln_eps)
        self.attn = ATTENTIONS[cfg.facts["attention"]](cfg)
        if not cfg.attn_only:
            self.ln2 = make_norm(cfg, cfg.ln_eps)
        self.mlp: SparseStep = STEPS[cfg.sparse_step](cfg)
        self.add_points("hook_resid_pre", "hook_attn_out", "hook_resid_mid")
        if not cfg.attn_only:
            self.add_points("hook_mlp_in", "hook_mlp_out")
        self.add_points("hook_resid_post")

    def forward(self, z: Stream, context: Context | None = None) -> Stream:
        """Returns the stream after attention and the sparse step, Z^{l+1}."""
        z = self.hook_resid_pre(z)
        out = self.hook_attn_out(self.attn.of_stream(z, self.ln1, context))
        return self.after_attention(z + out)

    def after_attention(self, mid: Stream) -> Stream:
        """Returns the stream after the layer, Z^{l+1}, if attention leaves this stream."""
        mid = self.hook_resid_mid(mid)
        if self.cfg.attn_only:
            return self.hook_resid_post(mid)
        read = self.hook_mlp_in(mid.clone()) if self.cfg.use_hook_mlp_in else mid
        out = self.mlp(self.ln2(read))
        if self.residual:
            return self.hook_resid_post(mid + self.hook_mlp_out(out))
        if is_hooked(self.hook_mlp_out):
            change = out - mid
            # if the hook changes nothing, the term in parentheses is exactly 0, and the stream
            # stays the same to the bit
            out = out + (self.hook_mlp_out(change.clone()) - change)
        return self.hook_resid_post(out)


class ClassAttention(SelfAttention):
    """Attention in which only CLS, the first token, asks; a pattern is `[batch, head, 1, pos]`."""

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        for name in ("attn_in", "q_input", "k_input", "v_input"):  # inputs are never split here
            delattr(self, f"hook_{name}")

    def codes(
        self, x: Stream, context: Context | None
    ) -> Sequence[Float[Tensor, "batch _ head d_head"]]:
        """Returns the query of CLS, and the keys and values of all tokens."""
        query, key, value = super().codes(x, context)
        return query[:, :1], key, value


class ClassBlock(HookedPart):
    """One layer of class attention, as ToST's code runs it.

    `x = Z + gamma_1 (attention of y at CLS, y itself at the patches)` with y = LN(Z), then `Z+ = y'
    + (gamma_2 MLP(y') at CLS, y' at the patches)` with y' = LN(x). Two things are unlike CaiT's
    layer, and the published weights were trained with both: the patches move too, and the second
    LayerNorm replaces the stream, so that the patches are doubled. `hook_attn_out` and
    `hook_mlp_out` hold what is added. Code: ToST `tost_vision/tost.py` `ClassAttentionBlock` with
    `tokens_norm=True`.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.ln1 = make_norm(cfg, cfg.ln_eps)
        self.attn = ClassAttention(cfg)
        self.ln2 = make_norm(cfg, cfg.ln_eps)
        self.mlp = MLP(cfg)
        self.add_points(
            "hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post",
        )  # fmt: skip

    def forward(self, z: Stream) -> Stream:
        """Returns the stream after the layer; CLS comes first."""
        z = self.hook_resid_pre(z)
        y = self.ln1(z)
        moved = torch.cat([self.attn(y), self.attn.gamma * y[:, 1:]], dim=1)
        y = self.ln2(self.hook_resid_mid(z + self.hook_attn_out(moved)))
        added = torch.cat([self.mlp(y[:, :1]), y[:, 1:]], dim=1)
        return self.hook_resid_post(y + self.hook_mlp_out(added))
