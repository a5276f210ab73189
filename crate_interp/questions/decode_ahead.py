"""Worker processes that decode samples in order, ahead of the process that measures them.

The workers belong to a torch DataLoader. They are forked from this process, so they have its data
set and its model's preprocessing. Each worker reads at most two batches ahead.
"""

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from crate_interp.data.picture_contents import Notes, noting
from crate_interp.data.samples import Found, read_runs
from crate_interp.questions.batches import nobody, ranges_of
from crate_interp.questions.experiment import Ahead, Task, Work

Place = tuple[int, int]  # a chunk, and the first of the samples to read


@contextmanager
def read_ahead(
    work: Work, tasks: Iterable[Task]
) -> Iterator[tuple[Iterable[Task], Callable[[Task], Ahead]]]:
    """Yields the tasks, and a function that returns the `ahead` of a task (see `Chunk`).

    The workers end with the context. Raises ValueError if a worker is killed.
    """
    if not work.options.workers:
        yield tasks, lambda task: nobody
        return
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError(
            f"workers={work.options.workers} needs processes that fork, which this system lacks. "
            "Give workers=0."
        )
    mine, theirs = tee(tasks)
    batches: Any = None  # the loader's iterator; its workers end with it
    head: tuple[Place, Any] | None = None

    def take(place: Place) -> Found | None:
        """Returns samples, or None if the workers do not have them."""
        nonlocal batches, head
        if batches is None:  # forks processes only when something is measured
            batches = _batches(work, theirs)
        while head is None or head[0] < place:
            head = next(batches, None)
            if head is None:
                return None
        if head[0] != place:
            return None
        (_, found), head = head, None
        if isinstance(found, Exception):
            raise found
        return found

    try:
        yield mine, lambda task: lambda start, stop: take((task.number, start))
    except Exception as error:
        cause: BaseException | None = error
        # torch may raise its error about a worker at any point, as the cause of another error
        while cause is not None and "DataLoader worker" not in str(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise ValueError(
            f"a worker that decodes samples ended ({str(cause).splitlines()[0]}). Memory or shared "
            "memory (/dev/shm) may be too small. Give fewer workers, or workers=0. With out=DIR, "
            "finished chunks are kept, and the same call continues from there."
        ) from None
    finally:
        batches = head = None


class _Reader(Dataset):
    """Reads samples in a worker."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __getitem__(self, wanted: tuple[Task, int, int]) -> tuple[Place, Found | Exception]:
        (task, start, stop), notes = wanted, Notes()
        place = (task.number, start)
        try:
            samples = noting(self.work.samples(task), notes)
            found = read_runs(samples, start, stop, self.work.step.masks)
            return place, replace(found, notes=notes)
        except ValueError as error:  # raised again in the measuring process
            return place, ValueError(str(error))
        except Exception as error:  # may not be one that can be sent
            return place, RuntimeError(f"{type(error).__name__}: {error}")


def _batches(work: Work, tasks: Iterable[Task]) -> Iterator[tuple[Place, Any]]:
    def wanted() -> Iterator[tuple[Task, int, int]]:
        for task in tasks:
            for start, stop in ranges_of(work.samples(task), work.options.batch_size):
                rows = task.rows and task.rows[start - task.start : stop - task.start]
                own = Task(task.number, start, stop, rows) if rows else task
                yield own, start, stop

    # torch warns if workers outnumber processors, and if a process with threads is forked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(
            _Reader(work), batch_size=None, sampler=wanted(), num_workers=work.options.workers,
            collate_fn=lambda found: found, prefetch_factor=2, multiprocessing_context="fork",
            generator=torch.Generator(),
        )  # fmt: skip
        return iter(loader)
