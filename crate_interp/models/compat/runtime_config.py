"""What a model's own config says of the model while it lives: device, dtype and switches."""

import weakref

import torch
from torch import Tensor, nn

from crate_interp.config import CrateConfig
from crate_interp.models.compat.offload import align_hooks


class Runtime:
    """Where the first parameter of a model is, and of which dtype, at the time of asking.

    Whatever moves the weights, it is right: `.to()`, `load_state_dict(assign=True)`, `to_empty`,
    accelerate. None once the model is gone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def _first(self) -> Tensor | None:
        model = self._model()
        return None if model is None else next(model.parameters(), None)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first parameter."""
        first = self._first()
        return None if first is None else first.dtype

    @property
    def device(self) -> torch.device | None:
        """The device of the first parameter; of one that is offloaded, that on which it is used."""
        first, model = self._first(), self._model()
        if first is None or model is None or not first.is_meta:
            return None if first is None else first.device
        owner = next(part for part in model.modules() if part._parameters)
        hooks = [hook for hook in align_hooks(owner) if hook.execution_device is not None]
        return torch.device(hooks[0].execution_device) if hooks else first.device


def follow(model: nn.Module, *configs: CrateConfig) -> None:
    """Lets the configs say the device and dtype of a model."""
    for cfg in configs:
        object.__setattr__(cfg, "_runtime", Runtime(model))
