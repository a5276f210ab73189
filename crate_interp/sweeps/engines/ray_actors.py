"""The engine of a Ray cluster: actors hold the model, and only numbers come back to the driver.

The driver gives a chunk to each free actor. If the process or the node of an actor dies, another
actor measures the chunk.
"""

import dataclasses
import logging
import os
import platform
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib.metadata import version
from itertools import islice
from types import ModuleType
from typing import Any

import torch

from crate_interp import __version__
from crate_interp.core.progress import stream, tqdm
from crate_interp.data.streams import Row
from crate_interp.results.kinds import Tables
from crate_interp.sweeps.runs.chunked_pass import Stage, Task
from crate_interp.sweeps.runs.provenance import torch_settings

_PACKAGES = ("torch", "transformer-lens", "numpy", "pandas")
Parcel = tuple[int, int, int, Sequence[Row]]  # the arguments of `Stage.task`
# _LOOK: seconds between two looks at the cluster. _LONG: if no actor has started after this number
# of looks, advice is printed. An actor for which the cluster has room starts sooner.
_LOOK, _LONG = 5.0, 12
_DEATHS = 5  # more deaths in a row than this for each actor mean that the chunks are at fault


def surroundings() -> dict[str, str | int]:
    """Returns everything outside the stage that may change the bits of a chunk."""
    versions = {name: version(name) for name in _PACKAGES}
    own = {"crate_interp": __version__, "Python": platform.python_version()}
    settings = torch_settings()
    names = dict.fromkeys(("default dtype", "matmul precision", *settings), "torch's first")
    return {**own, **versions, "torch threads": torch.get_num_threads(), **names, **settings}


def packed(stage: Stage) -> bytes:
    """Returns a stage as bytes; its model is on the CPU and keeps its hooks.

    Raises ValueError if a part of the stage cannot be sent to another process.
    """
    if torch.device(stage.model.cfg.device).type != "cpu":
        stage = dataclasses.replace(stage, model=deepcopy(stage.model).to("cpu"))
    try:
        return _cloudpickle().dumps(stage)
    except Exception as error:  # an unknown object may raise anything
        raise ValueError(
            f"engine='ray' cannot send {stage.name!r} to other processes: {error}. Remove "
            "locks, open files and generators from probes, hooks and data, or use engine='local'."
        ) from error


def _cloudpickle() -> Any:
    from ray import cloudpickle

    return cloudpickle


def parcel(task: Task) -> Parcel:
    """Returns the parts of a chunk that an actor needs in addition to the stage."""
    samples = task.samples
    return task.number, samples.start, samples.start + samples.n, task.rows or ()


class Worker:
    """Measures chunks of its stage; gpu: whether the worker has its own GPU."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.reference: object = None
        self.stage: Any = None

    def check(self, wanted: dict[str, str | int]) -> None:
        """Raises ValueError if numbers measured here may differ from those of the driver."""
        own = surroundings()
        other = [name for name, value in wanted.items() if own.get(name) != value]
        if other:
            shown = ", ".join(f"{name} {own.get(name)} (driver: {wanted[name]})" for name in other)
            raise ValueError(
                f"an actor on {socket.gethostname()} has {shown}, so its numbers would differ. "
                "Install the same versions on every node, start the driver with OMP_NUM_THREADS "
                "set to at most the number of cores of a node, and leave torch's settings as they "
                "are (precision='bfloat16' takes the place of torch.autocast)."
            )

    def measured(self, reference: list[Any], chunk: Parcel) -> Tables:
        """Returns the tables of a chunk.

        reference: a list with Ray's reference to the packed stage. Without the list, Ray would pass
        the stage's bytes in place of the reference.
        """
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
                f"an actor on {socket.gethostname()} cannot load the stage to measure: {error}. "
                "Install the packages that probes and data need on every node."
            ) from None
        if self.gpu:
            stage = dataclasses.replace(stage, model=stage.model.to("cuda"))
        return stage


class Pool:
    """The idle and the busy actors. The key of a busy actor is the reference to its next result.

    ray: the module `ray`.
    """

    def __init__(self, ray: ModuleType) -> None:
        self.ray, self.threads = ray, torch.get_num_threads()
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, Task | None]] = {}  # actor, task (None while starting)
        self.most = self.deaths = self.looks = 0

    @property
    def works(self) -> bool:
        """Tells whether a chunk is being measured."""
        return any(task for _, task in self.busy.values())

    @property
    def free(self) -> int:
        """Returns how many actors are idle, or will be when they have started."""
        return len(self.idle) + sum(task is None for _, task in self.busy.values())

    def has_room(self, gpu: bool) -> bool:
        """Tells whether another actor may start. The first always may; it then waits for room."""
        return len(self.idle) + len(self.busy) < max(1, self._places(gpu))

    def start(self, gpu: bool) -> None:
        """Starts an actor, as soon as the cluster has a place for it."""
        names = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        needs = dict(num_cpus=self.threads, num_gpus=int(gpu), runtime_env={"env_vars": names})
        actor = self.ray.remote(Worker).options(**needs).remote(gpu)
        self.busy[actor.check.remote(surroundings())] = (actor, None)
        self.most = max(self.most, len(self.idle) + len(self.busy))

    def send(self, stage: object, task: Task, parcel: Parcel) -> None:
        """Gives an idle actor a task; stage: the reference to the stage in Ray's store."""
        actor = self.idle.pop()
        self.busy[actor.measured.remote([stage], parcel)] = (actor, task)

    def answer(self) -> tuple[Task | None, Tables | None]:
        """Returns a task and its tables, or (None, None) if no task has finished yet.

        The tables are None if the actor of the task has died.
        """
        done, _ = self.ray.wait(list(self.busy), timeout=_LOOK)
        if not done:
            self._advise()
            return None, None
        actor, task = self.busy.pop(done[0])
        try:
            tables = self.ray.get(done[0])
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self.ray.exceptions.RayError as error:  # the actor failed, not the measuring code
            self._bury(actor, error)
            return task, None
        self.idle.append(actor)
        self.deaths, self.looks = 0 if task else self.deaths, 0
        return task, tables

    def end(self) -> None:
        """Ends all actors."""
        for actor in [*self.idle, *(actor for actor, _ in self.busy.values())]:
            self.ray.kill(actor)

    def _places(self, gpu: bool) -> int:
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        cpus = [int(has.get("CPU", 0) // self.threads) for has in nodes]
        gpus = [int(has.get("GPU", 0)) for has in nodes]
        return sum(map(min, cpus, gpus)) if gpu else sum(cpus)

    def _bury(self, actor: Any, error: Exception) -> None:
        self.ray.kill(actor)
        self.deaths += 1
        if self.deaths > _DEATHS * self.most:
            raise ValueError(
                f"{self.deaths} actors died in a row. Check the memory of the nodes: a smaller "
                f"batch_size needs less memory. The last actor died with this error: {error}"
            ) from None

    def _advise(self) -> None:
        self.looks += not self.works and not self.idle
        if self.looks == _LONG:
            tqdm.write(
                f"Ray has no room for an actor with {self.threads} CPUs, one for each thread of "
                "this process. Waiting. 'ray status' shows the nodes; OMP_NUM_THREADS sets the "
                "number of threads.",
                file=stream(),
            )


@contextmanager
def on_ray() -> Iterator[Any]:
    """Yields the engine on the Ray cluster of RAY_ADDRESS, or on a new cluster on this machine.

    If Ray is initialised already, its cluster is used. An actor has as many CPUs as this process
    has threads, and a GPU if the model is on one.

    Raises ValueError if Ray is not installed, or if the cluster cannot be joined.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("engine='ray' needs Ray: pip install 'crate_interp[ray]'.") from None
    ours = not ray.is_initialized()
    if ours:
        _join(ray, os.environ.get("RAY_ADDRESS") or "local")
    pool = Pool(ray)
    try:
        yield partial(_measured, pool)
    finally:
        pool.end()
        if ours:
            ray.shutdown()


def _join(ray: Any, address: str) -> None:
    try:
        more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, logging_level=logging.ERROR, **more)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"cannot join the Ray cluster {address!r} of RAY_ADDRESS: {error}. Start a cluster "
            "with 'ray start --head', or unset RAY_ADDRESS to use this machine only."
        ) from None


def _measured(
    pool: Pool, stage: Stage, tasks: Iterable[Task], advance: Callable[[int], Any]
) -> Iterator[tuple[Task, Tables]]:
    """Yields each task with its tables, in the order in which the tasks finish."""
    left, waiting = iter(tasks), deque[Task]()

    def enough(n: int) -> bool:
        waiting.extend(islice(left, max(0, n - len(waiting))))
        return len(waiting) >= n

    def hand_out() -> None:
        while pool.idle and enough(1):
            task = waiting.popleft()
            pool.send(reference, task, parcel(task))

    if not enough(1):
        return
    gpu = torch.device(stage.model.cfg.device).type == "cuda"
    reference = pool.ray.put(packed(stage))
    while pool.works or enough(1):
        while pool.has_room(gpu) and enough(1 + pool.free):
            pool.start(gpu)
        hand_out()
        task, tables = pool.answer()
        if task and tables is None:
            waiting.appendleft(task)  # its actor has died
        elif task and tables:
            hand_out()  # before this chunk is written, since writing takes a while
            advance(task.samples.n)
            yield task, tables
