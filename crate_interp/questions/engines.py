"""Engines, which measure the chunks of a pass: this process, or tasks on a Ray cluster.

An engine takes the work, its tasks, and a function that it calls with the number of newly finished
samples. It yields each task with its tables, in any order; a chunk has the same bits from each.
With workers, this process has others that decode samples in order, ahead of it: those of a torch
DataLoader, forked from this process, so that they have its data set and its model's preprocessing.
Each of them reads at most two batches ahead.
"""

import logging
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import islice, tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from crate_interp import __version__
from crate_interp.data.samples import Found, Notes, noting, read_runs
from crate_interp.questions.batches import ranges_of
from crate_interp.questions.experiment import Tables, Task, Work
from crate_interp.questions.provenance import torch_settings

Engine = Callable[[Work, Iterable[Task], Callable[[int], Any]], Iterator[tuple[Task, Tables]]]
Place = tuple[int, int]  # a chunk, and the first of the samples to read
_PACKAGES = ("torch", "transformer-lens", "numpy", "pandas")
_RETRIES = 8  # how often Ray measures a chunk again whose process died


def _in_this_process(
    work: Work, tasks: Iterable[Task], advance: Callable[[int], Any]
) -> Iterator[tuple[Task, Tables]]:
    """Measures in this process. Workers that decode ahead end with it; one may be killed."""
    if not work.options.workers:
        for task in tasks:
            yield task, work.measured(task, advance)
        return
    mine, theirs = tee(tasks)
    batches: Any = None  # the loader's iterator; its workers end with it
    head: tuple[Place, Any] | None = None

    def take(task: Task, start: int, stop: int) -> Found | None:
        """Returns samples, or None if the workers do not have them."""
        nonlocal batches, head
        place = task.number, start
        if batches is None:  # forks processes only when something is measured
            batches = _batches(work, theirs)
        while head is None or head[0] < place:
            if (head := next(batches, None)) is None:
                return None
        if head[0] != place:
            return None
        (_, found), head = head, None
        if isinstance(found, Exception):
            raise found
        return found

    try:
        for task in mine:
            yield task, work.measured(task, advance, partial(take, task))
    finally:
        batches = head = None


@dataclass(eq=False)
class _Reader(Dataset):
    """Reads samples in a worker."""

    work: Work

    def __getitem__(self, batch: tuple[Task, int, int]) -> tuple[Place, Found | Exception]:
        (task, start, stop), notes = batch, Notes()
        place = (task.number, start)
        try:
            samples = noting(self.work.samples(task), notes)
            found = read_runs(samples, start, stop, self.work.step.masks)
            return place, replace(found, notes=notes)
        except Exception as error:  # raised again in the measuring process; may not be sendable
            own = isinstance(error, ValueError)
            return place, ValueError(str(error)) if own else RuntimeError(repr(error))


def _batches(work: Work, tasks: Iterable[Task]) -> Iterator[tuple[Place, Any]]:
    def batch_ranges() -> Iterator[tuple[Task, int, int]]:
        for task in tasks:
            for start, stop in ranges_of(work.samples(task), work.options.batch_size):
                rows = task.rows and task.rows[start - task.start : stop - task.start]
                yield (Task(task.number, start, stop, rows) if rows else task), start, stop

    # torch warns if workers outnumber processors, and if a process with threads is forked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(
            _Reader(work), batch_size=None, sampler=batch_ranges(),
            num_workers=work.options.workers,
            collate_fn=lambda batch: batch, prefetch_factor=2, multiprocessing_context="fork",
            generator=torch.Generator(),
        )  # fmt: skip
        return iter(loader)


@contextmanager
def on_ray() -> Iterator[Engine]:
    """Yields the engine on the Ray cluster of RAY_ADDRESS, or on a new cluster on this machine.

    If Ray is initialised already, its cluster is used. Raises ValueError if Ray is not installed,
    or if the cluster cannot be joined.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("engine='ray' needs Ray: pip install 'crate_interp[ray]'.") from None
    ours, address = not ray.is_initialized(), os.environ.get("RAY_ADDRESS") or "local"
    if ours:
        more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, logging_level=logging.ERROR, **more)
    try:
        yield partial(_on_cluster, ray)
    finally:
        if ours:
            ray.shutdown()


def _on_cluster(
    ray: Any, work: Work, tasks: Iterable[Task], advance: Callable[[int], Any]
) -> Iterator[tuple[Task, Tables]]:
    """Sends the work into Ray's store once, and a Ray task for each chunk."""
    threads, gpu = torch.get_num_threads(), torch.device(work.model.cfg.device).type == "cuda"
    names = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    remote = ray.remote(_measured).options(
        num_cpus=threads, num_gpus=int(gpu), max_retries=_RETRIES, runtime_env={"env_vars": names}
    )
    left, running, packed = iter(tasks), {}, None
    while True:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        most = 2 * max(1, cpus // threads)  # a stream is not read to its end at once
        for task in islice(left, max(0, most - len(running))):
            packed = packed or ray.put(_packed(ray, work))
            # in a list, Ray passes the reference and not the bytes
            running[remote.remote([packed], task, gpu, surroundings())] = task
        if not running:
            return
        done, _ = ray.wait(list(running))
        for one in done:
            task = running.pop(one)
            try:
                tables = ray.get(one)
            except ray.exceptions.RayError as error:
                for other in running:  # or Ray prints their tracebacks
                    ray.cancel(other, force=True)
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise error.cause from None
                died = f"{task.start} to {task.stop - 1} died {_RETRIES + 1} times"
                died += " (is batch_size too large?)"
                raise ValueError(f"the process of samples {died}: {error}") from None
            advance(task.stop - task.start)
            yield task, tables


def _packed(ray: Any, work: Work) -> bytes:
    """Returns the work as bytes; its model is on the CPU and keeps its hooks."""
    if torch.device(work.model.cfg.device).type != "cpu":
        work = replace(work, model=deepcopy(work.model).to("cpu"))
    return ray.cloudpickle.dumps(work)


_opened: dict[Any, Work] = {}  # of this worker: one work at a time in memory


def _measured(packed: list[Any], task: Task, gpu: bool, driver: dict[str, Any]) -> Tables:
    """Measures a chunk in a worker, which opens the work once."""
    ray: Any = import_module("ray")
    here = surroundings()
    odd = [name for name in driver | here if here.get(name) != driver.get(name)]
    if odd:
        words = ", ".join(f"{name} {here.get(name)} (driver: {driver.get(name)})" for name in odd)
        words = f"{words}, so its numbers would differ: give every node the same"
        raise ValueError(f"a worker on {platform.node()} has {words}.")
    if packed[0] not in _opened:
        _opened.clear()
        work = ray.cloudpickle.loads(ray.get(packed[0]))  # a node may lack packages of probes
        _opened[packed[0]] = replace(work, model=work.model.to("cuda")) if gpu else work
    return _opened[packed[0]].measured(task)


def surroundings() -> dict[str, str | int]:
    """Returns everything outside the work that may change the bits of a chunk."""
    versions = {name: version(name) for name in _PACKAGES}
    versions |= {"crate_interp": __version__, "Python": platform.python_version()}
    return {**versions, "torch threads": torch.get_num_threads(), **torch_settings()}


ENGINES: dict[str, Callable[[], AbstractContextManager[Engine]]] = {
    "local": lambda: nullcontext(_in_this_process), "ray": on_ray,
}  # fmt: skip
