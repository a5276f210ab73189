"""Worker processes that decode samples in order, ahead of the process that measures them.

The workers belong to a torch DataLoader. They are forked from this process, so they have its data
set and its model's preprocessing. Each worker reads at most two batches ahead.
"""

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import tee
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from crate_interp.data.picture_contents import Notes, noting
from crate_interp.data.samples import Found, read_runs
from crate_interp.data.streams import Row
from crate_interp.questions.batches import nobody, ranges_of
from crate_interp.questions.experiment import Ahead, Task, Work


class _Wanted(NamedTuple):
    """Samples of a chunk to read; rows: their rows, if the data is a stream."""

    chunk: int
    start: int
    stop: int
    rows: Sequence[Row] | None


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
    queue = _Queue(work, theirs)
    try:
        yield mine, lambda task: lambda start, stop: queue.take(task.number, start, stop)
    except Exception as error:
        reason = _ended(error)
        if reason is None:
            raise
        raise ValueError(
            f"a worker that decodes samples ended ({reason}). Memory or shared memory (/dev/shm) "
            "may be too small. Give fewer workers, or workers=0. With out=DIR, finished chunks are "
            "kept, and the same call continues from there."
        ) from None
    finally:
        queue.close()


def _ended(error: BaseException | None) -> str | None:
    """Returns torch's message about a worker that ended, or None.

    torch may raise its error at any point of this process. So `error` may be another error, of
    which torch's error is the cause.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
            return str(error).splitlines()[0]
        error = error.__cause__ or error.__context__
    return None


class _Queue:
    """The samples that the workers have read, in the order of the chunks."""

    def __init__(self, work: Work, tasks: Iterable[Task]) -> None:
        self.work, self.tasks = work, tasks
        self.found: Any = None  # the loader's iterator; its workers end with it
        self.head: tuple[_Wanted, Found | Exception] | None = None

    def take(self, chunk: int, start: int, stop: int) -> Found | None:
        """Returns samples of a chunk, or None if the workers do not have them.

        Raises the error that a worker met when it read the samples.
        """
        if self.found is None:  # forks processes only when something is measured
            self.found = _started(self.work, self.tasks)
        while self.head is None or self.head[0][:2] < (chunk, start):
            self.head = next(self.found, None)
            if self.head is None:
                return None
        wanted, found = self.head
        if wanted[:3] != (chunk, start, stop):
            return None
        self.head = None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Ends the workers."""
        self.found = self.head = None


class _Reader(Dataset):
    """Reads samples in a worker."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __getitem__(self, wanted: _Wanted) -> tuple[_Wanted, Found | Exception]:
        place, notes = wanted._replace(rows=None), Notes()
        try:
            task = Task(wanted.chunk, wanted.start, wanted.stop, wanted.rows)
            samples = noting(self.work.samples(task), notes)
            found = read_runs(samples, wanted.start, wanted.stop, self.work.step.masks)
            return place, replace(found, notes=notes)
        except Exception as error:  # raised again in the measuring process
            return place, _sendable(error)


def _started(work: Work, tasks: Iterable[Task]) -> Iterator[tuple[_Wanted, Found | Exception]]:
    wanted: Any = (
        _Wanted(task.number, start, stop, _rows(task, start, stop))
        for task in tasks
        for start, stop in ranges_of(work.samples(task), work.options.batch_size)
    )
    # torch warns if workers outnumber processors, and if a process with threads is forked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(
            _Reader(work), batch_size=None, sampler=wanted, num_workers=work.options.workers,
            collate_fn=lambda found: found, prefetch_factor=2, multiprocessing_context="fork",
            generator=torch.Generator(),
        )  # fmt: skip
        return iter(loader)


def _rows(task: Task, start: int, stop: int) -> Sequence[Row] | None:
    first = task.start
    return None if task.rows is None else task.rows[start - first : stop - first]


def _sendable(error: Exception) -> Exception:
    """Returns an exception that can be sent between processes, with the same message."""
    kind = type(error)
    simple = all(isinstance(part, (str, int, type(None))) for part in error.args)
    if kind.__module__ == "builtins" and simple:
        return error
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError(f"{kind.__name__}: {error}")
