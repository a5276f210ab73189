"""A watch that is also a callback, for Hugging Face's Trainer and for Lightning."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def _transformers(watch: Any) -> Any:
    """Makes a Watch class for Hugging Face's Trainer; raises ImportError without transformers."""
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
    """Makes a Watch class for Lightning's Trainer; raises ImportError without Lightning.

    Lightning has two packages: `lightning.pytorch` is used if it is already imported, else
    `pytorch_lightning`.
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
            # a batch whose gradients are only accumulated is not an update
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
