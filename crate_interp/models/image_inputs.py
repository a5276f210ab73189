"""Features that image models share: checks of their input, preprocessing and padding."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.core import checks, pictures
from crate_interp.models.layers import Pixels, Stream, embed
from crate_interp.models.preprocess import check_preprocessed, preprocess, preprocess_masks
from crate_interp.models.runtimes import readable

Images = pictures.Picture | Sequence[pictures.Picture] | np.ndarray | Tensor


class ImageMixin:
    """Checks of images, `preprocess` and `pad`."""

    cfg: CrateConfig
    pos_embed: Any  # a table, or FourierPositions
    hook_pos_embed: HookPoint
    any_size = False  # whether images may be of any size without interpolate_pos

    def _check_images(self, images: Tensor) -> Pixels:
        if not isinstance(images, Tensor) or not images.is_floating_point():
            kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"images are {kind}: make floats of them, model.preprocess(images).")
        cfg, shape = self.cfg, tuple(images.shape)
        if images.ndim != 4 or shape[1] != cfg.channels or shape[0] == 0:
            wanted = f"[batch, {cfg.channels}, height, width]"
            raise ValueError(f"images have shape {shape}: give {wanted} with at least one image.")
        # on an accelerator the forward would wait for the answer
        if images.device.type == "cpu" and readable(images):
            check_preprocessed(cfg, images)
        size, patch = shape[2:], cfg.patch_size
        if size != cfg.image_size and not (self.any_size or cfg.interpolate_pos or cfg.fourier):
            raise ValueError(
                f"images are {size}, but the model was built for {cfg.image_size}: resize them "
                f"with model.preprocess, or load it with image_size={size} if it was trained on "
                "such images, or with interpolate_pos=True to resample its positions."
            )
        if any(side % step or side < step for side, step in zip(size, patch, strict=True)):
            raise ValueError(
                f"images are {size}: both sides must be multiples of the patch {patch}. Pad them: "
                "model(model.pad(images))."
            )
        return self._check_dtype(images)

    def _check_dtype(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if x.dtype != self.cfg.dtype and not torch.is_autocast_enabled(x.device.type):
            kinds = f"the input is {x.dtype}, but the model is {self.cfg.dtype}"
            raise ValueError(f"{kinds}: use x.to(model.cfg.dtype).")
        return x

    def _with_positions(self, tokens: Stream, images: Float[Tensor, "batch c h w"]) -> Stream:
        """Returns tokens plus their position embeddings, resampled for images of another size."""
        height, width = self.cfg.patch_size
        grid = (images.shape[2] // height, images.shape[3] // width)
        if self.cfg.fourier:
            table = self.pos_embed(grid)
        else:
            table = embed.interpolate_positions(self.pos_embed, self.cfg.grid, grid)
        return tokens + embed.hooked_positions(self.hook_pos_embed, table, tokens.shape[0])

    def preprocess(self, images: Images) -> Pixels:
        """Turns PIL images, paths or integer arrays into the model's input.

        The preprocessing is the same as in training: crate_interp/models/preprocess.py.
        """
        return preprocess(self.cfg, images).to(device=self.cfg.device, dtype=self.cfg.dtype)

    def preprocess_masks(self, masks: Images) -> UInt8[Tensor, "batch height width"]:
        """Turns masks into class maps on the CPU, resized and cropped like their pictures.

        See crate_interp/models/preprocess.py.
        """
        return preprocess_masks(self.cfg, masks)

    def resized(self, size: int | Sequence[int]) -> "ImageMixin":
        """Returns a copy of this model for images of another size, given as side or (h, w).

        Stored positions are resampled bicubically, as `interpolate_positions` does; ToST's
        positions are computed for any grid. `preprocess` of the copy scales pictures to this size.
        Raises ValueError for a size that is not a multiple of the patch, for a size that is not a
        square in CBT, and for a network behind a bridge.
        """
        model: Any = self
        cfg, (height, width) = model.cfg, checks.size("size", size)
        if cfg.facts.get("bridged"):
            raise ValueError("size: load a network behind a bridge with the size that you want.")
        _ = cfg.known_grid  # raises if it is a guess
        if cfg.image_size == (height, width):
            return copy.deepcopy(self)
        ratio, fixed = height / cfg.image_size[0], (height, width)
        new = dataclasses.replace(
            cfg,
            image_size=fixed,
            resize=round(cfg.resize * ratio) if isinstance(cfg.resize, int) else fixed,
            crop=None if cfg.crop is None else fixed,
            **({"n_ctx": None} if "n_ctx" in cfg.derived else {}),
        )
        weights = model.state_dict()
        if "pos_embed" in weights:
            table = embed.interpolate_positions(weights["pos_embed"], cfg.grid, new.grid)
            weights["pos_embed"] = table
        with torch.random.fork_rng(devices=[]):
            other = type(model)(new)
        other = other.to(device=cfg.device, dtype=cfg.dtype)
        other.load_state_dict(weights)
        return other.train(model.training)

    def pad(
        self, images: Shaped[Tensor, "... height width"]
    ) -> Shaped[Tensor, "... padded_height padded_width"]:
        """Returns images or masks, padded so that their sides are multiples of the patch.

        The last row and column are repeated below and at the right. Any dtype is accepted, and
        images that already fit are returned unchanged. The model's maps mean nothing at the added
        pixels: cut the maps back to the old height and width.
        """
        sides = images.shape[-2:]
        rows, columns = (
            torch.arange(side + -side % step, device=images.device).clamp(max=side - 1)
            for side, step in zip(sides, self.cfg.patch_size, strict=True)
        )
        if (len(rows), len(columns)) == tuple(sides):
            return images
        return images[..., rows, :][..., columns]
