"""One layer: compress, then sparsify. A plain transformer's layer has the same parts."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.layers.attention import MSSA, Attention, SelfAttention
from crate_interp.models.layers.context import Context
from crate_interp.models.layers.contraction import CBSA
from crate_interp.models.layers.norm import is_hooked, make_norm
from crate_interp.models.layers.sparse_steps import STEPS, SparseStep
from crate_interp.models.layers.token_statistics import TSSA

# `attention` of a family -> its class
ATTENTIONS: dict[str, Callable[[CrateConfig], Attention]] = {
    "mssa": MSSA,
    "tssa": TSSA,
    "cbsa": CBSA,
    "self": SelfAttention,
}


class Layer(nn.Module):
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
        self.hook_resid_pre = HookPoint()
        self.hook_attn_out = HookPoint()
        self.hook_resid_mid = HookPoint()
        if not cfg.attn_only:
            self.hook_mlp_in = HookPoint()
            self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    @property
    def mssa(self) -> Attention:
        """Attention, by the paper's name."""
        return self.attn

    @property
    def ista(self) -> SparseStep:
        """The sparse step, by the paper's name."""
        return self.mlp

    def forward(
        self, z: Float[Tensor, "batch pos d_model"], context: Context | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Returns the stream after attention and the sparse step, Z^{l+1}."""
        z = self.hook_resid_pre(z)
        mid = self.hook_resid_mid(z + self.hook_attn_out(self.attn.of_stream(z, self.ln1, context)))
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
