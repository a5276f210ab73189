"""HookedCrateMAE: masked images to reconstructed patches, encoder and decoder hooked."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.core import checks
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel, check_finite, layer_range, own_config
from crate_interp.models.layers import Pixels, Stream
from crate_interp.models.layers.attention import MSSA
from crate_interp.models.layers.block import CrateBlock
from crate_interp.models.layers.embed import ConvPatchEmbed, cat_tokens
from crate_interp.models.layers.norm import HookedLayerNorm, HookedPart
from crate_interp.models.preprocess import ImageMixin
from crate_interp.models.runtimes import readable


@dataclass(frozen=True)
class Reconstruction:
    """The output of a masked autoencoder. `mask`: 1 for patches that were removed, 0 for kept ones.

    pred: the pixels of every patch in the order (row, column, channel), normalised if
    `cfg.norm_pix_loss`. loss: mean squared error over removed patches, or over all patches if none
    was removed. latent: LN(Z^L), CLS first.
    """

    pred: Float[Tensor, "batch patch patch_values"]
    mask: Float[Tensor, "batch patch"]
    loss: Float[Tensor, ""]
    latent: Stream


@dataclass(frozen=True)
class DecoderView:
    """The decoder of a masked autoencoder as a model of its own: `cache.decoder.model`.

    cfg: its numbers of layers and heads are the decoder's. whole: the masked autoencoder.
    """

    whole: "HookedCrateMAE"
    cfg: CrateConfig
    blocks: nn.ModuleList
    ln_final: HookedLayerNorm
    unit: str = "images"
    has_cls: bool = True
    has_logits: bool = False
    towers: tuple[str, ...] = ()

    def check_point(self, name: str) -> None:
        """Raises KeyError if the decoder has no such hook point, or if the point cannot fire."""
        self.whole.check_point(f"decoder_{name}")


class CrateDecoderBlock(HookedPart):
    """A layer of the decoder, for tokens as rows: `G = LN(X) D^T`, then `G - MSSA(LN(G))`.

    There is no residual around the dictionary. G is the layer's `hook_resid_mid`, and
    `hook_attn_out` is the signed contribution -MSSA. Code: CRATE `model/crate_ae/crate_decoder.py`.
    The feed-forward in that file has a lambda of 5.0 that is never used.
    """

    hook_out_is_single_residual_stream = True

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.ln1 = HookedLayerNorm(cfg.d_model, cfg.ln_eps)
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(cfg.d_model, cfg.d_model)))
        self.ln2 = HookedLayerNorm(cfg.d_model, cfg.ln_eps)
        self.attn = MSSA(cfg)
        self.attn._result_contribution_scale = -1.0
        self.add_points("hook_resid_pre", "hook_resid_mid", "hook_attn_out", "hook_resid_post")

    def forward(self, x: Stream) -> Stream:
        """Returns the tokens after the layer: dictionary first, then attention is subtracted."""
        mid: Tensor = self.hook_resid_mid(self.ln1(self.hook_resid_pre(x)) @ self.D.T)
        out = -self.attn.of_stream(mid, self.ln2, None)
        return self.hook_resid_post(mid + self.hook_attn_out(out))


class HookedCrateMAE(ImageMixin, HookedModel):
    """CRATE-MAE: the encoder is `blocks`, the decoder `decoder_blocks`.

    `Z^0 = [CLS; kept patches, mask tokens elsewhere] + E_pos`, then CRATE's layers, `latent =
    LN(Z^L)`; the decoder maps the latent of all positions to pixels. Code: Ma-Lab-Berkeley/CRATE
    `model/crate_ae/crate_ae.py`. As in that code and unlike the paper, mask tokens enter the
    encoder. The encoder's position embeddings are the table that the code calls
    `decoder_pos_embed`; for images of another size this table is interpolated bicubically. Hook
    points: hooks/README.md; `cache.decoder` is the decoder's cache.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg = own_config(cfg, "HookedCrateMAE", ("mae",))
        self.decoder_cfg = replace(
            cfg, n_heads=cfg.decoder_n_heads, d_head=cfg.d_model // cfg.decoder_n_heads,
            n_layers=cfg.decoder_n_layers, output_matrix=None,
        )  # fmt: skip
        self.embed = ConvPatchEmbed(cfg)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, cfg.d_model))
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, cfg.d_model))
        self.pos_embed = nn.Parameter(sine_positions(cfg))
        self.hook_mask = HookPoint()
        self.hook_embed, self.hook_pos_embed = HookPoint(), HookPoint()
        self.blocks = nn.ModuleList(CrateBlock(cfg) for _ in range(cfg.n_layers))
        self.ln_final = HookedLayerNorm(cfg.d_model, cfg.ln_final_eps)
        layers = (CrateDecoderBlock(self.decoder_cfg) for _ in range(cfg.decoder_n_layers))
        self.decoder_blocks = nn.ModuleList(layers)
        self.decoder_norm = HookedLayerNorm(cfg.d_model, cfg.ln_final_eps)
        self.decoder_pred = nn.Linear(cfg.d_model, cfg.patch_values)
        self.hook_pred = HookPoint()
        self.pos_embed.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.embed.conv.weight.data.flatten(1))
        self._follow()
        self.setup()

    def forward(
        self,
        images: Tensor,
        noise: Tensor | None = None,
        mask_ratio: int | float = 0.75,
        *,
        stop_at_layer: int | None = None,
        start_at_layer: int | None = None,
        check: bool = False,
    ) -> Any:
        """Returns a `Reconstruction` of preprocessed float images.

        images: `[batch, channels, height, width]`. The int(patches * (1 - mask_ratio)) patches with
        the lowest `noise` `[batch, patch]` are kept; if `noise` is None, it is drawn from torch's
        global generator. mask_ratio=0 keeps all patches, like the official `prepare_tokens`.
        `stop_at_layer=l` returns Z^l of the encoder `[batch, pos, d_model]`. `check` looks for NaN
        and Inf in the images, as in HookedCrate. Raises ValueError for bad images, noise of a wrong
        shape or with NaN or Inf, and a ratio outside [0, 1).
        """
        self.watch_hooks()
        if start_at_layer is not None:
            raise ValueError("the loss needs images, so edit hook_resid_pre, not start_at_layer.")
        images = self._check_images(images)
        if check:
            check_finite(images)
        _, stop = layer_range(self.cfg.n_layers, None, stop_at_layer)
        patches = self.embed(images)
        batch, count, _ = patches.shape
        mask = self.hook_mask(random_mask(images, count, noise, mask_ratio))
        patches = torch.where(mask.bool().unsqueeze(-1), self.mask_token.to(patches.dtype), patches)
        tokens = self.hook_embed(cat_tokens(self.cls_token.expand(batch, -1, -1), patches))
        z = self._with_positions(tokens, images)
        for block in self.blocks[:stop]:
            z = block(z)
        if stop is not None:
            return z
        x = latent = self.ln_final(z)
        for block in self.decoder_blocks:
            x = block(x)
        pred = self.hook_pred(self.decoder_pred(self.decoder_norm(x))[:, 1:])
        return Reconstruction(pred, mask, self.loss(images, pred, mask), latent)

    def loss(
        self,
        images: Pixels,
        pred: Float[Tensor, "batch patch patch_values"],
        mask: Float[Tensor, "batch patch"],
    ) -> Float[Tensor, ""]:
        """Returns the mean squared error over removed patches.

        With `cfg.norm_pix_loss` the target patches have mean 0 and unbiased variance 1. If no patch
        was removed, the result is the mean over all patches; the official code divides zero by zero
        there.
        """
        target = self.patchify(images)
        if self.cfg.norm_pix_loss:
            variance, mean = torch.var_mean(target, dim=-1, keepdim=True)
            target = (target - mean) / (variance + 1e-6).sqrt()
        errors = (pred - target).square().mean(dim=-1)  # [batch, patch]
        removed = mask.sum()
        some = removed > 0  # no `if` below, because torch.export cannot read this value
        mean = (errors * mask).sum() / torch.where(some, removed, 1)
        return torch.where(some, mean, errors.mean())

    def patchify(self, images: Pixels) -> Float[Tensor, "batch patch patch_values"]:
        """Returns images cut into patches, each flattened as (row, column, channel)."""
        height, width = self.cfg.patch_size
        return rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=height, q=width)

    def unpatchify(
        self, pred: Float[Tensor, "batch patch patch_values"], size: tuple[int, int] | None = None
    ) -> Pixels:
        """Returns a `pred` as pictures of `size` (default cfg.image_size).

        This is the inverse of `patchify`.
        """
        (height, width), (p, q) = size or self.cfg.image_size, self.cfg.patch_size
        pattern = "b (h w) (p q c) -> b c (h p) (w q)"
        return rearrange(pred, pattern, h=height // p, w=width // q, p=p, q=q)

    any_size = True

    @property
    def full_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of a forward that sees every patch."""
        return {"mask_ratio": 0.0}

    def runtime_configs(self) -> list[CrateConfig]:
        """Returns the configs that follow this model's switches, device and dtype."""
        return [self.cfg, self.decoder_cfg]

    @property
    def W_U(self) -> Float[Tensor, "d_model patch_values"]:
        """The map from decoded, normalised tokens to pixels."""
        return self.decoder_pred.weight.T

    @property
    def b_U(self) -> Float[Tensor, "patch_values"]:
        """The bias of the map to pixels."""
        return self.decoder_pred.bias

    def decoder_view(self, cache: CrateCache) -> CrateCache:
        """Returns the decoder's part of a cache, without "decoder_" in the names of points.

        `cache.decoder` calls this.
        """
        names = [name for name in cache if name.startswith("decoder_blocks.")]
        kept = {name.removeprefix("decoder_"): cache[name] for name in names}
        view = DecoderView(self, self.decoder_cfg, self.decoder_blocks, self.decoder_norm)
        return CrateCache(kept, view, cache.has_batch_dim, mark=cache.mark)


def random_mask(
    images: Tensor, n_patches: int, noise: Tensor | None, mask_ratio: int | float
) -> Float[Tensor, "batch patch"]:
    """Returns a mask: 0 for the int(n_patches (1 - mask_ratio)) patches of lowest noise, else 1."""
    if not isinstance(mask_ratio, (int, float)) or not 0 <= mask_ratio < 1:
        raise ValueError(f"mask_ratio={mask_ratio!r}: give a number of at least 0 and below 1.")
    shape = (images.shape[0], n_patches)
    if noise is None:
        noise = torch.rand(shape, device=images.device)
    right = isinstance(noise, Tensor) and noise.shape == shape
    if not right or (readable(noise) and not bool(noise.isfinite().all())):
        wanted = f"finite numbers of shape {list(shape)} (batch, patch), or mask_ratio"
        raise ValueError(f"noise={checks.quote(noise)}: give {wanted}.")
    ranks: Int[Tensor, "batch patch"] = noise.argsort(dim=1).argsort(dim=1)
    return (ranks >= int(n_patches * (1 - mask_ratio))).to(images.dtype)


def sine_positions(cfg: CrateConfig) -> Float[Tensor, "1 pos d_model"]:
    """Returns MAE's fixed table: sines and cosines of column and row, zeros for CLS.

    All entries are zero if d_model is not a multiple of 4; for such widths the official code makes
    no table. The first half of the width encodes the column, as `pos_embed.py` of the code does.
    """
    quarter = cfg.d_model // 4
    table = torch.zeros(1, cfg.n_tokens, cfg.d_model)
    if cfg.d_model % 4:
        return table
    omega = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = torch.meshgrid(*map(torch.arange, cfg.grid), indexing="ij")
    halves = [position.flatten()[:, None].double() * omega for position in (columns, rows)]
    parts = [part for half in halves for part in (half.sin(), half.cos())]
    table[0, 1:] = torch.cat(parts, dim=1)
    return table
