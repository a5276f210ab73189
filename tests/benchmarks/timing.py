"""Honest timings on a shared machine.

One process, one thread, processor time, alternating jobs, the least of many. Run a benchmark with
OMP_NUM_THREADS=1: times of two threads vary several-fold, and the library never sets threads.
"""

import os
import random
import sys
import time
from collections.abc import Callable

import torch

# glibc hands large blocks back to the system and asks for them again. By the luck of a heap's
# layout a forward has none to fifty thousand page faults, a tenth of its time: both sides of a
# ratio are timed without them.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_MAX_": "0"}


def settle() -> None:
    """Starts the process again with an allocator that keeps memory.

    Exits with an error if more than one thread would be timed.
    """
    if torch.get_num_threads() != 1:
        sys.exit("run this with OMP_NUM_THREADS=1 (make bench does)")
    if any(os.environ.get(name) != value for name, value in _KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _KEEP_MEMORY)


def least(jobs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Returns the least processor seconds of each job, from rounds of all jobs for about so long.

    Each round has an order of its own: what ran before leaves a heap and caches, and twins that
    always follow different jobs differed by a tenth.
    """
    names = list(jobs)
    best = dict.fromkeys(names, float("inf"))
    for name in names:
        jobs[name]()  # warm up
    turn, end = 0, time.monotonic() + seconds
    while turn < 5 or time.monotonic() < end:
        for name in random.Random(turn).sample(names, len(names)):
            start = time.process_time()
            jobs[name]()
            best[name] = min(best[name], time.process_time() - start)
        turn += 1
    return best


def verdict(what: str, value: float, limit: float, at_least: bool = False) -> bool:
    """Prints a line and returns whether the limit holds."""
    holds = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    print(f"{what}: {value:.3f} (wanted {sign} {limit:g}) {'ok' if holds else 'MISSED'}")
    return holds
