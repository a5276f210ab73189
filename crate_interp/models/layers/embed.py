"""Embeddings of images and tokens, positions for other image sizes, and the class head."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.layers import Patches, Pixels, Stream
from crate_interp.models.layers.norm import is_hooked
from crate_interp.models.runtimes import at_hand, bias_of


class TokenEmbed(nn.Embedding):
    """A table of token embeddings; rows past d_vocab only pad the table."""

    def __init__(self, rows: int, cfg: CrateConfig) -> None:
        super().__init__(rows, cfg.d_model)
        self.d_vocab = cfg.d_vocab

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding of each token."""
        table = at_hand(self)
        return table if len(table) == self.d_vocab else table[: self.d_vocab]


class ClassHead(nn.Linear):
    """A linear map to classes, with TransformerLens' names for its weights."""

    @property
    def W_U(self) -> Float[Tensor, "width n_classes"]:
        """The map from the pooled token, or from the features made from it, to the classes."""
        return at_hand(self).T

    @property
    def b_U(self) -> Float[Tensor, "n_classes"]:
        """The bias; zeros if there is none."""
        return bias_of(self)


class CratePatchEmbed(nn.Module):
    """`LN(LN(patch) W^T + b)` on patches flattened as (row, column, channel).

    Code: CRATE `model/crate.py`.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.patch_size = cfg.patch_size
        values = cfg.patch_size[0] * cfg.patch_size[1] * cfg.channels
        self.norm_patch = nn.LayerNorm(values)
        self.proj = nn.Linear(values, cfg.d_model)
        self.norm_token = nn.LayerNorm(cfg.d_model)

    def forward(self, images: Pixels) -> Patches:
        """Returns the patches of images as tokens; the linear map is between two norms."""
        height, width = self.patch_size
        pattern = "batch channels (h p1) (w p2) -> batch (h w) (p1 p2 channels)"
        patches = rearrange(images, pattern, p1=height, p2=width)
        return self.norm_token(self.proj(self.norm_patch(patches)))

    @property
    def W_E(self) -> Float[Tensor, "patch_values d_model"]:
        """The embedding, `[patch_values, d_model]`."""
        return at_hand(self.proj).T


class FourierPositions(nn.Module):
    """Position embeddings that are computed from waves, for a grid of any size.

    Row y (from 1) of h rows is `2 pi y / (h + 1e-6)`, columns alike; 32 waves of each,
    `sin(y / 10000^(2 i / 32))` and the cosine, y before x; then a linear map to d_model. Code: ToST
    `tost_vision/tost.py` `PositionalEncodingFourier`.
    """

    _WAVES, _BASE = 32, 10000.0

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * self._WAVES, cfg.d_model)

    def forward(self, grid: tuple[int, int]) -> Float[Tensor, "1 patch d_model"]:
        """Returns the embedding of each place of a grid (h, w), row by row."""
        weight = self.proj.weight
        y, x = (self._waves(side) for side in grid)
        table = torch.cat(torch.broadcast_tensors(y[:, None], x[None]), dim=-1)
        return self.proj(table.flatten(0, 1).to(weight.dtype))[None]  # [1, h * w, d_model]

    def _waves(self, side: int) -> Float[Tensor, "side waves"]:
        """Returns the waves of each row, or of each column, at least in float32."""
        weight = self.proj.weight
        kind = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        places = torch.arange(1, side + 1, **kind) / (side + 1e-6) * (2 * math.pi)
        number = torch.arange(self._WAVES, **kind)
        turned = places[:, None] / self._BASE ** (2 * (number // 2) / self._WAVES)
        return torch.stack([turned[:, 0::2].sin(), turned[:, 1::2].cos()], dim=-1).flatten(1)


class ConvPatchEmbed(nn.Module):
    """A strided convolution without normalisation.

    Code: CRATE-alpha `torch_inference/model/crate_alpha.py`.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        size, bias = cfg.patch_size, cfg.conv_bias
        self.conv = nn.Conv2d(cfg.channels, cfg.d_model, size, stride=size, bias=bias)

    def forward(self, images: Pixels) -> Patches:
        """Returns the patches of images as tokens."""
        return self.conv(images).flatten(2).transpose(1, 2)  # [batch, patch, d_model]

    @property
    def W_E(self) -> Float[Tensor, "patch_values d_model"]:
        """The embedding, `[patch_values, d_model]`."""
        return at_hand(self.conv).flatten(1).T  # patch values in the order (channel, row, column)


def interpolate_positions(
    table: Float[Tensor, "1 pos d_model"], grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Tensor, "1 new_pos d_model"]:
    """Returns position embeddings of a `grid` (h, w), resampled bicubically to `new_grid`.

    The entry of CLS is unchanged. The rule is DINO's, which CRATE's own scripts follow: the scale
    for the resampler is (new_grid + 0.1) / grid, not new_grid / grid. The added 0.1 prevents
    rounding down to one patch too few. It shifts every sampling point a little, so the result
    differs from a plain resize to `new_grid` (by a few per cent of the table's spread for small
    grids). If `grid` is already `new_grid`, the table is returned unchanged.
    """
    if grid == new_grid:
        return table
    cls, patches = table[:, :1], table[:, 1:]
    image = rearrange(patches, "one (h w) d_model -> one d_model h w", h=grid[0])
    scale = ((new_grid[0] + 0.1) / grid[0], (new_grid[1] + 0.1) / grid[1])
    image = F.interpolate(image, scale_factor=scale, mode="bicubic")
    return cat_tokens(cls, rearrange(image, "one d_model h w -> one (h w) d_model"))


def hooked_positions(
    point: HookPoint, table: Float[Tensor, "*one pos d_model"], batch: int
) -> Float[Tensor, "..."]:
    """Returns the position embeddings after the point's hooks.

    If the point is hooked, its hooks see one copy per sample, `[batch, pos, d_model]`, so that an
    edit reaches neither the weights nor another sample.
    """
    return point(table.expand(batch, -1, -1).clone()) if is_hooked(point) else table


def cat_tokens(cls: Float[Tensor, "batch one d_model"], patches: Patches) -> Stream:
    """Returns the CLS token, then the patches."""
    return torch.cat([cls, patches], dim=1)


_EPS = 1e-5


class FrozenBatchNorm(nn.Module):
    """Batch norm with the statistics of the training, which stay as they are.

    `(x - running_mean) / sqrt(running_var + 1e-5) * weight + bias` for each channel. In train mode
    too the statistics are neither computed from the batch nor updated.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(
        self, x: Float[Tensor, "batch width height across"]
    ) -> Float[Tensor, "batch width height across"]:
        """Returns the channels centred and scaled by the stored statistics."""
        mean, variance = self.running_mean, self.running_var
        return F.batch_norm(x, mean, variance, self.weight, self.bias, eps=_EPS)


class ConvStem(nn.Module):
    """Patches as tokens, by convolutions that halve the image, with GELU between them.

    A patch of side 2^n has n convolutions 3 x 3 of stride 2 without bias, each with batch norm; the
    i-th of them, from the last, is d_model / 2^i wide. Neighbouring patches overlap in what they
    see. Code: ToST `tost_vision/tost.py` and CBSA `models.py` `ConvPatchEmbed`.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        count = cfg.patch_size[0].bit_length() - 1
        widths = [cfg.channels, *(cfg.d_model >> (count - 1 - i) for i in range(count))]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            for before, after in zip(widths, widths[1:], strict=False)
        )
        self.norms = nn.ModuleList(FrozenBatchNorm(width) for width in widths[1:])

    def forward(self, images: Pixels) -> Patches:
        """Returns the patches of images as tokens."""
        x = images
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(F.gelu(x) if place else x))
        return x.flatten(2).transpose(1, 2)  # [batch, patch, d_model]
