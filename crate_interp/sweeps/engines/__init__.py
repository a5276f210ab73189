"""Engines, which measure the chunks of a stage: this process, or the actors of a Ray cluster."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from crate_interp.results.kinds import Tables
from crate_interp.sweeps.engines.ray_actors import on_ray
from crate_interp.sweeps.runs.chunked_pass import Stage, Task
from crate_interp.sweeps.runs.decode_ahead import read_ahead


@contextmanager
def local() -> Iterator[Any]:
    """Yields the engine that measures in this process."""
    yield _measured


def _measured(
    stage: Stage, tasks: Iterable[Task], advance: Callable[[int], Any]
) -> Iterator[tuple[Task, Tables]]:
    with read_ahead(stage, tasks) as (coming, ahead_of):
        for task in coming:
            yield task, stage.measured(task, advance, ahead_of(task))


# An engine takes a stage, its tasks, and a function. It measures the tasks, and yields each task
# with its tables, in any order. It calls the function with the number of newly finished samples.
Engine = Callable[[Stage, Iterable[Task], Callable[[int], Any]], Iterator[tuple[Task, Tables]]]
# name of an engine -> a context manager that opens it
ENGINES: dict[str, Callable[[], AbstractContextManager[Engine]]] = {"local": local, "ray": on_ray}
