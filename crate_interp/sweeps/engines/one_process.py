"""The engine of one process: one chunk after another."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from crate_interp.results.kinds import Tables
from crate_interp.sweeps.runs.chunked_pass import Stage, Task
from crate_interp.sweeps.runs.decode_ahead import read_ahead


@contextmanager
def local() -> Iterator[Any]:
    """Yields the engine."""
    yield _measured


def _measured(
    stage: Stage, tasks: Iterable[Task], advance: Callable[[int], Any]
) -> Iterator[tuple[Task, Tables]]:
    with read_ahead(stage, tasks) as (coming, ahead_of):
        for task in coming:
            yield task, stage.measured(task, advance, ahead_of(task))
