"""What a run takes, said after its first chunk; a dry run stops there."""

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from crate_interp.core.progress import note
from crate_interp.questions.experiment import Tables, Task, Work

_LONG = 60.0  # seconds from which a run says what is left of it
# the seconds that each pass would take, in a dry run
_dry: ContextVar[list[float] | None] = ContextVar("dry run", default=None)


class Forecasted(Exception):
    """Raised in a dry run when one chunk of each pass has been measured."""


@contextmanager
def dry_run() -> Iterator[None]:
    """Makes a measurement stop after the first chunk of each pass, while it is open."""
    token = _dry.set([])
    try:
        yield
    except Forecasted:
        pass
    finally:
        _dry.reset(token)


def is_dry() -> bool:
    """Tells whether a dry run is open."""
    return _dry.get() is not None


def stop_dry(kind: str, also: str = "") -> None:
    """Says what all passes of a dry run take together, and raises Forecasted.

    also: the name of a pass that was not measured, if there is one.
    """
    words = f"{kind.replace('_', ' ')}: about {_short(sum(_dry.get() or ()))} in all"
    note(f"{words}{f', and the time of {also!r}' if also else ''}. Nothing was written.")
    raise Forecasted


def timed(
    found: Iterable[tuple[Task, Tables]], work: Work, todo: int | None, keeps: bool
) -> Iterator[tuple[Task, Tables]]:
    """Yields what an engine yields; after the first chunk says what is left, if that is long.

    todo: how many samples are left of the pass, or None for a stream. keeps: whether a folder
    keeps finished chunks. In a dry run, says what the pass takes and stops after this chunk.
    """
    begin = time.perf_counter()
    first = work.options.progress and work.options.engine == "local"  # Ray's first is one of many
    for task, tables in found:
        done, took = task.stop - task.start, time.perf_counter() - begin
        count, whole = math.ceil((todo or done) / done), took * (todo or done) / done
        plan = _dry.get()
        if plan is not None:
            plan.append(whole)
            all_take = f" of {count}, so all take about {_short(whole)}" if todo else ""
            note(
                f"{work.step.name}: the first chunk of {done} {work.model.unit} took "
                f"{_short(took)}{all_take}."
            )
        elif first and whole - took > _LONG:
            words = f"{work.step.name}: {count - 1} more chunks, about {_short(whole - took)}."
            words += " If it stops, the same command goes on." * keeps
            note(f"{words} {_crowded()}".rstrip())
        first = False
        yield task, tables
        if plan is not None:
            return


def _short(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _crowded() -> str:
    """Returns advice if this process and its neighbours have more threads than there are cores."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    ours = threads * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else ours
    if threads == 1 or max(ours, busy) <= 1.5 * cores:
        return ""
    return (
        f"{ours} threads and a load of {busy:.0f} share {cores} cores: OMP_NUM_THREADS=1 "
        "(--threads 1) may be ten times faster."
    )
