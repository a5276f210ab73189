"""Whether a call can compute gradients: checks before it starts, and torch's errors explained."""

import torch
from torch import nn


def check_gradients(caller: str, model: nn.Module) -> None:
    """Raises ValueError, naming the caller, if inference mode forbids gradients.

    It also forbids gradients through a model that was made or loaded in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"{caller} needs gradients, but inference mode is on. Leave torch.inference_mode() "
            "first, or write `with torch.inference_mode(False):` around the call."
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise ValueError(
            f"{caller} needs gradients, but the model was made in inference mode. Load the model "
            "outside torch.inference_mode()."
        )


def check_backward(model: nn.Module, stop_at_layer: int | None) -> None:
    """Raises ValueError if the backward pass of a run with `incl_bwd=True` is impossible."""
    if stop_at_layer is not None:
        raise ValueError(
            "incl_bwd=True calls backward on the output, but stop_at_layer returns a stream: use "
            "model.hooks(bwd_hooks=...) around a loss of your own."
        )
    check_gradients("incl_bwd=True", model)
    if not torch.is_grad_enabled():
        raise ValueError(
            "incl_bwd=True needs gradients, but gradient tracking is off: run outside "
            "torch.no_grad()."
        )


def no_backward(error: RuntimeError) -> ValueError | None:
    """Returns an error that explains torch's error in a backward pass, or None for other errors."""
    if "scalar outputs" in str(error):
        return ValueError(
            "incl_bwd=True needs a scalar output: use return_type='loss', or model.hooks("
            "bwd_hooks=...) around a loss of your own."
        )
    if "does not require grad" in str(error):
        return ValueError(
            "incl_bwd=True: the output has no grad_fn, because no parameter requires a gradient. "
            "Call model.requires_grad_(True)."
        )
    return None
