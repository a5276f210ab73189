"""The engine of a Ray cluster: actors hold the model, and only numbers come back to the driver.

The driver gives a chunk to each free actor. If an actor dies, with its process or its node, another
actor measures its chunk.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch

from crate_interp.results.kinds import Tables
from crate_interp.sweeps.engines.ray_pool import Pool
from crate_interp.sweeps.engines.ray_worker import packed, parcel
from crate_interp.sweeps.runs.chunked_pass import Stage, Task


@contextmanager
def on_ray() -> Iterator[Any]:
    """Yields the engine, on the Ray cluster of RAY_ADDRESS, or else on a new one on this machine.

    If Ray is initialised already, its cluster is used. An actor has as many CPUs as this process
    has threads, and a GPU if the model is on one.

    Raises ValueError if Ray is not installed, or there is no such cluster.
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
            f"cannot join the Ray cluster {address!r} of RAY_ADDRESS: {error}. Start one with "
            "'ray start --head', or unset RAY_ADDRESS for one on this machine only."
        ) from None


def _measured(
    pool: Pool, stage: Stage, tasks: Iterable[Task], advance: Callable[[int], Any]
) -> Iterator[tuple[Task, Tables]]:
    """Yields each task with its tables, as they come back."""
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
