"""What models of images share: checks of what they are given, and preprocessing."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.config import CrateConfig
from crate_interp.models.preprocess import preprocess


class ImageMixin:
    """`preprocess`, and what is said of images that the model does not take."""

    cfg: CrateConfig

    def _allows_other_sizes(self) -> bool:
        return self.cfg.interpolate_pos

    def _check_images(self, images: Any) -> Float[Tensor, "batch channels height width"]:
        if not isinstance(images, Tensor):
            raise ValueError(
                f"the model takes a tensor, got {type(images).__name__}: use model(model.preprocess(images))."
            )
        cfg, shape = self.cfg, tuple(images.shape)
        if not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}, the model takes floats: use model(model.preprocess(images)).")
        if images.ndim != 4 or shape[1] != cfg.channels:
            raise ValueError(
                f"images have shape {shape}, the model takes [batch, {cfg.channels}, height, width]"
                f" ({cfg.channels} channel{'s' if cfg.channels > 1 else ''})."
            )
        if shape[0] == 0:
            raise ValueError(f"images have shape {shape}: there is no image in the batch.")
        size = shape[2:]
        if size == cfg.image_size:
            return self._check_dtype(images)
        if not self._allows_other_sizes():
            raise ValueError(
                f"images are {size[0]} x {size[1]}, the model was built for {cfg.image_size[0]} x {cfg.image_size[1]}: "
                "resize them (model.preprocess), or load the model with interpolate_pos=True."
            )
        if any(side % patch or side < patch for side, patch in zip(size, cfg.patch_size, strict=True)):
            raise ValueError(
                f"images are {size[0]} x {size[1]}: both sides must be multiples of the patch {cfg.patch_size}."
            )
        return self._check_dtype(images)

    def _check_dtype(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if x.dtype != self.cfg.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"the input is {x.dtype}, the model {self.cfg.dtype}: use x.to(model.cfg.dtype).")
        return x

    def preprocess(self, images: Any) -> Float[Tensor, "batch channels height width"]:
        """What the model was trained on, from PIL images, paths or integer arrays (crate_interp/models/preprocess.py)."""
        return preprocess(self.cfg, images).to(device=self.cfg.device, dtype=self.cfg.dtype)
