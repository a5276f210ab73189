"""A fixed input for every kind of model: small, the same on every machine, drawn from no generator."""

from typing import Any

import torch
from torch import Tensor

from crate_interp.errors import CheckpointError
from crate_interp.models.embed import cat_tokens
from crate_interp.models.sae import SparseAutoencoder

_TOKENS = 5


def wave(*shape: int, model: Any) -> Tensor:
    """sin(0, 1, 2, ...) in a shape, in the model's dtype and on its device."""
    first = next(model.parameters())
    count = int(torch.tensor(shape).prod())
    return torch.arange(count, dtype=torch.float64).sin().to(first.device, first.dtype).view(shape)


def token_ids(cfg: Any, count: int, device: Any) -> Tensor:
    """Ids that jump through the vocabulary `[1, count]`."""
    return (torch.arange(count, device=device)[None] * 7919 + 13) % cfg.d_vocab


@torch.no_grad()
def output(model: Any) -> Tensor:
    """What the model makes of its fixed input, through every layer; a vision model sees two patches and CLS."""
    if isinstance(model, SparseAutoencoder):
        return model(wave(2, model.cfg.d_in, model=model))
    cfg, kind = model.cfg, model.cfg.kind
    if kind == "text":
        count = cfg.n_ctx if cfg.family == "clipa-text" else min(_TOKENS, cfg.n_ctx)
        return model(token_ids(cfg, count, cfg.device))
    if kind == "mae":
        height, width = cfg.patch_size
        images = wave(1, cfg.channels, 2 * height, 2 * width, model=model)
        return model(images, noise=wave(1, 4, model=model), mask_ratio=0.5).pred
    if kind == "clip":
        tokens = token_ids(model.text.cfg, cfg.n_ctx, cfg.device)
        image, text = output(model.visual), model.encode_text(tokens)
        return torch.cat([image.flatten(), text.flatten()])
    return model(tokens_of(model), start_at_layer=0)


@torch.no_grad()
def whole(model: Any) -> Tensor:
    """The output for an input of full size, where `output` leaves a part of the model out: the tokens of a vision model."""
    part = getattr(model, "visual", model)
    if part.cfg.kind != "vision":
        return output(model)
    return part(wave(1, part.cfg.channels, *part.cfg.image_size, model=model))


def tokens_of(model: Any) -> Tensor:
    """Z^0 of a vision model on two patches, `[1, 3, d_model]`: cheap for any image size."""
    height, width = model.cfg.patch_size
    patches = model.embed(wave(1, model.cfg.channels, height, 2 * width, model=model))[
        :, : model.cfg.n_tokens - 1
    ]
    tokens = cat_tokens(model.cls_token, patches)
    return tokens + model.pos_embed[:, : tokens.shape[1]]


def check_output(model: Any, where: str) -> Any:
    """The model; CheckpointError where finite weights make an output that is not."""
    if not bool(output(model).isfinite().all()):
        raise CheckpointError(
            f"{where}: the weights are finite, but the output on a fixed input is not: they are damaged, or too large for this dtype."
        )
    return model
