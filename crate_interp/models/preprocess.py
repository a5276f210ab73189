"""Turns pictures and masks into a vision model's input (with Pillow only), and input into pictures.

The steps are resize, centre crop, scale to [0, 1], normalise. Masks are resized and cropped like
their pictures, without mixing the classes of neighbouring pixels.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from PIL import Image
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.core import checks
from crate_interp.core.pictures import SIXTEEN_BITS, Picture, Undecodable, loaded
from crate_interp.measures.checks import all_finite
from crate_interp.models.layers import Pixels, Stream, embed
from crate_interp.models.runtimes import readable

# one picture or several
OneOrMore = Picture | Sequence[Picture]
Pictures = OneOrMore | np.ndarray | Tensor

_MODES = {1: "L", 3: "RGB"}
_WHITE = {8: 255, 16: 65_535}  # bits -> the value of white


def preprocess(cfg: CrateConfig, images: Pictures) -> Float[Tensor, "batch channels height width"]:
    """Returns float images in the form that the model takes: `(x / 255 - mean) / std`.

    images: a PIL image, a path, a sequence of either, or a uint8 array or tensor `[batch, channels,
    height, width]`. A float tensor counts as preprocessed and is returned unchanged. Pictures are
    turned upright by their EXIF orientation. Then they are resized and cropped in the centre:
    `cfg.resize` (the shorter side, or (h, w)), `cfg.interpolation`, `cfg.crop`; None leaves the
    step out. Colour is converted to the model's channels. With `cfg.transparency` "drop",
    transparency is ignored, as in PIL's convert("RGB"); with "white", pictures are first laid on
    white. With `cfg.bits` 16, 16-bit grey pictures are divided by 65,535 instead of 255, and keep
    their 16 bits when they are resized.

    Raises ValueError for unreadable files, wrong dtypes or shapes, no images, a crop larger than
    the picture, pictures whose size is not the model's after resize and crop, 16-bit pictures if
    `cfg.bits` is 8, and a model without mean and std.
    """
    if isinstance(images, (torch.Tensor, np.ndarray)):
        array = torch.as_tensor(images)
        if array.is_floating_point():
            if not all_finite(array):
                raise ValueError("images hold NaN or Inf: give finite numbers.")
            if array.ndim != 4:
                wanted = f"[batch, {cfg.channels}, height, width]"
                raise ValueError(f"images have shape {tuple(array.shape)}: give {wanted}.")
            check_preprocessed(cfg, array)
            return array
        return _normalise(cfg, _fit_array(cfg, array))
    pixels = [_pixels(cfg, _fit(cfg, *loaded(image))) for image in _sequence(images)]
    if any(one.is_floating_point() for one in pixels):  # 16-bit pictures, maybe among 8-bit ones
        pixels = [_scaled(one) for one in pixels]
    return _normalise(cfg, _stack(pixels))


def check_preprocessed(cfg: CrateConfig, images: Float[Tensor, "batch c h w"]) -> None:
    """Raises ValueError for float images that were not preprocessed.

    Preprocessing gives values between -most and most, where most is the largest of
    `|0 - mean| / std` and `|1 - mean| / std`. Pixels of 0 to 255, normalised or not, never lie
    below -most, but go far above most. So an image is refused if its least value is at least
    -most, and its largest is above 20 and above 8 most. Noise and perturbed images pass.
    """
    if not images.numel():
        return
    most = 0.0
    if cfg.mean is not None and cfg.std is not None:
        most = max(max(mean, 1 - mean) / std for mean, std in zip(cfg.mean, cfg.std, strict=True))
    flat = images.detach().flatten(1)
    largest = flat.amax(1)
    raw = (largest > max(20.0, 8 * most)) & (flat.amin(1) >= -most) & largest.isfinite()
    if raw.any():
        raise ValueError(
            f"images are floats up to {largest[raw].max().item():.0f}, and so not preprocessed: "
            "give model.preprocess(images.to(torch.uint8)), or (images / 255 - mean) / std."
        )


def _sequence(images: OneOrMore, kind: str = "image") -> list[Picture]:
    """Returns one or several pictures as a list; raises ValueError for an empty sequence."""
    several: Any = images
    listed = isinstance(images, Sequence) and not isinstance(images, str)
    pictures: list[Picture] = list(several) if listed else [several]
    if not pictures:
        raise ValueError(f"there is no {kind} to preprocess: the sequence is empty.")
    return pictures


def _fit(cfg: CrateConfig, image: Image.Image, what: str = "an image") -> Image.Image:
    """Returns the picture in the model's number of channels, resized and cropped."""
    if cfg.channels not in _MODES:
        raise ValueError(f"pictures have 1 or 3 channels, not {cfg.channels}: give floats.")
    convert = _sixteen_bits if image.mode in SIXTEEN_BITS else _to_mode
    resample = Image.Resampling[cfg.interpolation.upper()]
    return _resize_and_crop(cfg, convert(cfg, image, what), resample, what)


def _resize_and_crop(
    cfg: CrateConfig, image: Image.Image, resample: Image.Resampling, what: str
) -> Image.Image:
    """Returns the picture at the size that the model takes.

    Raises ValueError, naming the picture `what`, if the crop is larger than the picture, or the
    final size is not the model's.
    """

    if isinstance(cfg.resize, tuple):
        image = image.resize((cfg.resize[1], cfg.resize[0]), resample)
    elif cfg.resize is not None:  # the shorter side; the longer is rounded as torchvision does
        longer = int(cfg.resize * max(image.size) / min(image.size))
        tall = image.width <= image.height
        image = image.resize((cfg.resize, longer) if tall else (longer, cfg.resize), resample)
    if cfg.crop is not None:
        height, width = cfg.crop if isinstance(cfg.crop, tuple) else (cfg.crop, cfg.crop)
        if width > image.width or height > image.height:
            now = f"{image.height} x {image.width} after resize={cfg.resize}"
            raise ValueError(f"crop={cfg.crop} is larger than {what}, which is {now}.")
        # half pixels are rounded to even numbers, as torchvision does
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        image = image.crop((left, top, left + width, top + height))
    size = (image.height, image.width)
    if size != cfg.image_size and not cfg.interpolate_pos:
        raise ValueError(
            f"{what} becomes {size[0]} x {size[1]}, but the model takes {cfg.image_size[0]} x "
            f"{cfg.image_size[1]}: write ci.load(..., resize={min(cfg.image_size)}, "
            f"crop={cfg.image_size}), or resize the pictures."
        )
    return image


def _to_mode(cfg: CrateConfig, image: Image.Image, what: str) -> Image.Image:
    """Returns an 8-bit picture in the model's number of channels."""
    if image.mode == "F":  # such files do not say which value is white
        raise Undecodable(f"{what} has mode 'F' (more than 8 bits): save it in mode L or RGB.")
    if cfg.transparency == "white" and image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    elif "transparency" in image.info:  # Pillow would warn that it is lost
        image = image.copy()  # the user's picture keeps its transparency
        del image.info["transparency"]
    return image.convert(_MODES[cfg.channels])


def _sixteen_bits(cfg: CrateConfig, image: Image.Image, what: str) -> Image.Image:
    """Returns a 16-bit grey picture as floats from 0 to 65,535 (mode F), which Pillow can resize.

    Raises Undecodable if the model takes 8 bits only, or for values that 16 bits cannot hold.
    """
    if cfg.bits == 8:
        raise Undecodable(
            f"{what} has mode {image.mode!r} (more than 8 bits): to divide its values by 65,535, "
            "write ci.load(..., bits=16)."
        )
    values = np.asarray(image).astype(np.float32)
    if values.min(initial=0) < 0 or values.max(initial=0) > _WHITE[16]:
        raise Undecodable(f"{what} has mode {image.mode!r} and values that 16 bits cannot hold.")
    clear = image.info.get("transparency")
    if cfg.transparency == "white" and isinstance(clear, int):
        values[values == clear] = _WHITE[16]
    return Image.fromarray(values)


def _pixels(cfg: CrateConfig, image: Image.Image) -> Shaped[Tensor, "channels height width"]:
    """Returns the bytes of an 8-bit picture, or the floats of a 16-bit one in [0, 1]."""
    pixels = torch.from_numpy(np.array(image))  # [h, w] or [h, w, channels]
    if image.mode == "F":
        # bicubic sampling overshoots; Pillow limits bytes to their range, but not floats
        return (pixels.clamp(0, _WHITE[16]) / _WHITE[16]).expand(cfg.channels, -1, -1)
    return pixels.unsqueeze(0) if cfg.channels == 1 else pixels.permute(2, 0, 1)


def _scaled(pixels: Tensor) -> Float[Tensor, "..."]:
    """Returns bytes as floats in [0, 1]; floats are unchanged."""
    return pixels if pixels.is_floating_point() else pixels.to(torch.float32) / _WHITE[8]


def _fit_array(cfg: CrateConfig, array: Tensor) -> Tensor:
    """Returns uint8 `[batch, channels, height, width]` of the model's size.

    Only arrays that must be resized go through Pillow.
    """
    shape = tuple(array.shape)
    if array.dtype != torch.uint8:
        raise ValueError(f"images are {array.dtype}: give uint8 (0 to 255) or preprocessed floats.")
    if shape[-1] == cfg.channels and shape[-3:-2] != (cfg.channels,) and array.ndim in (3, 4):
        # a picture as arrays of pictures come: [height, width, channels], or several of them
        array = array.reshape(-1, *shape[-3:]).permute(0, 3, 1, 2)
        shape = tuple(array.shape)
    if array.ndim != 4 or shape[1] != cfg.channels:
        ways = f"[batch, {cfg.channels}, height, width] or uint8 [height, width, {cfg.channels}]"
        raise ValueError(f"images have shape {shape}: give {ways}.")
    if shape[2:] == cfg.image_size and cfg.resize in (None, min(cfg.image_size), cfg.image_size):
        return array
    pictures = array.permute(0, 2, 3, 1).cpu().numpy()  # [batch, h, w, channels]
    squeezed = pictures[..., 0] if cfg.channels == 1 else pictures
    return _stack([_pixels(cfg, _fit(cfg, Image.fromarray(picture))) for picture in squeezed])


def _stack(images: list[Tensor], kind: str = "image") -> Tensor:
    """Returns pictures as `[batch, ...]`.

    Raises ValueError if their heights and widths, the last two axes, differ.
    """
    sizes = {(image.shape[-2], image.shape[-1]) for image in images}
    if len(sizes) > 1:
        shown = ", ".join(f"{height} x {width}" for height, width in sorted(sizes)[:4])
        raise ValueError(f"the {kind}s differ in size ({shown}): give crop=..., or resize=(h, w).")
    return torch.stack(images)


def _normalise(cfg: CrateConfig, array: Tensor) -> Float[Tensor, "batch channels height width"]:
    if cfg.mean is None or cfg.std is None:
        published = " (published CRATE: mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])"
        raise ValueError(
            "the model does not say how its pictures were normalised. Load it with the mean and "
            f"std of its training, {cfg.channels} numbers each{published * (cfg.channels == 3)}, "
            "or give float images that are already normalised."
        )
    images = _scaled(array)
    mean, std = torch.tensor(cfg.mean), torch.tensor(cfg.std)
    return (images - mean.view(-1, 1, 1).to(images.device)) / std.view(-1, 1, 1).to(images.device)


def preprocess_masks(cfg: CrateConfig, masks: Pictures) -> UInt8[Tensor, "batch height width"]:
    """Returns class maps from masks, at the model's size.

    masks: a PIL image, a path, a sequence of either, or a uint8 or bool array or tensor `[batch,
    height, width]`. They are resized and cropped as by `preprocess`, with nearest-neighbour
    sampling. Their values do not change: they stay grey levels in 8-bit grey ("L"), palette indices
    ("P"), or 0 and 1 in black and white ("1").

    Raises ValueError for wrong modes, dtypes and shapes, unreadable files, no masks, and sizes that
    `preprocess` refuses.
    """
    if isinstance(masks, (torch.Tensor, np.ndarray)):
        array = torch.as_tensor(masks)
        if array.dtype not in (torch.uint8, torch.bool) or array.ndim != 3:
            kind = f"{array.dtype} of shape {list(array.shape)}"
            raise ValueError(f"masks are {kind}: give uint8 or bool [batch, height, width].")
        masks = [Image.fromarray(mask) for mask in array.to(torch.uint8).cpu().numpy()]
    pictures = _sequence(masks, "mask")
    return _stack([_fit_mask(cfg, *loaded(mask, "mask")) for mask in pictures], "mask")


def _fit_mask(cfg: CrateConfig, mask: Image.Image, what: str) -> UInt8[Tensor, "height width"]:
    if mask.mode not in ("1", "L", "P"):
        raise ValueError(f"{what} has mode {mask.mode!r}: give 8-bit grey (L), P, or 1.")
    # this keeps palette indices; convert("L") would turn them into the grey of their colours
    numbers = Image.fromarray(np.array(mask).astype(np.uint8))
    fitted = _resize_and_crop(cfg, numbers, Image.Resampling.NEAREST, what)
    return torch.from_numpy(np.array(fitted))


def displayable(image: Shaped[Tensor, "channels height width"], cfg: CrateConfig) -> np.ndarray:
    """Returns the image as `[h, w]` or `[h, w, 3]` in 0..1.

    Its preprocessing is undone if the config has mean and std; otherwise the contrast is stretched.
    """
    pixels = image.detach().float().cpu()
    if cfg.mean is not None and cfg.std is not None:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (cfg.mean, cfg.std))
        pixels = pixels * std + mean
        low, high = 0.0, 1.0
    else:
        low, high = pixels.min().item(), pixels.max().item()
    pixels = ((pixels - low) / max(high - low, 1e-12)).clamp(0, 1)
    return pixels[0].numpy() if len(pixels) != 3 else pixels.permute(1, 2, 0).numpy()


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

    def preprocess(self, images: Pictures) -> Pixels:
        """Turns PIL images, paths or integer arrays into the model's input.

        The preprocessing is the same as in training: crate_interp/models/preprocess.py.
        """
        return preprocess(self.cfg, images).to(device=self.cfg.device, dtype=self.cfg.dtype)

    def preprocess_masks(self, masks: Pictures) -> UInt8[Tensor, "batch height width"]:
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
