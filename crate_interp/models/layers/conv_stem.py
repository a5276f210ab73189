"""The convolutional stem of ToST and CBT: 3 x 3 convolutions of stride 2 with batch norm."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.config import CrateConfig

_EPS = 1e-5


class FrozenBatchNorm(nn.Module):
    """Batch norm with the statistics of the training, which stay as they are.

    `(x - running_mean) / sqrt(running_var + 1e-5) * weight + bias` for each channel. In train mode
    too the statistics are neither computed from the batch nor updated; `train()` says so once.
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
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=_EPS
        )


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

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch patch d_model"]:
        """Returns the patches of images as tokens."""
        x = images
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(F.gelu(x) if place else x))
        return x.flatten(2).transpose(1, 2)  # [batch, patch, d_model]

    def __getattr__(self, name: str) -> Any:
        if name == "W_E":  # an error in a property would be hidden by torch
            raise AttributeError(
                "a convolutional stem has no W_E: its convolutions overlap, with GELU between "
                "them. See model.embed.convs."
            )
        return super().__getattr__(name)

    def train(self, mode: bool = True) -> "ConvStem":
        """Sets the mode; warns that the statistics of batch norm stay as they are."""
        if mode and not self.training:
            warnings.warn(
                "the statistics of batch norm in the convolutional stem stay as they are while the "
                "model trains.",
                stacklevel=2,
            )
        return super().train(mode)
