"""The part that runs in an actor of a Ray cluster: it holds a stage and measures its chunks."""

import dataclasses
import platform
import socket
from collections.abc import Sequence
from copy import deepcopy
from importlib.metadata import version
from typing import Any

import torch

from crate_interp import __version__
from crate_interp.data.streams import Row
from crate_interp.results.kinds import Tables
from crate_interp.sweeps.runs.chunked_pass import Stage, Task

_PACKAGES = ("torch", "transformer-lens", "numpy", "pandas")
Parcel = tuple[int, int, int, Sequence[Row]]  # a chunk in the form that `Stage.task` takes


def surroundings() -> dict[str, str | int]:
    """Returns everything besides the stage that may change the bits of a chunk."""
    versions = {name: version(name) for name in _PACKAGES}
    own = {"crate_interp": __version__, "Python": platform.python_version()}
    return {**own, **versions, "torch threads": torch.get_num_threads()}


def packed(stage: Stage) -> bytes:
    """Returns a stage as bytes, with its model on the CPU and the model's hooks.

    Raises ValueError if something in it cannot be sent.
    """
    if torch.device(stage.model.cfg.device).type != "cpu":
        stage = dataclasses.replace(stage, model=deepcopy(stage.model).to("cpu"))
    try:
        return _cloudpickle().dumps(stage)
    except Exception as error:  # an unknown object may raise anything
        raise ValueError(
            f"engine='ray' cannot send {stage.name!r} to other processes: {error}. Take locks, "
            "open files and generators out of probes, hooks and data, or use engine='local'."
        ) from error


def _cloudpickle() -> Any:
    from ray import cloudpickle

    return cloudpickle


def parcel(task: Task) -> Parcel:
    """Returns a chunk in the form that is sent, without what the stage already has."""
    samples = task.samples
    return task.number, samples.start, samples.start + samples.n, task.rows or ()


class Worker:
    """Measures chunks of its stage; gpu: whether it has a GPU of its own."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.reference: object = None
        self.stage: Any = None

    def check(self, wanted: dict[str, str | int]) -> None:
        """Raises ValueError if numbers of this process may differ from those of the driver."""
        own = surroundings()
        other = [name for name, value in wanted.items() if own[name] != value]
        if other:
            shown = ", ".join(f"{name} {own[name]} and not {wanted[name]}" for name in other)
            raise ValueError(
                f"an actor on {socket.gethostname()} has {shown} as the driver does: its numbers "
                "would differ. Install the same versions on every node, and start the driver with "
                "OMP_NUM_THREADS set to at most the cores of a node."
            )

    def measured(self, reference: list[Any], chunk: Parcel) -> Tables:
        """Returns the tables of a chunk; reference: the packed stage's, in a list of its own."""
        if self.reference != reference[0]:
            self.reference, self.stage = None, None  # one stage at a time in memory
            self.stage, self.reference = self._opened(reference[0]), reference[0]
        return self.stage.measured(self.stage.task(*chunk), lambda n: None)

    def _opened(self, reference: Any) -> Stage:
        import ray

        try:
            stage = _cloudpickle().loads(ray.get(reference))
        except ImportError as error:
            raise ValueError(
                f"an actor on {socket.gethostname()} cannot open what is to be measured: {error}. "
                "Install what probes and data need on every node."
            ) from None
        if self.gpu:
            stage = dataclasses.replace(stage, model=stage.model.to("cuda"))
        return stage
