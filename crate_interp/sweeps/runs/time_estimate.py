"""A note at the beginning of long work: how long it takes, and whether the machine is busy."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from crate_interp.core.progress import note

LONG = 600.0  # a note is printed if the work takes at least this number of seconds
_TRIAL = 10.0  # seconds that are timed first


def _load() -> float:
    """Returns how many processes run or wait on this machine; 0 if that is unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@dataclass
class Forecast:
    """Counts samples as they are measured, and may print a note of one or two lines, once.

    A note appears after ten seconds, if the work is long or the machine is crowded. The first batch
    is not timed, because weights and controls are measured with it. n: how many samples this
    process measures. advance: a function that is called with each count.
    """

    what: str
    unit: str
    n: int
    advance: Callable[[int], object]
    busy: float = field(default_factory=_load)  # the load before this work began
    _done: int = 0
    # the time at which the first batch was done, and its number of samples
    _first: tuple[float, int] | None = None
    _said: bool = False

    def __call__(self, count: int) -> None:
        """Counts samples."""
        self.advance(count)
        self._done += count
        now = time.monotonic()
        if self._first is None:
            self._first = (now, self._done)
            return
        started, before = self._first
        if self._said or now - started < _TRIAL:
            return
        self._said = True
        pace = (now - started) / (self._done - before)
        for line in (self._long(pace * (self.n - before)), crowded(self.busy)):
            if line:
                note(line)

    def _long(self, seconds: float) -> str:
        if seconds < LONG:
            return ""
        hours, minutes = divmod(round(seconds / 60), 60)
        takes = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        threads = torch.get_num_threads()
        return (
            f"{self.what}: about {takes} for {self.n:,} {self.unit} on this machine "
            f"({threads} thread{'s' * (threads > 1)}); --limit n, more shards or --engine ray "
            "shorten it."
        )


def crowded(busy: float) -> str:
    """Returns advice if more threads want to run than there are cores, else "".

    busy: how many other processes run on this machine.
    """
    threads, cores = torch.get_num_threads(), _cores()
    ours = threads * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads == 1 or ours + busy <= 1.25 * cores:
        return ""
    return (
        f"{ours} threads of this run and a load of {busy:.0f} from other processes share {cores} "
        "cores. Threads that wait for one another can make the run ten times slower. Set "
        "OMP_NUM_THREADS=1 (--threads 1)."
    )


def _cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
