"""A fixed input for every kind of model.

It is small, the same on every machine, and made without random numbers.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from crate_interp.config import CrateConfig
from crate_interp.core.errors import CheckpointError
from crate_interp.models.clip import HookedCrateCLIP
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.embed import cat_tokens
from crate_interp.models.sae import SparseAutoencoder
from crate_interp.models.vision import HookedCrate

Model = TypeVar("Model", HookedModel, SparseAutoencoder)

_TOKENS = 5
_MOST_SCORES = 2**28  # maximum count of numbers in one layer's attention patterns: 1 GiB


def wave(*shape: int, model: nn.Module) -> Tensor:
    """Returns sin(0, 1, 2, ...) in the given shape, with the dtype and device of the model."""
    first = next(model.parameters())
    count = int(torch.tensor(shape).prod())
    return torch.arange(count, dtype=torch.float64).sin().to(first.device, first.dtype).view(shape)


def token_ids(cfg: CrateConfig, count: int, device: torch.device) -> Tensor:
    """Returns token ids that are spread over the whole vocabulary, `[1, count]`."""
    return (torch.arange(count, device=device)[None] * 7919 + 13) % cfg.d_vocab


@torch.no_grad()
def output(model: HookedModel | SparseAutoencoder) -> Tensor:
    """Returns the output of a model for its fixed input, through every layer.

    A vision model sees a few patches.
    """
    if isinstance(model, SparseAutoencoder):
        return model(wave(2, model.cfg.d_in, model=model))
    if isinstance(model, HookedCrateCLIP):
        tokens = token_ids(model.text.cfg, model.cfg.n_ctx, model.cfg.device)
        image, text = output(model.visual), model.encode_text(tokens)
        return torch.cat([image.flatten(), text.flatten()])
    cfg, kind = model.cfg, model.cfg.kind
    if kind == "text":
        whole_text = cfg.family == "clipa-text"
        return model(token_ids(cfg, cfg.n_ctx, cfg.device) if whole_text else full_input(model))
    if kind == "mae":
        height, width = cfg.patch_size
        images = wave(1, cfg.channels, 2 * height, 2 * width, model=model)
        return model(images, noise=wave(1, 4, model=model), mask_ratio=0.5).pred
    return model(tokens_of(model), start_at_layer=0)


def whole_is_small(model: HookedModel) -> bool:
    """Tells whether the attention patterns that `whole` makes fit into any machine's memory."""
    cfg: Any = getattr(model, "visual", model).cfg
    return cfg.kind != "vision" or cfg.n_heads * cfg.n_tokens**2 <= _MOST_SCORES


@torch.no_grad()
def whole(model: HookedModel) -> Tensor:
    """Returns the output of a vision model, or of CLIP's image tower, for one image of full size.

    Unlike `output`, this also runs the part of the model that turns images into tokens. For any
    other model the result is that of `output`.
    """
    part: Any = getattr(model, "visual", model)
    return part(full_input(part)) if part.cfg.kind == "vision" else output(model)


def full_input(model: HookedModel) -> Tensor:
    """Returns one image of full size, or a few token ids, in the form that the model takes."""
    cfg: Any = model.cfg
    if cfg.kind == "vision":
        return wave(1, cfg.channels, *cfg.image_size, model=model)
    return token_ids(cfg, min(_TOKENS, cfg.n_ctx), cfg.device)


def tokens_of(model: HookedModel) -> Tensor:
    """Returns Z^0 of a vision model on the patches of a small image, `[1, pos, d_model]`.

    This is cheap for any image size. There are two patches, or four in a square for CBSA.
    """
    assert isinstance(model, HookedCrate)
    cfg, (height, width) = model.cfg, model.cfg.patch_size
    square = cfg.facts["attention"] == "cbsa"
    grid = (min(2, cfg.grid[0]),) * 2 if square else (1, 2)
    images = wave(1, cfg.channels, grid[0] * height, grid[1] * width, model=model)
    patches = model.embed(images)
    if cfg.fourier:
        return patches + model.pos_embed(grid)
    patches = patches[:, : cfg.n_tokens - 1]
    tokens = cat_tokens(model.cls_token, patches)
    return tokens + model.pos_embed[:, : tokens.shape[1]]


def check_output(model: Model, where: str) -> Model:
    """Returns the model.

    Raises CheckpointError if its output for the fixed input is not finite.
    """
    if not bool(output(model).isfinite().all()):
        raise CheckpointError(
            f"{where}: the weights are finite, but the output for a fixed input is not: "
            "the weights are damaged, or too large for this dtype."
        )
    return model
