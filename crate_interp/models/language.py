"""HookedCrateLM: tokens to next-token logits, with a hook point at every equation."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.block import CrateBlock
from crate_interp.models.context import Past, contexts
from crate_interp.models.embed import TokenEmbed, hooked_positions
from crate_interp.models.hooked import HookedModel, own_config, set_runtime
from crate_interp.models.layers import check_stream, layer_range
from crate_interp.models.norm import HookedLayerNorm, NoNorm, make_norm
from crate_interp.models.parity import LanguageParity
from crate_interp.models.text import GenerateMixin

_ROWS = 64  # nanochat pads its tables to a multiple of this


class Unembed(nn.Module):
    """`softcap tanh(x W_U / softcap)`, or `x W_U`.

    Rows that only pad the table to a multiple of 64 give no logit.
    """

    def __init__(self, cfg: CrateConfig, embed: nn.Embedding) -> None:
        super().__init__()
        self.d_vocab, self.softcap = cfg.d_vocab, cfg.softcap
        # in a tuple, so that this module does not own the table too
        self._tied = (embed,) if cfg.family != "nanochat-crate" else ()
        if not self._tied:
            self.weight = nn.Parameter(0.001 * torch.randn(embed.num_embeddings, cfg.d_model))

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The map from the normalised stream to logits (before the softcap)."""
        table = self._tied[0].weight if self._tied else self.weight
        return table[: self.d_vocab].T

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """Zeros: no published model has this bias."""
        return self.W_U.new_zeros(self.d_vocab)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
        return self.cap(x @ self.W_U)

    def cap(self, logits: Float[Tensor, "*batch any"]) -> Float[Tensor, "*batch any"]:
        """Returns logits, or any part of them, after the softcap."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class HookedCrateLM(GenerateMixin, LanguageParity, HookedModel):
    """A language model: CRATE-LM, its baseline, or nanochat's CRATE-alpha.

    `logits = norm(Z^L) W_U`. crate-lm (overcomplete and vanilla) and gpt-baseline (GPT-2-like):
    `Z^0 = W_E[t] + W_pos`, and W_U is W_E^T; CRATE-LM vanilla has no final norm. nanochat-crate:
    `x0 = rms(W_E[t])`, and before layer l `Z^l = resid_lambda_l Z + x0_lambda_l x0`; positions are
    rotations, logits are capped. Code: crate-lm/crate-lm `crate_overcomplete.py`, `crate.py`,
    `gpt.py`; modularflow/nanochat-crate-a `nanochat/crate.py`. Different from it: forward returns
    the logits of all positions. Random weights follow nanoGPT (normal, 0.02) with the dictionaries
    of CRATE. Hook points: hooks/README.md.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = own_config(
            cfg, "HookedCrateLM", ("text",), ("crate-lm", "gpt-baseline", "nanochat-crate")
        )
        cfg = self.cfg
        rows = cfg.d_vocab if not cfg.rotary else -(-cfg.d_vocab // _ROWS) * _ROWS
        self.embed = TokenEmbed(rows, cfg)
        self.hook_embed = HookPoint()
        if cfg.rotary:
            self.resid_lambdas = nn.Parameter(torch.ones(cfg.n_layers))
            self.x0_lambdas = nn.Parameter(torch.zeros(cfg.n_layers))
        else:
            self.pos_embed = nn.Parameter(torch.zeros(cfg.n_ctx, cfg.d_model))
            self.hook_pos_embed = HookPoint()
        self.blocks = nn.ModuleList(CrateBlock(cfg) for _ in range(cfg.n_layers))
        no_norm = cfg.family == "crate-lm" and cfg.sparse_step == "ista"
        self.ln_final: Any = NoNorm() if no_norm else make_norm(cfg, cfg.ln_final_eps)
        self.unembed: Any = Unembed(cfg, self.embed)
        self._initialise()
        set_runtime(cfg, device=self.embed.weight.device, dtype=self.embed.weight.dtype)
        self.setup()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if not self.cfg.rotary:
            nn.init.normal_(self.pos_embed, std=0.02)

    def forward(
        self,
        tokens: Tensor | str | Sequence[str],
        return_type: str | None = "logits",
        *,
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
        start_at_layer: int | None = None,
        past: Past | None = None,
    ) -> Any:
        """Returns logits `[batch, pos, d_vocab]` of tokens `[batch, pos]`, or of text.

        Text becomes tokens by `to_tokens`. return_type: "logits", "loss" (next-token cross-entropy
        in nats, mean over positions; each one with `loss_per_token`), "both" or None.
        `stop_at_layer=l` returns the stream before layer l `[batch, pos, d_model]`, as its
        hook_resid_pre sees it; `start_at_layer=l` takes that stream in place of tokens. `past`: the
        tokens follow those it holds, and it grows. Raises ValueError for ids that the vocabulary
        lacks, no tokens, and more than n_ctx of them.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type={return_type!r}: give 'logits', 'loss', 'both' or None.")
        start, stop = layer_range(self.cfg.n_layers, start_at_layer, stop_at_layer)
        if start_at_layer is None:
            tokens = self._as_tokens(tokens, prepend_bos)
            check_tokens(tokens, self.cfg, tokens.shape[-1] + (past.length if past else 0))
            z = x0 = self._embed(tokens, past)
        else:
            z, x0 = self._check_start(tokens, start, return_type), None
        visible = contexts(self.cfg, z.shape[1], past, z.device)
        for layer in range(start, self.cfg.n_layers if stop is None else stop):
            z = z if x0 is None and layer == start else self._mixed(z, x0, layer)
            z = self.blocks[layer](z, visible[layer])
        if stop is not None:
            given = stop == self.cfg.n_layers or (x0 is None and stop == start)
            return z if given else self._mixed(z, x0, stop)
        return self._answer(z, tokens, return_type, loss_per_token)

    def _answer(self, z: Tensor, tokens: Any, return_type: str | None, loss_per_token: bool) -> Any:
        if return_type is None:
            return None
        logits = self.unembed(self.ln_final(z))
        if return_type == "logits":
            return logits
        loss = next_token_loss(logits, tokens, per_token=loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def _embed(
        self, tokens: Int[Tensor, "batch pos"], past: Past | None
    ) -> Float[Tensor, "batch pos d_model"]:
        x = self.embed(tokens)
        if self.cfg.rotary:
            return self.hook_embed(F.rms_norm(x, x.shape[-1:], eps=self.cfg.ln_eps))
        first = past.length if past else 0
        table = self.pos_embed[first : first + tokens.shape[1]]
        return self.hook_embed(x) + hooked_positions(self.hook_pos_embed, table, len(tokens))

    def _mixed(self, z: Tensor, x0: Tensor | None, layer: int) -> Tensor:
        """Returns the stream as layer `layer` takes it."""
        if not self.cfg.rotary:
            return z
        z = self.resid_lambdas[layer] * z
        return z if x0 is None else z + self.x0_lambdas[layer] * x0

    def _check_start(self, z: Any, start: int, return_type: str | None) -> Tensor:
        if not isinstance(z, Tensor) or not z.is_floating_point():
            raise ValueError(
                "start_at_layer takes the stream of floats [batch, pos, d_model] in place of "
                "tokens."
            )
        if return_type in ("loss", "both"):
            raise ValueError(
                f"return_type={return_type!r} needs tokens, and start_at_layer={start} takes a "
                "stream."
            )
        if self.cfg.rotary and bool(self.x0_lambdas[start + 1 :].any()):
            raise ValueError(
                f"start_at_layer={start}: layers after that add the embedding x0 (x0_lambdas), "
                "which a stream does not hold."
            )
        if z.dtype != self.cfg.dtype:
            raise ValueError(
                f"the stream is {z.dtype}, the model {self.cfg.dtype}: use z.to(model.cfg.dtype)."
            )
        return check_stream(self, z)

    @property
    def lens_positions(self) -> None:
        """None: `cache.logit_lens()` reads every token."""
        return None

    @property
    def adapter(self) -> SimpleNamespace:
        """What TransformerLens' logit lens applies after W_U: the softcap."""
        return SimpleNamespace(apply_output_logits_transform=self.unembed.cap)

    @property
    def full_options(self) -> dict[str, Any]:
        """The keyword arguments of a forward through every layer, without logits."""
        return {"return_type": None}

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding of each token."""
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The position embeddings; raises AttributeError if positions are rotations."""
        return self.pos_embed

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding: `ln_final.hook_normalized @ W_U` are the logits, before any softcap."""
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """Zeros: no published model has this bias."""
        return self.unembed.b_U

    def tokens_to_residual_directions(
        self, tokens: str | int | Int[Tensor, "..."]
    ) -> Float[Tensor, "... d_model"]:
        """Returns the direction of each token in the stream before ln_final.

        It is the token's column of W_U times ln_final's weight.
        """
        index = self.to_single_token(tokens) if isinstance(tokens, str) else tokens
        directions = self.W_U.T[index]
        return (
            directions * self.ln_final.weight
            if isinstance(self.ln_final, HookedLayerNorm)
            else directions
        )


def check_tokens(tokens: Tensor, cfg: CrateConfig, count: int) -> None:
    """Checks a batch of token ids.

    Raises ValueError for another dtype or shape, for ids that the vocabulary lacks, and if `count`
    exceeds n_ctx.
    """
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.ndim != 2:
        raise ValueError(
            f"tokens are {tokens.dtype} of shape {list(tokens.shape)}, the model takes whole "
            "numbers [batch, pos]."
        )
    if 0 in tokens.shape:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: there is no token.")
    if count > cfg.n_ctx:
        raise ValueError(
            f"there are {count} tokens, the model takes at most n_ctx={cfg.n_ctx}: cut them "
            "shorter."
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= cfg.d_vocab:
        raise ValueError(
            f"tokens go from {low} to {high}, the vocabulary from 0 to {cfg.d_vocab - 1}."
        )


def next_token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    per_token: bool = False,
) -> Float[Tensor, "..."]:
    """Returns the cross-entropy in nats of each token given those before it.

    It is the mean `[]`, or `[batch, pos - 1]` with `per_token`.
    """
    if tokens.shape[1] < 2:
        raise ValueError(
            "the loss needs at least two tokens: the second is predicted from the first."
        )
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return losses.unflatten(0, (tokens.shape[0], -1)) if per_token else losses.mean()
