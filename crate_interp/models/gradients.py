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


def check_backward(model: nn.Module, stop_at_layer: int | None) -> None:
    """Raises ValueError if the backward pass of a run with `incl_bwd=True` is impossible."""
    if stop_at_layer is not None:
        raise ValueError(
            "incl_bwd=True calls backward on the output, but stop_at_layer returns a stream: use "
            "model.hooks(bwd_hooks=...) around a loss of your own."
        )
    check_gradients("incl_bwd=True", model)
    if not torch.is_grad_enabled():
        raise ValueError("incl_bwd=True needs gradients: run outside torch.no_grad().")
