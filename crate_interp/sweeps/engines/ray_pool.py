"""The actors of a Ray cluster: started where there is room, and removed when they die."""

from types import ModuleType
from typing import Any

import torch

from crate_interp.core.progress import stream, tqdm
from crate_interp.results.kinds import Tables
from crate_interp.sweeps.engines.ray_worker import Parcel, Worker, surroundings
from crate_interp.sweeps.runs.chunked_pass import Task

# seconds between looks at the cluster, and how many looks an actor may need to start
_LOOK, _LONG = 5.0, 12
_DEATHS = 5  # deaths in a row, for each actor so far, from which the chunks are blamed


class Pool:
    """Idle actors, and busy ones by the objects that Ray will return; ray: the module."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray, self.threads = ray, torch.get_num_threads()
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, Task | None]] = {}  # an actor without a task is starting
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
        """Tells whether one more actor may start; one is always allowed, and may wait."""
        return len(self.idle) + len(self.busy) < max(1, self._places(gpu))

    def start(self, gpu: bool) -> None:
        """Starts an actor, as soon as the cluster has a place for it."""
        names = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        needs = dict(num_cpus=self.threads, num_gpus=int(gpu), runtime_env={"env_vars": names})
        actor = self.ray.remote(Worker).options(**needs).remote(gpu)
        self.busy[actor.check.remote(surroundings())] = (actor, None)
        self.most = max(self.most, len(self.idle) + len(self.busy))

    def send(self, stage: object, task: Task, parcel: Parcel) -> None:
        """Gives an idle actor a task; stage: its reference in Ray's store."""
        actor = self.idle.pop()
        self.busy[actor.measured.remote([stage], parcel)] = (actor, task)

    def answer(self) -> tuple[Task | None, Tables | None]:
        """Returns a task and its tables: none if its actor died, and no task if none is done."""
        done, _ = self.ray.wait(list(self.busy), timeout=_LOOK)
        if not done:
            self._advise()
            return None, None
        actor, task = self.busy.pop(done[0])
        try:
            tables = self.ray.get(done[0])
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self.ray.exceptions.RayError as error:
            # the fault is not the chunk's but the machine's
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
                f"{self.deaths} actors died one after the other. Look at the memory of the nodes: "
                f"a smaller batch_size takes less. The last one died of this: {error}"
            ) from None

    def _advise(self) -> None:
        self.looks += not self.works and not self.idle
        if self.looks == _LONG:
            tqdm.write(
                f"Ray has no free place for an actor with {self.threads} CPUs, the threads of this "
                "process: waiting. 'ray status' shows the nodes; OMP_NUM_THREADS sets the threads.",
                file=stream(),
            )
