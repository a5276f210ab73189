"""Preprocessed images as pictures to look at."""

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from crate_interp.config import CrateConfig


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
