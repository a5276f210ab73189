"""HookedCrateCLIP: a CRATE-alpha for images and a plain transformer for texts, in one space."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_hooks.threads import owner_of
from crate_interp.config import CrateConfig
from crate_interp.models import hooked
from crate_interp.models.layers.block import CrateBlock
from crate_interp.models.layers.embed import hooked_positions
from crate_interp.models.layers.norm import HookedLayerNorm
from crate_interp.models.preprocess import Pictures
from crate_interp.models.text.text_and_tokens import TextMixin, check_tokens
from crate_interp.models.vision import HookedCrate

# fields of a CLIP's config that its image tower (_VISUAL) and its text tower (_TEXT) take over
_VISUAL = (
    "d_model", "n_layers", "n_heads", "d_head", "d_mlp", "eta", "lambd", "ln_eps", "ln_final_eps",
    "image_size", "patch_size", "channels", "interpolate_pos", "resize", "crop", "interpolation",
    "transparency", "bits", "mean", "std", "assumed",
)  # fmt: skip
_TEXT = ("n_ctx", "d_vocab", "d_embed", "ln_eps", "ln_final_eps", "tokenizer", "prepend_bos")


class HookedTextTower(TextMixin, hooked.HookedModel):
    """The text tower of a CLIP, from tokens `[batch, n_ctx]` to features `[batch, d_embed]`.

    The features are `LN(Z^L)` of the last position, times the projection. There is no mask: as in
    the official code, every token sees every other token, including padding. A text is always n_ctx
    tokens long.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg = hooked.own_config(cfg, "HookedTextTower", ("text",), ("clipa-text",))
        self.embed = nn.Embedding(cfg.d_vocab, cfg.d_model)
        self.pos_embed = nn.Parameter(0.01 * torch.randn(cfg.n_ctx, cfg.d_model))
        self.hook_embed, self.hook_pos_embed = HookPoint(), HookPoint()
        self.blocks = nn.ModuleList(CrateBlock(cfg) for _ in range(cfg.n_layers))
        self.ln_final = HookedLayerNorm(cfg.d_model, cfg.ln_final_eps)
        self.hook_pooled = HookPoint()
        self.unembed = nn.Linear(cfg.d_model, int(cfg.d_embed), bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self._follow()
        self.setup()

    def forward(
        self,
        tokens: Tensor | str | Sequence[str],
        *,
        stop_at_layer: int | None = None,
        start_at_layer: int | None = None,
        check: bool = False,
    ) -> Float[Tensor, "..."]:
        """Returns features of token ids `[batch, n_ctx]` or of text.

        `stop_at_layer` and `start_at_layer` are as in HookedCrate. `check` looks for NaN and Inf in
        a stream, as in HookedCrate.
        """
        self.watch_hooks()
        start, stop = hooked.layer_range(self.cfg.n_layers, start_at_layer, stop_at_layer)
        if start_at_layer is None:
            z = self._tokens(self._read(tokens, None, None, None, None)[0])
        else:
            z = hooked.check_stream(self, cast(Tensor, tokens))
            if check:
                hooked.check_finite(z)
        for block in self.blocks[start:stop]:
            z = block(z)
        return z if stop is not None else self.unembed(self.hook_pooled(self.ln_final(z)[:, -1]))

    def _tokens(self, tokens: Tensor) -> Float[Tensor, "batch pos d_model"]:
        check_tokens(tokens, self.cfg, tokens.shape[-1])
        if tokens.shape[1] != self.cfg.n_ctx:
            wanted = f"exactly n_ctx={self.cfg.n_ctx}: use model.to_tokens(text)"
            raise ValueError(f"a text has {tokens.shape[1]} tokens, but this tower takes {wanted}.")
        z = self.hook_embed(self.embed(tokens))
        return z + hooked_positions(self.hook_pos_embed, self.pos_embed, tokens.shape[0])

    def _rows(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
    ) -> tuple[Int[Tensor, "batch pos"], None]:
        """Returns the ids of [CLS] and the wordpieces, cut to n_ctx and padded with zeros.

        There is no [SEP], as in the JAX training code.
        """

        texts = [input] if isinstance(input, str) else list(input)
        rows = [self._encode(one, prepend_bos)[: self.cfg.n_ctx] for one in texts]
        padded = [row + [0] * (self.cfg.n_ctx - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.long), None

    def window_rows(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yields each text as one row of n_ctx tokens, as `to_tokens` gives it."""
        for text in texts:
            yield self.to_tokens([text], move_to_device=False)[0].tolist()

    lens_positions = -1  # the position that `cache.logit_lens()` reads: the last one

    W_E = property(lambda self: self.embed.weight)  # [d_vocab, d_model]
    W_pos = property(lambda self: self.pos_embed)  # [n_ctx, d_model]


class HookedCrateCLIP(hooked.HookedModel):
    """CRATE-alpha CLIPA: `100 cos(image features, text features)`.

    `visual` is a HookedCrate and `text` a HookedTextTower. Each can be used alone, under its own
    hook names. In the CLIP, their points are called `visual.blocks.{l}...` and
    `text.blocks.{l}...`. Code: UCSC-VLAA/CRATE-alpha `torch_inference/model/clipa_model.py`. As in
    that code, the stored `logit_scale` is not used.
    """

    towers = ("visual", "text")

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg = hooked.own_config(cfg, "HookedCrateCLIP", ("clip",))
        shared = {name: getattr(cfg, name) for name in _VISUAL}
        visual = CrateConfig(family="clipa-visual", n_classes=cfg.d_embed, **shared)
        shared = {name: getattr(cfg, name) for name in _TEXT}
        shared |= {key: getattr(cfg, f"text_{key}") for key in ("d_model", "n_layers", "n_heads")}
        shared["assumed"] = [name for name in cfg.assumed if name in _TEXT]
        self.visual = HookedCrate(visual)
        self.text = HookedTextTower(CrateConfig(family="clipa-text", bias=True, **shared))
        self.logit_scale = nn.Parameter(torch.tensor(0.0))
        # the towers' points are also points of the CLIP, so the towers share the CLIP's count of
        # open contexts, its state of hooks and the owner of its hooks
        for tower in (self.visual, self.text):
            tower.__dict__["_levels"] = self.__dict__["_levels"]
            tower.__dict__["_hook_owner"] = owner_of(self)
            tower._hook_state = self._hook_state
        self._follow()
        self.setup()

    def forward(
        self, images: Tensor, tokens: Tensor | str | Sequence[str], *, check: bool = False
    ) -> Float[Tensor, "n_images n_texts"]:
        """Returns 100 times the cosine of every image with every text.

        Pictures are preprocessed; texts are token ids or strings. `check` looks for NaN and Inf in
        the images, as in HookedCrate.
        """
        image, text = self.visual(images, check=check), self.encode_text(tokens)
        image = image / (image.norm(dim=-1, keepdim=True) + 1e-8)
        return 100 * image @ (text / text.norm(dim=-1, keepdim=True)).T

    def encode_image(self, images: Tensor) -> Float[Tensor, "batch d_embed"]:
        """Returns image features before normalisation: LN(Z^L) of CLS, times `visual.proj`."""
        return self.visual(images)

    def encode_text(self, tokens: Tensor | str | Sequence[str]) -> Float[Tensor, "batch d_embed"]:
        """Returns text features before normalisation."""
        return self.text(tokens)

    def preprocess(self, images: Pictures) -> Float[Tensor, "batch channels height width"]:
        """Turns pictures into the image tower's input, as in training (models/preprocess.py)."""
        return self.visual.preprocess(images)

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the text tower, or None."""
        return self.text.tokenizer

    def to_tokens(self, text: str | Sequence[str]) -> Int[Tensor, "batch pos"]:
        """Returns token ids of texts, `[batch, n_ctx]`."""
        return self.text.to_tokens(text)

    def _why_silent(self, name: str) -> str | None:
        tower, _, point = name.partition(".")
        return getattr(self, tower)._why_silent(point)

    def runtime_configs(self) -> list[CrateConfig]:
        """Returns the configs that follow this model's switches, device and dtype."""
        return [self.cfg, self.visual.cfg, self.text.cfg]
