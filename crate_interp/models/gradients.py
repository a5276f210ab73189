"""Whether a call can compute gradients: checks before it starts."""

import torch
from torch import nn


def check_gradients(caller: str, model: nn.Module) -> None:
    """Raises ValueError, naming the caller, if inference mode forbids gradients.

    It also forbids gradients through a model that was made or loaded in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"{caller} needs gradients, but inference mode is on: leave torch.inference_mode()."
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise ValueError(f"{caller} needs gradients, but the model was made in inference mode.")
