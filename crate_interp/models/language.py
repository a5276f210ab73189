"""HookedCrateLM: tokens to logits of tokens, with a hook point at every equation."""

import warnings
from collections.abc import Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.lm_utils import lm_cross_entropy_loss

from crate_interp.config import CrateConfig
from crate_interp.models import hooked, runtimes
from crate_interp.models.hook_points import check_causal, check_linear
from crate_interp.models.layers import Ids, Mask, Stream, Vectors
from crate_interp.models.layers.block import CrateBlock
from crate_interp.models.layers.context import Padding, Past, contexts, padding_of
from crate_interp.models.layers.embed import TokenEmbed, hooked_positions
from crate_interp.models.layers.norm import HookedLayerNorm, MaskedTokenNorm, NoNorm, make_norm
from crate_interp.models.text.generation import GenerateMixin
from crate_interp.models.text.losses import check_labels, next_token_loss, token_loss
from crate_interp.models.text.text_and_tokens import check_tokens
from crate_interp.models.weights import Answers

_ROWS = 64  # nanochat pads its tables to a multiple of this number of rows


class Unembed(nn.Module):
    """`softcap tanh(x W_U / softcap)`, or `x W_U`, in CRATE-BERT with a bias.

    Rows that only pad the table to a multiple of 64 give no logits.
    """

    def __init__(self, cfg: CrateConfig, embed: nn.Embedding) -> None:
        super().__init__()
        self.d_vocab, self.softcap = cfg.d_vocab, cfg.softcap
        # in a tuple, so that torch does not register the table in this module too
        self._tied = (embed,) if cfg.family != "nanochat-crate" else ()
        self.bias = nn.Parameter(torch.zeros(cfg.d_vocab)) if cfg.segments else None
        if not self._tied:
            self.weight = nn.Parameter(0.001 * torch.randn(embed.num_embeddings, cfg.d_model))

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The map from the normalised stream to logits (before the softcap)."""
        return runtimes.at_hand(self._tied[0] if self._tied else self)[: self.d_vocab].T

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """The bias of the logits; zeros in all published models but CRATE-BERT."""
        tied = self.bias is None
        return self.W_U.new_zeros(self.d_vocab) if tied else runtimes.at_hand(self, "bias")

    def forward(self, x: Vectors) -> Float[Tensor, "*batch d_vocab"]:
        """Returns the logits of tokens, with the softcap if the model has one."""
        logits = x @ self.W_U
        return self.cap(logits if self.bias is None else logits + self.b_U)

    def cap(self, logits: Float[Tensor, "*batch any"]) -> Float[Tensor, "*batch any"]:
        """Returns logits after the softcap; the last axis may be a part of the vocabulary."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class HookedCrateLM(GenerateMixin, hooked.HookedModel):
    """A language model: CRATE-LM, its baseline, nanochat's CRATE-alpha, ToST or CRATE-BERT.

    `logits = norm(Z^L) W_U`. crate-lm (overcomplete and vanilla) and gpt-baseline (GPT-2-like):
    `Z^0 = W_E[t] + W_pos`, and W_U is W_E^T; CRATE-LM vanilla has no final norm. nanochat-crate:
    `x0 = rms(W_E[t])`, and before layer l `Z^l = resid_lambda_l Z + x0_lambda_l x0`; positions are
    rotations, logits are capped. Code: crate-lm/crate-lm `crate_overcomplete.py`, `crate.py`,
    `gpt.py`; modularflow/nanochat-crate-a `nanochat/crate.py`. Unlike that code, forward returns
    the logits of all positions. Random weights follow nanoGPT (normal, 0.02) with the dictionaries
    of CRATE. Hook points: hooks/README.md.

    crate-bert reads a text both ways: `Z^0 = LN(W_E[t] + W_pos + W_segment)`, no token is hidden
    from another, and the logits of the token at each place, for masked tokens, are
    `LN(GELU(Z^L W + b)) W_E^T + b_U`. So `ln_final` is this map, GELU and LN. `next_sentence(Z^L[:,
    0])` are the logits of its second head. The published code multiplies attention after the
    softmax by 1 - mask, and its data have mask 1 at real tokens: real tokens are cut out, and
    padding is read. Here every token reads all real tokens; `ci.load(...,
    attention_mask="published")` gives the other.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        families = "crate-lm", "gpt-baseline", "nanochat-crate", "tost-lm", "crate-bert"
        self.cfg = cfg = hooked.own_config(cfg, "HookedCrateLM", ("text",), families)
        rows = cfg.d_vocab if not cfg.rotary else -(-cfg.d_vocab // _ROWS) * _ROWS
        self.embed = TokenEmbed(rows, cfg)
        self.hook_embed = HookPoint()
        if cfg.rotary:
            self.resid_lambdas = nn.Parameter(torch.ones(cfg.n_layers))
            self.x0_lambdas = nn.Parameter(torch.zeros(cfg.n_layers))
        else:
            self.pos_embed = nn.Parameter(torch.zeros(cfg.n_ctx, cfg.d_model))
            self.hook_pos_embed = HookPoint()
        if cfg.segments:
            self.segment_embed = nn.Parameter(torch.zeros(cfg.segments, cfg.d_model))
            self.hook_token_type_embed = HookPoint()
            self.ln_embed = make_norm(cfg, cfg.ln_eps)
            layers = (nn.Linear(cfg.d_model, size) for size in (cfg.d_model, 2))
            self.next_sentence = nn.Sequential(next(layers), nn.Tanh(), next(layers))
        self.blocks = nn.ModuleList(CrateBlock(cfg) for _ in range(cfg.n_layers))
        no_norm = cfg.family == "crate-lm" and cfg.sparse_step == "ista"
        self.ln_final: Any = NoNorm() if no_norm else make_norm(cfg, cfg.ln_final_eps)
        if cfg.segments:
            self.ln_final = MaskedTokenNorm(cfg.d_model, cfg.ln_final_eps)
        self.unembed: Any = Unembed(cfg, self.embed)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if not cfg.rotary:
            nn.init.normal_(self.pos_embed, std=0.02)
        if cfg.segments:
            nn.init.normal_(self.segment_embed, std=0.02)
        self._follow()
        self.setup()

    def forward(
        self,
        input: Tensor | str | Sequence[str] | None = None,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        labels: Ids | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        *,
        past: Past | None = None,
        input_ids: Ids | None = None,
        segments: Ids | None = None,
        check: bool = False,
    ) -> Any:
        """Returns logits `[batch, pos, d_vocab]` of tokens `[batch, pos]`, or of text.

        `to_tokens` turns text into tokens; texts of unequal length are padded and masked.

        Args:
            input: Tokens, a text or several texts.
            return_type: "logits", "loss" (next-token cross-entropy in nats, mean over positions),
                "both", or None, which runs everything except the unembedding.
            loss_per_token: Whether the loss has a value at each position.
            prepend_bos: As in `to_tokens`.
            padding_side: The side ("left" or "right") on which pad tokens count as padding, as in
                TransformerLens' generate.
            attention_mask: `[batch, pos]`, 0 at padding: no token sees padding, and neither
                positions nor losses count it. Without it all tokens are read.
            labels: Token ids to predict instead of the input's own tokens; the model shifts the
                labels, and ignores -100. CRATE-BERT does not shift them: they are the right tokens
                at masked places, and -100 elsewhere. Its loss needs them.
            start_at_layer: With l, give the stream before layer l in place of tokens.
            stop_at_layer: With l, the call returns the stream before layer l `[batch, pos,
                d_model]`, as the layer's hook_resid_pre sees it.
            past: The keys and values of earlier tokens, which the input continues. Keys and values
                of the new tokens are added, and `attention_mask` then covers earlier and new
                tokens.
            input_ids: Hugging Face's name of the tokens. The result is then a transformers
                `CausalLMOutput` with `.loss` (if there are labels) and `.logits`, unless
                return_type asks for another result.
            segments: For CRATE-BERT, which segment each token is of `[batch, pos]`, 0 or 1.
                Default: all 0.
            check: Whether to look for NaN and Inf in a stream, as in HookedCrate; tokens are always
                checked.

        Raises:
            ValueError: For ids that the vocabulary lacks, for no tokens, for more than n_ctx
                tokens, and for a row whose tokens are all masked.
        """
        self.watch_hooks()
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type={return_type!r}: give 'logits', 'loss', 'both' or None.")
        if (input is None) == (input_ids is None):
            raise ValueError("give one input: tokens or text first, or token ids as input_ids=.")
        given: Any = input if input_ids is None else input_ids
        start, stop = hooked.layer_range(self.cfg.n_layers, start_at_layer, stop_at_layer)
        if start_at_layer is None:
            tokens, mask = self._read(given, prepend_bos, padding_side, attention_mask, past)
            check_tokens(tokens, self.cfg, tokens.shape[-1] + (past.length if past else 0))
            if labels is not None:
                count = self.cfg.d_vocab
                labels = check_labels(labels, tokens.shape, count, "token ids", tokens.device)
            elif not self.cfg.causal and return_type in ("loss", "both"):
                raise ValueError("the loss is that of masked tokens: give labels, -100 elsewhere.")
            segments = self._segments(segments, tokens)
        else:
            if not isinstance(given, Tensor) or not given.is_floating_point():
                raise ValueError("start_at_layer takes the stream of floats [batch, pos, d_model].")
            if return_type in ("loss", "both") or labels is not None:
                raise ValueError(f"a loss needs tokens, but start_at_layer={start} takes a stream.")
            self.check_start(start)
            hooked.check_stream(self, given)
            if check:
                hooked.check_finite(given)
            tokens, mask = given, attention_mask
        padding = padding_of(mask, tokens.shape[0], tokens.shape[1], past, tokens.device)
        embedded = start_at_layer is None  # otherwise z is the input of a layer
        z = self._embed(tokens, past, padding, segments) if embedded else tokens
        x0 = z if embedded else None
        visible = contexts(self.cfg, z.shape[1], past, z.device, padding)
        if past is not None:
            past.mask = None if padding is None else padding.real
        last = self.cfg.n_layers if stop is None else stop
        for layer in range(start, last):
            z = z if x0 is None and layer == start else self._mixed(z, x0, layer)
            z = self.blocks[layer](z, visible[layer])
        if last < self.cfg.n_layers and (embedded or last != start):
            z = self._mixed(z, x0, last)
        if stop is not None:
            return z
        as_output = input_ids is not None
        return self._answer(z, tokens, return_type, loss_per_token, padding, labels, as_output)

    def real_tokens(self, *args: object, **kwargs: object) -> Mask | None:
        """Returns which tokens of a forward with these arguments are real, or None if all are."""
        own = signature(self.forward)
        known = {name: value for name, value in kwargs.items() if name in own.parameters}
        given: Any = own.bind_partial(*args, **known).arguments
        read: Any = given.get("input") if given.get("input") is not None else given.get("input_ids")
        past, mask = given.get("past"), given.get("attention_mask")
        if given.get("start_at_layer") is None:
            sides = given.get("prepend_bos"), given.get("padding_side")
            with warnings.catch_warnings():  # the forward has warned of a text that is cut
                warnings.simplefilter("ignore")
                read, mask = self._read(read, *sides, mask, None)
        if past is not None:  # the forward has added the new tokens to it
            mask = past.mask
        if mask is None:
            return None
        real = (mask[None] if mask.ndim == 1 else mask).bool()
        return real[:, real.shape[1] - read.shape[1] :].to(read.device)

    def _answer(
        self,
        z: Tensor,
        tokens: Tensor,
        return_type: str | None,
        loss_per_token: bool,
        padding: Padding | None,
        labels: Tensor | None,
        as_output: bool,
    ) -> Any:
        x = self.ln_final(z)  # runs even if nothing is returned, so that a cache has its points
        if return_type is None:
            return None
        logits = self.unembed(x)
        as_output, loss = as_output and return_type == "logits", None
        if return_type != "logits" or (as_output and labels is not None):
            real = None if padding is None else padding.of_new(tokens.shape[1])
            if self.cfg.causal or labels is None:
                loss = next_token_loss(logits, tokens, loss_per_token, real, labels)
            else:
                loss = token_loss(logits, labels, loss_per_token, real)
        if as_output:
            from transformers import modeling_outputs  # slow to import

            fields: Any = {"logits": logits} if loss is None else {"loss": loss, "logits": logits}
            name = "CausalLMOutput" if self.cfg.causal else "MaskedLMOutput"
            return getattr(modeling_outputs, name)(**fields)
        return {"logits": logits, "loss": loss, "both": (logits, loss)}[return_type]

    def _segments(self, segments: Ids | None, tokens: Ids) -> Ids | None:
        """Returns the segments of tokens, or None for a model without them."""
        count = self.cfg.segments
        if segments is None:
            return torch.zeros_like(tokens) if count else None
        if not count:
            raise ValueError("this model has no segments: leave segments= out.")
        if not isinstance(segments, Tensor):
            raise ValueError("segments: give a tensor of whole numbers [batch, pos].")
        rows = segments[None] if segments.ndim == 1 else segments
        inside = ((rows >= 0) & (rows < count)).all() if runtimes.readable(rows) else True
        if rows.is_floating_point() or rows.shape != tokens.shape or not inside:
            what = f"whole numbers from 0 to {count - 1} of shape {list(tokens.shape)}"
            raise ValueError(f"segments: give {what}.")
        return rows.to(tokens.device, torch.long)

    def _embed(
        self, tokens: Ids, past: Past | None, padding: Padding | None, segments: Ids | None
    ) -> Stream:
        x = self.embed(tokens)
        if self.cfg.rotary:
            return self.hook_embed(F.rms_norm(x, x.shape[-1:], eps=self.cfg.ln_eps))
        first = past.length if past else 0
        new = slice(first, first + tokens.shape[1])
        # the published code also numbers padding, which it reads
        padding = None if self.cfg.attention_mask == "published" else padding
        table = self.pos_embed[new if padding is None else padding.positions[:, new]]
        x = self.hook_embed(x) + hooked_positions(self.hook_pos_embed, table, tokens.shape[0])
        if segments is None:
            return x
        return self.ln_embed(x + self.hook_token_type_embed(self.segment_embed[segments]))

    def _mixed(self, z: Tensor, x0: Tensor | None, layer: int) -> Tensor:
        """Returns the input of a layer; in nanochat-crate it mixes the stream and the embedding."""
        if not self.cfg.rotary:
            return z
        z = self.resid_lambdas[layer] * z
        return z if x0 is None else z + self.x0_lambdas[layer] * x0

    def check_start(self, layer: int) -> None:
        """Raises ValueError if a stream lacks what the layers from `layer` on read besides it."""
        later = self.x0_lambdas[layer + 1 :] if self.cfg.rotary else None
        if later is not None and runtimes.readable(later) and bool(later.any()):
            raise ValueError(
                f"start_at_layer={layer}: later layers add the embedding x0 (x0_lambdas), "
                "which a stream does not hold."
            )

    lens_positions = None  # `cache.logit_lens()` reads every token

    @property
    def adapter(self) -> SimpleNamespace:
        """The softcap, under the name by which TransformerLens' logit lens finds it."""
        return SimpleNamespace(apply_output_logits_transform=self.unembed.cap)

    @property
    def full_options(self) -> dict[str, Any]:
        """The keyword arguments with which a forward runs every layer and then stops."""
        return {"stop_at_layer": self.cfg.n_layers}

    W_E = property(lambda self: self.embed.W_E)  # [d_vocab, d_model]
    # `ln_final.hook_normalized @ W_U` are the logits, before any softcap; no model has a bias
    W_U = property(lambda self: self.unembed.W_U)  # pyright: ignore
    b_U = property(lambda self: self.unembed.b_U)  # pyright: ignore

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The position embeddings; raises AttributeError if positions are rotations."""
        return runtimes.at_hand(self, "pos_embed")

    def tokens_to_residual_directions(self, tokens: Answers) -> Float[Tensor, "... d_model"]:
        """Returns the direction of each token in the stream before ln_final.

        It is the token's column of W_U times ln_final's weight. tokens: a number or name, a list of
        these, or a tensor of numbers. Raises ValueError for a token that the vocabulary lacks, and
        for CRATE-BERT, whose logits are not linear in the normalised stream.
        """
        check_linear(self.cfg, "a direction of a token")
        directions = self.W_U.T[self.answer_ids(tokens)]
        scaled = isinstance(self.ln_final, HookedLayerNorm)
        return directions * runtimes.at_hand(self.ln_final) if scaled else directions

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Ids,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "..."]:
        """Returns the cross-entropy in nats of each token given the tokens before it.

        Returns the mean `[]`, or `[batch, pos - 1]` with `per_token`. attention_mask `[batch,
        pos]`: a prediction is not counted if the token that predicts or the predicted token is
        masked (0). This is TransformerLens' function. CRATE-BERT refuses it.
        """
        check_causal(self.cfg, "loss_fn")
        tokens = tokens.to(logits.device)
        mask = None if attention_mask is None else attention_mask.to(logits.device).bool()
        return lm_cross_entropy_loss(logits, tokens, mask, per_token)
