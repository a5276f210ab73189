"""A watch that is also a callback, for Hugging Face's Trainer and for Lightning."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def _transformers(watch: Any) -> Any:
    """Returns a Watch for Hugging Face's Trainer. Raises ImportError without transformers."""
    from transformers import TrainerCallback

    class TransformersWatch(watch, TrainerCallback):
        """A watch as a callback of transformers.Trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                self.start = max(self.start, state.global_step)
                self.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                self.step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                self.__exit__(None)

    return TransformersWatch


def _lightning(watch: Any) -> Any:
    """Returns a Watch for Lightning's Trainer, from either of its two packages.

    The one that is already imported is used. Raises ImportError without Lightning.
    """
    package = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    base: Any = import_module(package).Callback

    class LightningWatch(watch, base):
        """A watch as a callback of Lightning's Trainer."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                self.start = max(self.start, trainer.global_step)
                self.__enter__()

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            # batches whose gradients are accumulated are not updates
            if trainer.is_global_zero and trainer.global_step > self.now:
                self.step(trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                self.__exit__(None)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if self._open is not None:
                self.__exit__(type(exception), exception)

    return LightningWatch


# name of the trainer -> a function that makes a subclass of Watch
CALLBACKS: dict[str, Callable[[Any], Any]] = {
    "transformers": _transformers,
    "lightning": _lightning,
}
