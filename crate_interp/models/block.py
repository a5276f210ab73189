"""One CRATE layer: compress (MSSA), then sparsify (ISTA or the overcomplete ODL)."""

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.attention import MSSA
from crate_interp.models.norm import HookedLayerNorm, is_hooked
from crate_interp.models.sparsify import ISTA, OvercompleteODL


class CrateBlock(nn.Module):
    """`Z^{l+1/2} = Z^l + MSSA(LN(Z^l))`, then `Z^{l+1} = ISTA(LN(Z^{l+1/2}))` (family crate: the code replaces the
    stream) or `Z^{l+1} = Z^{l+1/2} + ODL(LN(Z^{l+1/2}))` (family crate-alpha).

    Where the code replaces the stream, `hook_mlp_out` is the virtual difference code - Z^{l+1/2}: it makes
    TransformerLens' additive bookkeeping add up, and an edit of it reaches the stream.
    """

    hook_out_is_single_residual_stream = True  # read by TransformerLens' logit lens

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.residual = cfg.family == "crate-alpha"
        self.ln1 = HookedLayerNorm(cfg.d_model, cfg.ln_eps)
        self.attn = MSSA(cfg)
        self.ln2 = HookedLayerNorm(cfg.d_model, cfg.ln_eps)
        self.mlp = OvercompleteODL(cfg) if self.residual else ISTA(cfg)
        self.hook_resid_pre = HookPoint()
        self.hook_attn_out = HookPoint()
        self.hook_resid_mid = HookPoint()
        self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    @property
    def mssa(self) -> MSSA:
        """The paper's name of `attn`."""
        return self.attn

    @property
    def ista(self) -> ISTA | OvercompleteODL:
        """The paper's name of `mlp`."""
        return self.mlp

    def forward(self, z: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        z = self.hook_resid_pre(z)
        mid = self.hook_resid_mid(z + self.hook_attn_out(self.attn(z, self.ln1)))
        out = self.mlp(self.ln2(mid))
        if self.residual:
            return self.hook_resid_post(mid + self.hook_mlp_out(out))
        if is_hooked(self.hook_mlp_out):
            change = out - mid
            # adding the difference between the hook's answer and what it saw changes no bit where it saw and left
            out = out + (self.hook_mlp_out(change.clone()) - change)
        return self.hook_resid_post(out)
