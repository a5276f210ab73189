"""What the training scripts beside this file share: a schedule, weights along the training, and going on where one stopped."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

WARMUP = 0.05  # of the steps


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine to zero."""
    warm = max(1, round(WARMUP * steps))
    return peak * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))))


def save_step(model: nn.Module, out: Path, step: int) -> None:
    """The weights after `step` steps, in float16."""
    (out / "steps").mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.float16).contiguous() for name, value in model.state_dict().items()}
    path = out / "steps" / f"step-{step}.safetensors"
    save_file(weights, path)
    path.chmod(0o644)
